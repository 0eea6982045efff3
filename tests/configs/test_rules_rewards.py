"""Rules of rewards: built-in ones and their keys, several for one tag, and the domains that prompts are drawn from."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from roll.base.errors import ConfigError
from roll.configs.check import check
from roll.configs.pipeline import RLVRConfig, RLVREngineRewardConfig
from roll.configs.scoring.built_in_rewards import BUILT_IN
from roll.configs.scoring.rewards import RewardConfig, domain_of, rewards_of, truths_read
from roll.plan.hardware import prepare_run
from roll.plan.plan import make_plan
from tests.configs.samples import SERVER, refusal, rlvr

SUM = "rewards={a: {tag_included: [x], weight: 2}, b: {tag_included: [x, y]}, c: {}}"
SHARES = "actor_train.data_args.domain_interleave_probs"


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name != "reward_model"])
def test_an_entry_with_the_name_of_a_built_in_reward_uses_it(tmp_path: Path, name: str) -> None:
    reward = rlvr(tmp_path, f"rewards={{{name}: {{}}}}").rewards[name]
    assert (reward.function, reward.timeout_s) == (BUILT_IN[name].function, BUILT_IN[name].timeout_s)
    assert reward.max_concurrent_calls == BUILT_IN[name].max_concurrent_calls


def test_a_function_may_be_the_name_of_a_built_in_reward(tmp_path: Path) -> None:
    rewards = rlvr(
        tmp_path, "rewards={a: {function: regex, timeout_s: 9, tag_included: [x]}, ifeval: {function: mine:f}}"
    ).rewards
    assert (rewards["a"].function, rewards["a"].timeout_s) == (BUILT_IN["regex"].function, 9.0)
    assert (rewards["ifeval"].function, rewards["ifeval"].timeout_s) == ("mine:f", 5.0)


def test_an_entry_with_another_name_is_the_math_rule(tmp_path: Path) -> None:
    assert rlvr(tmp_path, "rewards={strict: {}}").rewards["strict"].function == BUILT_IN["math_rule"].function


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (
            "{math_rule: {code_from: whole}}",
            "code_from: has no effect: of the built-in rewards, only code_sandbox reads",
        ),
        (
            "{ifeval: {base_url: 'http://a/v1'}}",
            "base_url: has no effect: of the built-in rewards, only llm_judge reads",
        ),
        ("{regex: {reward_type: soft}}", "reward_type: has no effect: of the built-in rewards, only ifeval and code_"),
        (
            "{code_sandbox: {answer_pattern: boxed}}",
            "answer_pattern: has no effect: of the built-in rewards, only math_",
        ),
        ("{regex: {pattern: '('}}", "pattern: '(' is not a regular expression: missing )"),
        ("{ifeval: {wrong_score: 1}}", "correct_score: 1 equals wrong_score"),
        (
            "{mine: {function: multiple_choise}}",
            "is not the name of a function; did you mean multiple_choice? write module:function, or a built-in",
        ),
        ("{llm_judge: {base_url: judge}}", "base_url: 'judge' is not an address; write http://host:port/v1"),
        ("{llm_judge: {prompt_template: 'Grade it'}}", "prompt_template: does not contain {response}"),
        ("{llm_judge: {prompt_template: '{response} {answer}'}}", "prompt_template: {answer} is not a field; known:"),
        ("{llm_judge: {prompt_template: '{response'}}", "prompt_template: cannot be filled in"),
        ("{llm_judge: {grade_pattern: 'yes|no'}}", "grade_pattern: 'yes|no' has no group for the grade"),
        ("{a: {}, b: {}}", "rewards.b: scores nothing: rewards.a already scores every tag that no reward names"),
        ("{a: {tag_included: [x], weight: 1.0e30}}", "a.weight: prompts tagged x have a score of up to 1e+30; use"),
        ("{a: {tag_included: [x], weight: 0}}", "a.weight: 0 gives prompts tagged x a score of 0"),
        ("{a: {weight: 0}}", "a.weight: 0 gives prompts whose tag no reward names a score of 0"),
        ("{a: {tag_included: [x], weight: nan}}", "a.weight: nan is not a finite number"),
        (
            "{a: {tag_included: [x], query_filter_config: {type: std_filter}}, "
            "b: {tag_included: [x], query_filter_config: {type: std_filter}}}",
            "rewards.b.query_filter_config: prompts tagged x are filtered by rewards.a and rewards.b; a filter reads",
        ),
    ],
)
def test_a_mistake_is_explained(tmp_path: Path, rewards: str, message: str) -> None:
    assert message in refusal(tmp_path, f"rewards={rewards}")


@pytest.mark.parametrize(
    ("rewards", "warned"),
    [
        ("{multiple_choise: {}}", True),
        ("{ifevel: {}}", True),
        ("{math: {}}", False),
        ("{strict: {}}", False),
        ("{multiple_choise: {function: math_rule}}", False),
        ("{multiple_choise: {function: mine:f}}", False),
    ],
)
def test_a_name_that_is_almost_that_of_a_built_in_reward_is_a_warning(
    tmp_path: Path, rewards: str, warned: bool
) -> None:
    warnings = [str(warning) for warning in check(rlvr(tmp_path, f"rewards={rewards}")).warnings]
    assert [("so math_rule scores; write function: " in warning) for warning in warnings] == [True] * warned


@pytest.mark.parametrize(
    ("reward", "warned"),
    [
        ("math_rule={correct_score: -1, wrong_score: 1}", True),
        ("math_rule={correct_score: -1, wrong_score: 1, weight: -1}", False),
        ("regex={function: regex, pattern: sorry, correct_score: -1}", False),
    ],
)
def test_scores_that_reward_wrong_answers_are_a_warning(tmp_path: Path, reward: str, warned: bool) -> None:
    tagged = reward.replace("}", ", tag_included: [math]}")
    found = [str(problem) for problem in check(rlvr(tmp_path, f"rewards.{tagged}")).warnings]
    message = "rewards.math_rule.correct_score: -1 is below wrong_score 1, so the policy learns to answer wrongly"
    assert any(message in each for each in found) == warned


STD_FILTER = "query_filter_config: {type: std_filter, filter_args: {std_threshold: %s}}"


@pytest.mark.parametrize(
    ("reward", "warned"),
    [
        (STD_FILTER % 100, True),
        (STD_FILTER % 0.5, True),
        (STD_FILTER % 0.49, False),
        (f"correct_score: 200, {STD_FILTER % 99}", False),
        (f"weight: 0.1, {STD_FILTER % 0.1}", True),
        (f"function: tests.usercode.odd_rewards:nothing, {STD_FILTER % 100}", False),
    ],
)
def test_a_filter_that_drops_every_group_is_a_warning(tmp_path: Path, reward: str, warned: bool) -> None:
    found = [str(problem) for problem in check(rlvr(tmp_path, f"rewards.math_rule={{{reward}}}")).warnings]
    message = "drops every group: the scores of prompts whose tag no reward names have a standard deviation of at most"
    assert any(message in each for each in found) == warned


def test_a_plan_names_the_built_in_reward_that_is_probably_meant(tmp_path: Path) -> None:
    plan = make_plan(rlvr(tmp_path, "rewards={multiple_choise: {}}"))
    assert any(
        "rewards.multiple_choise.function: is not given and multiple_choise is not a built-in reward, so math_rule "
        "scores; write function: multiple_choice if that is meant, else function: math_rule" in str(warning)
        for warning in plan.warnings
    )


def test_functions_of_the_user_may_read_every_key(tmp_path: Path) -> None:
    rewards = rlvr(tmp_path, "rewards={a: {function: mine:f, base_url: 'http://a/v1', code_from: whole}}").rewards
    assert rewards["a"].code_from == "whole"


def test_a_judge_needs_an_endpoint_a_model_and_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    missing = {each.path for each in check(rlvr(tmp_path, "rewards={llm_judge: {api_key_env: JUDGE_KEY}}")).missing}
    assert {f"rewards.llm_judge.{key}" for key in ("base_url", "api_key_env")} <= missing
    endpoint = "rewards={llm_judge: {base_url: 'http://127.0.0.1:30000/v1'}}"
    assert "rewards.llm_judge.model" in {each.path for each in check(rlvr(tmp_path, endpoint)).missing}


def test_rewards_that_name_a_tag_are_added_and_the_one_without_tags_scores_the_others(tmp_path: Path) -> None:
    config = rlvr(tmp_path, SUM)
    assert [rewards_of(config.rewards, tag) for tag in "xyz"] == [["a", "b"], ["b"], ["c"]]
    assert check(config).warnings == []
    reordered = {"c": RewardConfig(), "a": RewardConfig(tag_included=["x"])}
    assert (rewards_of(reordered, "x"), rewards_of(reordered, "y")) == (["a"], ["c"])
    assert rewards_of({"a": RewardConfig(tag_included=["x"])}, "y") == []


def test_a_sum_without_weights_is_a_warning(tmp_path: Path) -> None:
    rewards = "rewards={a: {tag_included: [x]}, b: {tag_included: [x, y]}}"
    [warning] = check(rlvr(tmp_path, rewards)).warnings
    assert str(warning) == (
        "rewards.b.tag_included: prompts tagged x are scored by rewards.a and rewards.b: their score is the sum; write "
        "weight: 1 to one of them if this is meant, or remove the tags from one"
    )


def test_one_of_several_rewards_may_filter(tmp_path: Path) -> None:
    rewards = (
        "rewards={a: {tag_included: [x], weight: 2}, b: {tag_included: [x], query_filter_config: {type: std_filter}}}"
    )
    assert check(rlvr(tmp_path, rewards)).errors == []


def test_shares_name_one_reward_of_each_tag(tmp_path: Path) -> None:
    config = rlvr(tmp_path, SUM, f"{SHARES}={{b: 0.5, c: 0.5}}")
    shares = config.actor_train.data_args.domain_interleave_probs
    assert [domain_of(config.rewards, shares, tag) for tag in "xyz"] == ["b", "b", "c"]
    with pytest.raises(ConfigError, match="prompts tagged x belong to a and b, whose scores are added, so it is not"):
        rlvr(tmp_path, SUM, f"{SHARES}={{a: 0.5, b: 0.5}}")


MODEL_REWARD = "rewards={math_rule: {tag_included: [math]}, reward_model: {weight: 0.5}}"
"""The model scores what is not tagged math."""


@pytest.fixture
def reward_model(tmp_path: Path) -> Path:
    """The folder of a reward model, its config.json alone."""
    folder = tmp_path / "scores"
    folder.mkdir()
    config = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "model_type": "qwen2",
        "max_position_embeddings": 32768,
        "architectures": ["Qwen2ForSequenceClassification"],
        "id2label": {"0": "score"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_reward_model_is_a_role_with_devices_and_a_model_of_its_own(tmp_path: Path, reward_model: Path) -> None:
    config = rlvr(
        tmp_path, MODEL_REWARD, "reward.device_mapping=[0,1]", f"reward.model_args.model_name_or_path={reward_model}"
    )
    assert config.uses_reward_model and "reward" in config.device_roles()
    assert config.rewards["reward_model"].template == config.actor_train.data_args.template
    assert not [problem for problem in check(config).warnings if "reward" in problem.path]
    unused = rlvr(tmp_path, "rewards={math_rule: {}}")
    assert not unused.uses_reward_model and "reward" not in unused.device_roles()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("reward.device_mapping=[]", "reward.device_mapping: is empty, but a reward_model in rewards needs the model"),
        (
            "reward.model_args.model_name_or_path=null",
            "reward.model_args.model_name_or_path: is not set; name a reward model",
        ),
        ("rewards.reward_model.template=qwen", "rewards.reward_model.template: 'qwen'"),
    ],
)
def test_a_reward_model_that_cannot_score_is_refused(
    tmp_path: Path, reward_model: Path, overrides: str, message: str
) -> None:
    given = [MODEL_REWARD, "reward.device_mapping=[0,1]", f"reward.model_args.model_name_or_path={reward_model}"]
    assert message in refusal(tmp_path, *given, overrides)


JUDGE = ("rewards={math_rule: {tag_included: [math]}, llm_judge: {}}", "judge.device_mapping=[24]")


def judged(tmp_path: Path, model: Path | None, *overrides: str) -> RLVRConfig:
    named = [] if model is None else [f"judge.model_args.model_name_or_path={model}"]
    return rlvr(tmp_path, *JUDGE, *named, *overrides)


@pytest.fixture
def judge_model(reward_model: Path) -> Path:
    """The folder of a language model, its config.json alone."""
    config = json.loads((reward_model / "config.json").read_text())
    (reward_model / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen2ForCausalLM"]}))
    return reward_model


def test_a_judge_without_an_endpoint_is_a_role_with_engines_and_a_model_of_its_own(
    tmp_path: Path, judge_model: Path
) -> None:
    config = judged(tmp_path, judge_model)
    assert config.uses_judge and list(config.device_roles())[-1] == "judge"
    assert config.rewards["llm_judge"].template == "native"
    report = check(config)
    assert not [problem for problem in (*report.warnings, *report.missing) if "judge" in problem.path]
    unused = rlvr(tmp_path, "rewards={math_rule: {}}")
    assert not unused.uses_judge and "judge" not in unused.device_roles()
    endpoint = rlvr(tmp_path, "rewards={llm_judge: {base_url: 'http://judge/v1', model: big}}")
    assert not endpoint.uses_judge and check(endpoint).warnings == []


def test_a_judge_of_the_run_is_never_the_policy_by_default(tmp_path: Path) -> None:
    message = "judge.model_args.model_name_or_path: is not set; name the model that grades"
    with pytest.raises(ConfigError, match=message):
        judged(tmp_path, None)


def test_a_judge_may_be_of_a_family_that_cannot_be_trained(tmp_path: Path, judge_model: Path) -> None:
    file = judge_model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["MixtralForCausalLM"]}))
    plan = make_plan(judged(tmp_path, judge_model), SERVER)
    assert "no memory estimate for judge: the model's architecture is not known here" in plan.warnings
    assert "judge" not in {memory.role for memory in plan.memory}
    file.write_text(json.dumps({"architectures": ["OtherForCausalLM"]}))
    with pytest.raises(ConfigError, match="judge.sequence_length: is not set, and .* does not say how many positions"):
        judged(tmp_path, judge_model)
    assert judged(tmp_path, judge_model, "judge.sequence_length=8192").judge.sequence_length == 8192


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["judge.sequence_length=40000"], "judge.sequence_length: 40000 is above max_position_embeddings 32768 of"),
        (["judge.strategy_args.strategy_config.load_format=dummy"], "load_format: dummy gives a judge random weights"),
        (["judge.num_gpus_per_worker=2"], "judge.device_mapping: 1 devices cannot hold engines of num_gpus_per_worker"),
        (["judge.generating_args={}"], "judge.generating_args: "),
        (["rewards.llm_judge.template=qwen"], "rewards.llm_judge.template: 'qwen'"),
        (
            ["judge.device_mapping=[16]", "async_generation_ratio=1"],
            "judge.device_mapping: overlaps actor_infer.device_mapping in device 16, and with async_generation_ratio 1",
        ),
    ],
)
def test_a_judge_that_cannot_grade_is_refused(
    tmp_path: Path, judge_model: Path, overrides: list[str], message: str
) -> None:
    named = f"judge.model_args.model_name_or_path={judge_model}"
    assert message in refusal(tmp_path, *JUDGE, named, *overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["judge.device_mapping=[0]"],
            "overlaps actor_train.device_mapping in device 0: a judge stays in their memory",
        ),
        (["rewards.llm_judge.world_size=2"], "world_size: has no effect: a model of the run gives the scores"),
        (
            ["rewards.llm_judge.model=big"],
            "model: has no effect: without base_url the judge is the model of role judge",
        ),
        (["rewards.llm_judge=null"], "judge: is configured but not used: no reward is an llm_judge without base_url"),
    ],
)
def test_keys_of_a_judge_without_effect_are_warned_of(
    tmp_path: Path, judge_model: Path, overrides: list[str], message: str
) -> None:
    assert any(message in str(problem) for problem in check(judged(tmp_path, judge_model, *overrides)).warnings)


ENGINES = (MODEL_REWARD, "reward.device_mapping=[24]", "reward.strategy_args.strategy_name=sglang")


def test_a_reward_model_on_engines_has_the_keys_of_an_engine(tmp_path: Path, reward_model: Path) -> None:
    named = (*ENGINES, f"reward.model_args.model_name_or_path={reward_model}")
    config = rlvr(tmp_path, *named, "reward.num_gpus_per_worker=1", "reward.max_running_requests=7")
    assert isinstance(config, RLVREngineRewardConfig)
    assert (config.reward.max_running_requests, config.reward.layout.data) == (7, 1)
    assert config.uses_reward_model and "reward" in config.device_roles()
    assert not [problem for problem in check(config).warnings if "reward" in problem.path]
    megatron = rlvr(tmp_path, *ENGINES[:2], f"reward.model_args.model_name_or_path={reward_model}")
    assert not isinstance(megatron, RLVREngineRewardConfig)
    plan = make_plan(config, SERVER)
    assert [(role.strategy, role.workers) for role in plan.roles if role.role == "reward"] == [("sglang", 1)]


def test_batch_sizes_of_megatron_are_warned_of_where_engines_score(tmp_path: Path, reward_model: Path) -> None:
    named = (*ENGINES, f"reward.model_args.model_name_or_path={reward_model}")
    (warning,) = check(rlvr(tmp_path, *named, "reward.infer_batch_size=3")).warnings
    assert str(warning).startswith("reward.infer_batch_size: has no effect: the engine forms its own batches")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reward.sequence_length=40000"], "reward.sequence_length: 40000 is above max_position_embeddings 32768 of"),
        (
            ["reward.strategy_args.strategy_config.load_format=dummy"],
            "load_format: dummy gives a reward model random weights",
        ),
        (["reward.strategy_args.strategy_config.json_model_override_args='{}'"], "the framework sets it for a reward"),
        (["reward.strategy_args.strategy_config.is_embedding=true"], "is_embedding: True: the framework sets this"),
        (["reward.strategy_args.strategy_config.tensor_model_parallel_size=2"], "set num_gpus_per_worker"),
        (["reward.num_gpus_per_worker=2"], "reward.device_mapping: 1 devices cannot hold engines of num_gpus_per"),
        (["reward.generating_args={temperature: 2}"], "reward.generating_args.temperature: has no effect: a reward"),
        (["reward.device_mapping=[]"], "reward.device_mapping: is empty, but a reward_model in rewards needs the"),
        (
            ["reward.device_mapping=[16]", "async_generation_ratio=1"],
            "reward.device_mapping: overlaps actor_infer.device_mapping in device 16, and with async_generation_ratio",
        ),
        (["reward.max_running=2"], "did you mean reward.max_running_requests?"),
        (
            ["reward.strategy_args.strategy_config.max_total_tokens=4096"],
            "the key-value cache of 4096 tokens is shorter than the longest sequence, 32768; use at least that, or "
            "leave it out, or set reward.sequence_length to the longest it has to score",
        ),
        (
            ["reward.strategy_args.strategy_config.context_length=99", "reward.sequence_length=100"],
            "the context of 99 tokens is shorter than the longest sequence, 100;",
        ),
    ],
)
def test_engines_that_cannot_score_are_refused(
    tmp_path: Path, reward_model: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        rlvr(tmp_path, *ENGINES, f"reward.model_args.model_name_or_path={reward_model}", *overrides)
    assert message in str(refusal.value)


def test_a_cache_shorter_than_the_positions_is_enough_for_the_sequences_it_has_to_score(
    tmp_path: Path, reward_model: Path
) -> None:
    named = (*ENGINES, f"reward.model_args.model_name_or_path={reward_model}")
    cache = "reward.strategy_args.strategy_config.max_total_tokens=4096"
    assert check(rlvr(tmp_path, *named, cache, "reward.sequence_length=4096")).errors == []


@pytest.mark.parametrize(
    ("platform", "architecture", "head_dim", "refused"),
    [
        ("cpu", "Qwen2ForSequenceClassification", 24, True),
        ("cpu", "Qwen2ForSequenceClassification", 16, False),
        ("cpu", "Qwen2ForSequenceClassification", None, False),
        ("cpu", "Qwen3ForSequenceClassification", 24, False),
        ("cuda", "Qwen2ForSequenceClassification", 24, False),
    ],
)
def test_an_engine_on_a_cpu_has_no_qwen2_whose_heads_have_a_size_of_their_own(
    tmp_path: Path, reward_model: Path, platform: str, architecture: str, head_dim: int | None, refused: bool
) -> None:
    file = reward_model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"head_dim": head_dim, "architectures": [architecture]}))
    named = (f"reward.model_args.model_name_or_path={reward_model}", f"platform={platform}")
    megatron, engine = (rlvr(tmp_path, *ENGINES[:count], *named) for count in (2, 3))
    make_plan(megatron, SERVER)
    with pytest.raises(ConfigError) if refused else nullcontext() as refusal:
        make_plan(engine, SERVER)
    if refused:
        message = "head_dim 24, which is not hidden_size 64 / num_attention_heads 4, and SGLang cannot load that on a"
        assert f"reward.model_args.model_name_or_path: {reward_model} is a {architecture}" in str(refusal.value)
        assert message in str(refusal.value)
        with pytest.raises(ConfigError, match="SGLang cannot load that on a CPU"):
            prepare_run(engine, SERVER)


@pytest.mark.parametrize("architecture", ["Gemma2ForSequenceClassification", "Qwen2ForRewardModel"])
def test_a_reward_model_of_another_family_or_head_is_refused_on_engines_too(
    tmp_path: Path, reward_model: Path, architecture: str
) -> None:
    file = reward_model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": [architecture]}))
    with pytest.raises(ConfigError, match=architecture):
        rlvr(tmp_path, *ENGINES, f"reward.model_args.model_name_or_path={reward_model}")


def test_engines_of_a_reward_model_on_the_devices_of_the_trainer_are_warned_of(
    tmp_path: Path, reward_model: Path
) -> None:
    named = (*ENGINES, f"reward.model_args.model_name_or_path={reward_model}", "reward.device_mapping=[0]")
    warnings = [str(each) for each in check(rlvr(tmp_path, *named)).warnings]
    assert any("overlaps actor_train.device_mapping in device 0: a reward model stays" in each for each in warnings)


def test_an_engine_that_no_reward_model_has_is_refused_with_those_that_it_can_have(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="megatron_train cannot run reward; use megatron_infer or sglang"):
        rlvr(tmp_path, MODEL_REWARD, "reward.strategy_args.strategy_name=megatron_train")


def test_a_reward_model_counts_tokens_with_its_own_tokenizer(tmp_path: Path, reward_model: Path) -> None:
    limit = "reward.max_tokens_per_microbatch_in_infer"
    given = [MODEL_REWARD, "reward.device_mapping=[0,1]", f"reward.model_args.model_name_or_path={reward_model}"]
    given.append("reward.use_dynamic_batching_in_infer=true")
    assert check(rlvr(tmp_path, *given, f"{limit}=100")).errors == []
    assert f"{limit}: 0 cannot hold one token; use at least that" in refusal(tmp_path, *given)


def test_a_language_model_has_no_scores(tmp_path: Path, reward_model: Path) -> None:
    text = (reward_model / "config.json").read_text().replace("ForSequenceClassification", "ForCausalLM")
    (reward_model / "config.json").write_text(text)
    given = [MODEL_REWARD, "reward.device_mapping=[0,1]", f"reward.model_args.model_name_or_path={reward_model}"]
    message = "is a Qwen2ForCausalLM, which has no head for scores; use a reward model, such as a Qwen2ForSequence"
    assert message in refusal(tmp_path, *given)


@pytest.mark.parametrize("key", ["world_size: 2", "timeout_s: 9", "max_concurrent_calls: 2", "correct_score: 2"])
def test_keys_of_functions_have_no_effect_on_a_reward_model(tmp_path: Path, reward_model: Path, key: str) -> None:
    config = rlvr(
        tmp_path,
        f"rewards={{reward_model: {{{key}}}}}",
        "reward.device_mapping=[0,1]",
        f"reward.model_args.model_name_or_path={reward_model}",
    )
    warnings = [str(problem) for problem in check(config).warnings]
    name = key.partition(":")[0]
    assert any(f"{name}: has no effect: " in warning and "role reward" in warning for warning in warnings), warnings


def test_a_reward_model_that_no_reward_uses_is_a_warning(tmp_path: Path) -> None:
    config = rlvr(tmp_path, "rewards={math_rule: {}}", "reward.device_mapping=[0,1]")
    assert any("reward: is configured but not used" in str(problem) for problem in check(config).warnings)


def test_only_prompts_that_a_reward_model_alone_scores_need_no_ground_truth() -> None:
    rewards = {
        "reward_model": RewardConfig(function=BUILT_IN["reward_model"].function, tag_included=["chat", "both"]),
        "math_rule": RewardConfig(tag_included=["both"]),
        "rest": RewardConfig(),
    }
    assert [[*truths_read(rewards, tag)] for tag in ("chat", "both", "other")] == [[], ["math_rule"], ["math_rule"]]


def test_a_judge_and_an_expression_read_the_ground_truth_only_where_their_text_asks_for_it() -> None:
    judge, regex = BUILT_IN["llm_judge"].function, BUILT_IN["regex"].function
    reads = {
        "judge": RewardConfig(function=judge),
        "blind": RewardConfig(function=judge, prompt_template="{response}"),
        "truth": RewardConfig(function=regex),
        "group": RewardConfig(function=regex, pattern="=(.*)"),
        "plain": RewardConfig(function=regex, pattern="="),
        "own": RewardConfig(function="my:score"),
    }
    assert [name for name, reward in reads.items() if truths_read({name: reward}, "any")] == ["judge", "truth", "group"]


def test_a_reward_model_may_read_fewer_tokens_than_the_policy_writes(tmp_path: Path, reward_model: Path) -> None:
    text = (reward_model / "config.json").read_text().replace("32768", "512")
    (reward_model / "config.json").write_text(text)
    model = f"reward.model_args.model_name_or_path={reward_model}"
    assert rlvr(tmp_path, MODEL_REWARD, "reward.device_mapping=[0,1]", model).sequence_length == 3072


def test_a_reward_model_on_the_devices_of_engines_that_run_ahead_is_a_warning(
    tmp_path: Path, reward_model: Path
) -> None:
    model = f"reward.model_args.model_name_or_path={reward_model}"
    for ratio, expected in ((0, False), (1, True)):
        config = rlvr(tmp_path, MODEL_REWARD, "reward.device_mapping=16-23", model, f"async_generation_ratio={ratio}")
        warnings = [str(problem) for problem in check(config).warnings]
        assert any("reward.device_mapping: is that of actor_infer" in each for each in warnings) == expected
