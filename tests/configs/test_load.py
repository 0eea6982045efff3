from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from roll.base.errors import ConfigError, Report
from roll.configs.pipeline import RLVRConfig, SFTConfig
from roll.loading.load import load_config
from roll.plan.hardware import Hardware, prepare_devices
from tests.configs.samples import RLVR, SFT, refusal, rlvr, sft, write


def test_the_pipeline_is_a_key_and_rlvr_by_default(tmp_path: Path) -> None:
    assert type(rlvr(tmp_path)) is RLVRConfig
    assert type(sft(tmp_path)) is SFTConfig


def test_a_launcher_refuses_a_file_for_another_pipeline(tmp_path: Path) -> None:
    file = write(tmp_path, RLVR + "pipeline: rlvr\n")
    with pytest.raises(ValueError, match="pipeline: the file is for rlvr, but this command starts sft"):
        load_config(file, pipeline="sft")


def test_an_unknown_pipeline_names_the_nearest(tmp_path: Path) -> None:
    assert "pipeline: 'rlrv' is not one of rlvr, sft, agentic, dpo, reward_model; did you mean rlvr?" in refusal(
        tmp_path, "pipeline=rlrv"
    )


def test_values_are_interpolated(tmp_path: Path) -> None:
    text = RLVR + "  generating_args:\n    max_new_tokens: ${response_length}\nexp_name: run-${rollout_batch_size}\n"
    config = rlvr(tmp_path, "response_length=512", text=text)
    assert config.actor_infer.generating_args.max_new_tokens == 512
    assert config.exp_name == "run-64"


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ('defaults: "\\0"', "is not a file"),
        ('defaults: ["\\uD800"]', "is not a file"),
        (f"max_steps: 0x{'f' * 50_000}", "is not a whole number"),
        (f"exp_name: {'${a:' * 300}{'}' * 300}", "nested too deep|cannot be interpolated"),
        ("\n".join(f"k{n}: {'${k' + str(n + 1) + '}'}" for n in range(3000)), "cannot be interpolated"),
        ("exp_name: 'a\u202eb'", "exp_name: 'a.u202eb' has characters that cannot be printed"),
        ('exp_name: "a\\nb"', "has characters that cannot be printed"),
    ],
    ids=["null byte", "surrogate", "digits", "nested", "chain", "direction", "line break"],
)
def test_a_hostile_file_is_refused_in_a_second(tmp_path: Path, tree: str, message: str) -> None:
    began = time.process_time()
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, RLVR + tree + "\n"))
    assert time.process_time() - began < 2


def test_interpolating_an_unknown_key_is_reported(tmp_path: Path) -> None:
    message = refusal(tmp_path, "exp_name=${nowhere}")
    assert (
        "exp_name: cannot be interpolated: Interpolation key 'nowhere' not found; `${key}` sees the values of files"
        in message
    )


def test_file_overrides_its_base_files(tmp_path: Path) -> None:
    write(tmp_path, RLVR + "seed: 1\nexp_name: base\n", "common/base.yaml")
    write(tmp_path, "exp_name: middle\nmax_steps: 7\n", "common/middle.yaml")
    file = write(tmp_path, "defaults: [../common/base, ../common/middle.yaml]\nexp_name: mine\n", "runs/run.yaml")
    config = load_config(file)
    assert (config.exp_name, config.seed, config.max_steps) == ("mine", 1, 7)


def test_sections_of_base_and_file_merge_key_by_key(tmp_path: Path) -> None:
    write(tmp_path, RLVR, "base.yaml")
    config = rlvr(tmp_path, text="defaults: base\nactor_train:\n  training_args:\n    learning_rate: 2e-6\n")
    assert config.actor_train.training_args.learning_rate == 2e-6
    assert config.actor_train.training_args.gradient_accumulation_steps == 64


def test_merge_keys_put_a_mapping_into_others(tmp_path: Path) -> None:
    text = RLVR + (
        "  generating_args: &train {temperature: 0.9, top_p: 0.8}\n"
        "validation:\n  generating_args: &sharper {<<: *train, temperature: 0.5}\n"
        "system_envs: {<<: [*sharper, *train], top_k: 3}\n"
    )
    config = rlvr(tmp_path, text=text)
    assert (config.validation.generating_args.temperature, config.validation.generating_args.top_p) == (0.5, 0.8)
    assert config.system_envs == {"temperature": "0.5", "top_p": "0.8", "top_k": "3"}


def test_circular_includes_are_reported(tmp_path: Path) -> None:
    write(tmp_path, "defaults: [config]\n", "other.yaml")
    message = refusal(tmp_path, text="defaults: [other]\n")
    assert "the files include each other: config.yaml -> other.yaml -> config.yaml" in message


def test_missing_base_file_is_reported(tmp_path: Path) -> None:
    assert "defaults: 'nothing' is not a file" in refusal(tmp_path, text="defaults: [nothing]\n")


def test_overrides_win_and_are_yaml(tmp_path: Path) -> None:
    config = rlvr(
        tmp_path,
        "seed=7",
        "seed=8",
        "actor_train.data_args.file_name=[a.jsonl, b.jsonl]",
        "actor_infer.strategy_args.strategy_config={mem_fraction_static: 0.5}",
        "actor_train.training_args.learning_rate=3e-6",
        "max_logprob_mismatch=~",
    )
    assert config.seed == 8
    assert config.actor_train.data_args.file_name == ["a.jsonl", "b.jsonl"]
    assert config.actor_infer.strategy_args.strategy_config == {"mem_fraction_static": 0.5}
    assert config.actor_train.training_args.learning_rate == 3e-6


@pytest.mark.parametrize(
    ("text", "message"),
    [(text, f"override {text!r}: write key=value") for text in ("seed", "=3", "actor_train..seed=3")]
    + [("+seed=3", "write it without '+'")],
)
def test_malformed_override_is_reported(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(tmp_path, text)


@pytest.mark.parametrize("written", ["1e-6", "1.0e-6", "'1e-6'", "0.000001"])
def test_numbers_in_scientific_notation_are_numbers(tmp_path: Path, written: str) -> None:
    config = rlvr(tmp_path, f"actor_train.training_args.learning_rate={written}")
    assert config.actor_train.training_args.learning_rate == 1e-6


def test_a_whole_number_is_a_number(tmp_path: Path) -> None:
    weight_decay = rlvr(tmp_path, "actor_train.training_args.weight_decay=0").actor_train.training_args.weight_decay
    assert weight_decay == 0.0 and isinstance(weight_decay, float)


def test_renamed_keys_are_read(tmp_path: Path) -> None:
    config = rlvr(tmp_path, text=RLVR + "num_gpus_per_node: 4\nrpc_timeout: 60\nseed: ${num_gpus_per_node}\n")
    assert (config.num_devices_per_node, config.rpc_timeout_s, config.seed) == (4, 60.0, 4)


def test_override_replaces_a_key_in_another_spelling(tmp_path: Path) -> None:
    config = rlvr(tmp_path, "num_devices_per_node=2", text=RLVR + "num_gpus_per_node: 4\n")
    assert config.num_devices_per_node == 2


def test_two_spellings_of_one_key_are_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, text=RLVR + "num_gpus_per_node: 4\nnum_devices_per_node: 4\n")
    assert "num_gpus_per_node: is another spelling of num_devices_per_node" in message


def test_other_spellings_of_values_are_translated_with_a_note(tmp_path: Path) -> None:
    config = rlvr(tmp_path, "actor_infer.generating_args.top_k=-1")
    assert config.actor_infer.generating_args.top_k == 0
    assert ("actor_infer.generating_args.top_k", "-1 is read as 0") in config.source.notes


def test_lengths_complete_each_other(tmp_path: Path) -> None:
    assert rlvr(tmp_path).sequence_length == 3072
    by_sequence = RLVR.replace("response_length: 1024", "sequence_length: 8192")
    assert rlvr(tmp_path, text=by_sequence).response_length == 8192 - 2048


@pytest.mark.parametrize(
    ("text", "lengths", "expected"),
    [
        (SFT, "sequence_length: 512", (511, 1, 512)),
        (SFT, "sequence_length: 4096", (4095, 1, 4096)),
        (RLVR, "sequence_length: 512", (256, 256, 512)),
        (RLVR, "sequence_length: 1536", (1024, 512, 1536)),
        (RLVR, "sequence_length: 512\nresponse_length: 400", (112, 400, 512)),
    ],
)
def test_the_longest_prompt_follows_from_sequence_length(
    tmp_path: Path, text: str, lengths: str, expected: tuple[int, int, int]
) -> None:
    text = re.sub("(prompt|response)_length: .*\n", "", text)
    config = load_config(write(tmp_path, f"{text}{lengths}\n"))
    assert (config.prompt_length, config.response_length, config.sequence_length) == expected


@pytest.mark.parametrize(
    ("overrides", "seconds"),
    [
        ("response_length=1024", 120),
        ("response_length=16384", 16384 / 20),
        ("validation.generating_args.max_new_tokens=1000 response_length=8000", 400),
        ("response_length=16384 actor_infer.generation_timeout_s=60", 60),
    ],
)
def test_long_responses_have_more_time(tmp_path: Path, overrides: str, seconds: float) -> None:
    assert rlvr(tmp_path, *overrides.split()).actor_infer.generation_timeout_s == seconds


@pytest.mark.parametrize(
    ("overrides", "bounds"),
    [
        ("actor_train.model_args.dtype=fp32", (0.19, 0.95, None)),
        ("pretrain=not/here actor_infer.model_args.dtype=fp16", (0.21, 1.05, None)),
        ("max_logprob_mismatch=2 p99_logprob_mismatch=~", (0.19, None, 2)),
    ],
)
def test_bounds_of_log_probs_follow_from_model_and_precision_unless_given(
    tmp_path: Path, overrides: str, bounds: tuple[float | None, ...]
) -> None:
    config = rlvr(tmp_path, *overrides.split())
    assert (config.mean_logprob_mismatch, config.p99_logprob_mismatch, config.max_logprob_mismatch) == bounds


def test_roles_take_the_model_of_the_run(tmp_path: Path) -> None:
    config = rlvr(tmp_path)
    assert config.actor_infer.model_args.model_name_or_path == config.pretrain


def test_validation_inherits_data_and_sampling(tmp_path: Path) -> None:
    config = rlvr(
        tmp_path,
        "eval_steps=10",
        "actor_train.data_args.prompt=question",
        "actor_infer.generating_args.stop_strings=['</s>']",
        "validation.data_args.file_name=val.jsonl",
        "validation.generating_args.temperature=0",
    )
    assert config.validation.data_args.prompt == "question"
    assert config.validation.data_args.file_name == ["val.jsonl"]
    assert config.validation.generating_args.stop_strings == ["</s>"]
    assert config.validation.generating_args.temperature == 0
    assert config.validation.generating_args.num_return_sequences == 1


@pytest.mark.parametrize(("ratio", "source"), [(0, "recompute"), (1, "behavior")])
def test_old_log_probs_follow_from_the_ratio(tmp_path: Path, ratio: float, source: str) -> None:
    assert rlvr(tmp_path, f"async_generation_ratio={ratio}").old_log_probs_source == source


def test_stale_samples_of_the_optimal_token_baseline_keep_the_ratio_to_the_policy_that_sampled(tmp_path: Path) -> None:
    config = rlvr(tmp_path, "async_generation_ratio=1", "adv_estimator=optimal_token_baseline")
    assert (config.old_log_probs_source, config.pg_ratio_base) == ("recompute", "behavior")


def test_environment_variables_may_be_numbers(tmp_path: Path) -> None:
    assert rlvr(tmp_path, "system_envs={OMP_NUM_THREADS: 4}").system_envs == {"OMP_NUM_THREADS": "4"}


def test_rewards_are_those_given(tmp_path: Path) -> None:
    config = rlvr(tmp_path, "rewards={strict: {answer_pattern: boxed}}")
    assert list(config.rewards) == ["strict"]
    assert config.rewards["strict"].answer_pattern == "boxed"


def test_a_date_is_text(tmp_path: Path) -> None:
    assert rlvr(tmp_path, "exp_name=2025-01-31").exp_name == "2025-01-31"


@pytest.mark.parametrize(
    ("listed", "seed"),
    [
        ("[_self_, base]", 1),
        ("[base, _self_]", 2),
        ("['base@_here_']", 2),
        ("base.yaml", 2),
        ("['base@_global_', 'optional nowhere']", 2),
        ("[{override hydra/launcher: slurm}, base, {nothing: null}]", 2),
        ("['../deepspeed_zero3', base]", 2),
    ],
)
def test_marks_of_hydra_are_read(tmp_path: Path, listed: str, seed: int) -> None:
    write(tmp_path, RLVR + "seed: 1\nmax_steps: 7\n", "base.yaml")
    config = rlvr(tmp_path, text=f"defaults: {listed}\nseed: 2\n")
    assert (config.seed, config.max_steps) == (seed, 7)


def test_a_problem_that_two_checks_find_is_reported_once() -> None:
    report = Report()
    for _ in range(2):
        report.error("pretrain", "is missing")
    assert [str(error) for error in report.errors] == ["pretrain: is missing"]


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_a_base_file_may_be_empty_but_not_the_file_itself(tmp_path: Path, text: str) -> None:
    write(tmp_path, text, "base.yaml")
    assert rlvr(tmp_path, text=f"defaults: base\n{RLVR}seed: 3\n").seed == 3
    assert "the top level must be a mapping" in refusal(tmp_path, text=text)


@pytest.mark.parametrize(
    "library",
    ["deepspeed_zero: {stage: 0}", "engines: {vllm: {block_size: 1}}", "rewards_library: {a: {}}", "word: 1"],
)
def test_a_key_of_a_base_file_that_nothing_refers_to_has_no_effect(tmp_path: Path, library: str) -> None:
    write(tmp_path, f"{RLVR}\n{library}\n", "base.yaml")
    assert rlvr(tmp_path, text="defaults: base\nseed: 3\n").seed == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("words: {a: 1}", "words: unknown key"),
        ("defaults: [library]\nword: 2", "word: unknown key"),
        ("defaults: [scalar]", "rollout_batch: unknown key; did you mean rollout_batch_size?"),
        ("defaults: [misspelled]", "actor_trian: unknown key; did you mean actor_train?"),
        ("defaults: [trl]", "num_generations: unknown key; here that is num_return_sequences_in_group"),
    ],
)
def test_other_unknown_keys_are_refused(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path, "word: 1\n", "library.yaml")
    write(tmp_path, "actor_trian: {pg_variant: ppo}\n", "misspelled.yaml")
    write(tmp_path, "num_generations: 4\n", "trl.yaml")
    write(tmp_path, "rollout_batch: 4\n", "scalar.yaml")
    assert message in refusal(tmp_path, text=f"{text}\n{RLVR}")


def test_a_base_file_may_go_into_a_section(tmp_path: Path) -> None:
    (tmp_path / "optimizer").mkdir()
    write(tmp_path / "optimizer", "learning_rate: 3e-6\n", "fast.yaml")
    write(tmp_path, RLVR, "base.yaml")
    for listed in ("optimizer@actor_train.training_args: fast", "'optimizer/fast@actor_train.training_args'"):
        config = rlvr(tmp_path, text=f"defaults:\n  - base\n  - {listed}\n")
        assert config.actor_train.training_args.learning_rate == 3e-6


def test_keys_that_only_interpolation_reads_are_variables(tmp_path: Path) -> None:
    text = RLVR + "lab: {name: blue}\nexp_name: ${lab.name}-${oc.env:NOT_SET_HERE,rlvr}-${now:%Y}\n"
    config = rlvr(tmp_path, text=text)
    assert config.exp_name.startswith("blue-rlvr-20")
    assert "lab: unknown key" in refusal(tmp_path, text=RLVR + "lab: {name: blue}\n")


def test_an_item_of_a_list_may_be_a_variable(tmp_path: Path) -> None:
    config = rlvr(tmp_path, text=RLVR + "steps: [5, 7]\nmax_steps: ${steps[1]}\nseed: ${ steps[0] }\n")
    assert (config.max_steps, config.seed) == (7, 5)


def test_the_text_of_an_environment_variable_may_be_a_number_or_a_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUN", "7")
    names = {"max_steps": "RUN", "exp_name": "RUN", "use_kl_loss": "NOT_SET,false"}
    names["resume_from_checkpoint"] = "NOT_SET,False"
    lines = "".join(f"{key}: ${{oc.env:{name}}}\n" for key, name in names.items())
    config = rlvr(tmp_path, text=RLVR + lines)
    assert (config.max_steps, config.exp_name) == (7, "7")
    assert config.use_kl_loss is False and config.resume_from_checkpoint is False


def test_a_value_that_is_missing_with_its_variable_names_the_variable(tmp_path: Path) -> None:
    message = "max_steps: the environment variable NOT_SET_HERE is not set; export NOT_SET_HERE=..."
    assert message in refusal(tmp_path, text=RLVR + "max_steps: ${oc.env:NOT_SET_HERE}\n")


def test_null_removes_a_reward_of_a_base_file(tmp_path: Path) -> None:
    write(tmp_path, RLVR + "rewards: {math_rule: {}, other: {tag_included: [x]}}\n", "base.yaml")
    text = "defaults: [base]\nrewards: {math_rule: null, mine: {function: 'mine:score'}, other: null}\n"
    assert list(rlvr(tmp_path, text=text).rewards) == ["mine"]


def test_a_variable_that_is_not_set_leaves_its_name(tmp_path: Path) -> None:
    config = rlvr(tmp_path, text=RLVR + "output_dir: ${oc.env:NOT_SET_HERE}/runs\n")
    assert config.output_dir == "$NOT_SET_HERE/runs"
    assert [problem.path for problem in config.source.report.missing] == ["output_dir"]


def test_an_automatic_platform_has_the_bounds_of_what_it_turns_out_to_be(tmp_path: Path) -> None:
    fp32 = ("actor_train.model_args.dtype=fp32", "actor_infer.model_args.dtype=fp32", "platform=auto")
    for options, mean in ((fp32, None), ((*fp32, "mean_logprob_mismatch=0.3"), 0.3)):
        config, expected = rlvr(tmp_path, *options), rlvr(tmp_path, *options, "platform=cpu")
        prepare_devices(config, Hardware(gpus=0, cores=64))
        assert config.platform == "cpu" and config.p99_logprob_mismatch == expected.p99_logprob_mismatch
        assert config.mean_logprob_mismatch == (mean or expected.mean_logprob_mismatch)


def test_a_tilde_in_a_path_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    given = ("pretrain=~/model", "actor_train.data_args.file_name=[~/a.jsonl,b~/c.jsonl]", "output_dir=~/out")
    config = rlvr(tmp_path, *given, "system_envs={HF_HOME: ~/cache}", "exp_name='~'")
    assert (config.pretrain, config.output_dir, config.logging_dir) == (
        "/home/me/model",
        "/home/me/out",
        "/home/me/out/logs",
    )
    assert config.actor_train.data_args.file_name == ["/home/me/a.jsonl", "b~/c.jsonl"]
    assert config.actor_train.model_args.model_name_or_path == "/home/me/model"
    assert (config.system_envs["HF_HOME"], config.exp_name) == ("/home/me/cache", "~")
