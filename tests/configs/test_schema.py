"""Every invalid value is reported with path, value and allowed values."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.base.errors import ConfigError
from roll.loading.load import load_config
from tests.configs.samples import RLVR, SFT, refusal

UNKNOWN = {
    "rollout_batchsize=64": "rollout_batchsize: unknown key; did you mean rollout_batch_size?",
    "tensor_model_parallel_size=2": "belongs at actor_train.strategy_args.strategy_config.tensor_model_parallel_size",
    "actor_train.learning_rate=1e-6": "actor_train.learning_rate: unknown key; this key belongs at "
    "actor_train.training_args.learning_rate",
    "actor_infer.temperature=1": "actor_infer.temperature: unknown key; this key belongs at "
    "actor_infer.generating_args.temperature",
    "actor_train.strategy_args.strategy_config.tensor_model_paralel_size=2": "did you mean "
    "actor_train.strategy_args.strategy_config.tensor_model_parallel_size?",
    "rewards={math: {timeout: 3}}": "rewards.math.timeout: unknown key; did you mean rewards.math.timeout_s?",
    "top_k=5": "top_k: unknown key; this key belongs at actor_infer.generating_args.top_k",
    "async_training.async_generation_ratio=1": "unknown key; this key belongs at async_generation_ratio",
    "source={}": "source: unknown key",
    "MAX_STEPS=1": "MAX_STEPS: unknown key; did you mean max_steps?",
    "actor_infer.tempurature=1": "the nearest key is actor_infer.generating_args.temperature",
    "actor_train.max_new_token=8": "the nearest key is actor_infer.generating_args.max_new_tokens",
    "correction.clip=1": "unknown key; known here: difference, m2_threshold, opsm_delta, rejection, rejections, renorm",
    "async_trainning.min_batch_count=1": "async_trainning: unknown key; did you mean async_training?",
    "actor_train.strategy_args.strategy_config.tp_size=2": "here that is actor_train.strategy_args.strategy_config."
    "tensor_model_parallel_size",
    "actor_infer.tp_size=2": "here that is actor_infer.num_gpus_per_worker",
    "actor_train.training_args.lr=1": "here that is actor_train.training_args.learning_rate",
    "target_loss=1": "target_loss: unknown key; it belongs to pipeline sft, and this is rlvr",
}

MISTYPED = {
    "rollout_batch_size=many": "rollout_batch_size: 'many' is not a whole number",
    "rollout_batch_size=true": "rollout_batch_size: True is not a whole number",
    "rollout_batch_size=64.5": "rollout_batch_size: 64.5 is not a whole number",
    "rollout_batch_size=64.0": "rollout_batch_size: 64.0 is not a whole number; write 64",
    "rollout_batch_size=~": "rollout_batch_size: null is not a whole number",
    "gamma=high": "gamma: 'high' is not a number",
    "gamma=true": "gamma: True is not a number",
    "use_kl_loss=1": "use_kl_loss: 1 is not true or false",
    "exp_name=7": "exp_name: 7 is not text; put it in quotes, and these in double quotes for the shell: "
    "exp_name=\"'7'\"",
    "exp_name=true": """exp_name="'true'\"""",
    "kl_penalty=k4": "kl_penalty: 'k4' is not one of k1, k2, k3, abs",
    "actor_train=ppo": "actor_train: 'ppo' is not a section",
    "actor_train.model_args.dtype=half": "actor_train.model_args.dtype: 'half' is not one of fp32, bf16, fp16",
    "actor_train.data_args.file_name=[1]": "actor_train.data_args.file_name[0]: 1 is not text; put it in quotes, "
    """and these in double quotes for the shell: "'1'\"""",
    "actor_train.strategy_args.strategy_config.sequence_parallel=2": "sequence_parallel: 2 is not true or false",
    "system_envs={A: true}": "system_envs: A is True; write the text of the variable in quotes",
    "system_envs={'A=B': x}": "system_envs: 'A=B' cannot be the name of an environment variable",
    "tracker_kwargs={tensorboard: {foo: 1}}": "tracker_kwargs.tensorboard.foo: unknown key; known here: flush_secs, "
    "log_dir",
    "tracker_kwargs={tensorboard: {flush_secs: soon}}": "tracker_kwargs.tensorboard.flush_secs: 'soon' is not a number",
    "tracker_kwargs={stdout: {stream: 1}}": "tracker_kwargs.stdout.stream: unknown key; this section has no keys",
    "tracker_kwargs={tensorboard: 5}": "tracker_kwargs.tensorboard: 5 is not a section",
    "output_dir=''": "output_dir: '' is empty; give it a value, or leave it out",
    "resume_from_checkpoint=''": "resume_from_checkpoint: '' is empty; give it a value",
    "rollout_dump_dir=''": "rollout_dump_dir: '' is empty; give it a value",
    "actor_infer.generating_args.stop_strings=['']": "stop_strings[0]: '' is empty; give it a value, or leave it out",
    "actor_train.data_args.file_name=[a.jsonl, '']": "actor_train.data_args.file_name[1]: '' is empty",
    r'output_dir="a\0b"': r"output_dir: 'a\x00b' contains a character that no file or tokenizer accepts; remove it",
    r'exp_name="\ud800"': r"exp_name: '\ud800' contains a character that no file or tokenizer accepts",
    "resume_from_checkpoint=3": "resume_from_checkpoint: 3 is not true or false or text",
    "pipeline=[rlvr]": "pipeline: ['rlvr'] is not one of rlvr, sft, agentic, dpo, reward_model; did you mean rlvr?",
    "pipeline=~": "pipeline: null is not one of rlvr, sft",
    "seed=017": "seed: '017' is not a whole number",
    "seed=1:30": "seed: '1:30' is not a whole number",
    "exp_name=&a [*a]": "an alias (*name) is inside its own anchor (&name)",
    "exp_name=" + "[" * 3000: "are nested too deep",
    "exp_name=!!timestamp abc": "contains a value that is not of its type",
    "actor_infer.strategy_args={strategy_name: vllm, strategy_config: [1]}": "strategy_config: [1] is not a section",
    "track_with=comet": "track_with: 'comet' is not known; known: tensorboard, wandb, swanlab, mlflow, stdout",
}

OUT_OF_BOUNDS = {
    "rollout_batch_size=0": "rollout_batch_size: 0 is too small; the least allowed is 1",
    "actor_train.training_args.learning_rate=0": "learning_rate: 0.0 is too small; it must be above 0",
    "actor_infer.generating_args.top_p=1.5": "top_p: 1.5 is too large; the most allowed is 1",
    f"gamma=1{'0' * 400}": "gamma: 100000000000000000...0000000000000000000 is too large; the largest allowed number",
    f"seed=1{'0' * 400}": "seed: 100000000000000000...0000000000000000000 is too large",
    f"seed=1{'0' * 5000}": "contains a value that is not of its type: Exceeds the limit (4300 digits)",
    "actor_infer.device_mapping=[1000000]": "actor_infer.device_mapping: [1000000] contains device 1000000; the last",
    "gamma=.nan": "gamma: nan is not a finite number",
    "actor_infer.generating_args.num_beams=4": "num_beams: 4 is not one of 1",
    "actor_train.strategy_args.strategy_config.context_parallel_size=2": "this recipe needs what is not available "
    "here: context parallelism (actor_train.strategy_args.strategy_config.context_parallel_size 2)",
}


@pytest.mark.parametrize(
    ("override", "message"),
    {
        "rollout_batch_size=8": "rollout_batch_size: unknown key; it belongs to pipeline rlvr, and this is sft",
        "actor_infer.device_mapping=[1]": "actor_infer: unknown key; it belongs to pipeline rlvr, and this is sft",
        "num_generations=8": "here that is num_return_sequences_in_group, of pipeline rlvr (docs/coming_from.md)",
    }.items(),
)
def test_a_key_of_another_pipeline_is_reported_with_its_pipeline(tmp_path: Path, override: str, message: str) -> None:
    assert message in refusal(tmp_path, override, text=SFT)


def test_quotes_in_a_file_need_no_shell_quotes(tmp_path: Path) -> None:
    message = refusal(tmp_path, text=RLVR + "exp_name: 7\n")
    assert message.endswith("exp_name: 7 is not text; put it in quotes: '7'")


def test_dotted_key_in_a_file_is_explained(tmp_path: Path) -> None:
    message = refusal(tmp_path, text=RLVR + "'actor_train.training_args.warmup_steps': 1\n")
    assert "in a file a dot does not open a section; write actor_train: {training_args: {warmup_steps: ...}}" in message


@pytest.mark.parametrize(("override", "message"), (UNKNOWN | MISTYPED | OUT_OF_BOUNDS).items())
def test_invalid_value_is_explained(tmp_path: Path, override: str, message: str) -> None:
    assert message in refusal(tmp_path, override)


def test_all_problems_of_a_file_are_reported_together(tmp_path: Path) -> None:
    message = refusal(tmp_path, "rollout_batchsize=64", "gamma=2", "actor_train.model_args.dtype=half")
    assert message.splitlines()[0].endswith("config.yaml: 3 problems")
    for path in ("rollout_batchsize:", "gamma:", "actor_train.model_args.dtype:"):
        assert path in message


def test_all_broken_rules_are_reported_together(tmp_path: Path) -> None:
    message = refusal(
        tmp_path,
        "actor_infer.generating_args.temperature=0",
        "adv_estimator=gpro",
        "use_kl_loss=true",
        "rollout_batch_size=3",
    )
    for path in (
        "rollout_batch_size:",
        "actor_infer.generating_args.temperature:",
        "adv_estimator:",
        "reference.device_mapping:",
    ):
        assert path in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nmax_steps: 2\nseed: 3\n", "seed: is given on line 1 and again on line 3; keep one"),
        ("actor_train:\n  pg_variant: ppo\n  pg_variant: ppo\n", "pg_variant: is given on line 2 and again on line 3"),
        ("a: {seed: 1, seed: 1}\n", "seed: is given on line 1 and again on line 1"),
        ("seed: [1\n", "line 2, column 1: not YAML"),
        ("- seed\n", "the top level must be a mapping of `key: value` lines"),
        ("", "the top level must be a mapping of `key: value` lines"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n", "is a git-lfs pointer"),
    ],
)
def test_invalid_yaml_is_explained(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(tmp_path, text=text)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("nowhere.yaml", "nowhere.yaml: 1 problem\ncannot be read"),
        ("myrun.yml", r"No such file or directory; did you mean .*/my_run.yaml\?"),
        ("loop.yaml", "loop.yaml: 1 problem\ncannot be read: Too many levels of symbolic links"),
    ],
)
def test_a_file_that_cannot_be_read_is_reported(tmp_path: Path, file: str, message: str) -> None:
    (tmp_path / "my_run.yaml").touch()
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / file)


def test_options_of_an_unknown_engine_are_not_checked(tmp_path: Path) -> None:
    section = "actor_train.strategy_args={strategy_name: torchtitan, strategy_config: {offload: 1}}"
    message = refusal(tmp_path, section)
    assert "strategy_name: 'torchtitan' is not one of megatron_train, megatron_infer, sglang" in message
    assert "offload" not in message


def test_response_length_is_required(tmp_path: Path) -> None:
    text = RLVR.replace("response_length: 1024\n", "")
    assert "response_length: is not given; write response_length" in refusal(tmp_path, text=text)
