"""A loss and an estimator from a module of the user, named in the YAML, are known with their options everywhere."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from roll.algorithms.advantages import compute_advantages
from roll.algorithms.estimators import ADV_ESTIMATORS
from roll.algorithms.policy_loss import POLICY_LOSSES
from roll.base import custom_modules
from tests.configs.samples import refusal, rlvr

MODULE = """
from dataclasses import dataclass
from roll.algorithms.estimators import RewardBatch, estimator
from roll.algorithms.policy_loss import PolicyTokens, TokenLosses, policy_loss
from roll.base.schema import option

@dataclass
class Options:
    bound: float = option(2.0, "Largest weight.", gt=0)

@policy_loss("{name}", options=Options, ratio_base="behavior")
def loss(tokens: PolicyTokens, options: Options) -> TokenLosses:
    ratio = tokens.ratio.detach()
    weight = ratio.clamp(max=options.bound)
    return TokenLosses(-weight * tokens.advantages * tokens.log_probs, ratio, weight < ratio)

@dataclass
class Shift:
    by: float = option(1.0, "Subtracted from every score.")

@estimator("{name}_shift", options=Shift, in_group=True)
def shift(batch: RewardBatch, options: Shift):
    advantages = (batch.scores - options.by)[:, None] * batch.response_mask
    return advantages, advantages
"""


IN_RANK = """
import pickle, sys, torch
from roll.algorithms.losses import token_losses
from roll.algorithms.policy_loss import PolicyTokens
one = torch.ones(1, 2)
settings = pickle.loads(bytes.fromhex(sys.argv[1]))
print(token_losses(PolicyTokens(one * 3, one, one, one.bool()), settings).loss.tolist())
"""


@pytest.fixture(autouse=True)
def no_loss_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(custom_modules, "_loaded", set(custom_modules._loaded))
    monkeypatch.setenv(custom_modules.CUSTOM_MODULES, "")
    for registry in (POLICY_LOSSES, ADV_ESTIMATORS):
        monkeypatch.setattr(registry, "_functions", dict(registry))
    yield
    for name in ("mine", "packaged"):
        sys.modules.pop(f"{name}_module", None)


def write_module(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (folder / f"{name}_module.py").write_text(MODULE.format(name=name))
    monkeypatch.syspath_prepend(str(folder))


def losses_in_rank(config: object, folder: Path) -> str:
    """What a new process computes with the settings of a configuration."""
    environment = os.environ | {"PYTHONPATH": f"{folder}:{Path(__file__).parents[2]}"}
    command = [sys.executable, "-c", IN_RANK, pickle.dumps(config).hex()]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_a_loss_of_the_user_is_chosen_with_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_module(tmp_path, monkeypatch, "mine")
    use = ["custom_modules=[mine_module]", "actor_train.pg_variant=mine"]
    config = rlvr(tmp_path, *use, "custom_options.mine.bound=1.5", "async_generation_ratio=1")
    assert config.pg_ratio_base == "behavior" and config.policy.custom_options["mine"].bound == 1.5
    assert losses_in_rank(config.policy, tmp_path) == "[[-4.5, -4.5]]\n"
    assert losses_in_rank(rlvr(tmp_path, *use).policy, tmp_path) == "[[-6.0, -6.0]]\n"
    assert "custom_options.mine.bound" in refusal(tmp_path, *use, "custom_options.mine.bound=-1")
    assert "custom_options.mine.bond" in refusal(tmp_path, *use, "custom_options.mine.bond=1")


def test_an_estimator_of_the_user_is_chosen_with_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_module(tmp_path, monkeypatch, "mine")
    use = ["custom_modules=[mine_module]", "adv_estimator=mine_shift"]
    batch = (torch.tensor([1.0, 3.0]), torch.zeros(2, dtype=torch.int64), torch.ones(2, 1))
    for options, expected in (([], [[0.0], [2.0]]), (["custom_options.mine_shift.by=2"], [[-1.0], [1.0]])):
        config = rlvr(tmp_path, *use, *options)
        assert compute_advantages(*batch, config.advantages).advantages.tolist() == expected
    alone = ("num_return_sequences_in_group=1", "rollout_batch_size=512")
    assert "1 gives every sample of mine_shift advantage 0" in refusal(tmp_path, *use, *alone)


def test_options_of_an_unknown_loss_are_refused(tmp_path: Path) -> None:
    assert "custom_options.other" in refusal(tmp_path, "custom_options.other.bound=1")


def test_an_installed_package_registers_by_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_module(tmp_path, monkeypatch, "packaged")
    info = tmp_path / "packaged-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: packaged\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{custom_modules.GROUP}]\npackaged = packaged_module\n")
    custom_modules._installed.cache_clear()
    assert rlvr(tmp_path, "actor_train.pg_variant=packaged").policy.pg_variant == "packaged"
    monkeypatch.undo()
    custom_modules._installed.cache_clear()
