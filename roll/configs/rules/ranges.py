"""Numbers that are possible but far from what anyone uses: a slip of the finger, or of a unit."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

from roll.base.errors import Report
from roll.base.schema import value_at
from roll.configs.pipeline import BaseConfig
from roll.configs.roles import EngineRoleConfig
from roll.configs.rules.files import obstacle
from roll.configs.rules.learning import LOWEST_TEMPERATURE
from roll.configs.scoring_roles import ScoringEngineConfig
from roll.hub.names import local_model
from roll.models.families.hf_config import read_positions

YEAR_S = 366 * 86400.0
"""Longest time in seconds that is accepted; far longer ones overflow in the clocks of threads and sockets."""

SHORTEST_TIMEOUT_S = 0.01
"""Shortest timeout that anything can keep; shorter ones fail every call."""

MAX_PROCESSES = 4096
"""Most processes of one reward on one machine."""

USUAL: dict[str, tuple[float, float]] = {
    "learning_rate": (1e-10, 0.1),
    "min_learning_rate": (0.0, 0.1),
    "weight_decay": (0.0, 1.0),
    "adam_beta1": (0.0, 0.9999),
    "adam_beta2": (0.5, 0.999999),
    "adam_epsilon": (1e-20, 1e-2),
    "warmup_steps": (0, 1e6),
    "max_grad_norm": (1e-6, 1e4),
    "per_device_train_batch_size": (1, 1e5),
    "gradient_accumulation_steps": (1, 1e6),
    "infer_batch_size": (1, 1e5),
    "max_tokens_per_microbatch_in_train": (0, 1e8),
    "max_tokens_per_microbatch_in_infer": (0, 1e8),
    "rollout_batch_size": (1, 1e6),
    "num_return_sequences_in_group": (1, 1e4),
    "num_return_sequences": (1, 1e4),
    "group_size": (1, 1e4),
    "num_env_groups": (1, 1e6),
    "max_env_num_per_worker": (0, 1e5),
    "max_actions_per_traj": (1, 1e4),
    "ppo_epochs": (1, 100),
    "max_steps": (1, 1e8),
    "prompt_length": (1, 1e7),
    "response_length": (1, 1e7),
    "sequence_length": (2, 1e7),
    "max_new_tokens": (1, 1e7),
    "num_devices_per_node": (1, 1024),
    "max_running_requests": (1, 1e5),
    "max_newer_requests": (0, 1e5),
    "model_update_buffer_size_mb": (1, 1e5),
    "temperature": (0.0, 5.0),
    "judge_temperature": (0.0, 5.0),
    "top_p": (1e-3, 1.0),
    "repetition_penalty": (0.1, 10.0),
    "mem_fraction_static": (0.02, 0.98),
    "async_generation_ratio": (0.0, 64.0),
    "max_staleness_allowed": (0, 1000),
    "max_sample_age_s": (1.0, YEAR_S),
    "max_queue_size": (1, 1e8),
    "min_batch_count": (1, 1000),
    "max_sync_retries": (0, 1000),
    "max_generation_retries": (0, 1000),
    "max_engine_restarts": (0, 1000),
    "max_restarts": (0, 1000),
    "engine_restart_delay_s": (0.0, 60.0),
    "start_timeout_s": (10.0, YEAR_S),
    "sync_timeout_s": (0.1, 86400.0),
    "sync_retry_delay_s": (0.0, 300.0),
    "health_check_interval_s": (0.05, 3600.0),
    "max_retries": (0, 1000),
    "max_resample_factor": (0.1, 1e4),
    "max_concurrent_calls": (1, 1e5),
    "judge_max_tokens": (1, 1e6),
    "memory_limit_mb": (64, 1e6),
    "process_memory_limit_mb": (256, 1e6),
    "child_process_limit": (0, 1e5),
    "output_limit_kb": (1, 1e6),
    "kl_loss_coef": (1e-8, 100.0),
    "init_kl_coef": (1e-8, 100.0),
    "target_kl": (1e-6, 1000.0),
    "entropy_loss_coef": (1e-8, 10.0),
    "opd_kl_coef": (1e-6, 100.0),
    "opd_jsd_beta": (1e-3, 0.999),
    "target_loss": (1e-6, 20.0),
    "center_rewards_coefficient": (1e-6, 10.0),
    "sft_loss_coef": (1e-8, 1000.0),
    "beta": (1e-4, 100.0),
    "pg_clip_low": (1e-6, 1.0),
    "pg_clip_high": (1e-6, 100.0),
    "gspo_clip_low": (1e-8, 1.0),
    "gspo_clip_high": (1e-8, 100.0),
    "geo_mean_clip_low": (1e-6, 100.0),
    "geo_mean_clip_high": (1e-6, 100.0),
    "sapo_tau_positive": (1e-3, 1000.0),
    "sapo_tau_negative": (1e-3, 1000.0),
    "dppo_tv_threshold": (1e-6, 1.0),
    "dppo_kl_threshold": (1e-6, 100.0),
    "kl_cov_coef": (1e-6, 1e4),
    "dual_clip_c": (1.0, 1000.0),
    "upper": (0.0, 1e6),
    "tis_upper_bound": (1e-3, 1e4),
    "cispo_epsilon_low": (1e-6, 1000.0),
    "cispo_epsilon_high": (1e-6, 1000.0),
    "kimi15_tau": (1e-6, 1000.0),
    "topr_positive_weight": (0.0, 1000.0),
    "topr_negative_weight": (0.0, 1000.0),
    "value_clip": (1e-4, 1e4),
    "reward_clip": (1e-6, 1e6),
    "advantage_clip": (1e-6, 1e6),
    "overlong_penalty_factor": (1e-6, 1e4),
    "length_reward_coef": (1e-6, 1e4),
    "length_penalty_per_token": (1e-9, 1.0),
    "difficulty_weight_easy": (0.0, 1e4),
    "difficulty_weight_hard": (0.0, 1e4),
    "length_weight_short": (0.0, 1e4),
    "length_weight_long": (0.0, 1e4),
    "weight": (-1e4, 1e4),
    "correct_score": (-1e6, 1e6),
    "wrong_score": (-1e6, 1e6),
    "max_ckpt_to_keep": (0, 1e4),
    "m2_threshold": (1e-6, 1e4),
    "opsm_delta": (0.0, 1e4),
    "veto_threshold": (0.0, 0.9),
    "mean_logprob_mismatch": (1e-8, 100.0),
    "p99_logprob_mismatch": (1e-8, 100.0),
    "max_logprob_mismatch": (1e-8, 1000.0),
    "flush_secs": (0.1, 86400.0),
}
"""Least and largest usual value by the name of a key."""

OFF_AT_ZERO = (
    "max_grad_norm",
    "kl_loss_coef",
    "init_kl_coef",
    "entropy_loss_coef",
    "sft_loss_coef",
    "length_reward_coef",
    "length_penalty_per_token",
)
"""Keys of USUAL whose feature the value 0 turns off."""

LEAST_TEMPERATURE = 0.1
"""Lowest sampling temperature of samples that are trained on that is not warned of."""

TINY = 1e-30
"""Numbers closer to 0 vanish in single precision."""

LARGEST_NODE = 16
"""Devices of the largest usual machine; more are CPU slots, or a slip."""

LEAST_RATIO = 0.01
"""Smallest `async_generation_ratio` above 0 that is not warned of."""

THREADS = re.compile(r"[1-9]\d{0,3}(,[1-9]\d{0,3})*", re.ASCII)
"""Values that OpenMP understands: a number of threads, or one for each level."""

REFUSED_VARIABLES = {
    ("PYTHONHOME", "PYTHONINSPECT", "PYTHONSTARTUP", "PYTHONOPTIMIZE"): (
        "changes how Python starts in every process; leave it out"
    ),
    ("RAY_ADDRESS", "RAY_TMPDIR", "RAY_NAMESPACE", "RAY_AUTH_TOKEN"): "comes too late, as Ray has been started; export "
    "it in the shell before `roll run`",
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"): (
        "is set for each process by the framework; leave it out, and see device_mapping"
    ),
}
"""Variables of `system_envs` that cannot do what they are for -> why, and what to do."""

PATH_VARIABLES = ("TMPDIR", "TMP", "TEMP", "HOME", "LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "PATH")
"""Variables with paths that processes need."""

CACHE_VARIABLES = (
    "HF_HOME HF_HUB_CACHE HF_DATASETS_CACHE HF_ASSETS_CACHE TRANSFORMERS_CACHE XDG_CACHE_HOME TORCH_HOME"
    " TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR MODELSCOPE_CACHE"
).split()
"""Variables with folders that processes make."""

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def check_ranges(config: BaseConfig, report: Report) -> None:
    """Refuses times longer than a year and too many processes, and warns of any other unusual number."""
    for path in config.source.given:
        value, name = value_at(config, path), path.rpartition(".")[2]
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if name.endswith("_s") and value > YEAR_S:
            report.error(path, f"{value:g} s is longer than a year; use at most {YEAR_S:.0f}")
        elif name.endswith(("_timeout_s", "_deadline_s", "timeout_s")) and value < SHORTEST_TIMEOUT_S:
            report.error(path, f"{value:g} s is over before anything can answer; use at least {SHORTEST_TIMEOUT_S}")
        elif name == "world_size" and value > MAX_PROCESSES:
            report.error(path, f"{value} processes are too many for one machine; use at most {MAX_PROCESSES}")
        elif name == "async_generation_ratio" and 0 < value < LEAST_RATIO:
            report.warn(path, f"{value:g} lets almost nothing be generated ahead; use 0, or at least {LEAST_RATIO}")
        elif 0 < abs(value) < TINY:
            report.warn(path, f"{value:g} is too small for single precision; use 0, or at least {TINY:g}")
        elif path == "actor_infer.generating_args.temperature" and LOWEST_TEMPERATURE <= value < LEAST_TEMPERATURE:
            report.warn(path, f"{value:g} makes nearly all samples of a prompt equal; use at least {LEAST_TEMPERATURE}")
        elif name in USUAL and not (value == 0 and name in OFF_AT_ZERO):
            least, largest = USUAL[name]
            if not least <= value <= largest:
                report.warn(path, f"{value:g} is unusual: usual values are between {least:g} and {largest:g}")


def check_node(config: BaseConfig, report: Report) -> None:
    """A node with more devices than any machine has are CPU slots, which the run uses."""
    count = config.num_devices_per_node or 0
    highest = max((max(worker.device_mapping, default=0) for worker in config.device_roles().values()), default=0)
    if count > max(LARGEST_NODE, 2 * (highest + 1)):
        report.warn("num_devices_per_node", f"{count}, but devices 0 to {highest} are used; write {highest + 1}")


def check_variables(config: BaseConfig, report: Report) -> None:
    """Environment variables have the values that processes can use, and none that the framework sets."""
    sections = {"system_envs": config.system_envs}
    sections |= {f"{role}.system_envs": worker.system_envs for role, worker in config.device_roles().items()}
    for path, variables in sections.items():
        for name, value in variables.items():
            if name in THREAD_VARIABLES and not THREADS.fullmatch(value):
                report.error(f"{path}.{name}", f"{value!r} is not a number of threads, such as '4'")
            if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
                report.error(path, f"{name!r} is not the name of a variable; use letters, digits and _")
            if name == "PYTHONHASHSEED" and not (value == "random" or (value.isdecimal() and int(value) < 2**32)):
                report.error(f"{path}.{name}", f"{value!r} ends every process; use random or 0 to 4294967295")
            for names, why in REFUSED_VARIABLES.items():
                if name in names:
                    report.error(f"{path}.{name}", f"{value!r} {why}")
            if name in CACHE_VARIABLES and (reason := obstacle(Path(value))):
                report.missing_resource(f"{path}.{name}", f"{value} {reason}; use another")
            if name in INTERFACE_VARIABLES and not _has_interface(value):
                there = ", ".join(known for _, known in socket.if_nameindex())
                report.warn(f"{path}.{name}", f"{value} is not an interface of this machine, which has {there}")
            if name in PATH_VARIABLES and not any(map(os.path.exists, re.split("[: ]", value))):
                report.warn(f"{path}.{name}", f"{value} is not on this machine; use a path that every node has")


def _has_interface(value: str) -> bool:
    """Whether this machine has an interface that a variable names: by its beginning, or with `^` those to leave out."""
    names = [name for _, name in socket.if_nameindex()]
    return value.startswith("^") or any(name.startswith(tuple(value.lstrip("=").split(","))) for name in names)


def check_engine_lengths(config: BaseConfig, report: Report) -> None:
    """An engine whose context and cache are set by hand has room for the longest sequence, of a scoring one its own."""
    for role, worker in config.device_roles().items():
        if not isinstance(worker, EngineRoleConfig):
            continue
        longest, advice = config.sequence_length, "use at least that, or leave it out"
        if isinstance(worker, ScoringEngineConfig):
            name = worker.model_args.model_name_or_path
            longest = worker.sequence_length or (None if name is None else read_positions(local_model(name)))
            advice += f", or set {role}.sequence_length to the longest it has to score"
        for name, what in (("context_length", "the context"), ("max_total_tokens", "the key-value cache")):
            given = worker.strategy_args.strategy_config.get(name)
            if isinstance(given, int) and longest is not None and given < longest:
                report.error(
                    f"{role}.strategy_args.strategy_config.{name}",
                    f"{what} of {given} tokens is shorter than the longest sequence, {longest}; {advice}",
                )
