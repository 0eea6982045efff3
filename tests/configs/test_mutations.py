"""Configurations with one or two wrong values: none hangs, none ends in a stack, none senseless passes in silence."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll.base.errors import ConfigError
from roll.base.schema import Key, known_keys
from roll.configs.check import check
from roll.loading.load import PIPELINES, load_config
from roll.loading.yaml_files import MAX_CHARACTERS, parse_yaml
from roll.plan.plan import make_plan
from tests.configs.samples import refusal, rlvr, sft

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RECIPES = ("examples/tiny_math/rlvr_config.yaml", "examples/tiny_frozen_lake/agentic_config.yaml")
CASES = 100

# fmt: off
STRANGE: tuple[Any, ...] = (
    None, True, "", " ", "\u200b", "a\x07b", "\ud800", "../../..", "/", "/proc/self/mem", "x" * 5000,
    "1_0", "\u0663", "nan", "1e5", "0x10", "${nowhere}", "${", "*", "!!python/object:os.system",
    0, -1, 1, 10**9, 2**63, 10**30, 1e300, 1e-300, 1e12, float("inf"), float("nan"), -0.0,
    [], [[]], [1, [2]], ["a"] * 3, {}, {"a": {"b": 1}}, {1: 2},
)
# fmt: on


def mutated(recipe: str, seed: int) -> tuple[dict[str, Any], list[str]]:
    """A recipe with one or two keys set to strange values, and which."""
    chance = random.Random(seed)
    tree = yaml.safe_load((ROOT / recipe).read_text())
    config = load_config(ROOT / recipe)
    paths = [key.path for key in known_keys(type(config)) if "<name>" not in key.path]
    changed = []
    for _ in range(chance.choice((1, 1, 2))):
        path = chance.choice(paths)
        *parents, last = path.split(".")
        section = tree
        for name in parents:
            section = section.setdefault(name, {}) if isinstance(section, dict) else {}
        if isinstance(section, dict):
            section[last] = chance.choice(STRANGE)
            changed.append(path)
    return tree, changed


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_strange_value_is_refused_or_checked_in_a_second(tmp_path: Path, recipe: str) -> None:
    file = tmp_path / "config.yaml"
    for seed in range(CASES):
        tree, changed = mutated(recipe, seed)
        file.write_text(yaml.safe_dump(tree, allow_unicode=True), errors="surrogatepass")
        start = time.process_time()
        try:
            make_plan(load_config(file))
        except ConfigError as error:
            assert str(error).strip(), changed
        assert time.process_time() - start < 1.0, changed


def numbers(folder: Path) -> list[tuple[str, Key]]:
    """Every key of an RLVR run that holds a number."""
    config = rlvr(folder)
    return [
        (key.path, key)
        for key in known_keys(type(config))
        if "<name>" not in key.path and {int, float} & {key.hint, *getattr(key.hint, "__args__", ())}
    ]


EXEMPT = {
    "seed": "any number is a seed",
    "save_steps": "may be above max_steps: never",
    "eval_steps": "may be above max_steps: never",
    "logging_steps": "may be above max_steps: never",
    "rollout_dump_steps": "may be above max_steps: never",
    "kl_horizon": "a large one does not adapt",
    "staleness_threshold": "only counts",
    "critic_warmup": "may be above max_steps: the critic alone learns",
    "top_k": "above the vocabulary it is without effect",
}
"""Keys for which no number is senseless, and why."""


def test_no_enormous_number_is_accepted_in_silence(tmp_path: Path) -> None:
    silent = []
    for path, key in numbers(tmp_path):
        if path.rpartition(".")[2] in EXEMPT:
            continue
        value = 10**12 if key.hint is int or int in getattr(key.hint, "__args__", ()) else 1e12
        try:
            config = rlvr(tmp_path, f"{path}={value}")
        except ConfigError:
            continue
        report = check(config)
        if not any(path.startswith(problem.path) for problem in [*report.errors, *report.warnings]):
            silent.append(path)
    assert not silent


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("start_timeout_s=1e300", "is longer than a year"),
        ("sync_timeout_s=1e-9", "is over before anything can answer"),
        ("rewards.math_rule.world_size=100000", "too many for one machine"),
        ("actor_train.training_args.learning_rate='1_0'", "is not a number"),
        ("actor_train.training_args.learning_rate='\u0663'", "is not a number"),
        ("max_steps=1_0", "is not a whole number"),
        ("exp_name='a\u200bb'", "a character that"),
        ("actor_infer.strategy_args.strategy_config.max_total_tokens=1", "the key-value cache of 1 tokens is shorter"),
        ("actor_infer.strategy_args.strategy_config.context_length=4", "the context of 4 tokens is shorter"),
        ("system_envs.OMP_NUM_THREADS=lots", "'lots' is not a number of threads"),
    ],
)
def test_a_value_that_nothing_can_work_with_is_refused(tmp_path: Path, override: str, message: str) -> None:
    try:
        text = " ".join(problem.message for problem in check(rlvr(tmp_path, override)).errors)
    except ConfigError as error:
        text = str(error)
    assert message in text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor_train.training_args.learning_rate=1e12", "1e+12 is unusual: usual values are between 1e-10 and 0.1"),
        ("engine_restart_delay_s=1000", "1000 is unusual: usual values are between 0 and 60"),
        ("start_timeout_s=0.5", "0.5 is unusual: usual values are between 10 and "),
        ("sync_timeout_s=1e7", "1e+07 is unusual: usual values are between 0.1 and 86400"),
        ("sync_retry_delay_s=1000", "1000 is unusual: usual values are between 0 and 300"),
        ("health_check_interval_s=0.0001", "0.0001 is unusual: usual values are between 0.05 and 3600"),
        ("max_grad_norm=1e-20", "1e-20 is unusual: usual values are between 1e-06 and 10000"),
        ("kl_cov_coef=1e12 actor_train.pg_variant=kl_cov ppo_epochs=2", "1e+12 is unusual: usual values are between"),
        ("dppo_kl_threshold=1e-12 actor_train.pg_variant=dppo_kl", "1e-12 is unusual: usual values are between 1e-06"),
        ("correction.veto_threshold=1", "1 is unusual: usual values are between 0 and 0.9"),
        ("sapo_tau_positive=1e-9 actor_train.pg_variant=sapo", "1e-09 is unusual: usual values are between 0.001"),
    ],
)
def test_an_unusual_number_is_a_warning(tmp_path: Path, override: str, message: str) -> None:
    path = override.partition("=")[0]
    [warning] = [each for each in check(rlvr(tmp_path, *override.split())).warnings if each.path.endswith(path)]
    assert warning.message.startswith(message)


def test_an_unusual_loss_to_end_at_is_a_warning(tmp_path: Path) -> None:
    data = "validation.data_args.file_name=a.jsonl"
    [warning] = check(sft(tmp_path, "target_loss=1e9", "eval_steps=5", data)).warnings
    assert str(warning) == "target_loss: 1e+09 is unusual: usual values are between 1e-06 and 20"


@pytest.mark.parametrize("key", ["output_dir", "logging_dir", "checkpoint_dir", "rollout_dump_dir"])
def test_the_root_folder_is_no_folder_for_output(tmp_path: Path, key: str) -> None:
    assert f"{key}: / is the root folder; use a folder of its own" in refusal(tmp_path, f"{key}=/")


@pytest.mark.parametrize("key", ["max_grad_norm", "entropy_loss_coef", "kl_loss_coef", "init_kl_coef"])
def test_zero_is_not_unusual_where_it_turns_something_off(tmp_path: Path, key: str) -> None:
    assert check(rlvr(tmp_path, f"{key}=0")).warnings == []


@pytest.mark.parametrize("root", PIPELINES.values())
def test_usual_values_are_a_range_around_the_default(root: type) -> None:
    for key in known_keys(root):
        if key.field.metadata["usual"] is not None:
            least, largest = key.field.metadata["usual"]
            assert least < largest and (not key.default or least <= key.default <= largest), key.path


def test_the_folder_of_the_model_is_no_folder_for_output(tmp_path: Path, tiny_model_dir: Path) -> None:
    message = refusal(tmp_path, f"pretrain={tiny_model_dir}", f"output_dir={tiny_model_dir}/run")
    assert f"output_dir: {tiny_model_dir}/run is inside {tiny_model_dir}, the model of actor_train" in message


def test_a_folder_of_a_tracker_that_cannot_be_written_is_found_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    options = [f"tracker_kwargs.tensorboard.log_dir={tmp_path}/file/events", "track_with=[tensorboard]"]
    problems = check(rlvr(tmp_path, *options)).missing
    assert any(problem.path == "tracker_kwargs.tensorboard.log_dir" for problem in problems)


def test_a_text_that_would_take_long_is_refused_at_once() -> None:
    start = time.process_time()
    with pytest.raises(ConfigError, match="characters are too many"):
        parse_yaml("a: [" + "1, " * 400_000 + "1]", "config.yaml")
    assert time.process_time() - start < 3.0


def test_as_many_unknown_keys_as_fit_are_refused_in_time(tmp_path: Path) -> None:
    text = "\n".join(f"learning_rat{i}: 1" for i in range(5000))
    assert len(text) < MAX_CHARACTERS
    start = time.process_time()
    assert "learning_rat1" in refusal(tmp_path, text=text)
    assert time.process_time() - start < 3.0
