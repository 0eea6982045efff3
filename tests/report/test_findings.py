"""Each rule finds its cause in a run that is spoiled by it, and nothing in a healthy one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from roll.report.findings import find
from roll.report.read import read_run
from tests.report.runs import Row, sample, write_run


def keys(folder: Path) -> list[str]:
    return [finding.text.key for finding in find(read_run(folder))]


def sets(**values: Callable[[float], float | None]) -> Callable[[Row, float], None]:
    """Replaces metrics, with `__` for a slash, by functions of the part of the run that is over."""

    def spoil(row: Row, part: float) -> None:
        row.update({name.replace("__", "/"): value(part) for name, value in values.items()})

    return spoil


def validates(
    value: Callable[[float], float], **others: Callable[[float], float | None]
) -> Callable[[Row, float], None]:
    """The same, with a validation score at every tenth step."""

    def spoil(row: Row, part: float) -> None:
        if "val/score" in row:
            row["val/score"] = value(part)
        sets(**others)(row, part)

    return spoil


def test_a_healthy_run(tmp_path: Path) -> None:
    assert keys(write_run(tmp_path)) == ["f_learned", "f_ok"]


def late(before: float, after: float) -> Callable[[float], float]:
    return lambda part: after if part > 0.8 else before


@pytest.mark.parametrize(
    ("key", "spoil"),
    [
        ("f_nan", sets(actor__loss=lambda part: None if part > 0.5 else 0.1)),
        ("f_fell", validates(lambda part: 0.2 + part if part < 0.5 else 1.2 - part)),
        ("f_flat", validates(lambda part: 0.3)),
        ("f_hacked", validates(lambda part: 0.7 - 0.4 * part)),
        ("f_part", validates(lambda part: 0.7 - 0.4 * part, reward__math__style=lambda part: 3 * part)),
        (
            "f_tag",
            sets(
                val__hard__score=lambda part: 0.6 - 0.5 * part,
                val__easy__score=lambda part: 0.2 + 0.6 * part,
                val__score=lambda part: 0.4 - 0.1 * part,
            ),
        ),
        ("f_no_gradient", sets(advantage__zero_variance_group_fraction=late(0.1, 0.9))),
        (
            "f_nothing",
            sets(advantage__zero_variance_group_fraction=lambda part: 0.9, rollout__reward_mean=lambda part: 0.01),
        ),
        ("f_length", sets(rollout__response_length_mean=lambda part: 20 + 40 * part)),
        ("f_entropy_low", sets(actor__entropy=lambda part: 1.0 if part < 0.1 else 0.01)),
        ("f_entropy_high", sets(actor__entropy=lambda part: 1.0 + 3 * part)),
        ("f_ess", sets(correction__ess=late(0.9, 0.2))),
        ("f_far", sets(correction__behavior_k3=late(0.01, 0.7))),
        ("f_mismatch", sets(actor__log_ratio_abs_mean=lambda part: 0.2, staleness__token_max=lambda part: 0)),
        ("f_norm", sets(actor__grad_norm=lambda part: 90.0 if part == 0.5 else 1.0)),
        ("f_cut", sets(rollout__truncated_fraction=late(0.1, 0.4))),
        ("f_cut_agents", sets(gateway__requests=lambda part: 64.0, gateway__cut_answers=late(2.0, 20.0))),
        ("f_drops", sets(ledger__dropped_generation_failed=lambda part: 100 * part)),
        ("f_idle", sets(throughput__trainer_idle=lambda part: 0.6)),
        ("f_slow", sets(time__step=lambda part: 9.0 if part == 0.5 else 1.0)),
    ],
)
def test_a_cause_is_among_the_first_three(tmp_path: Path, key: str, spoil: Callable[[Row, float], None]) -> None:
    assert key in keys(write_run(tmp_path, spoil=spoil))[:3]


def test_samples_that_carry_the_step_and_that_are_all_the_same(tmp_path: Path) -> None:
    few = [sample(number // 8, 0.0, 2.0 if number == 3 else 0.0, [number, 5]) for number in range(64)]
    assert keys(write_run(tmp_path / "few", samples=few))[0] == "f_few"
    same = [sample(number // 8, 1.0, 0.0, [5, 5] if number % 4 else [number]) for number in range(64)]
    assert keys(write_run(tmp_path / "same", samples=same))[0] == "f_same"
    looping = [sample(number // 8, 1.0, 0.0, [number, *range(9), *[7] * 20]) for number in range(64)]
    assert keys(write_run(tmp_path / "looping", samples=looping))[0] == "f_repeat"


@pytest.mark.parametrize(("score", "named"), [(2.5, False), (0.5, True)])
def test_scores_that_are_not_the_sum_of_their_rewards_are_named(tmp_path: Path, score: float, named: bool) -> None:
    rows = [sample(0, score, 0.5, [1], tag="plus", parts={"right": 1.0, "style": 0.5})]
    config = {"rewards": {"right": {"weight": 2.0}, "style": {}}}
    assert ("f_sum" in keys(write_run(tmp_path, samples=rows, config=config))) == named


def test_how_a_run_ended(tmp_path: Path) -> None:
    events = [{"component": "actor_infer-0", "message": "out of memory"}]
    failed = find(read_run(write_run(tmp_path / "failed", status="failed", events=events)))[0]
    assert failed.text.key == "f_failed" and "actor_infer-0 out of memory" in failed.text.in_language(0)
    assert "f_faults" in keys(write_run(tmp_path / "survived", events=events))
    write_run(tmp_path / "died", status=None)
    (tmp_path / "died" / "health.json").write_text('{"status": "running", "valid_until": 1}')
    assert keys(tmp_path / "died")[0] == "f_died"


def tokens(engine: int, distance: float) -> Row:
    ids = list(range(40))
    return sample(engine, 1.0, 0.5, ids, engine=engine, train_log_probs=[-0.5 - distance] * 40, entropy=[0.5] * 40)


def test_an_engine_whose_samples_are_apart_is_named(tmp_path: Path) -> None:
    rows = [tokens(engine, 0.4 if engine == 2 else 0.01) for engine in range(4) for _ in range(4)]
    found = find(read_run(write_run(tmp_path / "spoiled", samples=rows)))
    assert [each.text.key for each in found][:1] == ["f_engine"] and "Engine 2 is 0.4" in found[0].text.in_language(0)
    rows = [tokens(engine, 0.01) for engine in range(4) for _ in range(4)]
    assert "f_engine" not in keys(write_run(tmp_path / "healthy", samples=rows))


@pytest.mark.parametrize(
    ("entropy", "truncation", "named"), [(0.9, "warn", True), (0.5, "warn", False), (0.9, "replay", False)]
)
def test_sampling_that_cuts_the_tail_is_named(tmp_path: Path, entropy: float, truncation: str, named: bool) -> None:
    rows = [tokens(0, 0.01) | {"entropy": [entropy] * 40} for _ in range(4)]
    sampling = {"actor_infer": {"generating_args": {"top_p": 0.8}}, "on_truncated_sampling": truncation}
    assert ("f_truncated" in keys(write_run(tmp_path, samples=rows, config=sampling))) == named


@pytest.mark.parametrize(("right", "wrong", "named"), [(0.0, 1.0, True), (1.0, 0.0, False)])
def test_a_reward_that_gives_right_answers_less_is_named(
    tmp_path: Path, right: float, wrong: float, named: bool
) -> None:
    rows = [sample(n, right if n % 2 else wrong, 0.5, [7 if n % 2 else 9], tag="minus") for n in range(20)]
    assert ("f_flipped" in keys(write_run(tmp_path, samples=rows))) == named
