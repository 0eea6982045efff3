"""The sections of a role: its model, its optimizer, its data and its sampling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from roll.base.errors import Finding, error, warning
from roll.base.schema import Condition, needs, one_or_many, option
from roll.configs.learning.lora import LoraArguments
from roll.hub.splits import READABLE

if TYPE_CHECKING:
    from roll.configs.pipeline import RLConfig

TORCH_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""torch's name of each value of `dtype`."""


DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of one number of each value of `dtype`; the plan of a run is made without torch."""


def pipelines(*names: str, reason: str, is_error: bool = False) -> Condition:
    """The condition of keys that only these pipelines read."""
    return Condition(lambda config, _: config.pipeline in names, reason, ("pipeline",), is_error)


RESPONSES_SCORED = pipelines("rlvr", "agentic", reason="this pipeline scores no response")


PAIRS_READ = pipelines("dpo", "reward_model", reason="only dpo and reward_model read pairs of responses")


FILE_PIPELINES = ("rlvr", "sft", "dpo", "reward_model")


FILES_READ = pipelines(*FILE_PIPELINES, reason="environments are described in custom_envs", is_error=True)


COLUMNS_READ = pipelines(*FILE_PIPELINES, reason="observations come from environments, not from files")


DATASET_NAMED = (
    FILES_READ,
    Condition(
        lambda config, section: any(not name.endswith(READABLE) for name in section.file_name),
        "every file_name is a file; a dataset by name or folder has splits",
        (".file_name",),
    ),
)


ENGINE_RUNS = pipelines("rlvr", "agentic", reason="this pipeline generates nothing and updates no engine")


POLICY_LOSS = pipelines("rlvr", "agentic", reason="this pipeline has no policy loss", is_error=True)


FORWARD_PASSES = Condition(
    lambda config, _: config.pipeline not in ("sft", "reward_model") or config.eval_steps > 0,
    "eval_steps is 0, and only validation runs forward passes without a backward pass",
    ("pipeline", "eval_steps"),
)


OLD_LOG_PROBS = Condition(
    lambda config, role: role is not config.actor_train or getattr(config, "old_log_probs_source", "") != "behavior",
    "the old log-probs are those of the engine (old_log_probs_source: behavior), so actor_train computes none",
    ("old_log_probs_source", "async_generation_ratio"),
)


@dataclass
class ModelArguments:
    """Which model a role runs and in which precision."""

    model_name_or_path: str | None = option(
        None, "Folder of a HF model, or its name on the hub, as in `pretrain`; default: `pretrain`."
    )
    dtype: Literal["fp32", "bf16", "fp16"] = option("bf16", "Precision of weights and activations.")


@dataclass
class MegatronModelArguments(ModelArguments):
    """A model that Megatron runs."""

    attn_implementation: Literal["auto", "sdpa", "fa2"] = option(
        "auto", "Attention kernel: fa2 needs platform cuda with Transformer Engine; sdpa runs everywhere."
    )


def _names(value: Any) -> Any:
    """The names of one text with commas; any other value unchanged."""
    return [name for part in value.split(",") if (name := part.strip())] if isinstance(value, str) else value


@dataclass
class TrainModelArguments(LoraArguments, MegatronModelArguments):
    """A model that is trained."""

    disable_gradient_checkpointing: bool = option(
        False, "If false, strategy_config.recompute_granularity applies; true allows no recompute_granularity."
    )
    freeze_module_prefix: list[str] = option(
        factory=list,
        parse=_names,
        help="Weights that are not trained: beginnings of their names in the model's folder, or in Megatron, such as "
        "`model.embed_tokens` or `model.layers.0.`; a list, or one text with commas.",
    )


@dataclass
class TrainingArguments:
    """One optimizer and its schedule."""

    learning_rate: float = option(1e-6, "Peak learning rate.", gt=0, usual=(1e-10, 0.1))
    min_learning_rate: float = option(
        0.0,
        "Learning rate at the end of the schedule.",
        ge=0,
        usual=(0.0, 0.1),
        only_for=needs(
            "lr_scheduler_type",
            "lr_scheduler_type is constant; use linear or cosine",
            accepts=lambda kind: kind != "constant",
        ),
    )
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = option(
        "constant",
        "Shape after warm-up: linear and cosine fall from the peak to `min_learning_rate`, which the step after "
        "max_steps would have.",
    )
    warmup_steps: int = option(0, "Optimizer steps of linear warm-up; 0 is off.", ge=0, usual=(0, 1e6))
    warmup_ratio: float = option(
        0.0, "Warm-up as a share of all optimizer steps, instead of warmup_steps; 0 is off.", ge=0, le=1
    )
    weight_decay: float = option(0.0, "Decoupled weight decay; 0 is off.", ge=0, usual=(0.0, 1.0))
    adam_beta1: float = option(0.9, "First Adam decay.", ge=0, le=1, usual=(0.0, 0.9999))
    adam_beta2: float = option(0.999, "Second Adam decay.", ge=0, le=1, usual=(0.5, 0.999999))
    adam_epsilon: float = option(1e-8, "Adam denominator offset.", gt=0, usual=(1e-20, 1e-2))
    per_device_train_batch_size: int = option(
        1, "Samples of one micro-batch on one data-parallel rank.", ge=1, usual=(1, 1e5)
    )
    gradient_accumulation_steps: int = option(1, "Micro-batches of one optimizer step.", ge=1, usual=(1, 1e6))

    def samples_per_optimizer_step(self, data_parallel: int) -> int:
        """per_device_train_batch_size x gradient_accumulation_steps x data-parallel size."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * data_parallel


def parse_template_kwargs(value: Any) -> Any:
    """Variables of a chat template; the arguments with which a run renders it are refused."""
    taken = {"messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"}
    taken |= {"continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
    if isinstance(value, dict) and (wrong := sorted(taken & value.keys())):
        raise ValueError(f"{wrong[0]} is set by the run; leave it out")
    return value


@dataclass
class DataArguments:
    """Where prompts come from and the names of their columns."""

    file_name: list[str] = option(
        factory=list,
        parse=one_or_many,
        help="JSONL or parquet files, folders of a dataset, or datasets on the hub: `owner/name`, "
        "`owner/name@revision`, `hf://datasets/owner/name/path`; or questions that reasoning-gym generates: "
        "`reasoning_gym:NAME?option=value`. A single name is taken as a list of one.",
        only_for=FILES_READ,
    )
    subset: str | None = option(
        None,
        "Subset of a dataset given by name or folder, as `name` of `load_dataset`; default: its only or default one.",
        only_for=DATASET_NAMED,
    )
    split: str | None = option(
        None,
        "Split of a dataset given by name or folder; default: train, and for validation the first of validation and "
        "test that it has.",
        only_for=DATASET_NAMED,
    )
    template: str = option(
        "native",
        "Chat template: `native` is the tokenizer's own, `none` leaves the prompt unchanged, or a built-in one.",
    )
    template_kwargs: dict[str, Any] = option(
        factory=dict,
        parse=parse_template_kwargs,
        help="Variables of the chat template, such as {enable_thinking: false}.",
    )
    id: str = option(
        "id",
        "Column of the prompt's identity; a missing one is file and line, a repeated one gets #2, #3.",
        only_for=COLUMNS_READ,
    )
    tag: str = option("tag", "Column that chooses the reward of the sample.", only_for=(COLUMNS_READ, RESPONSES_SCORED))
    prompt: str = option("prompt", "Column with the question as text.", only_for=COLUMNS_READ)
    query: str | None = option(
        None,
        "Column with a text that follows the one of `prompt`, on a new line, where it is not empty.",
        only_for=COLUMNS_READ,
    )
    system: str | None = option(
        None, "Column with the system message of a `prompt`, where it is not empty.", only_for=COLUMNS_READ
    )
    messages: str = option(
        "messages",
        "Column with chat messages, as a list or as JSON in a text; used where present instead of `prompt`.",
        only_for=COLUMNS_READ,
    )
    tools: str = option(
        "tools",
        "Column with the schemas of the tools that the template shows, as a list or as JSON in a text.",
        only_for=COLUMNS_READ,
    )
    response: str = option(
        "solution",
        "Column with the answer: SFT's target, and the ground truth where `ground_truth` is absent.",
        only_for=COLUMNS_READ,
    )
    ground_truth: str = option(
        "ground_truth",
        "Column with the exact answer the reward compares with.",
        only_for=(COLUMNS_READ, RESPONSES_SCORED),
    )
    mask_history: bool = option(
        True, "SFT: learn the last answer of a conversation only; false learns every answer of the assistant."
    )
    chosen: str = option("chosen", "Column with the better response, a text or messages.", only_for=PAIRS_READ)
    rejected: str = option("rejected", "Column with the worse response.", only_for=PAIRS_READ)


@dataclass
class TrainDataArguments(DataArguments):
    """The data of training."""

    shuffle: bool = option(True, "Draw a new order, seeded, for every pass over the data.", only_for=COLUMNS_READ)
    domain_interleave_probs: dict[str, float] = option(
        factory=dict,
        help="Share of the prompts of each name in `rewards`; empty: as many as the files have. Names left out are not "
        "drawn.",
        only_for=pipelines("rlvr", reason="only rewards of pipeline rlvr have domains"),
    )


LONGEST_SAMPLING_MASK = 4096
"""Largest `top_k` whose kept tokens an engine returns: SGLang's default of sampling_mask_max_tokens."""


@dataclass
class GeneratingArguments:
    """How responses are sampled."""

    max_new_tokens: int | None = option(
        None, "Longest response in tokens; default: response_length.", ge=1, usual=(1, 1e7)
    )
    temperature: float = option(
        1.0, "Sampling temperature; training logits are divided by the same value.", ge=0, usual=(0.0, 5.0)
    )
    top_p: float = option(
        1.0, "Nucleus mass; on_truncated_sampling decides about a value below 1.", gt=0, le=1, usual=(1e-3, 1.0)
    )
    top_k: int = option(0, "Most likely tokens to sample from; 0 means all.", ge=0)
    repetition_penalty: float = option(1.0, "1 is off; any other value biases every ratio.", gt=0, usual=(0.1, 10.0))
    num_return_sequences: int | None = option(
        None, "Samples per prompt; default: num_return_sequences_in_group.", ge=1, usual=(1, 1e4)
    )
    num_beams: Literal[1] = option(1, "Beam search is not sampling: only 1.")
    stop_strings: list[str] = option(
        factory=list,
        parse=one_or_many,
        help="Strings that end a response: one token as this token, others where they end in the text.",
    )


def check_schedule(training: TrainingArguments, path: str) -> Iterator[Finding]:
    """Warm-up is given once, the learning rate falls, and the moving averages move."""
    if training.warmup_steps and training.warmup_ratio:
        yield error(
            f"{path}.warmup_ratio",
            f"{training.warmup_ratio} and warmup_steps {training.warmup_steps} exclude each other; keep one",
        )
    if training.min_learning_rate > training.learning_rate:
        yield error(
            f"{path}.min_learning_rate",
            f"{training.min_learning_rate} is above learning_rate {training.learning_rate}; use at most that",
        )
    for beta in ("adam_beta1", "adam_beta2"):
        if getattr(training, beta) == 1:
            yield error(
                f"{path}.{beta}", "1 never updates the moving average, so the optimizer never moves; use less than 1"
            )


LOWEST_TEMPERATURE = 1e-3
"""Lowest sampling temperature of samples that are trained on; logits divided by less overflow."""

BYTES_OF_KEPT_TOKEN = 36
"""Memory of one id in a list of Python."""

LARGE_MASK_BYTES = 4 * 2**30
"""Memory for the kept tokens of a batch that is warned of."""


def check_sampling(config: RLConfig) -> Iterator[Finding]:
    """Temperature, truncation, penalties and lengths of the samples trained on, and the lengths of validation."""
    sampling, path = config.actor_infer.generating_args, "actor_infer.generating_args"
    if sampling.temperature < LOWEST_TEMPERATURE:
        yield error(
            f"{path}.temperature",
            f"{sampling.temperature:g} is greedy: all samples of a prompt would be equal, with nothing to train on; "
            f"use at least {LOWEST_TEMPERATURE:g}, such as 1.0 (validation may use 0)",
        )
    if not config.is_num_return_sequences_expand and config.num_return_sequences_in_group > 1:
        yield error(
            "is_num_return_sequences_expand",
            "false is not available: each sample is a request with its own seed; set it to true or leave it out",
        )
    if sampling.top_k == 1:
        yield error(f"{path}.top_k", "1 is greedy: all samples of a prompt would be equal; use 0 for all tokens")
    is_agentic = config.pipeline == "agentic"
    if not is_agentic and sampling.num_return_sequences != config.num_return_sequences_in_group:
        yield error(
            f"{path}.num_return_sequences",
            f"{sampling.num_return_sequences} is not num_return_sequences_in_group "
            f"{config.num_return_sequences_in_group}; leave it out",
        )
    if sampling.repetition_penalty != 1:
        yield warning(
            f"{path}.repetition_penalty",
            f"{sampling.repetition_penalty:g} changes the distribution sampled from, but not the log-probs the engine "
            "returns: every ratio is biased; use 1.0",
        )
    yield from _check_truncation(config)
    if is_agentic:
        return
    for role in ("actor_infer", "validation"):
        longest = getattr(config, role).generating_args.max_new_tokens
        if longest is not None and config.response_length is not None and longest > config.response_length:
            yield error(
                f"{role}.generating_args.max_new_tokens",
                f"{longest} is above response_length {config.response_length}; use at most that, or leave it out",
            )


def _check_sampling_mask(config: RLConfig) -> Iterator[Finding]:
    top_k, options = config.actor_infer.generating_args.top_k, config.actor_infer.strategy_args.strategy_config
    limit = options.get("sampling_mask_max_tokens")
    if isinstance(limit, int) and limit < top_k:
        path = "actor_infer.strategy_args.strategy_config.sampling_mask_max_tokens"
        yield error(path, f"{limit} is below top_k {top_k}, so the engine would refuse every request; leave it out")
    if config.actor_infer.generating_args.top_p == 1:
        length = getattr(config, "response_length", None) or config.sequence_length or 0
        size = config.samples_per_batch * length * top_k * BYTES_OF_KEPT_TOKEN
        if size > LARGE_MASK_BYTES:
            yield warning(
                "actor_infer.generating_args.top_k",
                f"{top_k} keeps as many ids for every token, up to {size / 2**30:.0f} GiB for a batch of long "
                "responses; use a smaller top_k, a top_p below 1, or on_truncated_sampling: warn",
            )


def _check_truncation(config: RLConfig) -> Iterator[Finding]:
    sampling = config.actor_infer.generating_args
    cuts = [f"top_p {sampling.top_p:g}"] * (sampling.top_p < 1) + [f"top_k {sampling.top_k}"] * (sampling.top_k > 0)
    if config.replays_sampling_mask:
        yield from _check_sampling_mask(config)
    if not cuts or config.replays_sampling_mask:
        return
    message = (
        f"{' and '.join(cuts)} sample from a truncated distribution, but the engine returns log-probs of the whole "
        "one: every ratio and KL is biased; use top_p 1.0 and top_k 0, or on_truncated_sampling: replay with a top_k "
        f"from 2 to {LONGEST_SAMPLING_MASK}"
    )
    if config.on_truncated_sampling == "refuse":
        yield error("actor_infer.generating_args", f"{message} (on_truncated_sampling is refuse)")
    else:
        yield warning("actor_infer.generating_args", message)
