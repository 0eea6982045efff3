"""The reference page and the registries agree with the configuration classes."""

from __future__ import annotations

import subprocess
import sys

from roll.base.schema import known_keys
from roll.configs.devices.sglang_options import OWNED, server_options
from roll.loading.load import PIPELINES
from roll.loading.reference import DOCS, generated_pages


def test_the_pages_are_up_to_date() -> None:
    pages = generated_pages()
    outdated = [file.name for file, text in pages.items() if not file.exists() or file.read_text() != text]
    assert outdated == [], "run: python -m roll.loading.reference"
    assert set((DOCS / "configuration").glob("*.md")) <= pages.keys()


def test_every_key_has_a_help_text() -> None:
    for cls in PIPELINES.values():
        for key in known_keys(cls):
            assert key.field.metadata["help"], key.path


def test_options_of_the_installed_engine_are_found() -> None:
    known = server_options()
    assert known is not None
    assert {"mem_fraction_static", "load_format", "page_size", "attention_backend", "model_path"} <= known.keys()
    assert {"model_path", "tp_size", "port", "skip_tokenizer_init", "random_seed"} <= OWNED.keys()


def test_reading_and_planning_a_file_imports_no_engine() -> None:
    code = (
        "import sys, roll.loading.load, roll.plan.plan, roll.cli\n"
        "print([name for name in ('torch', 'ray', 'sglang', 'megatron', 'transformers') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
