"""The whole of a run: what every pipeline shares, and what RLVR and SFT add."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from roll.configs.arguments import StrategyArguments
from roll.configs.asynchronous import AsyncOptions
from roll.configs.fields import environment, internal, one_or_many, option
from roll.configs.policy import PolicyOptions
from roll.configs.worker import WorkerConfig


@dataclass
class Source:
    """Where a configuration came from: its file, the keys that were given, and what loading has to say about them."""

    file: str = ""
    given: list[str] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)


def _role(strategy_name: Any) -> WorkerConfig:
    return WorkerConfig(strategy_args=StrategyArguments(strategy_name=strategy_name))


@dataclass
class BaseConfig:
    """What every pipeline needs."""

    exp_name: str = option("roll", "Name of the run in trackers.")
    seed: int = option(42, "Every random choice of the run derives from it.", minimum=0)
    deterministic: bool = option(
        False, "On CPU the same seed gives the same metrics bit for bit, at some cost in speed."
    )
    platform: Literal["auto", "cpu", "cuda"] = option("auto", "Where devices are: auto takes cuda when there is one.")
    num_devices_per_node: int | None = option(
        None,
        "Devices of one node; default on cpu: its cores, on cuda: its GPUs (8 when planning elsewhere).",
        minimum=1,
    )
    output_dir: str = option("./output", "Everything the run writes.")
    logging_dir: str | None = option(None, "Log files; default: output_dir/logs.")
    track_with: list[Literal["tensorboard", "stdout"]] = option(
        factory=lambda: ["tensorboard"],
        parse=one_or_many,
        help="Trackers beside metrics.jsonl; a single name is taken as a list of one.",
    )
    tracker_kwargs: dict[str, dict[str, Any]] = option(
        factory=dict, help="Options of the trackers by name, e.g. {tensorboard: {log_dir: PATH}}."
    )
    max_steps: int = option(100, "Batches to train on.", minimum=1)
    save_steps: int = option(0, "Checkpoint every so many steps, and at the end; 0: at the end only.", minimum=0)
    logging_steps: int = option(
        1, "Console and tracker lines every so many steps (metrics.jsonl has every step).", minimum=1
    )
    eval_steps: int = option(0, "Validate before step 1, every so many steps, and at the end; 0: never.", minimum=0)
    max_ckpt_to_keep: int = option(2, "Newest checkpoints kept; 0 keeps all.", minimum=0)
    resume_from_checkpoint: bool | str = option(
        False, "true: the newest complete checkpoint of output_dir; or the path of one."
    )
    save_checkpoint: bool = option(True, "Write checkpoints at all.")
    save_hf_model: bool = option(False, "Export the final model as a HF folder, output_dir/hf_model.")
    pretrain: str | None = option(None, "HF model folder of every role that names none.")
    prompt_length: int = option(1024, "Longest prompt in tokens; longer ones are dropped and counted.", minimum=1)
    response_length: int | None = option(None, "Longest response in tokens.", minimum=1)
    sequence_length: int | None = option(
        None, "prompt_length + response_length; give either this or response_length.", minimum=2
    )
    max_grad_norm: float = option(1.0, "Gradient clipping by global norm; 0 turns it off.", minimum=0)
    rpc_timeout_s: float = option(
        3600.0, "Longest wait for a worker before the run ends with what it waited for.", above=0
    )
    start_timeout_s: float = option(600.0, "Longest wait for workers and engines to come up.", above=0)
    model_update_buffer_size_mb: int = option(512, "Bucket of one weight transfer.", minimum=1)
    sync_timeout_s: float = option(60.0, "Longest one publish of weights may take.", above=0)
    max_sync_retries: int = option(3, "Publishes tried again before the run ends.", minimum=0)
    sync_retry_delay_s: float = option(1.0, "Seconds between them.", minimum=0)
    verify_weights: Literal["first", "always"] = option(
        "first", "Compare names and checksums on both sides of a publish."
    )
    system_envs: dict[str, str] = option(
        factory=dict, parse=environment, help="Environment variables of every process of the run."
    )
    actor_train: WorkerConfig = option(factory=WorkerConfig, help="The role that learns.")
    validation: WorkerConfig = option(
        factory=WorkerConfig,
        help="Data and sampling of validation; it owns no devices. Keys of data_args and generating_args that are not "
        "given are those of training, but for file_name, and num_return_sequences, which is 1.",
    )
    source: Source = internal(factory=Source)


@dataclass
class SFTConfig(BaseConfig):
    """Supervised fine-tuning: loss on the answer only. A batch is one optimizer step of actor_train."""

    pipeline: Literal["sft"] = option("sft", "Which pipeline this file is for.")
    target_loss: float | None = option(
        None, "The run ends early, once a validation finds val/loss at or below this.", above=0
    )


@dataclass
class FilterArguments:
    """Thresholds of a query filter; each belongs to one type."""

    threshold_up: float | None = option(None, "mean_filter: groups with this mean score or more are dropped.")
    threshold_down: float | None = option(None, "mean_filter: groups with this mean score or less are dropped.")
    std_threshold: float | None = option(
        None, "std_filter: groups whose scores spread this much or less are dropped; default 0.", minimum=0
    )


@dataclass
class QueryFilterConfig:
    """Dynamic sampling: groups that teach nothing are replaced by fresh prompts."""

    type: Literal["no_filter", "mean_filter", "std_filter"] = option("no_filter", "What a group is judged by.")
    filter_args: FilterArguments = option(factory=FilterArguments, help="Its thresholds.")


@dataclass
class RewardConfig:
    """One rule that scores samples."""

    function: str = option(
        "roll.rewards.math_rule:math_reward", "`module:function(response, ground_truth, config) -> float`."
    )
    tag_included: list[str] = option(factory=list, help="Tags this reward scores; empty: every tag.")
    world_size: int = option(1, "Processes of its pool.", minimum=1)
    timeout_s: float = option(
        5.0, "Seconds one sample may take; the process is killed then and the sample dropped.", above=0
    )
    answer_pattern: Literal["boxed", "last_number", "boxed_or_last_number"] = option(
        "boxed_or_last_number", "Where the answer stands in the response."
    )
    correct_score: float = option(1.0, "Score of a right answer.")
    wrong_score: float = option(0.0, "Score of a wrong one.")
    query_filter_config: QueryFilterConfig = option(
        factory=QueryFilterConfig, help="Which groups scored by this rule are learned from."
    )


@dataclass
class RLConfig(AsyncOptions, PolicyOptions, BaseConfig):
    """What reinforcement learning adds, whatever its samples are."""

    actor_infer: WorkerConfig = option(factory=lambda: _role("sglang"), help="The role that generates.")
    reference: WorkerConfig = option(factory=lambda: _role("megatron_infer"), help="The frozen model of the KL terms.")
    rollout_dump_dir: str | None = option(
        None,
        "Folder for the samples of every step: ids, log-probs, versions, scores and advantages, one JSONL a step; "
        "`roll show` shows them.",
    )
    reward_pretrain: str | None = option(None, "Model of a reward role; rule rewards have none.")
    rollout_batch_size: int = option(64, "Prompts (rlvr) or trajectories (agentic) of one step.", minimum=1)
    num_return_sequences_in_group: int = option(
        1, "Samples per prompt; agentic: train_env_manager.group_size.", minimum=1
    )
    is_num_return_sequences_expand: bool = option(True, "Each sample is a request of its own, with its own seed.")
    ppo_epochs: int = option(1, "Passes over each batch.", minimum=1)
    adv_estimator: str = option("grpo", "Advantage estimator; see docs/algorithms.md for the known ones.")
    grpo_norm_by_std: bool = option(True, "Divide by the group's standard deviation; false is Dr. GRPO.")
    norm_mean_type: Literal["batch", "group"] | None = option(None, "Subtract this mean from scores (reinforce).")
    norm_std_type: Literal["batch", "group"] | None = option(None, "Divide scores by this deviation (reinforce).")
    gamma: float = option(1.0, "Discount of the return to go.", minimum=0, maximum=1)
    reward_clip: float | None = option(None, "Clip scores to +- this.", above=0)
    advantage_clip: float | None = option(None, "Clip advantages to +- this.", above=0)
    whiten_rewards: bool = option(False, "Zero mean and unit variance of scores over the batch.")
    whiten_advantages: bool = option(False, "Zero mean and unit variance of advantages over the batch's tokens.")
    log_prob_parity_bound: float | None = option(
        None,
        "Largest |log p - log mu| tolerated in the first step; default 1e-3 in fp32, 0.5 in half precision.",
        above=0,
    )
    truncated_sampling: Literal["warn", "refuse"] = option(
        "warn", "What to do when top_p or top_k truncate the sampled distribution."
    )
    max_generation_retries: int = option(
        2, "Times a failed request is tried again before its group is dropped.", minimum=0
    )
    max_failure_rate: float = option(
        0.1,
        "Prompts, or groups of trajectories, that may fail from one batch to the next before the run ends, as a share "
        "of those that come back whole meanwhile, or of a batch where fewer do; above 0 it allows one.",
        minimum=0,
        maximum=1,
    )
    max_resample_factor: float = option(
        10.0,
        "Groups that query filters may drop from one batch to the next before the run ends, for each that they keep, "
        "or in batches where they keep fewer.",
        above=0,
    )

    @property
    def groups_per_batch(self) -> int:
        """Groups of samples of one step: those to one prompt."""
        return self.rollout_batch_size

    @property
    def samples_per_batch(self) -> int:
        """Samples of one step."""
        return self.rollout_batch_size * self.num_return_sequences_in_group


@dataclass
class RLVRConfig(RLConfig):
    """Reinforcement learning with verifiable rewards."""

    pipeline: Literal["rlvr"] = option("rlvr", "Which pipeline this file is for.")
    rewards: dict[str, RewardConfig] = option(factory=lambda: {"math_rule": RewardConfig()}, help="Rewards by name.")
