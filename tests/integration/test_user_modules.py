"""A whole run with parts of the user's own modules: a loss, an estimator, a reward, a tracker and a weight transport.

An environment and a model family of the user are in test_agentic_run.py and test_megatron_strategy.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import finish, inputs_in, lines, recipe, start

pytestmark = pytest.mark.integration

PARTS = """
from dataclasses import dataclass
from pathlib import Path
from roll.algorithms.estimators import RewardBatch, estimator
from roll.algorithms.policy_loss import PolicyTokens, TokenLosses, policy_loss
from roll.base.schema import option
from roll.distributed.weights.broadcast import BroadcastTransport
from roll.distributed.weights.transport import register_transport
from roll.trackers.base import Tracker, register_tracker

@policy_loss("own_loss")
def loss(tokens: PolicyTokens, options: None) -> TokenLosses:
    return TokenLosses(3.0 + 0.0 * tokens.log_probs, tokens.ratio.detach(), tokens.mask & False)

@dataclass
class Shift:
    by: float = option(1.0, "Added to the advantage 0.")

@estimator("own_estimator", options=Shift)
def shift(batch: RewardBatch, options: Shift):
    advantages = options.by * batch.response_mask
    return advantages, advantages

@dataclass
class Greeting:
    greeting: str = option("hello", "Before each line.")

class OwnTracker(Tracker):
    def __init__(self, config, folder, options):
        self._file, self._greeting = Path(folder) / "own.txt", Greeting(**options).greeting

    def log(self, step, metrics):
        with self._file.open("a") as file:
            print(self._greeting, step, len(metrics) > 10, file=file)

register_tracker("own_tracker", Greeting)(OwnTracker)

@register_transport("own_transport")
class OwnTransport(BroadcastTransport):
    async def transfer(self, checksums):
        with (Path(__file__).parent / "transfers.txt").open("a") as file:
            print("sent", file=file)
        return await super().transfer(checksums)
"""

REWARD = """
from pathlib import Path

def two(response: str, ground_truth: str, config) -> float:
    tracked = Path(__file__).parent / "run" / "own.txt"
    if tracked.exists() and "step 2" in tracked.read_text():
        raise RuntimeError("the dog ate it")
    return config.options["score"]
"""


def test_a_run_uses_the_parts_of_the_users_modules_and_ends_with_the_cause_when_one_fails(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """The modules are beside the recipe, and so not in the current folder; the reward fails in the third step."""
    (tmp_path / "own_parts.py").write_text(PARTS)
    (tmp_path / "own_rewards.py").write_text(REWARD)
    config = recipe(
        inputs_in(tmp_path / "data", tiny_model_dir),
        tmp_path,
        custom_modules=["own_parts"],
        custom_options={"own_estimator": {"by": 0.5}},
        adv_estimator="own_estimator",
        actor_train__pg_variant="own_loss",
        rewards={"own": {"function": "own_rewards:two", "options": {"score": 2.0}}},
        track_with=["own_tracker"],
        tracker_kwargs={"own_tracker": {"greeting": "step"}},
        weight_transport="own_transport",
        max_steps=3,
        eval_steps=0,
        save_steps=0,
    )
    code, output = finish(start(config))
    text = " ".join(output.split())
    assert code == 1 and "reward_raised" in text and "max_failure_rate" in text and "the dog ate it" in text, output
    assert json.loads((tmp_path / "run" / "run.json").read_text())["summary"]["status"] == "failed"
    steps = lines(tmp_path)
    assert [line["rollout/reward_mean"] for line in steps] == [2.0, 2.0]
    assert {line[f"advantage/{name}"] for line in steps for name in ("min", "max")} == {0.5}
    assert [line["actor/pg_loss"] for line in steps] == pytest.approx([3.0, 3.0])
    assert (tmp_path / "run" / "own.txt").read_text() == "step 1 True\nstep 2 True\n"
    assert len((tmp_path / "transfers.txt").read_text().splitlines()) >= 2
