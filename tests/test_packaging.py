"""Pinned requirements, and the entry points of the package."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.metadata import entry_points, packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]

OPTIONAL = {"reasoning_gym", "transformer_engine", "apex", "modelscope", "wandb", "swanlab", "mlflow", "trackio", "mcp"}
"""Accelerators that are detected, a hub that is asked for, trackers, and clients of tools; never required."""

LISTS = ("gpu", "cpu", "gpu-lock")

REPINNED = {"apache-tvm-ffi", "compressed-tensors", "numpy", "protobuf", "sentencepiece", "triton"}
"""SGLang's and PyTorch's own pins on a machine with GPUs, where they are other versions than on a CPU."""


def lines(file: str) -> list[str]:
    text = (ROOT / "requirements" / file).read_text()
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def names(file: str) -> set[str]:
    return {normal(re.split(r"[\[=]", line)[0]) for line in lines(file)}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def third_party_imports(folder: str) -> set[str]:
    found: set[str] = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"roll", "tests", "examples", "benchmarks"}


def test_every_requirement_is_pinned_once() -> None:
    for file in ("cpu.txt", "gpu.txt", "gpu-lock.txt", "dev.txt"):
        assert all(re.fullmatch(r"[\w.\-]+(\[[\w,]+\])?==[\w.]+", line) for line in lines(file)), file
        assert len(names(file)) == len(lines(file)), file


def test_versions_agree_between_machines() -> None:
    cpu, gpu = (dict(line.split("==") for line in lines(file)) for file in ("cpu.txt", "gpu.txt"))
    differing = [name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]]
    assert not differing


def test_the_complete_list_for_gpus_has_the_pins_of_the_short_one_and_few_that_a_cpu_has_otherwise() -> None:
    short, cpu, lock = ({re.sub(r"\[.*\]", "", line) for line in lines(f"{name}.txt")} for name in LISTS)
    assert short <= lock
    pins = dict(line.split("==") for line in cpu)
    differing = {name for name, version in (line.split("==") for line in lock) if pins.get(name, version) != version}
    assert differing <= REPINNED and cpu & lock


def test_every_package_that_roll_imports_is_pinned() -> None:
    providers = packages_distributions()
    missing = {
        module
        for module in third_party_imports("roll") - OPTIONAL
        if not {normal(name) for name in providers.get(module, [module])} & names("cpu.txt")
    }
    assert not missing


def test_the_console_script_and_the_engine_plug_in_are_registered() -> None:
    (script,) = entry_points(group="console_scripts", name="roll")
    plug_ins = [entry_points(group=f"sglang.srt.{kind}", name="roll_cpu") for kind in ("platforms", "plugins")]
    assert script.value == "roll_posttraining:main"
    assert all(callable(plug_in.load()) for (plug_in,) in plug_ins)


def test_python_starts_with_the_finder_of_torchvision_and_without_torch() -> None:
    program = "import sys; print([finder.__name__ for finder in sys.meta_path[:1]], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "['TorchvisionFinder'] False\n", done.stderr


def test_torchvision_can_be_looked_for_without_importing_torch() -> None:
    program = "import sys, importlib.util as u; print(bool(u.find_spec('torchvision')), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "True False\n", done.stderr


def test_torchvision_is_importable_in_this_environment() -> None:
    import torch
    import torchvision

    assert torchvision.ops.nms.__module__ == "torchvision.ops.boxes"
    assert torch.ops.torchvision.nms.default.name() == "torchvision::nms"
