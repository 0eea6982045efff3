"""`roll compare` reads what verl, slime and TRL write, and names the formula of their advantages."""

from __future__ import annotations

import json
import os
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.algorithms.advantages import AdvantageSettings
from roll.base.errors import ConfigError
from roll.cli import main
from roll.tools.compare.batch_dump import batch_tensors, group_numbers
from roll.tools.compare.batch_loss import batch_losses
from roll.tools.compare.command import read_dump
from roll.tools.compare.formulas import Scored
from tests.configs.samples import RLVR, rlvr, write
from tests.tools.compare.dump_writers import LENGTHS, SCORES, slime_rollout, slime_train, trl, verl

GROUPS = [0, 0, 0, 0, 1, 1, 1, 1]


def normalised(scores: list[float], epsilon: float, biased: bool = False, std: bool = True) -> list[float]:
    """(R - mean) / (std + epsilon) of two groups of four, by the standard library."""
    found: list[float] = []
    for group in (scores[:4], scores[4:]):
        deviation = (statistics.pstdev(group) if biased else statistics.stdev(group)) + epsilon if std else 1.0
        found += [(score - statistics.fmean(group)) / deviation for score in group]
    return found


def compare(tmp_path: Path, capsys: pytest.CaptureFixture[str], dump: Path, *overrides: str) -> str:
    recipe = [str(write(tmp_path, RLVR)), "num_return_sequences_in_group=4", "rollout_batch_size=128", *overrides]
    assert main(["compare", *recipe, "--with", str(dump)]) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("uids", [False, True])
def test_verl_gives_scores_and_groups_and_what_it_lacks(tmp_path: Path, uids: bool) -> None:
    dump = read_dump(verl(tmp_path, uids), [])
    assert dump.scores == list(SCORES) and dump.lacks == ("token ids", "log-probs", "advantages")
    assert group_numbers(dump, 4).tolist() == GROUPS


def test_a_prompt_that_was_drawn_twice_is_two_groups(tmp_path: Path) -> None:
    same = replace(read_dump(verl(tmp_path), []), prompts=["one"] * 8)
    assert group_numbers(same, 4).tolist() == GROUPS and group_numbers(same, 3).tolist() == [0] * 8


def test_verl_is_compared_by_its_formula_which_gives_a_lone_sample_its_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = compare(tmp_path, capsys, verl(tmp_path))
    assert "the recipe gives theirs" in printed and "loss: not computed; it needs the lengths" in printed
    printed = compare(tmp_path, capsys, verl(tmp_path), "grpo_norm_by_std=false")
    assert "the recipe gives theirs" in printed
    printed = compare(tmp_path, capsys, verl(tmp_path, scores=SCORES[:5]))
    assert "the recipe gives others; largest difference 1 " in printed
    assert "A = R for a prompt with one sample; no key gives it, the nearest is adv_estimator: grpo" in printed


def test_slime_gives_ids_masks_and_log_probs(tmp_path: Path) -> None:
    masks: list[Any] = [None] * 8
    masks[3] = [1, 0, 0, 1]
    dump = read_dump(slime_rollout(tmp_path, loss_mask=masks, remove_sample=[False] * 7 + [True]), [])
    tensors = batch_tensors(dump, None)
    assert group_numbers(dump, 4).tolist() == GROUPS
    assert tensors["input_ids"][4].tolist() == [7, 15, 0, 0, 0, 0]
    assert tensors["response_mask"].int().tolist()[3] == [0, 0, 1, 0, 0, 1]
    assert tensors["response_mask"].sum(-1).tolist() == [1, 2, 3, 2, 1, 1, 2, 0]
    assert tensors["behavior_log_probs"][1].tolist() == [0, 0, -0.5, -0.5, 0, 0]
    assert dump.lacks == ("advantages", "log-probs of the trainer")


def test_a_reward_of_several_values_needs_its_key(tmp_path: Path) -> None:
    path = slime_rollout(tmp_path, reward=[{"score": score, "acc": 1} for score in SCORES])
    assert read_dump(path, ["score"]).scores == list(SCORES)
    with pytest.raises(ConfigError, match="--rewards: reward of row 0 has score, acc; name one of them"):
        read_dump(path, [])


class RunsCode:
    """Makes a file where it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.made),)


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    torch.save({"samples": [RunsCode(tmp_path / "made")]}, tmp_path / "1.pt")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_dump(tmp_path / "1.pt", [])
    assert not (tmp_path / "made").exists()


def test_losses_of_slimes_training_data_are_the_closed_forms(tmp_path: Path) -> None:
    advantages = normalised([*SCORES], 1e-6)
    tensors = batch_tensors(read_dump(slime_train(tmp_path, advantages), []), None)
    settings = rlvr(
        tmp_path, "actor_train.pg_variant=ppo", "old_log_probs_source=recompute", "async_generation_ratio=0"
    ).policy
    found = {each.mode: each for each in batch_losses(tensors, settings, 64)}
    weighted = sum(a * length for a, length in zip(advantages, LENGTHS, strict=True))
    squares = sum(a * a * length for a, length in zip(advantages, LENGTHS, strict=True))
    per_token = sum(a * a / length for a, length in zip(advantages, LENGTHS, strict=True))
    tokens = sum(LENGTHS)
    assert found["token-mean"].loss == pytest.approx(-weighted / tokens, rel=1e-5)
    assert found["token-mean"].log_prob_gradient == pytest.approx(squares**0.5 / tokens, rel=1e-5)
    assert found["seq-mean-token-sum"].loss == pytest.approx(-weighted / 8, rel=1e-5)
    assert found["seq-mean-token-mean"].loss == pytest.approx(-sum(advantages) / 8, abs=1e-6)
    assert found["seq-mean-token-mean"].log_prob_gradient == pytest.approx(per_token**0.5 / 8, rel=1e-5)


FORMULAS = {
    "slime's grpo": (normalised([*SCORES], 1e-6), "the recipe gives theirs", "here adv_estimator: grpo"),
    "Dr. GRPO": (
        normalised([*SCORES], 0, std=False),
        "the recipe gives others",
        "theirs: A = R - mean_group; here adv_estimator: grpo, grpo_norm_by_std: false",
    ),
    "biased": (
        normalised([*SCORES], 1e-6, biased=True),
        f"largest difference {3**0.5 - 1.5:.3g}",
        "A = (R - mean_group) / (biased_std_group + 1e-06); no key gives it, the nearest is adv_estimator: grpo",
    ),
    "leave-one-out": (
        [4 / 3 * value for value in normalised([*SCORES], 0, std=False)],
        "the recipe gives others",
        "here adv_estimator: rloo",
    ),
    "unknown": ([0.1 * number for number in range(8)], "the recipe gives others", "of none of the known formulas"),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_the_formula_of_advantages_is_named_with_the_keys_that_give_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    advantages, verdict, formula = FORMULAS[name]
    printed = compare(tmp_path, capsys, slime_train(tmp_path, advantages))
    assert verdict in printed and formula in printed
    assert "at the policy of old_log_probs" in printed


def test_the_epsilon_of_trl_is_told_from_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = compare(tmp_path, capsys, trl(tmp_path, normalised([*SCORES], 1e-4)))
    assert "theirs: A = (R - mean_group) / (std_group + 1e-04); no key gives it" in printed
    apart = 0.75 / 0.5 - 0.75 / (0.5 + 1e-4)
    found = re.search(r"which differs by at most (\S+)", printed)
    assert found is not None and float(found[1]) == pytest.approx(apart, rel=0.01)
    assert "not in this dump: token ids, log-probs" in printed


def test_rewards_of_trl_are_added_and_rows_without_one_left_out(tmp_path: Path) -> None:
    half = [None, *(score / 2 for score in SCORES[1:])]
    path = trl(tmp_path, [0.0] * 8, a=half, b=half, answer=["4"] * 8)
    dump = read_dump(path, [])
    assert dump.scores == list(SCORES[1:]) and [*dump.parts] == ["a", "b"]
    assert dump.notes == [
        "rewards: a + b",
        "where reward_weights were given: --rewards a:WEIGHT,b:WEIGHT",
        "rows without a reward, left out: 1",
    ]
    assert read_dump(path, ["a"]).scores == [score / 2 for score in SCORES[1:]]
    with pytest.raises(ConfigError, match="--rewards: answer is no column of numbers; use a, b"):
        read_dump(path, ["answer"])


def test_rewards_of_trl_have_weights(tmp_path: Path) -> None:
    path = trl(tmp_path, [0.0] * 8, a=[*SCORES], b=[1.0] * 8)
    dump = read_dump(path, ["a", "b:0.5"])
    assert dump.scores == [score + 0.5 for score in SCORES] and dump.notes == ["rewards: a + 0.5 b"]
    twice = read_dump(path, ["a", "b", "a"])
    assert twice.scores == [2 * score + 1 for score in SCORES] and twice.notes == ["rewards: 2 a + b"]
    assert twice.weights == (2.0, 1.0)
    for weight in ("half", "nan", "inf"):
        with pytest.raises(ConfigError, match=f"--rewards: b:{weight}: '{weight}' is no number; write b:0.5"):
            read_dump(path, [f"b:{weight}"])


@pytest.mark.parametrize(("name", "rewards"), [("1.jsonl", ["a"]), ("1.pt", ["a", "b"])])
def test_a_reward_that_is_not_read_is_refused(tmp_path: Path, name: str, rewards: list[str]) -> None:
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=f"--rewards: {','.join(rewards)}; a file {Path(name).suffix} has at most"):
        read_dump(tmp_path / name, rewards)


def test_the_gdpo_of_a_dump_has_the_weights_of_its_rewards(tmp_path: Path) -> None:
    a, b = list(map(float, SCORES)), [0.5, 0.1, 0.9, 0.2, 0.4, 0.3, 0.6, 0.8]
    parts, groups, mask = torch.tensor([a, b]).T, torch.tensor([0] * 4 + [1] * 4), torch.ones(8, 1, dtype=torch.bool)
    weighted = Scored(parts @ torch.tensor([2.0, 1.0]), groups, mask, parts, (2.0, 1.0))
    gdpo = next(each.values for each in weighted.formulas() if each.keys == {"adv_estimator": "gdpo"})
    assert torch.equal(gdpo, weighted.of_recipe(AdvantageSettings(adv_estimator="gdpo", reward_weights=(2.0, 1.0))))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("1.jsonl", json.dumps({"input": "", "output": ""}), "row 0 has no score; give a file STEP.jsonl of verl"),
        ("1.jsonl", "no", "row 0 is not JSON"),
        ("1.pt", "no", "cannot be read"),
        ("1.parquet", "no", "cannot be read"),
        ("1.csv", "", "ends in .csv; use .jsonl, .pt, .parquet"),
    ],
)
def test_another_file_is_refused_with_what_is_expected(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_dump(tmp_path / name, [])


def test_the_gradient_of_weights_needs_token_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(write(tmp_path, RLVR)), "--with", str(verl(tmp_path)), "--gradient"]) == 2
    assert "12.jsonl has no token ids; use slime's debug data" in capsys.readouterr().err
