"""Every model family has its part in each place that the docstring of `FAMILIES` lists."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from roll.configs.model_config import FAMILIES
from roll.datasets.templates import BUILT_IN
from roll.distributed.infer.sglang_checksums import EngineChecksums
from roll.models.hf_config import read_hf_config
from roll.models.tiny import ARCHITECTURE_OF, write_tiny_model
from roll.models.weight_mapping import stage_rules
from roll.tools.rehearse.model import CHATML_END, END_OF_TURN, FAMILY_NAMES, NATIVE_TEMPLATE

NAMES = [family.name for family in FAMILIES.values()]


@pytest.mark.parametrize("family", NAMES)
def test_a_tiny_model_has_exactly_the_tensors_of_the_rules(family: str, tmp_path: Path) -> None:
    config = read_hf_config(write_tiny_model(tmp_path, family))
    rules = stage_rules(config, 0, config.layers, first=True, last=True)
    assert (config.family, config.architecture) == (family, ARCHITECTURE_OF[family])
    assert load_file(tmp_path / "model.safetensors").keys() == {name for rule in rules for name in rule.hf}


@pytest.mark.parametrize("family", NAMES)
def test_it_is_known_how_an_engine_splits_each_tensor(family: str, tmp_path: Path) -> None:
    checksums = EngineChecksums.of_model(write_tiny_model(tmp_path, family), tensor_parallel=2)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        checksums.add(name, tensor)
    assert {name.rpartition("@")[2] for name in checksums.result()} == {"0", "1"}


def test_a_rehearsal_recognises_every_family_by_its_name() -> None:
    assert {architecture for _, architecture in FAMILY_NAMES} == FAMILIES.keys()


def test_a_rehearsal_has_the_template_of_every_family_and_the_token_that_ends_its_turns() -> None:
    assert NATIVE_TEMPLATE.keys() == set(NAMES) >= END_OF_TURN.keys()
    for family, template in NATIVE_TEMPLATE.items():
        assert END_OF_TURN.get(family, CHATML_END) in BUILT_IN[template].markers
