"""Options of a run by who reads them: data, processes, weight updates, training ranks, engines, the rollout.

A pipeline's configuration inherits them; a component takes the options it reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from roll.base.errors import Finding, error, warning
from roll.base.schema import YEAR_S, Condition, ConfigSource, internal, needs, option, time_text
from roll.configs.arguments import ENGINE_RUNS, pipelines
from roll.configs.asynchronous import AsyncOptions
from roll.configs.devices.system_envs import environment
from roll.configs.learning.lora import LoraArguments, PoliciesOptions
from roll.configs.roles import ActorTrainConfig, TrainedRoleConfig

if TYPE_CHECKING:
    from roll.configs.pipeline import RLConfig


@dataclass
class DataOptions:
    """What data and templates are converted by, and how long sequences are."""

    pipeline: Literal["rlvr", "sft", "agentic", "dpo", "reward_model"] = option(
        "rlvr", "Which pipeline this file is for; agentic where it is left out and the file has keys of agents."
    )
    template_time: str | None = option(
        None,
        "Time that a chat template with today's date (`strftime_now`) takes for now, such as 2026-01-31T12:00; "
        "default: the first start of the run, also where it is resumed.",
        parse=time_text,
    )
    prompt_length: int = option(
        1024,
        "Longest prompt in tokens; longer ones are dropped and counted. Default with a sequence_length of at most "
        "1024: half of it; where responses are given (sft, dpo, reward_model): all but one token of it.",
        ge=1,
        usual=(1, 1e7),
    )
    response_length: int | None = option(None, "Longest response in tokens.", ge=1, usual=(1, 1e7))
    sequence_length: int | None = option(
        None, "prompt_length + response_length; give either this or response_length.", ge=2, usual=(2, 1e7)
    )

    @property
    def max_sequence_length(self) -> int:
        """Tokens of the longest sequence of a run, prompt and response.

        Raises:
            ValueError: neither `sequence_length` nor `response_length` is set.
        """
        if self.sequence_length is not None:
            return self.sequence_length
        if self.response_length is None:
            raise ValueError("response_length: set it or sequence_length")
        return self.prompt_length + self.response_length


@dataclass
class ProcessOptions:
    """What every process of a run reads: its devices, folders and environment, and how long it is waited for."""

    source: ConfigSource = internal(factory=ConfigSource)
    platform: Literal["auto", "cpu", "cuda"] = option("auto", "Where devices are: auto takes cuda when there is one.")
    exp_name: str = option("roll", "Name of the run in trackers.")
    output_dir: str = option("./output", "Everything the run writes.")
    logging_dir: str | None = option(None, "Log files; default: output_dir/logs.")
    system_envs: dict[str, str] = option(
        factory=dict, parse=environment, help="Environment variables of every process of the run."
    )
    rpc_timeout_s: float = option(
        3600.0,
        "Maximum wait for a worker; after it the call fails with an error that names it, as if the worker had died.",
        gt=0,
    )
    start_timeout_s: float = option(600.0, "Maximum wait for workers and engines to start.", gt=0, usual=(10.0, YEAR_S))


@dataclass
class StepOptions:
    """How long a run trains."""

    max_steps: int = option(100, "Batches to train on.", ge=1, usual=(1, 1e8))


@dataclass
class CheckpointOptions(StepOptions, ProcessOptions):
    """Where checkpoints and exported models are, how many there are, and which a run continues from."""

    checkpoint_dir: str | None = option(
        None,
        "Checkpoints; default: output_dir/checkpoints.",
        only_for=needs("save_checkpoint", "save_checkpoint is false"),
    )
    save_steps: int = option(
        0,
        "Checkpoint every so many steps, and at the end; 0: at the end only.",
        ge=0,
        only_for=needs("save_checkpoint", "save_checkpoint is false", is_error=True),
    )
    max_ckpt_to_keep: int = option(
        2,
        "Newest checkpoints kept; 0 keeps all.",
        ge=0,
        usual=(0, 1e4),
        only_for=needs("save_checkpoint", "save_checkpoint is false"),
    )
    resume_from_checkpoint: bool | str = option(
        False, "true: the newest complete checkpoint of output_dir; or the path of one."
    )
    save_checkpoint: bool = option(True, "Write checkpoints at all.")
    save_hf_model: bool = option(
        False, "Export the final model as a HF folder, output_dir/hf_model; of adapters (lora_target) as a PEFT folder."
    )
    save_merged_hf_model: bool = option(
        False,
        "Export the final model with its adapters added to the weights, as a HF folder, output_dir/merged_hf_model.",
        only_for=Condition(
            lambda config, _: config.actor_train.model_args.trains_adapters,
            "no adapters are trained; save_hf_model exports the model",
            ("actor_train.model_args.lora_target",),
        ),
    )
    save_hf_checkpoints: bool = option(
        False,
        "Export the model as a HF folder in every checkpoint as well, as hf_model.",
        only_for=needs("save_checkpoint", "save_checkpoint is false"),
    )


@dataclass
class WeightUpdateOptions:
    """How weights reach the engines, and what happens where they do not."""

    model_update_buffer_size_mb: int = option(
        512, "Size of one bucket of a weight update.", ge=1, usual=(1, 1e5), only_for=ENGINE_RUNS
    )
    weight_transport: str = option(
        "auto",
        "How weights reach the engines: `shared_memory` (one node), `broadcast`, or a name of `register_transport`; "
        "`auto` chooses by the devices.",
        only_for=ENGINE_RUNS,
    )
    weight_update: Literal["full", "delta"] = option(
        "full",
        "`delta`: engines that have the version before get only the values that have changed; every update is then "
        "verified. Needs bf16, in which most weights stay the same in a step.",
        only_for=ENGINE_RUNS,
    )
    sync_timeout_s: float = option(
        60.0, "Maximum duration of one weight update.", gt=0, usual=(0.1, 86400.0), only_for=ENGINE_RUNS
    )
    max_sync_retries: int = option(
        3, "Retries of a failed weight update before the run ends.", ge=0, usual=(0, 1000), only_for=ENGINE_RUNS
    )
    sync_retry_delay_s: float = option(
        1.0,
        "Seconds between the retries of a weight update.",
        ge=0,
        usual=(0.0, 300.0),
        only_for=(ENGINE_RUNS, needs("max_sync_retries", "max_sync_retries is 0")),
    )
    verify_weights: Literal["first", "always"] = option(
        "first", "Compare names and checksums of trainer and engine after a weight update.", only_for=ENGINE_RUNS
    )


@dataclass
class SeedOptions:
    """What makes a run repeatable."""

    seed: int = option(42, "Every random choice of the run is derived from it.", ge=0)
    deterministic: bool = option(
        False, "The same seed gives the same metrics bit for bit, at some cost in speed; needs a ratio of 0."
    )


@dataclass
class WorkerOptions(PoliciesOptions, WeightUpdateOptions, SeedOptions, ProcessOptions, DataOptions):
    """What the workers of every role read."""

    pretrain: str | None = option(
        None,
        "Model of every role without model_name_or_path: a HF folder, or `owner/name` or `owner/name@revision` on the "
        "hub, which is fetched once per node. A folder wins where both exist.",
    )


@dataclass
class TrainerOptions(StepOptions, WorkerOptions):
    """What training ranks read."""

    max_grad_norm: float = option(1.0, "Gradient clipping by global norm; 0 turns it off.", ge=0, usual=(1e-6, 1e4))
    actor_train: ActorTrainConfig = option(factory=ActorTrainConfig, help="The role that is trained.")

    @property
    def samples_per_batch(self) -> int:
        """Number of samples of one step; here one optimizer step."""
        return self.actor_train.samples_per_optimizer_step

    @property
    def optimizer_steps_per_batch(self) -> int:
        """Optimizer steps of actor_train in one training step; an incomplete one is filled with masked samples."""
        return self.steps_per_batch(self.actor_train)

    def steps_per_batch(self, role: TrainedRoleConfig) -> int:
        """Optimizer steps of a role in one training step."""
        return -(-self.samples_per_batch // role.samples_per_optimizer_step)

    def schedule_steps(self, role: TrainedRoleConfig) -> int:
        """Optimizer steps of the learning-rate schedule of a role."""
        return self.max_steps * self.steps_per_batch(role)

    def trained_roles(self) -> dict[str, TrainedRoleConfig]:
        return {"actor_train": self.actor_train}


@dataclass
class LoopOptions(CheckpointOptions, TrainerOptions):
    """What the training loop reads."""

    eval_steps: int = option(0, "Validate before step 1, every so many steps, and at the end; 0: never.", ge=0)


@dataclass
class EngineHealthOptions:
    """When engines are checked and restarted."""

    max_engine_restarts: int = option(
        3,
        "Restarts of one engine within an hour, after it died or did not answer; then it is left out, and the run ends "
        "where it has no other. 0: never.",
        ge=0,
        usual=(0, 1000),
    )
    engine_restart_delay_s: float = option(
        1.0,
        "Seconds before the second restart of an engine within an hour; the first is at once, and each further one "
        "waits twice as long, at most a minute.",
        ge=0,
        usual=(0.0, 60.0),
        only_for=needs("max_engine_restarts", "max_engine_restarts is 0"),
    )
    health_check_interval_s: float = option(
        2.0, "Seconds between two health checks of an engine.", gt=0, usual=(0.05, 3600.0)
    )
    health_check_timeout_s: float = option(
        120.0, "An engine that does not answer for so long is restarted, except during a weight update.", gt=0
    )


@dataclass
class EngineOptions(EngineHealthOptions, AsyncOptions, WorkerOptions):
    """What engines and weight updates read."""

    def takes_turns(self, platform: str) -> bool:
        """Whether engines and trainer hold memory of the same devices in turns, on `platform`, cpu or cuda."""
        return False

    def adapters(self, platform: str) -> dict[str, LoraArguments] | None:
        """The adapters that engines on `platform`, cpu or cuda, get, by policy; None where they get weights."""
        return None

    @property
    def replays_routing(self) -> bool:
        """Whether engines return the experts of each token."""
        return False


@dataclass
class RolloutOptions(AsyncOptions, SeedOptions):
    """What the rollouter reads: the size of batches, and how many failures it accepts."""

    rollout_batch_size: int = option(64, "Prompts (rlvr) or trajectories (agentic) of one step.", ge=1, usual=(1, 1e6))
    num_return_sequences_in_group: int = option(
        1, "Samples per prompt; agentic: train_env_manager.group_size.", ge=1, usual=(1, 1e4)
    )
    max_generation_retries: int = option(
        2, "Retries of a failed request before its group is dropped.", ge=0, usual=(0, 1000)
    )
    max_failure_rate: float = option(
        0.1,
        "Maximum failed fraction per batch of prompts, or groups of trajectories; above 0, one failure is always "
        "allowed. The fraction is of the completed ones since the last batch, or of a batch if fewer completed.",
        ge=0,
        le=1,
    )
    max_resample_factor: float = option(
        10.0,
        "Maximum number of groups that query filters may drop per batch for each group they keep; the batch size "
        "counts if they keep fewer.",
        gt=0,
        usual=(0.1, 1e4),
        only_for=(
            pipelines("rlvr", reason="every complete group is trained on"),
            Condition(
                lambda config, _: any(
                    reward.query_filter_config.type != "no_filter" for reward in config.rewards.values()
                ),
                "every query_filter_config is of type no_filter",
                ("rewards",),
            ),
        ),
    )

    @property
    def groups_per_batch(self) -> int:
        """Number of groups of samples of one step; in RLVR a group is the samples of one prompt."""
        return self.rollout_batch_size


def check_weight_update(config: RLConfig) -> Iterator[Finding]:
    """Deltas need engines that keep the bits of actor_train, and a dtype in which most of these stay the same."""
    if config.weight_update == "full":
        return
    path, platform = "weight_update", "cpu" if config.platform == "cpu" else "cuda"
    training, sampling = config.actor_train.model_args.dtype, config.actor_infer.model_args.dtype
    if training == "fp32":
        why = "in fp32 nearly every value changes at each step, and its position would be sent too"
        yield error(path, f"delta: {why}; use full, or actor_train.model_args.dtype bf16")
    elif sampling != training:
        yield error(
            path, f"delta: actor_infer converts {training} to {sampling}; use full, or {training} in actor_infer"
        )
    if config.adapters(platform) is not None:
        yield warning(path, "delta has no effect: engines get adapters alone; leave it out, or set lora_update: merged")
    elif config.takes_turns(platform):
        why = "actor_infer discards its weights in turns with actor_train"
        yield error(path, f"delta: {why}; use full, or devices of their own")
