"""Messages of the rules between keys of roles, batches, engines and rewards."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from roll.base.errors import ConfigError, Problem
from roll.configs.check import check
from roll.plan.hardware import prepare_run
from roll.plan.plan import make_plan
from tests.configs.samples import LAPTOP, RLVR, SERVER, SFT, refusal, rlvr, sft

TP = "actor_train.strategy_args.strategy_config.tensor_model_parallel_size"
MEGATRON = "actor_train.strategy_args.strategy_config"
PP = f"{MEGATRON}.pipeline_model_parallel_size"
SGLANG = "actor_infer.strategy_args.strategy_config"
TRAINING = "actor_train.training_args"
SAMPLING = "actor_infer.generating_args"
AHEAD = "async_generation_ratio=1"

DEVICES = {
    "actor_train.device_mapping=[0,1,2]": "actor_train.device_mapping: 3 devices cannot hold tensor "
    "parallel 2; use 2 or 4",
    "actor_train.device_mapping=[0]": "actor_train.device_mapping: 1 devices cannot hold tensor parallel 2; use 2",
    "actor_train.device_mapping=[]": "actor_train.device_mapping: is empty; list the devices of this role",
    "actor_infer.num_gpus_per_worker=3": "actor_infer.device_mapping: 8 devices cannot hold engines of "
    "num_gpus_per_worker 3; use 6 or 9",
    "actor_train.num_gpus_per_worker=2": "actor_train.num_gpus_per_worker: has no effect: a Megatron rank has one",
    f"{AHEAD} actor_infer.device_mapping=12-19": "actor_infer.device_mapping: overlaps actor_train.device_mapping in "
    "devices 12, 13, 14, 15, and with async_generation_ratio 1 both compute there at the same time: write "
    "devices outside, such as 16-23, to separate them, or set the ratio to 0",
    f"{AHEAD} actor_infer.device_mapping=8-15,0-7": "lists the devices of actor_train in another order; to share them "
    "write 0-15",
    f"{AHEAD} actor_train.device_mapping=0-99999": "write devices outside, such as 100000-100007, to",
    "actor_infer.device_mapping=sixteen": "actor_infer.device_mapping: 'sixteen' is not a list of ranks",
    "actor_infer.device_mapping=[16,16]": "actor_infer.device_mapping: [16, 16] contains device 16 twice",
    "actor_infer.device_mapping=[-1]": "contains a negative device",
    "actor_infer.device_mapping=9-3": "'9-3'",
    "actor_infer.device_mapping=__import__('os')": "is not a list of ranks",
}

BATCH = {
    "rollout_batch_size=60": "rollout_batch_size: 60 prompts x num_return_sequences_in_group 8 = 480 samples do not "
    "fill optimizer steps of 512 (per_device_train_batch_size 1 x gradient_accumulation_steps 64 x data parallel 8); "
    "use rollout_batch_size 64, or gradient_accumulation_steps 60",
    "rollout_batch_size=1000000000001": "or gradient_accumulation_steps 73",
    "rollout_batch_size=100": "use rollout_batch_size 64 or 128, or gradient_accumulation_steps 50",
    f"{TRAINING}.warmup_ratio=0.1 {TRAINING}.warmup_steps=3": "warmup_ratio: 0.1 and warmup_steps 3 exclude each other",
    f"{TRAINING}.min_learning_rate=1": "min_learning_rate: 1.0 is above learning_rate 1e-06",
    f"{TRAINING}.adam_beta2=1": "adam_beta2: 1 never updates the moving average",
    "actor_train.use_dynamic_batching_in_train=true actor_train.max_tokens_per_microbatch_in_train=3000": "actor_train."
    "max_tokens_per_microbatch_in_train: 3000 cannot hold one sample of sequence_length 3072; use at least that",
    "actor_train.use_dynamic_batching_in_train=true actor_train.max_tokens_per_microbatch_in_train=3073 "
    "prompt_length=2049 actor_train.strategy_args.strategy_config.tensor_model_parallel_size=2": "3073 cannot hold one "
    "sample of sequence_length 3073, rounded up to 3074 for tensor parallel 2; use at least that",
    "sequence_length=4000": "sequence_length: 4000 is not prompt_length 2048 + response_length 1024 = 3072",
}

ALGORITHM = {
    "adv_estimator=gpro": "adv_estimator: 'gpro' is not known; did you mean grpo? known: ",
    "adv_estimator=gspo": "adv_estimator: 'gspo' is not known; gspo is a value of actor_train.pg_variant; known: ",
    "actor_train.pg_variant=grpo": "actor_train.pg_variant: 'grpo' is not known; grpo is a value of adv_estimator; ",
    "actor_train.pg_variant=topper": "actor_train.pg_variant: 'topper' is not known; did you mean topr? ",
    "num_return_sequences_in_group=1 rollout_batch_size=512": "num_return_sequences_in_group: 1 gives every sample of "
    "grpo advantage 0, so nothing is learned; use at least 2",
    "is_num_return_sequences_expand=false": "is_num_return_sequences_expand: false is not available",
    "use_kl_loss=true kl_loss_coef=0.01": "reference.device_mapping: is empty, but use_kl_loss needs the reference",
    "add_token_level_kl=true init_kl_coef=0.01": "reference.device_mapping: is empty, but add_token_level_kl needs",
    "use_opd=true": "reference.device_mapping: is empty, but use_opd needs the teacher, which is the reference; set",
    "adv_estimator=opd": "reference.device_mapping: is empty, but adv_estimator opd needs the teacher, which is the",
    "use_kl_loss=true reference.device_mapping=0-15": "kl_loss_coef: 0 turns off the KL that use_kl_loss requires",
    "add_token_level_kl=true reference.device_mapping=0-15": "init_kl_coef: 0 turns off the KL that add_token_level_kl",
}

SAMPLES = {
    f"{SAMPLING}.temperature=0": f"{SAMPLING}.temperature: 0 is greedy: all samples of a prompt would be equal",
    f"{SAMPLING}.temperature=1e-9": f"{SAMPLING}.temperature: 1e-09 is greedy",
    f"{SAMPLING}.top_k=1": f"{SAMPLING}.top_k: 1 is greedy: all samples of a prompt would be equal",
    f"{SAMPLING}.top_k=9 {SGLANG}.sampling_mask_max_tokens=3": "sampling_mask_max_tokens: 3 is below top_k 9",
    f"{SAMPLING}.temperature=-1": f"{SAMPLING}.temperature: -1.0 is too small; the least allowed is 0",
    f"{SAMPLING}.num_return_sequences=4": "num_return_sequences: 4 is not num_return_sequences_in_group 8",
    f"{SAMPLING}.max_new_tokens=2000": f"{SAMPLING}.max_new_tokens: 2000 is above response_length 1024",
    f"on_truncated_sampling=refuse {SAMPLING}.top_p=0.9": "top_p 0.9 sample from a truncated distribution",
    "prompt_length=200000": "sequence_length: 201024 is above max_position_embeddings 131072 of pretrain; use at "
    "most that, for prompt_length 200000 and response_length 1024 together",
}

ENGINES = {
    f"{SGLANG}.mem_fraction_statik=0.8": f"{SGLANG}.mem_fraction_statik: SGLang has no option of this name; did you "
    "mean mem_fraction_static?",
    f"{SGLANG}.gpu_memory_utilization=0.8": "SGLang has no option of this name; did you mean mem_fraction_static?",
    f"{SGLANG}.max_num_seqs=8": "SGLang has no option of this name; set actor_infer.max_running_requests",
    f"{SGLANG}.mem_fraction_static=80": "mem_fraction_static: 80 is not a share of the device's memory between 0 and 1",
    f"{SGLANG}.page_size=banana": f"{SGLANG}.page_size: 'banana' is not a whole number or null",
    f"{SGLANG}.chunked_prefill_size=0.5": "chunked_prefill_size: 0.5 is not a whole number",
    f"{SGLANG}.disable_radix_cache=1": f"{SGLANG}.disable_radix_cache: 1 is not true or false",
    f"{SGLANG}.kv_cache_dtype=fp9": f"{SGLANG}.kv_cache_dtype: 'fp9' is not one of auto, ",
    f"{SGLANG}.tp_size=2": f"{SGLANG}.tp_size: 2: the framework sets this option; set num_gpus_per_worker",
    f"{SGLANG}.random_seed=2": f"{SGLANG}.random_seed: 2: the framework sets this option; set seed",
    f"{SGLANG}.model_path=x": "the framework sets this option; set model_args.model_name_or_path",
    f"{SGLANG}.port=30000": "the framework sets this option; ports and addresses are allocated",
    "actor_infer.strategy_args.strategy_name=megatron_infer": "cannot run a role that generates; use sglang",
    "actor_train.strategy_args.strategy_name=sglang": "sglang cannot run a trained role; use megatron_train",
    f"{TP}=1 actor_train.strategy_args.strategy_config.sequence_parallel=true rollout_batch_size=128": "true "
    "splits the sequence over tensor-parallel ranks, and there is one; set it to false",
    "platform=cpu actor_train.model_args.attn_implementation=fa2": "attn_implementation: fa2 needs a GPU",
    "platform=cpu actor_train.strategy_args.strategy_config.apply_rope_fusion=true": "rope_fusion: true needs a GPU",
    f"platform=cpu {MEGATRON}.optimizer_cpu_offload=true": "optimizer_cpu_offload: true needs a GPU",
    f"platform=cpu {MEGATRON}.attention_backend=flash": "attention_backend: flash needs a GPU, and platform is cpu",
    f"{MEGATRON}.overlap_param_gather=true {MEGATRON}.use_distributed_optimizer=false": "overlap_param_gather: true "
    "needs use_distributed_optimizer: true",
    f"{MEGATRON}.overlap_param_gather=true {MEGATRON}.overlap_grad_reduce=false": "overlap_param_gather: true needs "
    "overlap_grad_reduce: true",
    f"{MEGATRON}.optimizer_cpu_offload=true {MEGATRON}.use_precision_aware_optimizer=false": "false contradicts "
    "optimizer_cpu_offload: true",
    f"{MEGATRON}.exp_avg_dtype=bf16": "exp_avg_dtype: has no effect: only use_precision_aware_optimizer without",
    f"{MEGATRON}.exp_avg_dtype=bf16 {MEGATRON}.optimizer_cpu_offload=true": "exp_avg_dtype: has no effect: only",
    f"{MEGATRON}.optimizer_cpu_offload=true actor_train.model_args.dtype=fp32": "optimizer_cpu_offload: true cannot be "
    "resumed with model_args.dtype fp32",
    f"{MEGATRON}.recompute_modules=[attention]": "recompute_modules: 'attention' is none of core_attn, mlp",
    "actor_train.model_args.dtype=fp16": "actor_train.model_args.dtype: fp16 needs loss scaling",
    "actor_train.model_args.disable_gradient_checkpointing=true "
    "actor_train.strategy_args.strategy_config.recompute_granularity=full": "recompute_granularity: full contradicts",
    "eval_steps=5": "validation.data_args.file_name: is empty, but eval_steps is 5; set a file, or eval_steps: 0",
    "actor_train.data_args.file_name=[]": "actor_train.data_args.file_name: is empty; set the JSONL or parquet files",
    "actor_train.data_args.file_name=a.csv": "actor_train.data_args.file_name: a.csv has an unknown file type",
    "actor_train.data_args.template=qwen2_6": "template: 'qwen2_6' is not known; did you mean qwen2_5? ",
}

MODEL_SPLITS = {
    f"{TP}=8 actor_train.device_mapping=0-7 actor_infer.device_mapping=[8] rollout_batch_size=64": f"{TP}: 8 does not "
    "divide the model's 28 attention heads, 4 key-value heads (a divisor or a multiple) and intermediate_size 18944; "
    "use 1, 2 or 4",
    f"{TP}=1 {PP}=8": f"{PP}: 8 does not divide the model's 28 layers; use 1, 2, 4, 7, 14 or 28",
    f"{PP}=4 {MEGATRON}.virtual_pipeline_model_parallel_size=2": "virtual_pipeline_model_parallel_size: 2 does not "
    "divide the layers of the stages, [7, 7, 7, 7]; use 1 or 7",
    f"{PP}=4 {MEGATRON}.num_layers_in_last_pipeline_stage=5": "pipeline_model_parallel_size: the 3 stages without a "
    "number of their own cannot share 23 of the model's 28 layers",
    f"{MEGATRON}.recompute_granularity=full {MEGATRON}.recompute_num_layers=3": "recompute_num_layers: groups of 3 do "
    "not fill stages of 28 layers; use 1, 2, 4, 7, 14 or 28, or recompute_method: block",
    f"{PP}=4 {MEGATRON}.account_for_loss_in_pipeline_split=true": "pipeline_model_parallel_size: 4 stages cannot share "
    "29 of the model's 28",
    f"{PP}=2 {MEGATRON}.account_for_embedding_in_pipeline_split=true": "evenly; use "
    "account_for_embedding_in_pipeline_split: true and account_for_loss_in_pipeline_split: true",
    f"{PP}=2 {MEGATRON}.num_layers_in_first_pipeline_stage=12 {MEGATRON}.num_layers_in_last_pipeline_stage=12": "num_"
    "layers_in_last_pipeline_stage: 24 layers in 2 of 2 stages, and the model has 28; use 16",
    f"{PP}=2 {MEGATRON}.num_layers_in_first_pipeline_stage=30": "num_layers_in_first_pipeline_stage: 30 layers in 1 of "
    "2 stages, and the model has 28",
    f"{MEGATRON}.recompute_granularity=selective {MEGATRON}.recompute_modules=[]": "recompute_modules: is empty, so",
    f"{MEGATRON}.recompute_activations=true": "True is not available: write recompute_granularity: selective",
    f"platform=cuda {MEGATRON}.apply_rope_fusion=true actor_train.model_args.dtype=fp32": "apply_rope_fusion: true "
    "needs Transformer Engine, which computes neither fp32 nor attn_implementation sdpa; leave it out",
    "actor_infer.num_gpus_per_worker=8": "actor_infer.num_gpus_per_worker: 8 does not divide the model's 28",
    "pretrain=null": "pretrain: is not set, and neither is actor_train.model_args.model_name_or_path",
}

MISLEADING = {
    "actor_train.generating_args.temperature=0.5": "actor_train.generating_args.temperature: has no effect: training "
    "samples are drawn by actor_infer.generating_args",
    "actor_infer.pg_variant=vanilla": "actor_infer.pg_variant: has no effect: only actor_train has a policy loss",
    "validation.device_mapping=[0]": "validation.device_mapping: has no effect: validation generates on actor_infer's",
    "save_checkpoint=false save_steps=5": "save_steps: has no effect: save_checkpoint is false",
    "adv_estimator=gae": "critic.device_mapping: is empty, but adv_estimator gae needs the critic; set its devices,",
    "adv_estimator=gae critic={device_mapping: 0-7, strategy_args: {strategy_name: deepspeed_train}}": "DeepSpeed "
    "training (critic.strategy_args.strategy_name deepspeed_train)",
    "adv_estimator=gae critic={device_mapping: 0-7, training_args: {gradient_accumulation_steps: 7}}": "samples do not "
    "fill the critic's optimizer steps of",
    "adv_estimator=gae critic={device_mapping: 0-7, training_args: {warmup_steps: 2, warmup_ratio: 0.1}}": "critic."
    "training_args.warmup_ratio: 0.1 and warmup_steps 2 exclude each other; keep one",
    "actor_train.pg_variant={tis: 1, decoupled_ppo: 1}": "the losses of a mixture have one base of the ratio, and "
    "that of tis is the sampling policy",
    "actor_train.pg_variant={ppo: 0.5, tospr: 0.5}": "actor_train.pg_variant: 'tospr' is not known; did you mean topr?",
    "correction={m2_threshold: 0.04} old_log_probs_source=behavior": "correction.m2_threshold: needs the log ratios of "
    "the whole batch before the loss is computed",
    "correction.weights={level: token, normalize: true} actor_train.pg_variant=tis old_log_probs_source=behavior": ""
    "correction.weights.normalize: needs the log ratios of the whole batch",
    "adv_estimator=optimal_token_baseline old_log_probs_source=behavior": "adv_estimator: optimal_token_baseline needs "
    "the probabilities of all tokens, which the log-prob pass of the trainer computes",
    "correction={veto_threshold: 0.1, renormalize: true, opsm_delta: 0}": "correction.renormalize: true needs to know "
    "the kept tokens before the loss is computed, and those of opsm_delta depend on",
    "correction={opsm_delta: -1}": "correction.opsm_delta: -1.0 is too small; the least allowed is 0",
    "actor_train.pg_variant=clip_cov clip_cov_lower=6": "clip_cov_lower: 6 is above the upper bound 5; swap them",
    "actor_train.pg_variant={clip_cov: 1, kl_cov: 1}": "clip_cov and kl_cov cannot be mixed with each other; keep one",
    'actor_train.pg_variant={"ppo + 0.5 topr": 0.5}': "'ppo + 0.5 topr' is not the name of a loss",
    "actor_train.pg_variant={ppo: -1}": "actor_train.pg_variant: weight -1 of ppo is not a number from 1e-6 to 1e6",
}

REWARD = "rewards.math_rule"

REWARDS = {
    "rewards={}": "rewards: is empty, so nothing scores a response; describe one, such as math_rule: {}",
    "rewards={a: {}, b: {}}": "rewards.b: scores nothing: rewards.a already scores every tag that no reward",
    f"{REWARD}.function=math_reward": "'math_reward' is not the name of a function; did you mean math_rule?",
    f"{REWARD}.function=a/b.py:f": "'a/b.py:f' is not the name of a function; write",
    f"{REWARD}.function=mine.py:f": "'mine.py:f' is not the name of a function; write module:function, here mine:f",
    f"{REWARD}.correct_score=0": f"{REWARD}.correct_score: 0 equals wrong_score, so every answer has the same score",
    "async_training.rollouter_class=mine.Rollouter": "rollouter_class: 'mine.Rollouter' is not the name of a class",
}

CASES = REWARDS | DEVICES | BATCH | ALGORITHM | SAMPLES | ENGINES | MODEL_SPLITS | MISLEADING


@pytest.mark.parametrize(("overrides", "message"), CASES.items())
def test_broken_rule_is_explained(tmp_path: Path, overrides: str, message: str) -> None:
    assert message in refusal(tmp_path, *_split(overrides))


HARMLESS = {
    "reward_pretrain=x": "reward_pretrain: has no effect: no reward reads it; a reward model is the entry",
    "actor_infer.infer_batch_size=2": "actor_infer.infer_batch_size: has no effect: the engine forms its own batches",
    "actor_infer.model_args.disable_gradient_checkpointing=true": "disable_gradient_checkpointing: has no effect",
    "actor_infer.data_args.template=qwen2_5": "has no effect: prompts are read by actor_train.data_args",
    "value_clip=0.5": "value_clip: has no effect: adv_estimator is not gae, so there is no critic",
    "hydra={run: {dir: .}}": "hydra: has no effect: configuration is not read by Hydra",
    "checkpoint_config={type: file_system}": "checkpoint_config: has no effect: checkpoints are written to files",
    "difficulty_low_threshold=0.1": "difficulty_low_threshold: has no effect: difficulty_mask is false",
    "critic={device_mapping: 0-7}": "critic: is configured but not used: adv_estimator is grpo; it is not loaded",
    "critic={model_args: {dtype: fp32}}": "critic.model_args.dtype: has no effect: adv_estimator is not gae, so there",
    "adv_estimator=gae critic={device_mapping: 0-7, data_args: {template: qwen2_5}}": "critic.data_args.template: has "
    "no effect: it learns from the samples of actor_train",
    "actor_train.pg_variant={ppo: 1, gspo: 1} tis_upper_bound=2": "tis_upper_bound: has no effect: it belongs to",
    "lambd=0.9": "lambd: has no effect: it belongs to adv_estimator gae",
    "kl_loss_coef=0.1": "kl_loss_coef: has no effect: use_kl_loss is false; set it to true",
    "init_kl_coef=0.1": "init_kl_coef: has no effect: add_token_level_kl is false; set it to true",
    "norm_mean_type=batch": "norm_mean_type: has no effect: only adv_estimator reinforce reads it",
    "adv_estimator=reinforce grpo_norm_by_std=false": "grpo_norm_by_std: has no effect: it belongs to adv_est",
    "actor_train.pg_variant=vanilla pg_clip_low=0.1": "pg_clip_low: has no effect: it belongs to "
    "actor_train.pg_variant ppo or decoupled_ppo",
    "actor_train.worker_cls=a.b.ActorPGWorker": "actor_train.worker_cls: has no effect",
    f"on_truncated_sampling=warn {SAMPLING}.top_p=0.99 {SAMPLING}.top_k=100": f"{SAMPLING}: top_p 0.99 and top_k 100 "
    "sample from a truncated distribution, but the engine returns log-probs of the whole one: every ratio and KL is",
    "async_generation_ratio=1e-30": "async_generation_ratio: 1e-30 lets almost nothing be generated ahead; use 0",
    f"{SAMPLING}.top_p=0.99": f"{SAMPLING}: top_p 0.99 sample from a truncated distribution",
    f"{SAMPLING}.top_k=4000": f"{SAMPLING}.top_k: 4000 keeps as many ids for every token, up to 70 GiB",
    f"{SAMPLING}.top_k=5000": "or on_truncated_sampling: replay with a top_k from 2 to 4096",
    f"{SAMPLING}.repetition_penalty=1.1": "repetition_penalty: 1.1 changes the distribution sampled from",
    "actor_infer.model_args.dtype=fp16": "actor_infer.model_args.dtype: fp16 samples while actor_train computes in",
    "reference.device_mapping=0-15": "reference: is configured but not used",
    "old_log_probs_source=behavior": "old_log_probs_source: behavior in synchronous training",
    f"{TRAINING}.warmup_steps=1000": "warmup_steps: 1000 is longer than the run of 100 optimizer steps",
    "validation.data_args.file_name=val.jsonl": "validation.data_args.file_name: has no effect: eval_steps is 0",
    "async_generation_ratio=1 actor_infer.device_mapping=0-15": "1 lets actor_infer and actor_train compute at the "
    "same time on the devices they share, so each is slower",
    "in_flight_policy=abort_resume": "in_flight_policy: has no effect: async_generation_ratio is 0, so no request runs",
    "async_training.staleness_threshold=1": "staleness_threshold: has no effect: async_generation_ratio is 0",
    "async_training.max_staleness_allowed=1": "max_staleness_allowed: has no effect: async_generation_ratio is 0",
    "async_training.max_sample_age_s=600": "max_sample_age_s: has no effect: async_generation_ratio is 0",
    "async_generation_ratio=2 async_training.max_sample_age_s=60": "max_sample_age_s: 60 s is less than actor_infer",
    "async_generation_ratio=2 async_training.staleness_threshold=2": "staleness_threshold: has no effect: no sample is",
    "async_generation_ratio=1 actor_train.infer_batch_size=8": "actor_train.infer_batch_size: has no effect: the old",
    "async_generation_ratio=1 actor_train.use_dynamic_batching_in_infer=true "
    "actor_train.max_tokens_per_microbatch_in_infer=512": "actor_train.max_tokens_per_microbatch_in_infer: has no effe",
    "old_log_probs_source=behavior actor_train.use_dynamic_batching_in_infer=true": "batching_in_infer: has no effect",
    "actor_infer.max_newer_requests=2": "max_newer_requests: has no effect: async_generation_ratio is 0",
    "async_training.max_queue_size=600": "max_queue_size: has no effect: async_generation_ratio is 0",
    "async_training.batch_generation_interval=1": "batch_generation_interval_s: has no effect: each batch is generated "
    "on request",
    "max_resample_factor=3": "max_resample_factor: has no effect: every query_filter_config is of type no_filter",
    "max_sync_retries=0 sync_retry_delay_s=4": "sync_retry_delay_s: has no effect: max_sync_retries is 0",
    "track_with=[] logging_steps=5": "logging_steps: has no effect: track_with is empty",
    f"{TRAINING}.min_learning_rate=1e-8": "min_learning_rate: has no effect: lr_scheduler_type is constant",
    "reference.model_args.dtype=fp32": "reference.model_args.dtype: has no effect: neither use_kl_loss nor",
    "use_kl_loss=true kl_loss_coef=0.1 reference.device_mapping=0-15 "
    "reference.strategy_args.strategy_config.recompute_granularity=full": "recompute_granularity: has no effect: the "
    "reference is not trained",
    "eval_steps=1 validation.data_args.file_name=a.jsonl validation.data_args.shuffle=false": "shuffle: has no effect",
    f"{SGLANG}.load_format=nope": f"{SGLANG}.load_format: 'nope' is not one of SGLang's own: auto, pt, safetensors, ",
    "num_nodes=3": "num_nodes: has no effect: nodes follow from device_mapping",
}


@pytest.mark.parametrize(("overrides", "message"), HARMLESS.items())
def test_harmless_key_is_a_warning(tmp_path: Path, overrides: str, message: str) -> None:
    warnings = [str(warning) for warning in check(rlvr(tmp_path, *_split(overrides))).warnings]
    assert any(message in warning for warning in warnings), warnings


def test_correct_file_has_no_warnings(tmp_path: Path) -> None:
    assert check(rlvr(tmp_path)).warnings == []
    assert check(sft(tmp_path)).warnings == []


def test_explicit_default_is_no_warning(tmp_path: Path) -> None:
    assert check(rlvr(tmp_path, "actor_infer.infer_batch_size=16", "kl_loss_coef=0")).warnings == []


@pytest.mark.parametrize(
    "overrides",
    [
        "actor_train.infer_batch_size=8",
        "async_generation_ratio=1 actor_train.pg_variant=decoupled_ppo actor_train.infer_batch_size=8",
        "async_generation_ratio=1 use_kl_loss=true kl_loss_coef=0.1 reference.device_mapping=0-15 "
        "reference.infer_batch_size=8",
        "async_generation_ratio=2 async_training.staleness_threshold=1 async_training.max_sample_age_s=600",
    ],
)
def test_keys_with_an_effect_are_no_warning(tmp_path: Path, overrides: str) -> None:
    assert check(rlvr(tmp_path, *_split(overrides))).warnings == []


def test_generation_keys_have_no_effect_in_sft(tmp_path: Path) -> None:
    message = [str(warning) for warning in check(sft(tmp_path, "sync_timeout_s=5")).warnings]
    assert message == ["sync_timeout_s: has no effect: this pipeline generates nothing and updates no engine"]
    assert "actor_train.pg_variant: has no effect" in refusal(tmp_path, "actor_train.pg_variant=vanilla", text=SFT)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor_train.data_args.tag=domain", "tag: has no effect: this pipeline scores no response"),
        ("actor_train.infer_batch_size=3", "infer_batch_size: has no effect: eval_steps is 0, and only validation"),
    ],
)
def test_rl_data_keys_have_no_effect_in_sft(tmp_path: Path, override: str, message: str) -> None:
    (warning,) = check(sft(tmp_path, override)).warnings
    assert message in str(warning)


def test_rewards_may_divide_tags(tmp_path: Path) -> None:
    rewards = "rewards={a: {tag_included: [x]}, b: {tag_included: [z, y]}, c: {}}"
    assert check(rlvr(tmp_path, rewards)).warnings == []


def test_submission_interval_with_background_generation(tmp_path: Path) -> None:
    given = ["async_training.batch_generation_interval_s=1", "async_training.rollouter=actor"]
    assert check(rlvr(tmp_path, *given)).warnings == []


def test_missing_resources_stop_a_run_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    config = rlvr(tmp_path, "pretrain=models/Qwen2.5-7B", "resume_from_checkpoint=old/step_5")
    assert check(config).missing == [
        Problem(
            "pretrain",
            "models/Qwen2.5-7B is not a folder on this machine; write a path that exists, or the name of a model on "
            f"the hub, owner/name; relative paths start in {Path.cwd()}",
        ),
        Problem(
            "actor_train.data_args.file_name",
            f"train.jsonl is not a file on this machine; relative paths start in {Path.cwd()}",
        ),
        Problem(
            "resume_from_checkpoint",
            "old/step_5 is not a folder; use a checkpoint's path, or true for the newest one of output_dir; "
            f"relative paths start in {Path.cwd()}",
        ),
    ]


def test_engine_options_are_not_checked_where_sglang_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roll.configs.devices.sglang_options.server_options", lambda: None)
    warnings = check(rlvr(tmp_path, f"{SGLANG}.anything=1")).warnings
    assert [str(warning) for warning in warnings] == [
        f"{SGLANG}: sglang is not installed here: anything were not checked against its options"
    ]


def test_a_section_for_vllm_is_read_as_sglang(tmp_path: Path) -> None:
    text = RLVR + (
        "  strategy_args:\n    strategy_name: vllm\n    strategy_config:\n      gpu_memory_utilization: 0.8\n"
        "      tensor_parallel_size: 2\n      swap_space: 4\n      enable_prefix_caching: true\n"
        "      enforce_eager: true\n      load_format: auto\n"
    )
    config = rlvr(tmp_path, text=text)
    engine = config.actor_infer.strategy_args
    assert (engine.strategy_name, config.actor_infer.num_gpus_per_worker) == ("sglang", 2)
    assert engine.strategy_config == {
        "mem_fraction_static": 0.8,
        "disable_radix_cache": False,
        "disable_cuda_graph": True,
        "load_format": "auto",
    }
    (note,) = [message for path, message in config.source.notes if path.startswith("actor_infer.strategy_args")]
    assert note == (
        "vllm is read as sglang: gpu_memory_utilization 0.8 as mem_fraction_static, tensor_parallel_size 2 as "
        "actor_infer.num_gpus_per_worker, enable_prefix_caching true as disable_radix_cache false, enforce_eager true "
        "as disable_cuda_graph; unchanged: load_format; without effect: swap_space"
    )


def test_an_override_wins_over_an_option_of_vllm(tmp_path: Path) -> None:
    text = RLVR + "  strategy_args: {strategy_name: vllm, strategy_config: {gpu_memory_utilization: 0.8}}\n"
    config = rlvr(tmp_path, f"{SGLANG}.mem_fraction_static=0.5", text=text)
    assert config.actor_infer.strategy_args.strategy_config == {"mem_fraction_static": 0.5}
    config = rlvr(tmp_path, "actor_infer.strategy_args.strategy_name=sglang", text=text)
    assert config.actor_infer.strategy_args.strategy_config == {"mem_fraction_static": 0.8}


def _split(overrides: str) -> list[str]:
    return re.split(r" (?=[\w.]+=)", overrides) if "{" in overrides else overrides.split(" ")


def test_optimizer_steps_of_one_sample_are_a_warning(tmp_path: Path) -> None:
    sizes = ["rollout_batch_size=4", "actor_train.training_args.gradient_accumulation_steps=1"]
    config = rlvr(tmp_path, *sizes, "actor_train.device_mapping=[0,1]")
    warnings = [str(warning) for warning in check(config).warnings]
    assert any(
        "gradient_accumulation_steps: 1 with per_device_train_batch_size 1 makes 32 optimizer steps of one sample each"
        in warning
        and "use 32 for one step of the whole batch" in warning
        for warning in warnings
    )
    assert not any("of one sample" in str(warning) for warning in check(rlvr(tmp_path)).warnings)


def test_a_run_on_gpus_needs_gpus_here_or_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = rlvr(tmp_path, "platform=cuda")
    missing = "platform: cuda needs GPUs, and this machine has none; use cpu, or join the Ray of a cluster"
    with pytest.raises(ConfigError, match=missing):
        prepare_run(config, LAPTOP)
    few = rlvr(tmp_path, "platform=cuda", "num_devices_per_node=16")
    with pytest.raises(ConfigError, match="num_devices_per_node: 16, and this machine has 8 GPUs; use those"):
        prepare_run(few, SERVER)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ConfigError) as caught:
        prepare_run(config, LAPTOP)
    assert "platform" not in str(caught.value)
    assert any(line.startswith("num_devices_per_node: is not set") for line in make_plan(config, LAPTOP).stops)


def test_gpus_of_a_node_cannot_be_counted_on_a_machine_without_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    text = RLVR.replace("num_devices_per_node: 8\n", "")
    with pytest.raises(ConfigError, match="num_devices_per_node: is not set, and this machine has no GPUs to count"):
        prepare_run(rlvr(tmp_path, "platform=cuda", text=text), LAPTOP)
    config = rlvr(tmp_path, "num_devices_per_node=8")
    with pytest.raises(ConfigError):  # the model is not on this machine
        prepare_run(config, LAPTOP)
    assert config.platform == "cpu"


def test_devices_of_a_second_node_need_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = rlvr(tmp_path, "platform=cpu", "num_devices_per_node=8")
    message = "device 23 is on another machine, as num_devices_per_node is 8: set num_devices_per_node: 24 if it is on"
    with pytest.raises(ConfigError, match=message):
        prepare_run(config, LAPTOP)
    assert any(message in line for line in make_plan(config, LAPTOP).stops)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ConfigError) as caught:
        prepare_run(config, LAPTOP)
    assert "num_devices_per_node" not in str(caught.value)


def test_options_of_a_tracker_that_is_off_are_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, "track_with=[]", "tracker_kwargs={stdout: {}}")
    assert "tracker_kwargs.stdout: track_with does not contain stdout" in message
