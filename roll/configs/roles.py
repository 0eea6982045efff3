"""The roles of a run: one dataclass for each, so that a key a role does not read does not exist there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from roll.algorithms.options.policy_options import parse_pg_variant
from roll.base.schema import needs, option
from roll.configs.arguments import (
    ENGINE_RUNS,
    FORWARD_PASSES,
    OLD_LOG_PROBS,
    POLICY_LOSS,
    DataArguments,
    GeneratingArguments,
    MegatronModelArguments,
    ModelArguments,
    TrainDataArguments,
    TrainingArguments,
    TrainModelArguments,
)
from roll.configs.asynchronous import PROMPTS_MIX
from roll.configs.devices.megatron import MegatronConfig, MegatronTrainConfig
from roll.configs.devices.parallel_layout import ParallelLayout, parse_device_mapping
from roll.configs.devices.system_envs import environment
from roll.configs.learning.lora import LoraUpdateArguments

ENGINES = ("megatron_train", "megatron_infer", "sglang")
"""Values of `strategy_name`; each role runs one of them."""


def engine_of(role: str, engine: str, *others: str) -> Callable[[Any], Any]:
    """A parser of `strategy_name` that accepts one engine of a role; errors name the `others` that it can have."""
    allowed = " or ".join((engine, *others))

    def parse(value: Any) -> Any:
        if value == engine:
            return value
        if isinstance(value, str) and value in ENGINES:
            raise ValueError(f"{value} cannot run {role}; use {allowed}")
        shown = "null" if value is None else repr(value)
        raise ValueError(f"{shown} is not one of {', '.join(ENGINES)}; use {allowed}")

    return parse


@dataclass
class StrategyArguments:
    """Which engine a role runs, and the options of that engine in `strategy_config`."""

    strategy_name: str


@dataclass
class MegatronTrainArguments(StrategyArguments):
    """Megatron-Core with an optimizer."""

    strategy_name: Literal["megatron_train"] = option(
        "megatron_train", "The engine.", parse=engine_of("a trained role", "megatron_train"), decides_section=True
    )
    strategy_config: MegatronTrainConfig = option(factory=MegatronTrainConfig, help="Options of Megatron.")


@dataclass
class MegatronInferArguments(StrategyArguments):
    """Megatron-Core for forward passes."""

    strategy_name: Literal["megatron_infer"] = option(
        "megatron_infer", "The engine.", parse=engine_of("reference", "megatron_infer"), decides_section=True
    )
    strategy_config: MegatronConfig = option(factory=MegatronConfig, help="Options of Megatron.")


@dataclass
class SGLangArguments(StrategyArguments):
    """SGLang."""

    strategy_name: Literal["sglang"] = option(
        "sglang", "The engine.", parse=engine_of("a role that generates", "sglang"), decides_section=True
    )
    strategy_config: dict[str, Any] = option(
        factory=dict, help="Options of SGLang's ServerArgs, passed through by name."
    )


@dataclass(frozen=True)
class AbsentKey:
    """Why a role does not have a key that other roles have; an error if readers would rely on it."""

    reason: str
    is_error: bool = False


NO_POLICY_LOSS = AbsentKey("only actor_train has a policy loss", is_error=True)
NO_OPTIMIZER = AbsentKey("only actor_train has an optimizer")
ONE_DEVICE_PER_RANK = AbsentKey(
    "a Megatron rank has one device; set strategy_config.tensor_model_parallel_size instead", is_error=True
)


@dataclass
class RoleConfig:
    """A role that owns devices; its ranks own those of `device_mapping` in order."""

    value_head: ClassVar[bool] = False
    """Whether its model gives one value for each token instead of logits."""

    value_bias: ClassVar[bool] = True
    """Whether that value has a bias: `...ForTokenClassification` of HF has one, `...ForSequenceClassification` none."""

    absent_keys: ClassVar[dict[str, AbsentKey]] = {}
    """Keys of other roles -> why this role does not have them, where the reason is more than which role has them."""

    model_args: ModelArguments = option(factory=ModelArguments, help="The role's model.")
    strategy_args: StrategyArguments = option(factory=MegatronInferArguments, help="The role's engine.")
    device_mapping: list[int] = option(
        factory=list,
        help="Global device ranks: a list, `0-7,16-23`, or `list(range(0,8))`.",
        parse=parse_device_mapping,
    )
    system_envs: dict[str, str] = option(
        factory=dict, parse=environment, help="Environment variables of the role's processes."
    )

    @property
    def layout(self) -> ParallelLayout:
        """How the devices are split into parallel dimensions; here one data-parallel rank each."""
        return ParallelLayout(data=max(1, len(self.device_mapping)))


@dataclass
class MegatronRoleConfig(RoleConfig):
    """A role that runs Megatron-Core, one rank on each device."""

    model_args: MegatronModelArguments = option(factory=MegatronModelArguments, help="The role's model.")
    strategy_args: MegatronTrainArguments | MegatronInferArguments = option(
        factory=MegatronInferArguments, help="The role's engine."
    )
    infer_batch_size: int = option(
        16,
        "Samples of one forward micro-batch (log-probs) on one data-parallel rank. "
        "A larger per_device_train_batch_size is the default instead.",
        ge=1,
        usual=(1, 1e5),
        only_for=(
            FORWARD_PASSES,
            OLD_LOG_PROBS,
            needs(
                "use_dynamic_batching_in_infer",
                "use_dynamic_batching_in_infer forms forward micro-batches by tokens",
                accepts=lambda dynamic: not dynamic,
            ),
        ),
    )
    use_dynamic_batching_in_infer: bool = option(
        False,
        "Form forward micro-batches by tokens instead of by count.",
        only_for=(FORWARD_PASSES, OLD_LOG_PROBS),
    )
    max_tokens_per_microbatch_in_infer: int = option(
        0,
        "Tokens of one forward micro-batch, padding included; needed with dynamic batching.",
        ge=0,
        usual=(0, 1e8),
        only_for=(
            FORWARD_PASSES,
            OLD_LOG_PROBS,
            needs("use_dynamic_batching_in_infer", "use_dynamic_batching_in_infer is false"),
        ),
    )

    use_sequence_packing: bool = option(
        True,
        "Compute the samples of a micro-batch as one sequence without padding, in which each attends to itself; false "
        "pads each to the longest.",
    )

    @property
    def layout(self) -> ParallelLayout:
        """How the devices are split into parallel dimensions."""
        megatron = self.strategy_args.strategy_config
        model = ParallelLayout(
            tensor=megatron.tensor_model_parallel_size,
            context=megatron.context_parallel_size,
            pipeline=megatron.pipeline_model_parallel_size,
            expert=megatron.expert_model_parallel_size,
            expert_tensor=megatron.expert_tensor_parallel_size,
        )
        return replace(model, data=max(1, len(self.device_mapping) // model.model_size))

    @property
    def forward_token_limit(self) -> int | None:
        """Padded tokens of one forward micro-batch; None if micro-batches are formed by count."""
        return self.max_tokens_per_microbatch_in_infer if self.use_dynamic_batching_in_infer else None


@dataclass
class TrainedRoleConfig(MegatronRoleConfig):
    """A role with an optimizer."""

    model_args: TrainModelArguments = option(factory=TrainModelArguments, help="The role's model.")
    strategy_args: MegatronTrainArguments = option(factory=MegatronTrainArguments, help="The role's engine.")
    training_args: TrainingArguments = option(factory=TrainingArguments, help="The optimizer.")
    use_dynamic_batching_in_train: bool = option(False, "Form training micro-batches by tokens instead of by count.")
    max_tokens_per_microbatch_in_train: int = option(
        0,
        "Padded tokens of one training micro-batch; needed with dynamic batching.",
        ge=0,
        usual=(0, 1e8),
        only_for=needs("use_dynamic_batching_in_train", "use_dynamic_batching_in_train is false"),
    )

    @property
    def training_token_limit(self) -> int | None:
        """Padded tokens of one training micro-batch; None if micro-batches are formed by count."""
        return self.max_tokens_per_microbatch_in_train if self.use_dynamic_batching_in_train else None

    @property
    def samples_per_optimizer_step(self) -> int:
        """Samples of one optimizer step over all data-parallel ranks."""
        return self.training_args.samples_per_optimizer_step(self.layout.data)


@dataclass
class RouterReplayOptions:
    """Which experts a token of a mixture is trained with."""

    mode: Literal["disable", "R2", "R3"] = option(
        "disable",
        "disable: experts that the trained model chooses; R2: its experts in the pass of the old log-probs; "
        "R3: experts with which the engine sampled the token.",
        only_for=POLICY_LOSS,
    )

    @property
    def replays(self) -> bool:
        """Whether tokens are trained with recorded experts."""
        return self.mode != "disable"

    @property
    def engine_records(self) -> bool:
        """Whether the recorded experts are those of the engine."""
        return self.mode == "R3"

    @property
    def pass_records(self) -> bool:
        """Whether the recorded experts are those of the pass of the old log-probs."""
        return self.mode == "R2"


@dataclass
class ActorTrainConfig(LoraUpdateArguments, TrainedRoleConfig):
    """`actor_train`: the policy that is trained."""

    absent_keys: ClassVar[dict[str, AbsentKey]] = {
        "generating_args": AbsentKey("training samples are drawn by actor_infer.generating_args", is_error=True),
        "num_gpus_per_worker": ONE_DEVICE_PER_RANK,
    }

    data_args: TrainDataArguments = option(factory=TrainDataArguments, help="The training data.")
    pg_variant: str = option(
        "ppo",
        "Policy loss; see docs/algorithms/policy_loss.md for the known ones. Several with weights, such as "
        "{ppo: 0.5, topr: 0.5}, are added.",
        parse=parse_pg_variant,
        only_for=POLICY_LOSS,
    )
    router_replay: RouterReplayOptions = option(
        factory=RouterReplayOptions, help="The experts of a mixture in training."
    )


@dataclass
class RewardModelTrainConfig(ActorTrainConfig):
    """`actor_train` of pipeline reward_model: the value after the last token is the reward of a sequence.

    It has no bias, since the loss reads differences of rewards and `...ForSequenceClassification` has none.
    """

    value_head: ClassVar[bool] = True
    value_bias: ClassVar[bool] = False


@dataclass
class CriticConfig(TrainedRoleConfig):
    """`critic`: the value model of `adv_estimator: gae`, trained on the same samples as the policy."""

    value_head: ClassVar[bool] = True
    absent_keys: ClassVar[dict[str, AbsentKey]] = {
        "pg_variant": NO_POLICY_LOSS,
        "data_args": AbsentKey("it learns from the samples of actor_train"),
        "generating_args": AbsentKey("training samples are drawn by actor_infer.generating_args", is_error=True),
        "num_gpus_per_worker": ONE_DEVICE_PER_RANK,
    }


@dataclass
class ReferenceConfig(MegatronRoleConfig):
    """`reference`: the frozen model of the KL terms."""

    absent_keys: ClassVar[dict[str, AbsentKey]] = {
        "pg_variant": NO_POLICY_LOSS,
        "training_args": NO_OPTIMIZER,
        "num_gpus_per_worker": ONE_DEVICE_PER_RANK,
        "strategy_args": AbsentKey("the reference is not trained"),
        "model_args": AbsentKey("the reference is not trained"),
    }

    strategy_args: MegatronInferArguments = option(factory=MegatronInferArguments, help="The role's engine.")


NEWER_REQUESTS_ON_CPU = 4
"""A decode step of the CPU engine takes about 0.25 ms plus 60 us for each request: four requests double its time."""

OWN_BATCHES = AbsentKey("the engine forms its own batches; max_running_requests bounds them")
OWN_KERNELS = AbsentKey("the engine chooses its own kernels")


@dataclass
class EngineRoleConfig(RoleConfig):
    """A role that runs SGLang, an engine on every `num_gpus_per_worker` devices."""

    strategy_args: SGLangArguments = option(factory=SGLangArguments, help="The role's engine.")
    num_gpus_per_worker: int = option(1, "Devices of one engine: its tensor-parallel size.", ge=1)
    max_running_requests: int = option(128, "Requests one engine runs at a time.", ge=1, usual=(1, 1e5))
    generation_timeout_s: float = option(
        120.0,
        "Seconds one request may take before it is aborted and retried. Default: 1 for every 20 tokens of the longest "
        "response, at least 120, and for agents at most trajectory_timeout_s.",
        gt=0,
    )

    @property
    def layout(self) -> ParallelLayout:
        """`tensor`: devices of one engine; `data`: number of engines."""
        engines = len(self.device_mapping) // self.num_gpus_per_worker
        return ParallelLayout(tensor=self.num_gpus_per_worker, data=max(1, engines))

    def newer_requests(self, platform: str) -> int | None:
        """Requests of newer prompts that an engine starts beside older ones, on cpu or cuda; None: no limit."""
        return None


@dataclass
class ActorInferConfig(EngineRoleConfig):
    """`actor_infer`: the engines that generate."""

    absent_keys: ClassVar[dict[str, AbsentKey]] = {
        "pg_variant": NO_POLICY_LOSS,
        "training_args": NO_OPTIMIZER,
        "data_args": AbsentKey("prompts are read by actor_train.data_args"),
        "infer_batch_size": OWN_BATCHES,
        "model_args": OWN_KERNELS,
    }

    generating_args: GeneratingArguments = option(factory=GeneratingArguments, help="The sampling of training.")
    max_newer_requests: int | None = option(
        None,
        "Most requests of newer prompts that one engine starts while requests due in the next batch run. Default: "
        f"{NEWER_REQUESTS_ON_CPU} on a CPU, where each request makes a decode step longer; no limit on GPUs. "
        "The value of max_running_requests is no limit.",
        ge=0,
        usual=(0, 1e5),
        only_for=PROMPTS_MIX,
    )

    def newer_requests(self, platform: str) -> int | None:
        """`max_newer_requests` or its default."""
        default = NEWER_REQUESTS_ON_CPU if platform == "cpu" else None
        return default if self.max_newer_requests is None else self.max_newer_requests


@dataclass
class ValidationConfig:
    """`validation`: data and sampling of validation, which runs on the engines of actor_infer."""

    absent_keys: ClassVar[dict[str, AbsentKey]] = {
        "pg_variant": NO_POLICY_LOSS,
        "training_args": NO_OPTIMIZER,
        "device_mapping": AbsentKey("validation generates on actor_infer's devices", is_error=True),
        "strategy_args": AbsentKey("validation generates with actor_infer's engine", is_error=True),
        "data_args.shuffle": AbsentKey("validation runs over all of its data"),
    }

    data_args: DataArguments = option(factory=DataArguments, help="The validation data.")
    generating_args: GeneratingArguments = option(
        factory=GeneratingArguments, help="The sampling of validation.", only_for=ENGINE_RUNS
    )


DEVICE_ROLES = ("actor_train", "actor_infer", "reference", "critic", "reward", "judge")
"""Roles that can own devices, in the order they are shown."""

ROLES = (*DEVICE_ROLES, "validation")
