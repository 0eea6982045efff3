"""The CPU patch of Megatron-Core replaces exactly what its table lists, and only in the process that calls it."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from roll.platforms.cpu.megatron_cpu import REPLACED

pytestmark = pytest.mark.integration

PROGRAM = """
import torch, warnings
warnings.filterwarnings("ignore")
import megatron.core.tensor_parallel.random
from roll.platforms.cpu.megatron_cpu import REPLACED, patch_megatron_for_cpu
from tests.integration.test_megatron_cpu_layer import resolve
before = {name: resolve(name) for name in REPLACED}
untouched = {name: getattr(torch, name) for name in ("full", "arange", "matmul")}
patch_megatron_for_cpu()
once = {name: resolve(name) for name in REPLACED}
patch_megatron_for_cpu()
assert all(resolve(name) is once[name] for name in REPLACED), "the second call replaced something again"
same = [name for name in REPLACED if once[name] is before[name]]
assert not same, f"listed but not replaced: {same}"
shared = len(once) - len({id(value) for value in once.values()})
assert shared == 0, "torch._dynamo refuses one object under two names"
assert all(getattr(torch, name) is value for name, value in untouched.items())
with torch.device("meta"):
    assert torch.empty(1).device.type == torch.zeros(1).device.type == "meta", "torch.device as a context is ignored"
from tempfile import TemporaryDirectory
from roll.models.tiny import write_tiny_model
from transformers import AutoModelForCausalLM
with TemporaryDirectory() as folder:
    write_tiny_model(folder, "qwen3")
    model = AutoModelForCausalLM.from_pretrained(folder)
rotary = model.model.rotary_emb
exponent = torch.arange(0, model.config.head_dim, 2) / model.config.head_dim
base = model.config.rope_parameters["rope_theta"]
assert torch.allclose(rotary.inv_freq, 1 / base**exponent), f"uninitialized rotary frequencies: {rotary.inv_freq}"
assert torch.zeros(2, device="cuda").device.type == "cpu" and torch.tensor([1.0], device="cuda:0").device.type == "cpu"
assert torch.ones(1).type() == "torch.cuda.FloatTensor" and torch.ones(1).type(torch.int32).dtype == torch.int32
torch.manual_seed(3)
state = torch.cuda.get_rng_state()
drawn = torch.rand(3)
torch.cuda.set_rng_state(state)
assert torch.equal(drawn, torch.rand(3))
assert not torch.cuda.is_available()
"""


ABSENT = object()


def resolve(name: str) -> Any:
    """The current value of a dotted name; `ABSENT` for one that Megatron defines only with Transformer Engine."""
    root, _, rest = name.partition(".")
    if root == "megatron":
        module, _, attribute = name.rpartition(".")
        return getattr(importlib.import_module(module), attribute, ABSENT)
    return reduce(getattr, rest.split("."), importlib.import_module(root))


def test_every_listed_name_is_replaced_by_its_own_object():
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_other_processes_are_unchanged():
    names = [name for name in REPLACED if name.startswith("torch.")]
    assert all(getattr(resolve(name), "__module__", None) != "roll.platforms.cpu.megatron_cpu" for name in names)
