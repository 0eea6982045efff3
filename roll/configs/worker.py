"""One role of a run: the devices it owns and what it does with them."""

from __future__ import annotations

from dataclasses import dataclass

from roll.configs.arguments import (
    DataArguments,
    GeneratingArguments,
    ModelArguments,
    StrategyArguments,
    TrainingArguments,
)
from roll.configs.device_mapping import parse_device_mapping
from roll.configs.fields import environment, option


@dataclass
class WorkerConfig:
    """A role (`actor_train`, `actor_infer`, `reference`, `validation`).

    Ranks own devices in the order of `device_mapping`, `num_gpus_per_worker` of them each.
    """

    model_args: ModelArguments = option(factory=ModelArguments, help="The role's model.")
    training_args: TrainingArguments = option(factory=TrainingArguments, help="The role's optimizer.")
    data_args: DataArguments = option(factory=DataArguments, help="The role's data.")
    generating_args: GeneratingArguments = option(factory=GeneratingArguments, help="The role's sampling.")
    strategy_args: StrategyArguments = option(factory=StrategyArguments, help="The role's engine.")
    device_mapping: list[int] = option(
        factory=list,
        help="Global device ranks: a list, `0-7,16-23`, or `list(range(0,8))`.",
        parse=parse_device_mapping,
    )
    num_gpus_per_worker: int = option(
        1, "Devices of one sglang engine (its tensor parallel size); 1 for Megatron.", minimum=1
    )
    infer_batch_size: int = option(
        16, "Samples of one forward micro-batch (log-probs) on one data-parallel rank.", minimum=1
    )
    use_dynamic_batching_in_train: bool = option(False, "Form training micro-batches by tokens instead of by count.")
    max_tokens_per_microbatch_in_train: int = option(
        0, "Padded tokens of one training micro-batch; needed with dynamic batching.", minimum=0
    )
    use_dynamic_batching_in_infer: bool = option(False, "Form forward micro-batches by tokens instead of by count.")
    max_tokens_per_microbatch_in_infer: int = option(
        0, "Padded tokens of one forward micro-batch; needed with dynamic batching.", minimum=0
    )
    pg_variant: str = option("ppo", "Policy loss; see docs/algorithms.md for the known ones.")
    max_running_requests: int = option(128, "Requests one engine runs at a time.", minimum=1)
    generation_timeout_s: float = option(
        120.0, "Seconds one request may take before it is aborted and retried.", above=0
    )
    system_envs: dict[str, str] = option(
        factory=dict, parse=environment, help="Environment variables of the role's processes."
    )
