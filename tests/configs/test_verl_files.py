"""Files of verl are read as they are: keys that move, numbers of prompts, and keys that change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.configs.load import load_config
from roll.configs.pipeline import RLVRConfig
from tests.configs.samples import RLVR, refusal, rlvr, write

ONE_STEP_OFF = """
data: {train_files: a.parquet, val_files: b.parquet, prompt_key: prompt, truncation: left, max_prompt_length: 2048,
  max_response_length: 8192, train_batch_size: 512, filter_overlong_prompts: true, return_raw_chat: true}
algorithm: {adv_estimator: grpo, use_kl_in_reward: false, kl_ctrl: {kl_coef: 0.0},
  rollout_correction: {bypass_mode: true}}
actor_rollout_ref:
  hybrid_engine: false
  model: {path: Qwen/Qwen2.5-7B, use_remove_padding: true, enable_gradient_checkpointing: true, lora_rank: 0,
    override_config: {max_position_embeddings: 32768}}
  actor:
    strategy: megatron
    megatron: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2, param_offload: false}
    fsdp_config: {param_offload: false}
    optim: {lr: 1e-6, lr_warmup_steps: 10, weight_decay: 0.1, clip_grad: 0.5}
    ppo_mini_batch_size: 32
    ppo_micro_batch_size_per_gpu: 2
    clip_ratio_low: 0.2
    clip_ratio_high: 0.28
    clip_ratio_c: 10.0
    ulysses_sequence_parallel_size: 1
    use_kl_loss: false
    loss_agg_mode: token-mean
    policy_loss: {loss_mode: vanilla}
  rollout: {n: 12, name: vllm, mode: async, load_format: dummy, calculate_log_probs: true, free_cache_engine: false,
    gpu_memory_utilization: 0.8, tensor_model_parallel_size: 2, log_prob_micro_batch_size_per_gpu: 4,
    temperature: 1.0, top_k: -1, multi_turn: {enable: false}, val_kwargs: {top_p: 0.7, do_sample: true, n: 4}}
  ref: {log_prob_micro_batch_size_per_gpu: 4, megatron: {tensor_model_parallel_size: 2, param_offload: true}}
critic: {strategy: megatron}
reward: {reward_manager: {name: dapo}, reward_kwargs: {max_resp_len: 8192,
  overlong_buffer_cfg: {enable: true, len: 4096, penalty_factor: 0.5, log: false}}}
trainer: {nnodes: 2, n_gpus_per_node: 6, device: cuda, logger: [console, tensorboard], project_name: DAPO,
  experiment_name: mine, val_before_train: true, test_freq: 10, save_freq: -1, total_epochs: 10,
  total_training_steps: 100, default_local_dir: out, resume_mode: auto, critic_warmup: 0}
rollout: {nnodes: 2, n_gpus_per_node: 2}
"""

FULLY_ASYNC = """
data: {train_batch_size: 0, gen_batch_size: 1, val_files: b.parquet}
actor_rollout_ref: {actor: {ppo_mini_batch_size: 32}, rollout: {n: 8}}
rollout: {total_rollout_steps: 51700, total_epochs: 10, test_freq: 5}
async_training: {staleness_threshold: 0.1, trigger_parameter_sync_step: 4, require_batches: 2, partial_rollout: true}
"""
WITHOUT_BATCH = RLVR.replace("rollout_batch_size: 64\n", "").replace("num_return_sequences_in_group: 8\n", "")
WITHOUT_BATCH = WITHOUT_BATCH.replace("    gradient_accumulation_steps: 64\n", "    warmup_steps: 1\n")


def test_a_file_of_the_one_step_off_trainer_is_read_as_it_is(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, ONE_STEP_OFF), ["async_generation_ratio=1"])
    assert isinstance(config, RLVRConfig)
    training = config.actor_train.training_args
    assert (config.platform, config.pretrain, config.max_steps) == ("cuda", "Qwen/Qwen2.5-7B", 100)
    assert (config.rollout_batch_size, config.num_return_sequences_in_group) == (512, 12)
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (2, 64)  # 384 / 3 ranks / 2
    assert (training.learning_rate, training.warmup_steps, training.weight_decay) == (1e-6, 10, 0.1)
    assert (config.max_grad_norm, config.dual_clip_loss, config.dual_clip_c) == (0.5, True, 10)
    assert (config.overlong_buffer_len, config.overlong_penalty_factor) == (4096, 0.5)
    assert (config.save_steps, config.eval_steps, config.resume_from_checkpoint) == (0, 10, True)
    assert config.actor_train.pg_variant == "ppo" and config.track_with == ["stdout", "tensorboard"]
    assert config.actor_train.strategy_args.strategy_config.recompute_granularity == "full"
    assert config.validation.generating_args.num_return_sequences == 4
    assert config.old_log_probs_source == "behavior" and config.is_offload_states is False


def test_the_counts_of_the_fully_asynchronous_trainer_are_converted(tmp_path: Path) -> None:
    config = rlvr(tmp_path, text=WITHOUT_BATCH + FULLY_ASYNC)
    assert config.rollout_batch_size == 32 * 2 * 4
    assert config.max_steps == 51700 // 256
    assert config.actor_train.training_args.gradient_accumulation_steps == 32 * 8 // 8  # 16 devices, tensor parallel 2
    assert (config.async_generation_ratio, config.in_flight_policy) == (0.1, "abort_resume")
    notes = [f"{path}: {message}" for path, message in config.source.notes]
    how = (
        "async_training.require_batches: is read as rollout_batch_size: 256, that is 32 x 2 x 4 (ppo_mini_batch_size x"
    )
    assert any(note.startswith(how) for note in notes), notes


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("async_training.require_batches=0", "async_training.require_batches: 0 is not a whole number of at least 1"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3", "ppo_mini_batch_size: 32 is not a multiple of"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=none", "ppo_mini_batch_size: 'none' is not the prompts of an"),
    ],
)
def test_counts_that_do_not_fit_are_refused(tmp_path: Path, override: str, message: str) -> None:
    assert message in refusal(tmp_path, override, text=WITHOUT_BATCH + FULLY_ASYNC)


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.hybrid_engine=false",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        "actor_rollout_ref.rollout.free_cache_engine=false",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.ref.fsdp_config.param_offload=true",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4",
        "trainer.project_name=DAPO",
        "trainer.total_training_steps=null",
        "data.filter_overlong_prompts=true",
        "use_peft=false",
        "actor_rollout_ref.model={lora_rank: 0, lora_alpha: 16, lora: {rank: 0}}",
    ],
)
def test_a_key_that_changes_nothing_is_accepted_alone(tmp_path: Path, override: str) -> None:
    assert rlvr(tmp_path, override).rollout_batch_size == 64


@pytest.mark.parametrize(
    "override",
    ["use_peft=true", "lora_rank=16", "peft_config={r: 8}", "actor_train.model_args.lora_rank=16", "lora_r=4",
     "actor_rollout_ref.model.lora_rank=8", "lora_target_modules=[q_proj]"],
)  # fmt: skip
def test_lora_is_answered_with_one_line_in_any_spelling(tmp_path: Path, override: str) -> None:
    lines = refusal(tmp_path, override).splitlines()
    assert len(lines) == 2 and "needs what is not available here: LoRA (" in lines[1]


def test_a_fragment_is_answered_with_what_a_file_needs(tmp_path: Path) -> None:
    text = "trainer: {nnodes: 1, n_gpus_per_node: 8, device: cuda}\nrollout: {nnodes: 1, n_gpus_per_node: 2}\n"
    needed = "the longest response in tokens, and pretrain, and actor_train.data_args.file_name"
    assert refusal(tmp_path, text=text).endswith(needed)


def test_values_of_verl_are_read_with_a_remark_in_any_file(tmp_path: Path) -> None:
    config = rlvr(tmp_path, "save_steps=-1", "track_with=[console]")
    assert config.save_steps == 0 and config.track_with == ["stdout"]
    assert {("save_steps", "-1 is read as 0"), ("track_with", "console is read as stdout")} <= set(config.source.notes)
