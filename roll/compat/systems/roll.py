"""Keys of ROLL that differ from ours."""

from __future__ import annotations

import re

from roll.compat.rules import Table, read_rules

DATA_COLUMNS = "actor_train.data_args"

POLICY_LOSS_KEYS = """tis_lower_bound tis_upper_bound topr_positive_weight topr_negative_weight cispo_epsilon_low
    cispo_epsilon_high cispo_use_unified_mask kimi15_tau""".split()
"""Keys of `actor_train` there that are keys of the run here."""

ROLL_MOVES = {
    "teacher.opd_kl_coef": "opd_kl_coef",
    "teacher": "reference",
    "student_pretrain": "pretrain",
    "student_train": "actor_train",
    "student_infer": "actor_infer",
    "env_monitor.hung_timeout": "trajectory_timeout_s",
    "checkpoint_config.output_dir": "checkpoint_dir",
    "max_running_requests": "actor_infer.max_running_requests",
    "pg_variant": "actor_train.pg_variant",
    **{f"{name}_key": f"{DATA_COLUMNS}.{name}" for name in ("prompt", "query", "response", "system")},
    **{
        f"{role}.model_args.flash_attn": f"{role}.model_args.attn_implementation"
        for role in ("actor_train", "reference", "actor_infer")
    },
    **{f"actor_train.{key}": key for key in POLICY_LOSS_KEYS},
}

ROLL_VALUES = {
    "attn_implementation": {"flash_attention_2": "fa2"},
    "dtype": {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"},
    "template": {
        "qwen_25": "qwen2_5",
        "empty": "chatml",
        **dict.fromkeys(("qwen3_coder", "native_nonthinking", "longCOT_qwen2.5", "longcot_V3", "base"), "native"),
    },
    "lr_scheduler_type": {
        "constant_with_warmup": "constant",
        "cosine_with_min_lr": "cosine",
        "polynomial": "linear",
        "inverse_sqrt": "cosine",
    },
}
"""Templates and schedules without a counterpart are read as the nearest that this project has."""

VISION_PART = re.compile(r"vis(ion|ual)|image|video|audio|talker|code2wav|projector", re.IGNORECASE)
"""Parts of a model that one for text does not have, such as `vision_model.blocks`."""


ROLL_TESTS = {
    "policy": lambda value: isinstance(value, dict) and value.get("proxy_type") == "policy",
}
"""Further words of the rules."""

ROLL_RULES = """
[] rlvr sft dpo
val_batch_size: validation runs over the whole validation set
[] agentic
reward: environments give the rewards
[] sft dpo reward_model
refuse reward: this pipeline scores no response
[]
reward_model: a reward model is the entry reward_model of `rewards` with the role `reward`: name it in
    reward.model_args.model_name_or_path
[] rlvr sft
reward_pretrain: no reward reads it; a reward model is the entry reward_model of `rewards`, named in
    reward.model_args.model_name_or_path
[] agentic
reward_pretrain: environments give the rewards
[]
hydra: configuration is not read by Hydra
alive_check_interval: health_check_interval_s is the interval
num_nodes: nodes follow from device_mapping and num_devices_per_node
local_rank: ranks follow from device_mapping
model_name: exp_name is the name of the run
base_dir: output_dir has everything a run writes
pipeline_cls: pipeline chooses it
checkpoint_config: checkpoints are written to files, in checkpoint_dir
generate_opt_level: requests are always scheduled one by one
*additional*prompts: query_filter_config replaces dropped groups by new prompts
user_defined_rollout_loop_cls: async_training.rollouter_class names a class of your own
router_args: requests go to the engine with the fewest
rollout_mock: rollout_dump_dir writes the samples of every step
transfer_backend: batches are sent by Ray
*profiler_*: there is no profiler
report_length_and_rewards: lengths and scores are metrics
otlp_output_dir: there is no telemetry
save_logging_board_dir: trackers write to output_dir
is_offload_optimizer_states_in_train_step: is_offload_states moves all states between steps
enable_reference: the reference is used if use_kl_loss or add_token_level_kl is on
val_*_length: validation has the lengths of training
l2: weight_decay is the penalty of large weights
use_reward_scaling if off: reward_clip, norm_mean_type and norm_std_type change scores
use_reward_norm if off: norm_mean_type and norm_std_type normalize scores
add_len_reward if off: length_reward_coef and length_penalty_per_token change scores by length
error_max_len_clip if off: wrong answers are trained on whatever their length; set it to false
error_max_len_threshold: wrong answers are trained on whatever their length
rl_loss_coef if 1: the policy loss has weight 1; leave it out
positive_loss_coef postive_loss_coef: topr_positive_weight is the weight of good responses
use_topr_* use_policy_loss_type: actor_train.pg_variant chooses the loss
minibatch_data_iter_num: ppo_epochs is the number of passes
balance_length: micro-batches are always balanced
dataset_filter: every row is read
vlm_filter: there are no images; prompts longer than prompt_length are left out
traj_save_dir: rollout_dump_dir has the texts of every step
val_greedy: validation.generating_args.temperature 0 is greedy
val_n_sample: validation.generating_args.num_return_sequences is the number of samples
mask_type: every response token is trained on
response_filter_config: query_filter_config drops groups
tag_to_template: one template serves all prompts: actor_train.data_args.template
dirty_data_mask: a row that cannot be read ends the run before it starts
open_feedback_turn: environments give the turns
use_token_reward: a score belongs to a whole response
global_scale_factor global_shift_value: correct_score and wrong_score are the scores
[] sft dpo reward_model
difficulty_loss_weight if off: this pipeline scores no response
length_loss_weight if off: this pipeline generates no response
is_offload_states: there is no engine to share devices with
[]
env_manager_cls *_pattern *_format_penalty *agent_system_template *agent_template user_prompt_* reward_template: the
    entries of custom_envs have their own
custom_env gem_*: entries of custom_envs are used; this is a library of them
agent_runner_cls: no environment names it
deepspeed_*: Megatron trains
default_history_length: every turn sees all earlier turns
[*_env_manager.]
format_penalty: write env_config.format_penalty of the entries in custom_envs
[]
train_env_manager.generating_args: actor_infer.generating_args is read
val_env_manager.generating_args: validation.generating_args is read
[*_env_manager.]
world_size: processes follow from max_env_num_per_worker
system_envs: system_envs are those of every process; write them there
name: the two managers have fixed names
max_concurrency: env_managers run every environment in its own thread
worker_cls: environments run in processes of a pool
group_filter_cls if *.GroupFilter: every complete group is trained on; leave it out
llm_proxy if policy: actions are always the policy's; an agent that calls an OpenAI-compatible endpoint is named in
    custom_envs.<name>.agent (docs/agents.md)
[custom_envs.*.]
agent_runner_cls if off: the run plays the environment itself
use_thread_lock: environments share no state
max_env_step_concurrent: num_env_groups bounds the steps at a time
user_prompt_format: agent_template is the message
reward_template: the model sees the rewards that observations name
history_length: every turn sees all earlier turns
tool_wrapper: tools are named in env_config.tools (docs/environments/tools.md)
[]
env_monitor: every wait has a deadline: env_step_timeout_s, trajectory_timeout_s
partial_gpu_mode: with a ratio of 0 roles take turns on the devices that they share
exp_mode: environments have one mode
parse_tool_call_parameter_to_dict if off: tools are the environment's own
render_save_dir: rollout_dump_dir has the texts of every step
skip_mock_system_prompt: messages are rendered one by one, without a mock system prompt
[]
actor_infer.router_replay reference.router_replay critic.router_replay: that of actor_train is read
[<role>.]
worker_cls: workers follow from strategy_name, losses from pg_variant
name: a role's name is its section
world_size: workers follow from device_mapping
backend_timeout: start_timeout_s and rpc_timeout_s bound every wait
max_concurrency: every worker answers as many calls as there are
model_update_frequency if 1: weights are updated after every batch; set it to 1
sequence_packing_args: micro-batches are formed before they are packed
use_remove_padding: engines compute no padding; use_sequence_packing of the other roles decides
sequence_length_round_in_*: lengths are rounded up to the tensor-parallel size
offload_nccl: process groups stay
logits_in_fp32: log-probs are always computed in fp32
apply_loss_scale: the loss is divided by the counts of the whole batch
mtp_training_mode: the model families here predict one token
topr_*_weight: only actor_train has a policy loss
opd_kl_coef: there is no teacher
tag_included: every sample is of this role
data_args.video_*: prompts are text
data_args.preprocessing_num_workers: prompts are prepared in one process
data_args.interleave_probs: domain_interleave_probs mixes the prompts
data_args.dataset_type: the type follows from the file's ending
data_args.max_samples if off: all rows are read; shorten the file
data_args.*cache*: nothing is cached
data_args.dataset_dir: prompts are read by actor_train.data_args
data_args.eval_file_name if off: validation.data_args.file_name names the files of validation
data_args.cutoff_len: prompt_length and sequence_length bound every sample
data_args.eval_dataset_dir: validation.data_args names its files
model_args.model_type: the type follows from the model's config.json
model_args.num_labels: the head is that of a language model
model_args.device_map: device_mapping places the ranks
model_args.gradient_checkpointing_use_reentrant: Megatron recomputes in its own way
model_args.model_config_kwargs if off: the model's config.json is used as it is; change it there
model_args.moe_aux_loss_coef if off: experts are not balanced by a loss
model_args.ulysses_size if null 0 1: a sequence is not split
model_args.vision_dp if off: the model families here read text
model_args.additional_target if off: adapters alone are trained, without other weights
model_args.autocast_adapter_dtype: adapters have the dtype of the model
training_args.num_train_epochs: max_steps sets the length of the run
training_args.max_steps: max_steps of the run sets the length of the schedule
training_args.dataloader_*: there is no data loader
training_args.seed: every random choice follows from seed
training_args.bf16 training_args.fp16: model_args.dtype is the precision
training_args.save_hf_model: save_hf_model is a key of the run
training_args.output_dir: output_dir is a key of the run
training_args.logging_*: logging_steps is a key of the run
training_args.report_to: track_with is a key of the run
training_args.save_*: save_steps is a key of the run
training_args.eval_*: eval_steps is a key of the run
training_args.per_device_eval_batch_size: validation is generated; the engine forms its own batches
training_args.ddp_*: Megatron has its own data parallelism
training_args.optim if adam*: the optimizer is Adam; leave it out
training_args.max_grad_norm: max_grad_norm is a key of the run
training_args.lr_scheduler_kwargs: min_learning_rate is the end of the schedule
training_args.use_distributed_optimizer: it is a key of strategy_config
generating_args.do_sample if on: responses are always sampled; use validation temperature 0 for greedy
generating_args.max_length: sequence_length is the longest prompt with its response
generating_args.length_penalty: it belongs to beam search
generating_args.logprobs: engines always return the log-prob of every sampled token
generating_args.include_stop_str_in_output: the token that ends a response belongs to it
generating_args.min_new_tokens if off: a response may end at once
generating_args.min_p generating_args.presence_penalty generating_args.frequency_penalty
    generating_args.logits_processor* if off: responses are sampled from the whole distribution
[<megatron_role>.strategy_args.strategy_config.]
distribute_saved_activations overlap_param_gather_with_optimizer_step overlap_p2p_comm* delay_* align_* batch_p2p_*
    defer_embedding_wgrad_compute ddp_* tp_comm_* cross_entropy_* masked_softmax_fusion bias_swiglu_fusion
    bias_gelu_fusion *_layer_norm fused_* use_flash_attn use_cpu_initialization use_te_* use_torch_*
    use_ring_exchange_p2p deallocate_pipeline_outputs variable_seq_lengths num_distributed_optimizer_instances
    compile_warmup manual_gc* timers* *cuda_graph*: Megatron-Core is set up without it; it would change speed or
    memory
main_grads_dtype: accumulate_allreduce_grads_in_fp32 chooses the precision of gradients
bf16 fp16 params_dtype pipeline_dtype: model_args.dtype is the precision
moe_shared_expert_overlap moe_permute_fusion moe_layer_recompute moe_router_fusion moe_per_layer_logging moe_use_*
    if true false null: Megatron-Core is set up without it; it would change speed or memory
moe_router_dtype: routers always compute in fp32
moe_router_topk moe_router_pre_softmax moe_ffn_hidden_size moe_shared_expert_* moe_layer_freq num_moe_* num_experts:
    the model's config.json has it
moe_router_load_balancing_type if none: experts are not balanced by a loss
save_* ckpt_* async_save dist_ckpt_* use_checkpoint*: checkpoints have one format; save_hf_model and
    save_hf_checkpoints export the model
max_grad_norm clip_grad: max_grad_norm is a key of the run
lr_scheduler_kwargs: min_learning_rate is the end of the schedule
fp8*: training runs in the precision of model_args.dtype
mtp_*: the model families here predict one token
check_for_nan_* calculate_per_token_loss additional_configs seed name: Megatron is set up in one way
recompute_activations if off: write recompute_granularity: selective
refuse decoder_first_pipeline_num_layers: write num_layers_in_first_pipeline_stage
refuse decoder_last_pipeline_num_layers: write num_layers_in_last_pipeline_stage
refuse num_layers_per_virtual_pipeline_stage: write virtual_pipeline_model_parallel_size, the number of parts of each
    stage
pipeline_model_parallel_layout if off: write num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage
grad_reduce_in_bf16 if off: write accumulate_allreduce_grads_in_fp32: false
no_rope_fusion if off: write apply_rope_fusion: false
use_fused_rope if off: write apply_rope_fusion: true
attention_dropout hidden_dropout if off: there is no dropout; set it to 0
cpu_offloading* fine_grained_activation_offloading if off: activations stay on the device; recompute_granularity saves
    their memory
use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy if off: each data-parallel rank has whole weights;
    use_distributed_optimizer shards Adam's states
attention_softmax_in_fp32 if true: the softmax of attention is computed in fp32
transformer_impl if transformer_engine local: Transformer Engine computes the layers where it is installed
microbatch_group_size_per_vp_stage: it is the number of stages, as by default in Megatron
bucket_size average_in_collective nccl_ub pad_buckets_for_high_nccl_busbw: buckets of gradients have Megatron's
    defaults
empty_unused_memory_level: cached memory is freed where devices are handed over
optimizer if adam*: the optimizer is Adam; leave it out
[rewards.*.]
*_args device_mapping num_gpus_per_worker infer_batch_size max_concurrency system_envs name format_pattern
    judge_model_type code_url use_local reward_manager_config: a reward is a function, or the model of role reward or
    judge, without these options
response_length_penalty_coef: in ROLL one class reads it, and for the length of the padded response, which is the same
    for all; length_reward_coef and length_penalty_per_token change scores by length
"""

ROLL = Table(
    rename={
        "num_gpus_per_node": "num_devices_per_node",
        "rpc_timeout": "rpc_timeout_s",
        "sft_train": "actor_train",
    },
    move=ROLL_MOVES,
    values=ROLL_VALUES,
    rules=read_rules(ROLL_RULES, ROLL_TESTS),
)
