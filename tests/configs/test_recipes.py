"""Recipes with ROLL's keys plan as they are, or are refused with one line that names what is missing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll.base.errors import ConfigError
from roll.base.schema import value_at
from roll.configs.agentic import AgenticConfig
from roll.configs.compat import roll, set_at
from roll.configs.compat.roll_rewards import WORKERS
from roll.configs.load import load_config
from roll.configs.pipeline import BaseConfig, RLConfig, RLVRConfig
from roll.configs.plan import make_plan
from roll.configs.rewards import BUILT_IN, built_in_of
from roll.configs.rules import check
from roll.plan.check_inputs import check_environments
from tests.configs.samples import LAPTOP, READ_KEYS, RECIPES, REFUSED, recipes


def load(name: str, *overrides: str) -> BaseConfig:
    return load_config(RECIPES / f"{name}.yaml", overrides)


def notes(config: BaseConfig) -> str:
    return "\n".join(f"{path}: {message}" for path, message in config.source.notes)


@pytest.mark.parametrize("name", recipes(refused=False))
def test_a_recipe_plans_as_it_is(name: str) -> None:
    assert make_plan(load(name), LAPTOP).roles


@pytest.mark.parametrize("name", recipes(refused=True))
def test_a_recipe_that_cannot_run_is_refused_in_one_line(name: str) -> None:
    first = (RECIPES / f"{name}.yaml").read_text().splitlines()[0].removeprefix(REFUSED)
    with pytest.raises(ConfigError) as caught:
        load(name)
    assert [str(problem) for problem in caught.value.problems] == [
        f"this recipe needs what is not available here: {first}"
    ]


def test_roles_that_take_turns_may_overlap_in_part() -> None:
    config = load("rlvr_five_domains")
    assert isinstance(config, RLConfig)
    assert config.actor_train.device_mapping == list(range(16))
    assert config.actor_infer.device_mapping == list(range(12)) and config.takes_turns("cuda")


def test_engines_that_run_ahead_get_the_devices_of_their_own() -> None:
    config = load("agentic_shop")
    assert isinstance(config, RLConfig)
    assert config.actor_infer.device_mapping == [4, 5, 6, 7]


def test_classes_of_rewards_are_read_as_built_in_rewards() -> None:
    config = load("rlvr_five_domains")
    assert isinstance(config, RLVRConfig)
    assert {name: built_in_of(reward.function) for name, reward in config.rewards.items()} == {
        "ifeval": "ifeval",
        "math_rule": "math_rule",
        "code_sandbox": "code_sandbox",
        "llm_judge": "llm_judge",
    }
    assert config.rewards["ifeval"].reward_type == "soft" and config.rewards["code_sandbox"].timeout_s == 60.0
    assert "GeneralRuleRewardWorker is read as function: ifeval, without its penalty" in notes(config)
    assert "rewards.llm_judge.judge_prompt: has no effect: it names a prompt of ROLL" in notes(config)


@pytest.mark.parametrize(("worker", "built_in"), sorted(WORKERS.items()))
def test_every_known_class_has_its_built_in_reward(worker: str, built_in: str) -> None:
    config = load("rlvr_five_domains", f"rewards.ifeval.worker_cls=a.b.{worker}")
    assert isinstance(config, RLVRConfig)
    assert config.rewards["ifeval"].function == BUILT_IN[built_in].function
    assert config.rewards["ifeval"].reward_type == ("soft" if built_in in ("ifeval", "code_sandbox") else "strict")


def test_a_judge_with_devices_of_its_own_is_read_as_role_judge() -> None:
    config = load("rlvr_five_domains")
    assert isinstance(config, RLVRConfig) and config.uses_judge
    assert config.judge.model_args.model_name_or_path == "some/judge" and config.judge.device_mapping == [
        *range(12, 16)
    ]
    judge = config.rewards["llm_judge"]
    assert (judge.judge_max_tokens, judge.judge_temperature, judge.template) == (100, 0.8, "qwen2_5")
    assert "rewards.llm_judge.device_mapping: is read as judge.device_mapping" in notes(config)
    assert not [problem for problem in check(config).missing if problem.path.startswith("rewards.")]


def test_a_judge_with_devices_and_an_endpoint_is_asked_at_the_endpoint() -> None:
    config = load("rlvr_five_domains", "rewards.llm_judge.base_url=http://judge:30000/v1")
    assert isinstance(config, RLVRConfig) and not config.uses_judge
    assert config.rewards["llm_judge"].model == "some/judge"
    assert not [problem for problem in check(config).missing if problem.path.startswith("rewards.")]


def test_a_judge_with_neither_stops_a_run_only() -> None:
    config = load("rlvr_five_domains", "rewards.llm_judge.device_mapping=[]")
    [missing] = [str(each) for each in check(config).missing if each.path.startswith("rewards.")]
    assert missing.startswith("rewards.llm_judge.base_url: a judge needs an OpenAI-compatible endpoint, such as")


def test_options_of_a_judge_behind_an_api_are_read() -> None:
    api = ["judge_model_type=api", "judge_api_url=http://judge/v1", "judge_model_name=big"]
    config = load("rlvr_five_domains", *(f"rewards.llm_judge.{item}" for item in api))
    assert isinstance(config, RLVRConfig)
    assert (config.rewards["llm_judge"].base_url, config.rewards["llm_judge"].model) == ("http://judge/v1", "big")
    with pytest.raises(ConfigError, match="judge_api_key: keys are not read from files; export it, and write api_key"):
        load("rlvr_five_domains", "rewards.llm_judge.judge_api_key=secret")


def test_a_class_without_a_rule_here_stops_a_run_only() -> None:
    overrides = ["rewards.ifeval.worker_cls=mine.DetectionRewardWorker"]
    missing = {problem.path: problem.message for problem in check(load("rlvr_five_domains", *overrides)).missing}
    assert missing["rewards.ifeval.function"].startswith("no rule here does what DetectionRewardWorker does; write")
    config = load("rlvr_five_domains", *overrides, "rewards.ifeval.function=mine:score")
    assert "rewards.ifeval.function" not in {problem.path for problem in check(config).missing}


def test_an_environment_that_is_not_here_stops_a_run_only() -> None:
    missing = [problem for problem in check(load("agentic_shop")).missing if "env_type" in problem.path]
    assert [problem.path for problem in missing] == ["custom_envs.Shop.env_type"]


def test_keys_of_roll_take_effect() -> None:
    config = load("rlvr_five_domains")
    assert isinstance(config, RLConfig)
    assert config.checkpoint_dir == "/tmp/models/five-domains"
    assert config.tracker_kwargs == {"tensorboard": {"log_dir": "/tmp/boards/rlvr"}}
    assert (config.max_len_mask, config.difficulty_mask, config.difficulty_high_threshold) == (True, True, 0.95)
    assert config.dual_clip_c == 1.4
    assert config.actor_train.data_args.domain_interleave_probs["math_rule"] == 0.5
    assert config.actor_train.data_args.file_name[2:] == ["data/math.jsonl", "data/ifeval.jsonl"]
    assert config.actor_train.model_args.attn_implementation == "fa2"


def test_a_bound_of_the_dual_clip_that_is_given_stays() -> None:
    config = load("rlvr_five_domains", "dual_clip_c=2")
    assert isinstance(config, RLConfig) and config.dual_clip_c == 2


def test_the_bound_of_the_dual_clip_is_that_of_pg_clip_also_with_other_bounds_of_the_ratio() -> None:
    config = load("rlvr_five_domains", "use_pg_clip_range=true", "pg_clip=0.1", "pg_clip_high=0.28")
    assert isinstance(config, RLConfig)
    assert (config.pg_clip_high, config.dual_clip_c) == (0.28, 1.2)


def test_bounds_of_the_ratio_that_are_turned_off_have_no_effect(tmp_path: Path) -> None:
    text = (RECIPES / "rlvr_five_domains.yaml").read_text()
    file = tmp_path / "recipe.yaml"
    file.write_text(f"{text}\nuse_pg_clip_range: false\npg_clip_high: 0.28\n")
    config = load_config(file)
    assert isinstance(config, RLConfig) and config.pg_clip_high == 0.2
    assert "pg_clip_high: has no effect: use_pg_clip_range is false" in notes(config)


def test_the_kl_of_a_reward_is_k1_unless_the_recipe_says_otherwise() -> None:
    for overrides, penalty in (([], "k1"), (["kl_penalty=mse"], "k2")):
        config = load("rlvr_five_domains", "add_token_level_kl=true", *overrides)
        assert isinstance(config, RLConfig)
        assert (config.kl_penalty, config.init_kl_coef) == (penalty, 0.2)


def test_a_weight_by_difficulty_is_read_with_a_remark_on_what_difficulty_is() -> None:
    config = load("rlvr_five_domains", "difficulty_loss_weight=true")
    assert isinstance(config, RLConfig)
    assert (config.difficulty_loss_weight, config.difficulty_weight_easy, config.difficulty_weight_hard) == (
        True,
        0.5,
        2,
    )
    assert "difficulty_loss_weight: weights a prompt by the mean score of its samples, not by the column" in notes(
        config
    )
    assert "difficulty_loss_weight" not in notes(load("rlvr_five_domains"))


def test_a_weight_by_length_is_read_with_a_remark_on_which_lengths_are_compared() -> None:
    config = load("rlvr_five_domains", "length_loss_weight=true")
    assert isinstance(config, RLConfig)
    assert (config.length_loss_weight, config.length_weight_short, config.length_weight_long) == (True, 1.5, 0.5)
    assert "length_loss_weight: compares the lengths of the whole batch, not those of a micro-batch" in notes(config)
    assert "length_loss_weight" not in notes(load("rlvr_five_domains"))


@pytest.mark.parametrize(
    ("overrides", "packs", "remark"),
    [
        ([], False, "says the same as actor_train.use_sequence_packing"),
        (["use_remove_padding=true"], True, "is read as actor_train.use_sequence_packing: true"),
        (["use_sequence_packing=true"], True, "actor_train.use_sequence_packing decides"),
        (["use_sequence_packing=false", "use_remove_padding=true"], False, "actor_train.use_sequence_packing decides"),
        (["use_sequence_packing=null", "use_remove_padding=true"], True, "is read as actor_train.use_sequence_packing"),
    ],
)
def test_padding_is_computed_only_if_neither_key_removes_it(overrides: list[str], packs: bool, remark: str) -> None:
    """The recipe has false for both."""
    config = load("rlvr_offpolicy", *(f"actor_train.{override}" for override in overrides))
    assert isinstance(config, RLVRConfig)
    assert config.actor_train.use_sequence_packing is packs
    assert f"actor_train.use_remove_padding: {remark}" in notes(config)


def test_columns_of_a_recipe_for_sft() -> None:
    data = load("sft_alpaca").actor_train.data_args
    assert (data.prompt, data.query, data.response, data.system) == ("instruction", "input", "output", "system")


def test_a_correction_of_roll_is_read() -> None:
    config = load("rlvr_gspo_corrected")
    assert isinstance(config, RLConfig)
    assert config.actor_train.pg_variant == "gspo" and config.gspo_clip_high == 0.2
    assert (config.correction.weights.level, config.correction.weights.upper) == ("token", 1.5)
    rejection = config.correction.rejection
    assert (rejection.statistic, rejection.level, rejection.upper) == ("k1", "segment-mean", 1.05)
    difference = config.correction.difference
    assert (difference.level, difference.lower, difference.upper) == ("segment-mean", -0.1, 0.1)
    assert "not available" not in notes(config)


def test_every_ratio_of_the_filters_of_roll_is_read_and_one_difference() -> None:
    both = "{enabled: true, agg_type: sequence, ratio_low: 0.5, ratio_high: 2, diff_enabled: true, diff_high: 0.3}"
    ratio = "{enabled: true, agg_type: token, ratio_low: 0.1, ratio_high: 4}"
    off = "{enabled: false, agg_type: token, ratio_low: 0.9, ratio_high: 1.1}"
    for filters, lost in (([both, off, ratio], False), ([both, both, ratio], True)):
        config = load("rlvr_gspo_corrected", f"train_infer_correction.filters=[{', '.join(filters)}]")
        assert isinstance(config, RLConfig)
        rejections = list(config.correction.all_rejections.values())
        assert [(each.level, each.upper) for each in rejections[:1] + rejections[-1:]] == [
            ("sequence-sum", 2),
            ("token", 4),
        ]
        assert len(rejections) == 2 + lost and config.correction.difference.upper == 0.3
        assert ("not available: further differences" in notes(config)) == lost


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train_infer_correction=true", "train_infer_correction: True is not a section"),
        ("train_infer_correction.is_weight.weight_type=tokn", "weight_type: 'tokn' is not one of token, sequence"),
        ("train_infer_correction.is_weight.weight_type=[token]", "weight_type: ['token'] is not one of token"),
        ("enable_old_logprobs_recompute='no'", "enable_old_logprobs_recompute: 'no' is not true or false"),
        ("use_pg_clip_range=1", "use_pg_clip_range: 1 is not true or false"),
        ("reward_norm=true", "reward_norm: True is not batch, group, running or null"),
        ("batch_adjust_mode=[copy]", "batch_adjust_mode: "),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_and_not_taken_for_another(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load("rlvr_gspo_corrected", override)


def test_the_remark_on_pg_clip_names_the_bounds_that_it_sets() -> None:
    config = load("rlvr_gspo_corrected", "pg_clip=0.3", "pg_clip_low=0.1")
    assert isinstance(config, RLConfig) and (config.pg_clip_low, config.pg_clip_high) == (0.1, 0.3)
    assert "pg_clip: is read as pg_clip_high: 0.3" in notes(config)


def test_the_remark_on_pg_clip_names_the_bounds_that_it_replaces(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(f"defaults: [{RECIPES / 'rlvr_gspo_corrected.yaml'}]\npg_clip: 0.2\npg_clip_high: 0.3\n")
    message = "pg_clip_high: 0.2, instead of pg_clip_high 0.3; use_pg_clip_range: true would take those"
    assert message in notes(load_config(file))


def test_normalization_of_rewards_decides_about_grpo() -> None:
    config = load("agentic_two_nodes_fp16")
    assert isinstance(config, RLConfig)
    assert (config.adv_estimator, config.norm_mean_type, config.norm_std_type) == ("reinforce", None, None)
    assert config.actor_train.model_args.dtype == "bf16"
    config = load("agentic_frozen_lake_async")
    assert isinstance(config, RLConfig)
    assert (config.adv_estimator, config.grpo_norm_by_std) == ("grpo", True)


def test_normalization_by_tag_is_read() -> None:
    config = load("agentic_two_nodes_fp16", "reward_normalization={grouping: tags, method: mean_std}")
    assert isinstance(config, RLConfig)
    assert (config.adv_estimator, config.norm_mean_type, config.norm_std_type) == ("reinforce", "tag", "tag")


def test_normalization_by_running_statistics_is_read() -> None:
    config = load("rlvr_five_domains", "reward_norm=running")
    assert isinstance(config, RLConfig)
    assert (config.norm_mean_type, config.norm_std_type) == ("running", "running")


def test_a_variable_of_the_environment_that_is_not_set_stops_a_run_only() -> None:
    missing = [str(problem) for problem in check(load("rlvr_offpolicy")).missing]
    assert (
        "tracker_kwargs.api_key: the environment variable A_KEY_THAT_IS_NOT_SET is not set; "
        "export A_KEY_THAT_IS_NOT_SET=..."
    ) in missing


def test_keys_without_effect_for_one_reason_are_one_remark() -> None:
    (line,) = [line for line in notes(load("rlvr_five_domains")).splitlines() if "prompts are prepared in one" in line]
    assert line.startswith("actor_train.data_args.preprocessing_num_workers: has no effect")
    (line,) = [line for line in notes(load("rlvr_five_domains")).splitlines() if "a reward is a function" in line]
    assert "rewards.ifeval.model_args, rewards.ifeval.data_args" in line or "rewards.ifeval.data_args" in line


def test_keys_that_are_null_are_not_given(tmp_path: Path) -> None:
    text = (RECIPES / "rlvr_offpolicy.yaml").read_text()
    text = text.replace("resume_from_checkpoint: false", "resume_from_checkpoint: ~") + "reference: ~\n"
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    assert load_config(file).resume_from_checkpoint is False


PLACES = {
    "<role>.generating_args": "actor_infer.generating_args",
    "<role>": "actor_train",
    "<megatron role>": "actor_train",
    "rewards.*": "rewards.math_rule",
    "custom_envs.*": "custom_envs.Guess",
    "*_env_manager": "train_env_manager",
    "*": "any",
}
"""Parts of patterns of the tables -> names that a recipe has."""


def null_keys(recipe: str) -> list[str]:
    """Paths of the tables of ROLL that a recipe does not give."""
    given = yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text())
    keys = [(item.pattern, item.pipelines) for item in roll.UNSUPPORTED_KEYS]
    keys += [(key, ("rlvr",)) for key in (*roll.RENAMED_KEYS, *roll.MOVED_KEYS, *READ_KEYS, "a_key_of_later")]
    paths = []
    for path, pipelines in keys:
        of_agents = "rlvr" not in pipelines or path.startswith(("custom_env", "*_env", "train_env", "val_env"))
        for part, name in PLACES.items():
            path = path.replace(part, name)
        if of_agents == ("train_env_manager" in given) and value_at(given, path) is None:
            paths.append(path)
    return paths


@pytest.mark.parametrize(("recipe", "least"), [("rlvr_offpolicy", 150), ("agentic_game_steps", 15)])
def test_keys_of_the_tables_that_are_null_change_nothing(recipe: str, least: int, tmp_path: Path) -> None:
    paths = null_keys(recipe)
    assert len(paths) > least
    tree: dict[str, Any] = {"defaults": [str(RECIPES / f"{recipe}.yaml")]}
    for path in sorted(paths, key=len, reverse=True):
        if value_at(tree, path) is None:  # not a section that has null keys already
            tree = set_at(tree, path, None)
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(tree))
    assert load_config(file) == load(recipe)


def test_agents_that_call_an_endpoint_are_named(tmp_path: Path) -> None:
    message = "call the policy through an OpenAI-compatible endpoint (custom_envs.Guess.agent_runner_cls GEMRunner)"
    with pytest.raises(ConfigError, match=re.escape(message)):
        load("agentic_game_steps", "custom_envs.Guess.agent_runner_cls=a.b.GEMRunner")


def test_ids_of_other_libraries_are_environments_that_are_not_here() -> None:
    config = load("agentic_game_steps")
    assert isinstance(config, AgenticConfig) and check_environments(config) == []
    assert "custom_envs.Guess.env_type" in {problem.path for problem in check(config).missing}


def test_the_coefficients_of_topr_without_a_policy_loss_are_its_variant() -> None:
    overrides = ["rl_loss_coef=0.0", "use_topr_neg_loss_coef=0.3"]
    config = load("rlvr_five_domains", *overrides, "postive_loss_coef=0.7")
    assert isinstance(config, RLConfig) and config.actor_train.pg_variant == "topr"
    assert (config.topr_positive_weight, config.topr_negative_weight) == (0.7, 0.3)
    assert "topr_negative_weight: 0.3; 1 instead of x_1, which is not a number" in notes(
        load("rlvr_five_domains", *overrides, "positive_loss_coef=x_1")
    )
    for others in (["rl_loss_coef=0.0"], [*overrides, "actor_train.pg_variant=ppo"], ["rl_loss_coef=0.5"]):
        with pytest.raises(ConfigError, match="the policy loss has weight 1; leave it out"):
            load("rlvr_five_domains", *others)


def test_a_context_in_which_vllm_cuts_responses_is_the_longest_sequence() -> None:
    short = "actor_infer.strategy_args.strategy_config.max_model_len=100"
    config = load("rlvr_async_vllm", short)
    assert isinstance(config, RLConfig)
    assert "context_length" not in config.actor_infer.strategy_args.strategy_config
    assert f"max_model_len: 100 would cut sequences; the context is {config.sequence_length}" in notes(config)


@pytest.mark.parametrize("parts", ["vision_model", "visual.blocks,audio_tower", "[model.visual, vision_tower]"])
def test_a_model_for_text_has_no_frozen_parts_of_vision(parts: str) -> None:
    config = load("rlvr_offpolicy", f"actor_train.model_args.freeze_module_prefix={parts}")
    assert "freeze_module_prefix: has no effect: a model for text has no such part" in notes(config)


@pytest.mark.parametrize(
    ("override", "lacks"),
    [
        ("actor_train.model_args.freeze_module_prefix=vision_model,embedding", "frozen parts of a model"),
        ("pretrain=Qwen/Qwen3.5-27B", "linear attention"),
        (
            "pretrain=/models/Qwen3-Next-80B-A3B",
            "mixtures of experts (pretrain /models/Qwen3-Next-80B-A3B), linear att",
        ),
    ],
)
def test_what_a_model_needs_is_named(override: str, lacks: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"this recipe needs what is not available here: {lacks}")):
        load("rlvr_offpolicy", override)


def test_a_critic_without_devices_is_on_those_of_the_policy() -> None:
    config = load("rlvr_five_domains", "adv_estimator=gae")
    assert isinstance(config, RLConfig)
    assert config.critic.device_mapping == config.actor_train.device_mapping


def test_environments_of_older_versions_are_read() -> None:
    entry = {"env_config": {"dim_x": 5, "dim_y": 7}, "user_prompt_format": "x", "reward_template": "{reward}"}
    text = yaml.safe_dump({**entry, "agent_template": "State: {state}"}, default_flow_style=True)
    config = load("agentic_game_steps", f"custom_envs.Guess={text}")
    assert isinstance(config, AgenticConfig)
    assert config.custom_envs["Guess"].env_config["dim_room"] == [5, 7]
    assert config.custom_envs["Guess"].agent_template == "State: {observation}"


def test_terms_of_the_kl_without_a_weight_are_off() -> None:
    config = load("rlvr_grpo_32b", "kl_loss_coef=0")
    assert isinstance(config, RLConfig) and not config.use_kl_loss
    config = load("rlvr_grpo_32b")
    assert isinstance(config, RLConfig) and config.kl_loss_type == "k3"
    assert (config.pg_clip_low, config.pg_clip_high) == (0.25, 0.25)


def test_pages_of_the_cache_are_left_out_on_cpu() -> None:
    kernels = (f"{role}.model_args.attn_implementation=sdpa" for role in ("actor_train", "reference"))
    config = load("rlvr_five_domains", "platform=cpu", *kernels)
    assert isinstance(config, RLConfig)
    assert "page_size" not in config.actor_infer.strategy_args.strategy_config


@pytest.mark.parametrize(("base", "sample_by"), [("traj_envs", "traj"), ("step_envs", "step")])
def test_a_recipe_without_its_base_file_takes_the_environments_of_this_project(
    tmp_path: Path, base: str, sample_by: str
) -> None:
    tags = ["SimpleSokoban", "LargerSokoban", "SokobanDifferentGridVocab", "FrozenLake", "FrozenLakeThink"]
    text = (RECIPES / "agentic_frozen_lake_async.yaml").read_text()
    text = text.replace("config/traj_envs@_here_", f"../nowhere/{base}@_here_").replace("[Lake]", "[FrozenLake]")
    text = text.replace("[Boxes, BoxesInLetters, Lake]", "[SimpleSokoban, LargerSokoban, SokobanDifferentGridVocab]")
    head, _, own = text.partition("custom_envs:\n")
    entries = "".join(f"  {tag}: ${{custom_env.{tag}}}\n" for tag in tags)
    file = tmp_path / "recipe.yaml"
    file.write_text(f"{head}custom_envs:\n{entries}{own[own.index('  OwnLake') :]}")
    config = load_config(file)
    assert isinstance(config, AgenticConfig) and config.sample_by == sample_by
    assert config.custom_envs["FrozenLake"].max_tokens_per_step == 64
    assert f"{base}@_here_" not in notes(config)
    assert f"../nowhere/{base} does not exist; the environments of this project are used" in notes(config)


@pytest.mark.parametrize(
    "override",
    [
        "is_num_return_sequences_expand=false",
        "vlm_filter={enable: true, image_key: images}",
        "traj_save_dir=./output/trajectories",
        "reference.topr_positive_weight=1.0",
        "actor_infer.topr_negative_weight=1.0",
        "actor_train.model_args.vision_dp=false",
        "actor_train.model_args.disable_gradient_checkpointing=true",
        "reference.model_args.dtype=fp16",
        "actor_train.data_args.cache_path=./cache",
        "actor_train.data_args.eval_file_name=null",
        "actor_infer.data_args.dataset_dir=data",
        "actor_train.training_args.warmup_ratio=0.1",
        "actor_train.training_args.per_device_eval_batch_size=8",
        "actor_train.training_args.optim=adamw_torch",
        "actor_infer.generating_args.presence_penalty=0.0",
        "actor_train.strategy_args.strategy_config.optimizer=adam",
    ],
)
def test_a_value_without_effect_in_roll_is_a_remark(override: str) -> None:
    path = override.partition("=")[0]
    assert f"{path}: " in notes(load("rlvr_five_domains", override)).replace(", ", ": ")


@pytest.mark.parametrize(
    "override",
    [
        "actor_infer.pg_variant=tis",
        "actor_train.training_args.optim=muon",
        "actor_infer.generating_args.presence_penalty=0.5",
        "actor_train.data_args.eval_file_name=val.jsonl",
    ],
)
def test_a_value_with_an_effect_that_is_missing_here_is_an_error(override: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(override.partition("=")[0])):
        load("rlvr_five_domains", override)


def test_distillation_from_a_teacher_is_read() -> None:
    config = load("distill_on_policy")
    assert isinstance(config, RLVRConfig)
    assert (config.adv_estimator, config.opd_kl_coef, config.uses_reference) == ("opd", 0.5, True)
    teacher, student = config.reference.model_args.model_name_or_path, config.actor_train.model_args.model_name_or_path
    assert (teacher, student) == ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-1.5B")
    assert config.actor_infer.generating_args.max_new_tokens == 4096
    assert "student_train: is read as actor_train" in notes(config)


def test_a_teacher_beside_scores_is_read(tmp_path: Path) -> None:
    text = (RECIPES / "distill_on_policy.yaml").read_text()
    file = tmp_path / "recipe.yaml"
    text = text.replace("student_train:", "actor_train:").replace("student_infer:", "actor_infer:")
    file.write_text(f"{text.replace('_in_group: 1', '_in_group: 4')}\nuse_opd: true\nadv_estimator: grpo\n")
    config = load_config(file)
    assert isinstance(config, RLVRConfig)
    assert (config.adv_estimator, config.use_opd, config.opd_kl_coef) == ("grpo", True, 0.5)


def test_the_model_of_a_teacher_may_be_given_at_the_top(tmp_path: Path) -> None:
    text = (RECIPES / "distill_on_policy.yaml").read_text()
    file = tmp_path / "recipe.yaml"
    file.write_text(text.replace(', model_name_or_path: "${teacher_pretrain}"', ""))
    config = load_config(file)
    assert isinstance(config, RLVRConfig)
    assert config.reference.model_args.model_name_or_path == "Qwen/Qwen2.5-7B-Instruct"


@pytest.mark.parametrize(
    ("override", "missing"),
    [
        ("opsd_mode=true", "distillation from the model itself (opsd_mode)"),
        ("teacher.tag_included=[math]", "several teachers, or a teacher of some tags (reference.tag_included)"),
        ("teacher.math={model_args: {dtype: bf16}}", "several teachers, or a teacher of some tags (reference.math)"),
    ],
)
def test_distillation_that_is_missing_is_named(override: str, missing: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"this recipe needs what is not available here: {missing}")):
        load("distill_on_policy", override)


@pytest.mark.parametrize(
    ("overrides", "estimator"),
    [
        (["is_pure_opd=false"], "grpo"),
        (["is_pure_opd=true"], "opd"),
        (["student_train.training_args.learning_rate=1"], "opd"),
        (["is_pure_opd=false", "student_train.training_args.learning_rate=1", "adv_estimator=rloo"], "rloo"),
    ],
)
def test_the_switch_of_distillation_wins_over_the_names_of_roles(overrides: list[str], estimator: str) -> None:
    config = load("distill_on_policy", "num_return_sequences_in_group=2", *overrides)
    assert isinstance(config, RLVRConfig)
    assert config.adv_estimator == estimator
