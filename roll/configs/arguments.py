"""Arguments that describe one role: its model, its training, its data, its sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from roll.configs.fields import one_or_many, option

TORCH_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""torch's name of each value of `dtype`."""


@dataclass
class ModelArguments:
    """Which model a role runs and in which precision."""

    model_name_or_path: str | None = option(None, "Folder of a HF model; default: the pipeline's `pretrain`.")
    dtype: Literal["fp32", "bf16", "fp16"] = option("bf16", "Precision of weights and activations.")
    attn_implementation: Literal["auto", "sdpa", "fa2"] = option(
        "auto", "Attention of the training side: fa2 needs platform cuda with Transformer Engine; sdpa is portable."
    )
    disable_gradient_checkpointing: bool = option(
        False, "False lets strategy_config.recompute_granularity apply; true refuses it."
    )


@dataclass
class TrainingArguments:
    """One optimizer and its schedule."""

    learning_rate: float = option(1e-6, "Peak learning rate.", above=0)
    min_learning_rate: float = option(0.0, "Learning rate the schedule ends at.", minimum=0)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = option("constant", "Shape after warm-up.")
    warmup_steps: int = option(0, "Optimizer steps of linear warm-up.", minimum=0)
    warmup_ratio: float = option(
        0.0, "Warm-up as a share of all optimizer steps; exclusive with warmup_steps.", minimum=0, maximum=1
    )
    weight_decay: float = option(0.0, "Decoupled weight decay.", minimum=0)
    adam_beta1: float = option(0.9, "First Adam decay.", minimum=0, maximum=1)
    adam_beta2: float = option(0.999, "Second Adam decay.", minimum=0, maximum=1)
    adam_epsilon: float = option(1e-8, "Adam denominator offset.", above=0)
    per_device_train_batch_size: int = option(1, "Samples of one micro-batch on one data-parallel rank.", minimum=1)
    gradient_accumulation_steps: int = option(1, "Micro-batches of one optimizer step.", minimum=1)


@dataclass
class DataArguments:
    """Where prompts come from and what their columns are called."""

    file_name: list[str] = option(
        factory=list, parse=one_or_many, help="JSONL or parquet files; a single name is taken as a list of one."
    )
    template: str = option(
        "native", "Chat template: `native` is the tokenizer's own; `none` takes the prompt as it is; or one by name."
    )
    id: str = option("id", "Column of the prompt's identity; missing ids are made from the file and line.")
    tag: str = option("tag", "Column that says which reward scores the sample.")
    prompt: str = option("prompt", "Column with the question as text.")
    messages: str = option("messages", "Column with chat messages; used where present instead of `prompt`.")
    response: str = option(
        "solution", "Column with the answer: SFT's target, and the ground truth where `ground_truth` is absent."
    )
    ground_truth: str = option("ground_truth", "Column with the exact answer the reward compares with.")
    mask_history: bool = option(
        True, "SFT: learn the last answer of a conversation only; false learns every answer of the assistant."
    )
    shuffle: bool = option(True, "Draw a new order, seeded, for every pass over the data.")


@dataclass
class GeneratingArguments:
    """How responses are sampled."""

    max_new_tokens: int | None = option(None, "Longest response in tokens; default: response_length.", minimum=1)
    temperature: float = option(1.0, "Sampling temperature; training logits are divided by the same value.", minimum=0)
    top_p: float = option(
        1.0, "Nucleus mass; below 1 the engine's log-probs are those of another distribution.", above=0, maximum=1
    )
    top_k: int = option(0, "Most likely tokens to sample from; 0 means all.", minimum=0)
    repetition_penalty: float = option(1.0, "1 is off; anything else biases every ratio.", above=0)
    num_return_sequences: int | None = option(
        None, "Samples per prompt; default: num_return_sequences_in_group.", minimum=1
    )
    num_beams: Literal[1] = option(1, "Beam search is not sampling: only 1.")
    stop_strings: list[str] = option(
        factory=list, parse=one_or_many, help="Strings that end a response; each must be one token of the tokenizer."
    )


@dataclass
class MegatronConfig:
    """`strategy_config` of megatron_train and megatron_infer."""

    tensor_model_parallel_size: int = option(1, "Ranks one layer is split over.", minimum=1)
    pipeline_model_parallel_size: int = option(1, "Stages the layers are split into.", minimum=1)
    expert_model_parallel_size: int = option(
        1, "Ranks experts are split over; the dense families here allow 1.", minimum=1, maximum=1
    )
    context_parallel_size: int = option(1, "Ranks one sequence is split over; only 1 yet.", minimum=1, maximum=1)
    sequence_parallel: bool = option(
        False, "Split norms and residuals along the sequence over the tensor-parallel ranks."
    )
    use_distributed_optimizer: bool = option(True, "Shard fp32 weights and Adam state over data-parallel ranks.")
    overlap_grad_reduce: bool = option(False, "Reduce gradients while the backward pass runs.")
    recompute_granularity: Literal["full", "selective"] | None = option(
        None, "Recompute activations in the backward pass."
    )
    accumulate_allreduce_grads_in_fp32: bool = option(True, "Keep and reduce gradients in fp32.")
    bias_activation_fusion: bool = option(False, "Fused bias and activation kernel (cuda only).")
    apply_rope_fusion: bool = option(False, "Fused rotary embedding kernel (cuda with Transformer Engine only).")


@dataclass
class StrategyArguments:
    """Which engine a role runs, and the engine's own options."""

    strategy_name: Literal["megatron_train", "megatron_infer", "sglang"] = option("megatron_train", "The engine.")
    strategy_config: dict = option(
        factory=dict,
        help="megatron_*: fields of MegatronConfig; sglang: options of SGLang's ServerArgs, passed through by name.",
    )
