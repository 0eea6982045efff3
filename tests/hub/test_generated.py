"""Questions that reasoning-gym generates as data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll.datasets.prompts import load_prompts
from roll.hub.generated import generate, held_out
from roll.hub.names import HubError, local_file
from roll.plan.inputs import fetch_inputs, look_up
from tests.configs.samples import rlvr

pytestmark = pytest.mark.slow  # reasoning-gym takes two seconds to import
SUMS = "reasoning_gym:chain_sum?max_terms=3&max_digits=2&size=60"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)


def questions(text: str) -> set[str]:
    return {json.loads(line)["prompt"] for line in generate(text).read_text().splitlines()}


def test_rows_are_those_of_the_options_and_the_seed() -> None:
    assert len(questions(SUMS)) == 60
    assert questions(SUMS) == questions(f"{SUMS}&seed=42") != questions(f"{SUMS}&seed=1")
    assert local_file(SUMS) == generate(SUMS)


def test_rows_of_one_task_with_other_options_have_other_ids() -> None:
    ids = [json.loads(line)["id"] for text in (SUMS, f"{SUMS}&min_terms=3") for line in generate(text).open()]
    assert len(set(ids)) == len(ids) == 120


@pytest.mark.parametrize("seed", [3, 42])
def test_no_question_of_validation_is_trained_on(seed: int) -> None:
    few = f"reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1&seed={seed}&size="
    training, validation = questions(f"{few}150"), questions(held_out(f"{few}8"))
    assert len(training) == 150 and len(validation) == 8 and not training & validation


def test_validation_reads_the_split_that_is_held_out(tmp_path: Path) -> None:
    config = rlvr(
        tmp_path, "eval_steps=5", *(f"{role}.data_args.file_name={SUMS}" for role in ("actor_train", "validation"))
    )
    assert not look_up(config).problems
    fetch_inputs(config)
    args = config.validation.data_args
    training = load_prompts(config.actor_train.data_args.file_name, config.actor_train.data_args)
    validation = load_prompts(args.file_name, args)
    assert len(training) == len(validation) == 60
    assert not {prompt.question for prompt in training} & {prompt.question for prompt in validation}
    assert {prompt.tag for prompt in training} == {"chain_sum"}


def test_several_tasks_are_mixed_by_weight() -> None:
    text = "reasoning_gym:composite?datasets=[{name: chain_sum, weight: 3}, {name: gcd, weight: 1}]&size=80"
    tags = [json.loads(line)["tag"] for line in generate(text).read_text().splitlines()]
    assert set(tags) == {"chain_sum", "gcd"} and 45 <= tags.count("chain_sum") <= 75


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chain_sun", "no dataset 'chain_sun'; did you mean chain_sum or"),
        ("chain_sum?max_term=3", "max_term"),
        ("chain_sum?min_terms=9&max_terms=3", "max_terms must be >= min_terms"),
        ("chain_sum?size=many", "size 'many' and seed 42 must be whole numbers"),
        ("chain_sum?split=test", "split 'test' is not known; use train or validation"),
        ("chain_sum?max_terms=2&max_digits=1&size=400", "different questions of split train; lower size"),
        ("composite", "'datasets'"),
        ("rearc", "cannot be scored from a file"),
    ],
)
def test_what_cannot_be_generated_is_named(text: str, message: str) -> None:
    with pytest.raises(HubError) as raised:
        generate(f"reasoning_gym:{text}")
    assert message in str(raised.value) and text in str(raised.value)
