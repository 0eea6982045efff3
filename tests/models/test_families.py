"""What every model family gives, and a family of the user."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from roll.base import custom_modules
from roll.base.errors import ConfigError
from roll.distributed.infer.sglang_checksums import EngineChecksums
from roll.loading.load import load_config
from roll.models.families import registry
from roll.models.families.family import ModelFamily
from roll.models.families.hf_config import UnsupportedModel
from roll.models.families.layouts import TRAINED_VOCABULARY_MULTIPLE
from roll.models.families.registry import chat_templates
from roll.models.families.shape import known_model_shape
from roll.models.families.weights import gguf_tensors, model_rules
from roll.models.tiny import write_tiny_model
from roll.models.weight_files import check_weights
from tests.configs.samples import SFT
from tests.models.renamed_llama import write_renamed

FAMILIES = registry.families()
TIED = "tie_word_embeddings"
NAMES = [family.name for family in FAMILIES]
HEADS = [(each.name, tied) for each in FAMILIES for tied in (False, True) if tied or not each.only.get(TIED)]
OWN = "tests.models.own_family"


@pytest.fixture
def only_built_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forgets after the test which modules of the user were imported."""
    monkeypatch.setattr(registry, "_families", dict(registry._families))
    monkeypatch.setattr(custom_modules, "_loaded", set(custom_modules._loaded))
    monkeypatch.setenv(custom_modules.CUSTOM_MODULES, "")
    yield
    sys.modules.pop(OWN, None)


@pytest.fixture
def own_family(only_built_in: None) -> str:
    custom_modules.use_custom_modules([OWN])
    return "renamed"


@pytest.mark.parametrize(("family", "tied"), HEADS)
def test_the_rules_are_exactly_the_tensors_of_a_model_with_their_shapes(
    family: str, tied: bool, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path, family, tie_word_embeddings=tied, vocab_size=6 * TRAINED_VOCABULARY_MULTIPLE)
    model, tensors = known_model_shape(folder), load_file(folder / "model.safetensors")
    rules = model_rules(model)
    assert (model.family.name, model.tied) == (family, tied)
    shapes = {name: shape for rule in rules for name, shape in zip(rule.hf, rule.hf_shapes(model), strict=True)}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes
    count = model.stage_parameters(0, [model.layers], 1)
    count += model.expert_parameters(0, [model.layers], 1, 1)
    assert count == sum(tensor.numel() for tensor in tensors.values())
    if model.family.gguf is not None:
        assert {tensor.hf for tensor in gguf_tensors(model).values()} == shapes.keys()


@pytest.mark.parametrize(("family", "tied"), HEADS)
def test_it_is_known_how_an_engine_splits_each_tensor(family: str, tied: bool, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, family, tie_word_embeddings=tied)
    checksums = EngineChecksums.of_model(folder, tensor_parallel=2)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        checksums.add(name, tensor)
    assert {name.rpartition("@")[2] for name in checksums.result()} == {"0", "1"}


@pytest.mark.parametrize("family", FAMILIES, ids=NAMES)
def test_a_rehearsal_has_the_template_of_a_family_and_the_token_that_ends_its_turns(
    family: ModelFamily,
) -> None:
    assert family.rehearsal.names.search(family.architecture)
    assert family.rehearsal.end_of_turn in chat_templates()[family.rehearsal.template].markers


@pytest.mark.usefixtures("only_built_in")
def test_a_family_of_a_module_that_the_file_names_is_planned(tmp_path: Path) -> None:
    folder = write_renamed(write_tiny_model(tmp_path / "llama", "llama"), tmp_path / "own")
    file = tmp_path / "config.yaml"
    file.write_text(f"{SFT}\ncustom_modules: {OWN}\n")
    config = load_config(file, [f"pretrain={folder}"])
    assert config.custom_modules == [OWN]
    assert check_weights(folder) == []
    own, llama = known_model_shape(folder), known_model_shape(tmp_path / "llama")
    assert own.family.name == "renamed"
    assert own.stage_parameters(0, [own.layers], 1) == llama.stage_parameters(0, [llama.layers], 1)


@pytest.mark.usefixtures("only_built_in")
def test_a_module_that_cannot_be_imported_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_family.py").write_text("1 / 0\n")
    (tmp_path / "config.yaml").write_text(f"{SFT}\ncustom_modules: [broken_family]\n")
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path / "config.yaml")
    [problem] = error.value.problems
    assert problem.path == "custom_modules" and "broken_family.py:1: ZeroDivisionError" in problem.message


def test_a_family_of_an_installed_package_is_known(tmp_path: Path) -> None:
    package = tmp_path / "own-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[{custom_modules.GROUP}]\nrenamed = {OWN}\n")
    code = "from roll.models.families.registry import architectures; print(*architectures())"
    assert "RenamedForCausalLM" in printed(code, tmp_path)


def test_families_are_read_without_torch(tmp_path: Path) -> None:
    assert "torch" not in printed("import sys, roll.models.families.shape; print(*sys.modules)", tmp_path)


def printed(code: str, folder: Path) -> list[str]:
    """Words that a new process prints, which finds packages in `folder` too."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (folder, Path(__file__).parents[2])))}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, text=True, capture_output=True, check=True).stdout.split()


@pytest.mark.usefixtures("only_built_in")
def test_the_example_of_the_page_is_a_family(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/extensions/families.md").read_text()
    [(module, code)] = re.findall(r"^```python\n# (\w+family)\.py\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    custom_modules.use_custom_modules([module])
    assert registry.family_named("mine").architecture == "MineForCausalLM"


def test_two_families_do_not_share_a_name(own_family: str) -> None:
    with pytest.raises(ValueError, match="model family renamed .* is known"):
        registry.register_family(registry.family_named(own_family))


def test_a_family_of_no_module_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["RenamedForCausalLM"]}')
    with pytest.raises(UnsupportedModel, match="architectures: RenamedForCausalLM is not supported; known: "):
        known_model_shape(tmp_path)
