"""Devices, engines and batches: sizes that divide, options that the engine and the platform have."""

from __future__ import annotations

import sys
from collections import Counter
from math import gcd, isqrt, lcm
from typing import Any

from roll.base.errors import Report
from roll.configs.agentic import AgenticConfig
from roll.configs.megatron import ineffective_modules
from roll.configs.parallel_layout import spans
from roll.configs.pipeline import BaseConfig, DPOConfig, PreferenceConfig, RLConfig, RLVRConfig
from roll.configs.roles import (
    DEVICE_ROLES,
    OLD_LOG_PROBS,
    EngineRoleConfig,
    MegatronRoleConfig,
    RoleConfig,
    TrainedRoleConfig,
    TrainingArguments,
)
from roll.configs.scoring_roles import RewardEngineConfig, RewardModelRoleConfig, ScoringEngineConfig
from roll.configs.sglang_options import (
    ALLOWED,
    OWNED,
    REFUSED,
    RUNS_CODE,
    VLLM_NAMES,
    VLLM_ROLE_NAMES,
    ServerOption,
    server_options,
)
from roll.configs.suggestions import nearest
from roll.configs.trackers import missing_package

CUDA_ONLY = (
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "apply_rope_fusion",
    "gradient_accumulation_fusion",
    "use_precision_aware_optimizer",
    "optimizer_cpu_offload",
)
"""Megatron options that need a GPU."""


SCORING_MODELS = {"judge": "a judge", "reward": "a reward model"}
"""What the engines of a scoring role run."""

MAX_DEVICES = 65_536
"""More devices than any cluster has: a number above is a slip, and no advice."""

MAX_TRIES = 1_000_000
"""Numbers tried as divisors: all up to the square root of any realistic batch."""


def check_devices(config: BaseConfig, report: Report) -> None:
    """Every role that needs devices has some, their number fits its layout; engines that run ahead have their own."""
    _check_owned(config, report)
    for role, worker in config.device_roles().items():
        _check_divides(role, worker, report)
    if isinstance(config, RLConfig) and config.async_generation_ratio > 0:
        for role, worker in config.device_roles().items():
            if isinstance(worker, MegatronRoleConfig):
                _check_overlap(config, role, report)


def _check_owned(config: BaseConfig, report: Report) -> None:
    needed = ["actor_train"] + (["actor_infer"] if isinstance(config, RLConfig) else [])
    for role in needed:
        if not getattr(config, role).device_mapping:
            report.error(f"{role}.device_mapping", "is empty; list the devices of this role, such as list(range(0,8))")
    devices = f"such as {spans(config.actor_train.device_mapping)}, the devices of actor_train, to share them"
    if isinstance(config, DPOConfig) and not config.reference.device_mapping:
        report.error("reference.device_mapping", f"is empty, but pipeline dpo needs it; set its devices, {devices}")
    if not isinstance(config, RLConfig):
        return
    if config.async_generation_ratio > 0 and config.shares_devices:
        report.warn(
            "async_generation_ratio",
            f"{config.async_generation_ratio:g} lets actor_infer and actor_train compute at the same time on the "
            "devices they share, so each is slower; give them separate devices",
        )
    if config.is_offload_states and not config.shares_devices:
        report.warn("is_offload_states", "has no effect: actor_train and actor_infer have devices of their own")
    elif config.is_offload_states and config.async_generation_ratio > 0:
        ratio = f"async_generation_ratio {config.async_generation_ratio:g}"
        report.warn("is_offload_states", f"has no effect: with {ratio} the engines generate while actor_train trains")
    if config.uses_reference and not config.reference.device_mapping:
        names = ("use_kl_loss", "add_token_level_kl", "use_opd")
        terms = " and ".join(name for name in names if getattr(config, name)) or f"adv_estimator {config.adv_estimator}"
        model = "teacher, which is the reference" if config.uses_teacher else "reference"
        report.error("reference.device_mapping", f"is empty, but {terms} needs the {model}; set its devices, {devices}")
    if config.reference.device_mapping and not config.uses_reference:
        report.warn(
            "reference",
            "is configured but not used: neither use_kl_loss nor add_token_level_kl is on; it is not loaded",
        )
    if config.uses_critic and not config.critic.device_mapping:
        report.error(
            "critic.device_mapping",
            f"is empty, but adv_estimator {config.adv_estimator} needs the critic; set its devices, {devices}",
        )
    if config.critic.device_mapping and not config.uses_critic:
        report.warn("critic", f"is configured but not used: adv_estimator is {config.adv_estimator}; it is not loaded")
    if not isinstance(config, RLVRConfig):
        return
    if config.uses_reward_model and not config.reward.device_mapping:
        report.error(
            "reward.device_mapping",
            f"is empty, but a reward_model in rewards needs the model of role reward; set its devices, {devices}",
        )
    ahead = f"async_generation_ratio {config.async_generation_ratio:g}"
    same = set(config.reward.device_mapping) == set(config.actor_infer.device_mapping)
    is_megatron = isinstance(config.reward, MegatronRoleConfig)
    if config.uses_reward_model and same and is_megatron and config.async_generation_ratio > 0:
        report.warn(
            "reward.device_mapping",
            f"is that of actor_infer, and with {ahead} engines and reward model compute there at the same time; give "
            "the reward model other devices",
        )
    if config.reward.device_mapping and not config.uses_reward_model:
        report.warn("reward", "is configured but not used: no reward is a reward_model; it is not loaded")
    if config.judge.device_mapping and not config.uses_judge:
        report.warn("judge", "is configured but not used: no reward is an llm_judge without base_url; it is not loaded")
    for role, worker in config.device_roles().items():
        if isinstance(worker, ScoringEngineConfig):
            _check_scoring_devices(config, role, report)


def _check_scoring_devices(config: RLVRConfig, scoring: str, report: Report) -> None:
    """Engines that score keep their memory on devices that they share, and above ratio 0 compute beside the others."""
    devices, what = {*config.device_roles()[scoring].device_mapping}, SCORING_MODELS[scoring]
    for role, worker in config.device_roles().items():
        shared = sorted(devices & {*worker.device_mapping})
        if role == scoring or not shared:
            continue
        overlap = f"overlaps {role}.device_mapping in {_short(shared)}"
        if config.async_generation_ratio > 0:
            taken = {device for other in config.device_roles().values() for device in other.device_mapping}
            outside = spans(range(max(taken) + 1, max(taken) + 1 + len(devices)))
            ratio = f"async_generation_ratio {config.async_generation_ratio:g}"
            report.error(
                f"{scoring}.device_mapping",
                f"{overlap}, and with {ratio} both compute there at the same time; write devices outside, such as "
                f"{outside}",
            )
        else:
            report.warn(
                f"{scoring}.device_mapping",
                f"{overlap}: {what} stays in their memory, so set {scoring}.strategy_args.strategy_config."
                "mem_fraction_static to its share; or write other devices",
            )
        return


def _check_divides(role: str, worker: RoleConfig, report: Report) -> None:
    count, path = len(worker.device_mapping), f"{role}.device_mapping"
    tensor, pipeline = worker.layout.tensor, worker.layout.pipeline
    if count % (tensor * pipeline) == 0:
        return
    size = tensor * pipeline
    if size > MAX_DEVICES:
        report.error(path, f"{count} devices cannot hold {size:,} parallel ranks of one model; use at most {count}")
    elif isinstance(worker, EngineRoleConfig):
        suggestion = f"use {_multiples(count, tensor)}"
        report.error(path, f"{count} devices cannot hold engines of num_gpus_per_worker {tensor}; {suggestion}")
    else:
        sizes = f"tensor parallel {tensor}" + (f" x pipeline parallel {pipeline}" if pipeline > 1 else "")
        report.error(path, f"{count} devices cannot hold {sizes}; use {_multiples(count, tensor * pipeline)}")


def _multiples(count: int, size: int) -> str:
    below = count // size * size
    return f"{below} or {below + size}" if below else str(size)


def _check_overlap(config: RLConfig, role: str, report: Report) -> None:
    """Engines that generate while a role computes share all its devices, which is slow, or none."""
    one, other = getattr(config, role).device_mapping, config.actor_infer.device_mapping
    shared = sorted(set(one) & set(other))
    if not shared or one == other:
        return
    path, ratio = "actor_infer.device_mapping", f"async_generation_ratio {config.async_generation_ratio:g}"
    if set(one) == set(other):
        report.error(path, f"lists the devices of {role} in another order; to share them write {spans(one)}")
        return
    outside = spans(range(max(one) + 1, max(one) + 1 + len(other)))
    report.error(
        path,
        f"overlaps {role}.device_mapping in {_short(shared)}, and with {ratio} both compute there at the same time: "
        f"write devices outside, such as {outside}, to separate them, or set the ratio to 0, where they take turns",
    )


def _short(ranks: list[int]) -> str:
    names = ", ".join(str(rank) for rank in ranks[:4])
    return f"device{'s' if len(ranks) > 1 else ''} {names}" + (", ..." if len(ranks) > 4 else "")


def check_engines(config: BaseConfig, report: Report) -> None:
    """Engines get options that they know and that the platform supports."""
    for role in DEVICE_ROLES:
        worker = getattr(config, role, None)
        if isinstance(worker, MegatronRoleConfig) and (role == "actor_train" or worker.device_mapping):
            _check_megatron(config, role, worker, report)
        elif isinstance(worker, EngineRoleConfig) and worker.device_mapping:
            _check_sglang(role, worker, report)
    _check_precision(config, report)
    if not isinstance(config, AgenticConfig):
        _check_data(config, report)
    _check_trackers(config, report)


def _check_trackers(config: BaseConfig, report: Report) -> None:
    for tracker, count in Counter(config.track_with).items():
        if count > 1:
            report.error("track_with", f"contains {tracker} {count} times; list it once")
        package = missing_package(tracker)
        if package is not None:
            advice = f"install it with: {sys.executable} -m pip install {package}"
            report.missing_resource("track_with", f"{tracker} is not installed; {advice}")
    for name in config.tracker_kwargs:
        if name not in config.track_with:
            path, message = f"tracker_kwargs.{name}", f"track_with does not contain {name}; add it or remove this"
            report.unused(path, message, is_error=not config.source.unused_by_override(path, ["track_with"]))


def _check_precision(config: BaseConfig, report: Report) -> None:
    if not isinstance(config, RLConfig):
        return
    training, sampling = config.actor_train.model_args.dtype, config.actor_infer.model_args.dtype
    if training != sampling:
        report.warn(
            "actor_infer.model_args.dtype",
            f"{sampling} samples while actor_train computes in {training}: their log-probs differ by rounding; "
            f"use {training}",
        )


def _check_data(config: BaseConfig, report: Report) -> None:
    if config.eval_steps and not config.validation.data_args.file_name:
        report.error(
            "validation.data_args.file_name",
            f"is empty, but eval_steps is {config.eval_steps}; set a file, or eval_steps: 0",
        )
    if not config.actor_train.data_args.file_name:
        report.error("actor_train.data_args.file_name", "is empty; set the JSONL or parquet files to train on")


def _check_megatron(config: BaseConfig, role: str, worker: MegatronRoleConfig, report: Report) -> None:
    path, megatron, model = (
        f"{role}.strategy_args.strategy_config",
        worker.strategy_args.strategy_config,
        worker.model_args,
    )
    if megatron.sequence_parallel and megatron.tensor_model_parallel_size == 1:
        report.error(
            f"{path}.sequence_parallel",
            "true splits the sequence over tensor-parallel ranks, and there is one; set it to false, or "
            "tensor_model_parallel_size to 2 or more",
        )
    if isinstance(worker, TrainedRoleConfig):
        _check_recompute(worker, f"{path}.recompute_granularity", report)
        _check_optimizer(worker, path, report)
    if model.dtype == "fp16":
        report.error(f"{role}.model_args.dtype", "fp16 needs loss scaling, which is not available; use bf16 or fp32")
    if config.platform != "cpu":
        if megatron.apply_rope_fusion and (model.attn_implementation == "sdpa" or model.dtype == "fp32"):
            report.error(
                f"{path}.apply_rope_fusion",
                "true needs Transformer Engine, which computes neither fp32 nor attn_implementation sdpa; leave it out",
            )
        if megatron.attention_backend != "auto" and (model.attn_implementation == "sdpa" or model.dtype == "fp32"):
            reason = "attn_implementation sdpa" if model.attn_implementation == "sdpa" else "dtype fp32"
            report.warn(f"{path}.attention_backend", f"has no effect: with {reason} torch's attention computes")
        if model.attn_implementation == "fa2" and model.dtype == "fp32":
            report.warn(f"{role}.model_args.attn_implementation", "fa2 has no fp32: torch's attention computes instead")
        return
    for option in CUDA_ONLY:
        if getattr(megatron, option, False):
            report.error(f"{path}.{option}", "true needs a GPU, and platform is cpu; set it to false")
    if megatron.attention_backend != "auto":
        report.error(
            f"{path}.attention_backend", f"{megatron.attention_backend} needs a GPU, and platform is cpu; use auto"
        )
    if model.attn_implementation == "fa2":
        report.error(f"{role}.model_args.attn_implementation", "fa2 needs a GPU, and platform is cpu; use auto or sdpa")


def _check_recompute(worker: TrainedRoleConfig, path: str, report: Report) -> None:
    recompute = worker.strategy_args.strategy_config.recompute_granularity
    if recompute == "selective" and not worker.strategy_args.strategy_config.recompute_modules:
        report.error(path.replace("granularity", "modules"), "is empty, so nothing is recomputed; use [core_attn]")
    if worker.model_args.disable_gradient_checkpointing and recompute is not None:
        report.error(path, f"{recompute} contradicts model_args.disable_gradient_checkpointing: true; keep one of them")


def _check_optimizer(worker: TrainedRoleConfig, path: str, report: Report) -> None:
    megatron = worker.strategy_args.strategy_config
    if megatron.optimizer_cpu_offload and worker.model_args.dtype == "fp32":
        report.error(
            f"{path}.optimizer_cpu_offload", "true cannot be resumed with model_args.dtype fp32; use bf16, or false"
        )
    for option in ("overlap_param_gather", "use_precision_aware_optimizer", "optimizer_cpu_offload"):
        if getattr(megatron, option) and not megatron.use_distributed_optimizer:
            report.error(
                f"{path}.{option}", "true needs use_distributed_optimizer: true; set that, or leave this option out"
            )
    if megatron.overlap_param_gather and megatron.overlap_grad_reduce is False:
        report.error(
            f"{path}.overlap_param_gather",
            "true needs overlap_grad_reduce: true, as in Megatron; set that, or leave this option out",
        )
    if megatron.optimizer_cpu_offload and megatron.use_precision_aware_optimizer is False:
        report.error(
            f"{path}.use_precision_aware_optimizer",
            "false contradicts optimizer_cpu_offload: true, which Megatron implements in that optimizer; leave it out",
        )
    for sentence in ineffective_modules(megatron):
        report.warn(f"{path}.recompute_modules", f"has no effect for {sentence}")


def _check_sglang(role: str, worker: EngineRoleConfig, report: Report) -> None:
    path, options = f"{role}.strategy_args.strategy_config", worker.strategy_args.strategy_config
    if isinstance(worker, ScoringEngineConfig) and options.get("load_format") == "dummy":
        report.error(
            f"{path}.load_format",
            f"dummy gives {SCORING_MODELS[role]} random weights, which nothing replaces; leave it out",
        )
    if isinstance(worker, RewardEngineConfig) and "json_model_override_args" in options:
        report.error(f"{path}.json_model_override_args", "the framework sets it for a reward model; leave it out")
    known, scores = server_options(), isinstance(worker, ScoringEngineConfig)
    for name, value in options.items():
        if name in OWNED:
            report.error(f"{path}.{name}", f"{value!r}: the framework sets this option; {OWNED[name]}")
        elif known is not None and name not in known:
            like = VLLM_NAMES.get(name) or nearest(name, known.keys() - OWNED.keys())
            hint = f"; did you mean {like}?" if like else ""
            if name in VLLM_ROLE_NAMES:
                hint = f"; set {role}.{VLLM_ROLE_NAMES[name]}"
            report.error(f"{path}.{name}", f"SGLang has no option of this name{hint}")
        elif _is_refused(name, value, (known or {}).get(name)) and (not scores or REFUSED[name] == RUNS_CODE):
            report.error(f"{path}.{name}", f"{value!r} {REFUSED[name]}; leave it out")
        elif name == "mem_fraction_static":
            _check_share(f"{path}.{name}", value, report)
        elif known is not None:
            _check_value(f"{path}.{name}", value, known[name], report)
    if known is None and options:
        report.warn(path, f"sglang is not installed here: {', '.join(options)} were not checked against its options")


def _is_refused(name: str, value: Any, option: ServerOption | None) -> bool:
    if name in ALLOWED and option is not None and (option.error(value) or option.remark(value)):
        return False  # `_check_value` reports what SGLang does not know
    return name in REFUSED and bool(value) and value not in ALLOWED.get(name, ("{}",))


def _check_share(path: str, share: Any, report: Report) -> None:
    if share is not None and not (isinstance(share, int | float) and 0 < share < 1):
        report.error(path, f"{share!r} is not a share of the device's memory between 0 and 1, such as 0.8")


def _check_value(path: str, value: Any, option: ServerOption, report: Report) -> None:
    refusal, doubt = option.error(value), option.remark(value)
    if refusal:
        report.error(path, refusal)
    if doubt:
        report.warn(path, doubt)


def check_training(config: BaseConfig, report: Report) -> None:
    """The optimizers' schedules and the token budgets of dynamic batching."""
    for role, worker in config.trained_roles().items():
        _check_schedule(worker.training_args, f"{role}.training_args", report)
    _check_token_limits(config, report)


def _check_token_limits(config: BaseConfig, report: Report) -> None:
    length = config.sequence_length or 0
    sample = f"one sample of sequence_length {length}"
    for role, trained in config.trained_roles().items():
        path, limit = f"{role}.max_tokens_per_microbatch_in_train", trained.training_token_limit
        tensor = trained.layout.tensor
        if isinstance(config, PreferenceConfig):
            rows = 1 if trained.use_sequence_packing else 2  # each padded row is rounded up
            pair = f"a pair of 2 x sequence_length {length} = {2 * length}"
            _check_holds(path, limit, 2 * length, pair, tensor, rows * tensor, report)
        else:
            _check_holds(path, limit, length, sample, tensor, tensor, report)
    for role, worker in config.device_roles().items():
        if isinstance(worker, MegatronRoleConfig) and OLD_LOG_PROBS.holds(config, worker):
            path, limit = f"{role}.max_tokens_per_microbatch_in_infer", worker.forward_token_limit
            tensor = worker.layout.tensor
            has_own_tokenizer = isinstance(worker, RewardModelRoleConfig)  # then sequence_length says nothing
            tokens, what = (1, "one token") if has_own_tokenizer else (length, sample)
            _check_holds(path, limit, tokens, what, tensor, tensor, report)


def _check_holds(
    path: str, limit: int | None, tokens: int, what: str, tensor: int, round_to: int, report: Report
) -> None:
    least = -(-tokens // round_to) * round_to
    if limit is not None and limit < least:
        rounded = f", rounded up to {least} for tensor parallel {tensor}" if least > tokens else ""
        report.error(path, f"{limit} cannot hold {what}{rounded}; use at least that")


def _check_schedule(training: TrainingArguments, path: str, report: Report) -> None:
    if training.warmup_steps and training.warmup_ratio:
        report.error(
            f"{path}.warmup_ratio",
            f"{training.warmup_ratio} and warmup_steps {training.warmup_steps} exclude each other; keep one",
        )
    if training.min_learning_rate > training.learning_rate:
        report.error(
            f"{path}.min_learning_rate",
            f"{training.min_learning_rate} is above learning_rate {training.learning_rate}; use at most that",
        )
    for beta in ("adam_beta1", "adam_beta2"):
        if getattr(training, beta) == 1:
            report.error(
                f"{path}.{beta}", "1 never updates the moving average, so the optimizer never moves; use less than 1"
            )


def check_batch(config: BaseConfig, report: Report) -> None:
    """The samples of a step fill whole optimizer steps, of every trained role."""
    for role, worker in config.trained_roles().items():
        if isinstance(config, RLConfig):
            if not _fills(config, role, worker, report):
                continue
            _check_step_size(config, role, worker, report)
        training, steps = worker.training_args, config.schedule_steps(worker)
        if training.warmup_steps > steps:
            report.warn(
                f"{role}.training_args.warmup_steps",
                f"{training.warmup_steps} is longer than the run of {steps} optimizer steps: the peak is never reached",
            )


def _check_step_size(config: RLConfig, role: str, worker: TrainedRoleConfig, report: Report) -> None:
    samples = config.samples_per_batch
    if worker.samples_per_optimizer_step == 1 and samples > 1:
        report.warn(
            f"{role}.training_args.gradient_accumulation_steps",
            f"1 with per_device_train_batch_size 1 makes {samples} optimizer steps of one sample each of every batch: "
            f"each follows the noise of its sample, and later ones learn from older samples; use {samples} for one "
            "step of the whole batch",
        )


def _fills(config: RLConfig, role: str, worker: TrainedRoleConfig, report: Report) -> bool:
    """Whether the samples fill optimizer steps; otherwise reports sizes that do. Batches of agents are padded."""
    prompts, group = config.rollout_batch_size, config.num_return_sequences_in_group
    samples, step = config.samples_per_batch, worker.samples_per_optimizer_step
    if samples % step == 0:
        return True
    if isinstance(config, AgenticConfig):
        _warn_of_padding(config, step, report)
        return True
    training, data_parallel = worker.training_args, worker.layout.data
    size = training.per_device_train_batch_size
    product = (
        f"per_device_train_batch_size {size} x gradient_accumulation_steps "
        f"{training.gradient_accumulation_steps} x data parallel {data_parallel}"
    )
    unit = step // gcd(step, group)
    below = prompts // unit * unit
    suggestion = f"use rollout_batch_size {f'{below} or ' if below else ''}{below + unit}"
    if samples % (size * data_parallel) == 0:
        accumulation = _nearest_divisor(samples // (size * data_parallel), training.gradient_accumulation_steps)
        suggestion += f", or gradient_accumulation_steps {accumulation}"
    count = f"{prompts} prompts x num_return_sequences_in_group {group} = {samples} samples"
    steps = "optimizer steps" if role == "actor_train" else f"the {role}'s optimizer steps"
    report.error("rollout_batch_size", f"{count} do not fill {steps} of {step} ({product}); {suggestion}")
    return False


def _warn_of_padding(config: AgenticConfig, step: int, report: Report) -> None:
    trajectories, group = config.rollout_batch_size, config.train_env_manager.group_size
    if config.sample_by == "step" or trajectories % group:
        return
    empty, unit = -trajectories % step, lcm(step, group)
    report.warn(
        "rollout_batch_size",
        f"{trajectories} trajectories do not fill optimizer steps of {step}: {empty} samples of every batch are masked "
        f"padding; use {-(-trajectories // unit) * unit} to learn from all",
    )


def _nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` nearest to `wanted`, among MAX_TRIES candidates and their complements."""
    small = [n for n in range(1, min(isqrt(number), MAX_TRIES) + 1) if number % n == 0]
    return min(small + [number // n for n in small], key=lambda n: (abs(n - wanted), n))
