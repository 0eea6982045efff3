"""The roles `reward` and `judge`: models that score responses, on Megatron ranks or on SGLang engines of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from roll.base.errors import Finding, error
from roll.base.schema import option
from roll.configs.arguments import MegatronModelArguments, ModelArguments
from roll.configs.roles import (
    NO_OPTIMIZER,
    NO_POLICY_LOSS,
    ONE_DEVICE_PER_RANK,
    OWN_BATCHES,
    OWN_KERNELS,
    AbsentKey,
    EngineRoleConfig,
    MegatronInferArguments,
    MegatronRoleConfig,
    engine_of,
)

SCORING_MODELS = {"judge": "a judge", "reward": "a reward model"}
"""The roles whose models score responses, which are never those of `pretrain`, and what they run."""

OWN_TEMPLATE = AbsentKey("a reward has its template: rewards.<name>.template")

REWARD_MODEL = (
    "Folder of a HF model with one output, a ...ForSequenceClassification or ...ForTokenClassification, or its name on "
    "the hub; needed."
)


@dataclass
class RewardModelArguments(MegatronModelArguments):
    """A reward model that Megatron runs."""

    model_name_or_path: str | None = option(None, REWARD_MODEL)


@dataclass
class RewardMegatronArguments(MegatronInferArguments):
    """Megatron-Core for the forward passes of a reward model."""

    strategy_name: Literal["megatron_infer"] = option(
        "megatron_infer",
        "The engine; with sglang the role has SGLang engines of its own, and other keys.",
        parse=engine_of("reward", "megatron_infer", "sglang"),
        decides_section=True,
    )


@dataclass
class RewardModelRoleConfig(MegatronRoleConfig):
    """`reward`: the frozen model of the built-in reward reward_model, with its own tokenizer."""

    value_head: ClassVar[bool] = True
    absent_keys: ClassVar[dict[str, AbsentKey]] = {
        "pg_variant": NO_POLICY_LOSS,
        "training_args": NO_OPTIMIZER,
        "num_gpus_per_worker": ONE_DEVICE_PER_RANK,
        "data_args": OWN_TEMPLATE,
        "strategy_args": AbsentKey("the reward model is not trained"),
        "model_args": AbsentKey("the reward model is not trained"),
    }

    model_args: RewardModelArguments = option(factory=RewardModelArguments, help="The role's model.")
    strategy_args: RewardMegatronArguments = option(factory=RewardMegatronArguments, help="The role's engine.")


@dataclass
class ScoringEngineConfig(EngineRoleConfig):
    """A role whose engines score responses with a model and a tokenizer of their own."""

    sequence_length: int | None = option(
        None,
        "Longest sequence in tokens, prompt and response or question and answer; longer ones are failures. Default: "
        "max_position_embeddings of the model.",
        ge=2,
        usual=(2, 1e7),
    )
    generation_timeout_s: float = option(
        120.0, "Seconds one request may take in an engine before it is aborted and sent to the next one.", gt=0
    )


@dataclass
class RewardEngineModelArguments(ModelArguments):
    """A reward model that SGLang runs."""

    model_name_or_path: str | None = option(None, REWARD_MODEL)


@dataclass
class RewardEngineConfig(ScoringEngineConfig):
    """`reward` where `strategy_name` is sglang: the engines of the built-in reward reward_model."""

    value_head: ClassVar[bool] = True
    absent_keys: ClassVar[dict[str, AbsentKey]] = {
        "pg_variant": NO_POLICY_LOSS,
        "training_args": NO_OPTIMIZER,
        "data_args": OWN_TEMPLATE,
        "generating_args": AbsentKey("a reward model generates nothing", is_error=True),
        "infer_batch_size": OWN_BATCHES,
        "use_dynamic_batching_in_infer": OWN_BATCHES,
        "max_tokens_per_microbatch_in_infer": OWN_BATCHES,
        "model_args": OWN_KERNELS,
    }

    model_args: RewardEngineModelArguments = option(factory=RewardEngineModelArguments, help="The role's model.")


@dataclass
class JudgeModelArguments(ModelArguments):
    """The model of a judge."""

    model_name_or_path: str | None = option(None, "Folder of a HF model that grades, or its name on the hub; needed.")


@dataclass
class JudgeConfig(ScoringEngineConfig):
    """`judge`: the engines of the built-in reward llm_judge, with a model and a tokenizer of their own."""

    absent_keys: ClassVar[dict[str, AbsentKey]] = {
        "pg_variant": NO_POLICY_LOSS,
        "training_args": NO_OPTIMIZER,
        "data_args": AbsentKey("a reward has its question and its chat template: rewards.<name>.prompt_template"),
        "generating_args": AbsentKey("a reward has judge_temperature and judge_max_tokens", is_error=True),
        "infer_batch_size": OWN_BATCHES,
        "model_args": OWN_KERNELS,
    }

    model_args: JudgeModelArguments = option(factory=JudgeModelArguments, help="The role's model.")


def check_scoring_engine(role: str, worker: ScoringEngineConfig) -> Iterator[Finding]:
    """Its options keep the weights of the model, and its output."""
    path, options = f"{role}.strategy_args.strategy_config", worker.strategy_args.strategy_config
    if options.get("load_format") == "dummy":
        yield error(
            f"{path}.load_format",
            f"dummy gives {SCORING_MODELS[role]} random weights, which nothing replaces; leave it out",
        )
    if isinstance(worker, RewardEngineConfig) and "json_model_override_args" in options:
        yield error(f"{path}.json_model_override_args", "the framework sets it for a reward model; leave it out")
