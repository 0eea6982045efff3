"""Any recipe that loads becomes a small run that loads too and keeps what the recipe exercises."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings

from roll.base.schema import value_at
from roll.configs.agentic import AgenticConfig
from roll.configs.defaults import OWN_MODEL_ROLES
from roll.configs.pipeline import RLConfig, RLVRConfig
from roll.lab.rehearse.inputs import Inputs, fewest_actions
from roll.lab.rehearse.overrides import LONGEST, SHORTEST, Rehearsal, shrink
from roll.lab.rehearse.sizes import MAX_ENGINES, MAX_SLOTS
from roll.loading.load import AnyConfig, build_config, load_config
from roll.rewards.llm_judge import grade_in
from tests.configs.samples import AGENTIC, MODEL, RECIPES, RLVR, SFT, recipes
from tests.lab.rehearse.recipes import agentic_recipes, rlvr_recipes, sft_recipes, write_small_config

ROOT = Path(__file__).parents[3]
OF_RUNS = (file for file in sorted((ROOT / "examples").glob("*/*.yaml")) if file.name != "serve_config.yaml")
"""Without the file of `roll serve`, which gets its data from its clients."""

FILES = [*OF_RUNS, *(RECIPES / f"{name}.yaml" for name in recipes(refused=False))]


@cache
def model(name: str = "") -> str:
    """A folder of its own for every name."""
    return write_small_config(Path(mkdtemp()), "qwen3_moe" if "A3B" in name or "tiny_moe" in name else "qwen2")


def rehearse(config: AnyConfig, steps: int = 2, **sizes: Any) -> Rehearsal:
    names = {role.model_args.model_name_or_path or "" for role in config.device_roles().values()}
    files = {} if config.pipeline == "agentic" else {"actor_train": ["a.jsonl"], "validation": ["b.jsonl"]}
    actions = fewest_actions(config) if isinstance(config, AgenticConfig) else {}
    inputs = Inputs({name: model(name) for name in names}, files, actions=actions, **sizes)
    return shrink(config, inputs, "output/small/run", steps)


def both(tree: dict[str, Any]) -> tuple[AnyConfig, AnyConfig, Rehearsal]:
    """A recipe, its rehearsal as a configuration, and the rehearsal."""
    recipe = build_config(tree)
    made = rehearse(recipe)
    return recipe, build_config(yaml.safe_load(yaml.safe_dump(made.tree))), made


def check_sizes(recipe: AnyConfig, small: AnyConfig, made: Rehearsal) -> None:
    """Layouts, devices and lengths of any pipeline."""
    roles, recipes = small.device_roles(), recipe.device_roles()
    assert roles.keys() == recipes.keys()
    devices = {device for role in roles.values() for device in role.device_mapping}
    assert devices == set(range(len(devices))) and len(devices) == small.num_devices_per_node <= MAX_SLOTS
    reached = {role: {*worker.device_mapping} for role, worker in recipes.items()}
    for _ in roles:  # devices that a role shares through others
        reached = {role: set().union(*(own for own in reached.values() if own & reached[role])) for role in roles}
    for first in roles:
        for second in roles:
            shares = bool(reached[first] & reached[second])
            assert (roles[first].device_mapping == roles[second].device_mapping) == shares
            assert shares or not set(roles[first].device_mapping) & set(roles[second].device_mapping)
    sizes = [
        (getattr(recipes[name].layout, kind), getattr(role.layout, kind), name, kind)
        for name, role in roles.items()
        for kind in ("tensor", "pipeline", "data")
    ]
    lost = [(name, kind) for before, after, name, kind in sizes if before > 1 and after == 1]
    assert not lost or len(devices) > MAX_SLOTS // 2, f"{lost} would have fitted"
    for role in roles.values():
        assert role.model_args.dtype == "fp32"
        assert role.layout.world_size == len(role.device_mapping)
    if "actor_infer" in roles:
        assert roles["actor_infer"].layout.data <= MAX_ENGINES
    assert small.platform == "cpu" and small.max_steps == 2 and small.save_checkpoint
    assert (small.eval_steps > 0) == (recipe.eval_steps > 0)
    before, after = recipe.actor_train.training_args, small.actor_train.training_args
    assert (before.gradient_accumulation_steps > 1) == (after.gradient_accumulation_steps > 1)


def check_lengths(recipe: RLConfig, small: RLConfig) -> None:
    assert recipe.response_length and small.response_length
    assert small.response_length == min(recipe.response_length, LONGEST)


FAST = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@FAST
@given(rlvr_recipes())
def test_a_rehearsal_of_rlvr_loads_and_keeps_the_structure(tree: dict[str, Any]) -> None:
    recipe, small, made = both(tree)
    assert isinstance(recipe, RLVRConfig) and isinstance(small, RLVRConfig)
    check_sizes(recipe, small, made)
    check_lengths(recipe, small)
    assert small.prompt_length >= SHORTEST
    assert small.samples_per_batch % small.actor_train.samples_per_optimizer_step == 0
    assert small.samples_per_batch <= 32 and small.num_return_sequences_in_group <= 4
    assert (small.num_return_sequences_in_group > 1) == (recipe.num_return_sequences_in_group > 1)
    assert (small.optimizer_steps_per_batch > 1) == (recipe.optimizer_steps_per_batch > 1)
    for key in ("async_generation_ratio", "adv_estimator", "ppo_epochs", "use_kl_loss", "old_log_probs_source"):
        assert getattr(small, key) == getattr(recipe, key)
    assert small.rewards.keys() == recipe.rewards.keys()


@FAST
@given(agentic_recipes())
def test_a_rehearsal_of_agents_loads_and_keeps_every_environment(tree: dict[str, Any]) -> None:
    recipe, small, made = both(tree)
    assert isinstance(recipe, AgenticConfig) and isinstance(small, AgenticConfig)
    check_sizes(recipe, small, made)
    check_lengths(recipe, small)
    manager = small.train_env_manager
    assert manager.tags == recipe.train_env_manager.tags
    assert min(manager.num_groups_partition) >= 1
    assert small.rollout_batch_size == small.groups_per_batch * manager.group_size <= 32
    assert small.groups_per_batch >= len(manager.tags)
    assert (manager.processes > 1) == (recipe.train_env_manager.processes > 1) or manager.environments == 1
    assert small.turns <= max(5, min(recipe.turns, 3)), "Sokoban accepts 5 actions or more"


@FAST
@given(sft_recipes())
def test_a_rehearsal_of_sft_loads(tree: dict[str, Any]) -> None:
    check_sizes(*both(tree))


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_every_recipe_of_the_repository_has_a_rehearsal(file: Path) -> None:
    recipe = load_config(file)
    made = rehearse(recipe)
    small = build_config(made.tree)
    check_sizes(recipe, small, made)
    assert small.pipeline == recipe.pipeline
    assert small.source.notes == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_the_mapping_of_a_configuration_loads_as_the_same_configuration(file: Path) -> None:
    recipe = load_config(file)
    assert build_config(recipe.source.tree, recipe.pipeline) == recipe


def changes_of(made: Rehearsal) -> dict[str, tuple[Any, Any]]:
    return {change.path: (change.before, change.after) for change in made.changes}


def test_changes_name_the_value_of_the_recipe_and_that_of_the_rehearsal() -> None:
    changes = changes_of(rehearse(build_config(yaml.safe_load(RLVR)), steps=5, prompt_tokens=57))
    assert changes["max_steps"] == (100, 5)
    assert changes["rollout_batch_size"] == (64, 4)
    assert changes["num_return_sequences_in_group"] == (8, 4)
    assert changes["prompt_length"] == (2048, 57)
    assert changes["response_length"] == (1024, 32)
    assert changes["actor_train.device_mapping"] == (list(range(16)), [0, 1, 2, 3])
    assert changes["actor_infer.device_mapping"] == (list(range(16, 24)), [4, 5])
    assert changes["actor_train.training_args.gradient_accumulation_steps"] == (64, 2)
    assert changes["pretrain"] == (MODEL, model(MODEL))
    assert "num_gpus_per_worker" not in " ".join(changes), "it is 1 in both"


@pytest.mark.parametrize("text", [RLVR, AGENTIC, SFT])
def test_every_change_has_a_reason_and_changes_something(text: str) -> None:
    for change in rehearse(build_config(yaml.safe_load(text))).changes:
        assert change.reason and change.before != change.after


OPENED = {"type": "mean_filter", "filter_args": {"threshold_down": -1e9, "threshold_up": 1e9}}
TWO_REWARDS = {"math": {"tag_included": ["a"]}, "code": {}}
FILTERS = (
    {"type": "mean_filter", "filter_args": {"threshold_up": 0.9}},
    {"type": "std_filter", "filter_args": {"std_threshold": 0.1}},
)
INFER, TRAIN = (f"{role}.strategy_args.strategy_config" for role in ("actor_infer", "actor_train"))


@pytest.mark.parametrize(
    ("keys", "path", "value"),
    [
        ({}, "length_penalty_per_token", 0.01),  # the scores of a group differ
        ({"sync_timeout_s": 5}, "sync_timeout_s", 180),
        *(
            ({"rewards": {"math": {"query_filter_config": each}}}, "rewards.math.query_filter_config", OPENED)
            for each in FILTERS
        ),
        ({"difficulty_mask": True}, "difficulty_low_threshold", -1e9),
        ({"difficulty_mask": True}, "difficulty_high_threshold", 1e9),
        (
            {"rewards": TWO_REWARDS, "actor_train.data_args.domain_interleave_probs": {"math": 0.99, "code": 0.01}},
            "actor_train.data_args.domain_interleave_probs",
            {"math": 1.0, "code": 1.0},
        ),
        ({"reference.device_mapping": list(range(16))}, "reference", None),  # it is not used
        ({f"{INFER}.mem_fraction_static": 0.8}, f"{INFER}.mem_fraction_static", None),  # of a GPU
        ({f"{INFER}.attention_backend": "fa3"}, f"{INFER}.attention_backend", None),
        ({f"{TRAIN}.apply_rope_fusion": True}, f"{TRAIN}.apply_rope_fusion", None),
        ({"checkpoint_dir": "/mine"}, "checkpoint_dir", None),  # everything is in the folder of the rehearsal
    ],
)
def test_what_a_random_model_on_a_slow_machine_needs_is_set_and_listed(
    keys: dict[str, Any], path: str, value: Any
) -> None:
    tree = yaml.safe_load(RLVR)
    for key, wanted in keys.items():
        *sections, name = key.split(".")
        section = tree
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = wanted
    made = rehearse(build_config(tree))
    assert build_config(made.tree)
    assert value_at(made.tree, path) == value
    assert [changed for changed in changes_of(made) if f"{changed}.".startswith(f"{path}.")]


def test_a_reference_of_another_model_gets_a_model_of_its_own() -> None:
    tree = yaml.safe_load(RLVR) | {"use_kl_loss": True, "kl_loss_coef": 0.1}
    tree["reference"] = {"device_mapping": list(range(16)), "model_args": {"model_name_or_path": "Qwen/Qwen2.5-32B"}}
    config = build_config(tree)
    models = {MODEL: model(), "Qwen/Qwen2.5-32B": f"{model()}/other"}
    made = shrink(config, Inputs(models, {"actor_train": ["a.jsonl"]}), "out", 2)
    assert made.tree["pretrain"] == model()
    assert made.tree["reference"]["model_args"]["model_name_or_path"] == f"{model()}/other"
    assert made.tree["reference"]["device_mapping"] == made.tree["actor_train"]["device_mapping"]


def test_a_judge_keeps_its_engines_and_its_question_and_grades_with_the_digits_of_a_random_model() -> None:
    recipe, small, made = both(load_config(ROOT / "examples/tiny_domains/rlvr_config.yaml").source.tree)
    assert isinstance(recipe, RLVRConfig) and isinstance(small, RLVRConfig)
    assert recipe.uses_judge and small.uses_judge and small.judge.device_mapping
    before, judge = recipe.rewards["llm_judge"], small.rewards["llm_judge"]
    assert (judge.function, judge.prompt_template) == (before.function, before.prompt_template)
    assert grade_in("a7b3.", judge) == pytest.approx(3 / 9)
    assert "rewards.llm_judge.grade_pattern" in [change.path for change in made.changes]


@pytest.mark.parametrize("role", OWN_MODEL_ROLES)
def test_a_role_that_never_takes_pretrain_keeps_a_model_of_the_same_name(role: str) -> None:
    reward = {"judge": "llm_judge", "reward": "reward_model"}[role]
    own = {"device_mapping": [24], "model_args": {"model_name_or_path": "some/model"}}
    tree = yaml.safe_load(RLVR) | {"pretrain": "some/model", "rewards": {reward: {}}, role: own}
    assert rehearse(build_config(tree)).tree[role]["model_args"]["model_name_or_path"] == model("some/model")
