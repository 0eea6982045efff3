"""Memory of one device of each role, estimated from the model's shape; formulas carry their numbers.

Estimates count what grows with the model, the batch and the context. Communication buffers, kernels' workspaces and
fragmentation come on top: leave some of the device free.
"""

from __future__ import annotations

from dataclasses import dataclass

from roll.configs.megatron import stage_layers
from roll.configs.model_config import ModelShape
from roll.configs.pipeline import BaseConfig, RLConfig
from roll.configs.roles import DTYPE_BYTES, ActorInferConfig, ActorTrainConfig, MegatronRoleConfig

HEAD_CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
"""Size of the fp32 logits of one chunk of tokens on one rank: the output head never has those of all tokens. Chunks
that fit into caches are fast on a CPU; larger ones keep a GPU busy and need fewer reductions over ranks."""

HEAD_KEPT_BYTES = 512 * 2**20
"""Probabilities up to this size are kept for the head's backward pass; larger ones are recomputed chunk by chunk."""


@dataclass(frozen=True)
class MemoryLine:
    """One kind of memory of one device, in bytes, and its formula with the numbers put in."""

    name: str
    bytes: int
    formula: str


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one role on its fullest device."""

    role: str
    where: str
    lines: list[MemoryLine]

    @property
    def total(self) -> int:
        """Bytes of all lines."""
        return sum(line.bytes for line in self.lines)


def memory_plans(config: BaseConfig, shapes: dict[str, ModelShape], platform: str) -> list[MemoryPlan]:
    """One plan for each role whose model's shape is known, on `platform`, cpu or cuda."""
    plans = []
    for role, worker in config.device_roles().items():
        if role not in shapes:
            continue
        shape = shapes[role]
        if isinstance(worker, ActorTrainConfig):
            plans.append(_training(config, worker, shape, platform))
        elif isinstance(worker, ActorInferConfig) and isinstance(config, RLConfig):
            plans.append(_generation(config, worker, shape))
        elif isinstance(worker, MegatronRoleConfig):
            plans.append(_forward(config, role, worker, shape, platform))
    return plans


def _training(config: BaseConfig, worker: ActorTrainConfig, shape: ModelShape, platform: str) -> MemoryPlan:
    """The fullest pipeline stage."""
    stages = worker.layout.pipeline
    plans = [_training_stage(config, worker, shape, stage, platform) for stage in range(stages)]
    return max(plans, key=lambda plan: plan.total)


def _training_stage(
    config: BaseConfig, worker: ActorTrainConfig, shape: ModelShape, stage: int, platform: str
) -> MemoryPlan:
    layout, megatron = worker.layout, worker.strategy_args.strategy_config
    size = DTYPE_BYTES[worker.model_args.dtype]
    count = shape.stage_parameters(stage, stage_layers(shape.layers, megatron), layout.tensor)
    gradient = 4 if megatron.accumulate_allreduce_grads_in_fp32 else size
    master = 0 if size == 4 else 4
    shards = layout.data if megatron.use_distributed_optimizer else 1
    state = f"{'fp32 weights 4 + ' if master else ''}Adam 4 + 4"
    lines = [
        MemoryLine("weights", count * size, f"{count:,} parameters x {size} B"),
        MemoryLine("gradients", count * gradient, f"{count:,} parameters x {gradient} B"),
        MemoryLine(
            "optimizer",
            count * (master + 8) // shards,
            f"{count:,} parameters x ({state}) B / {shards} data-parallel shards",
        ),
        _activations(config, worker, shape, stage),
    ]
    if stage == layout.pipeline - 1:
        lines.append(_head(_training_tokens(config, worker), shape, layout.tensor, platform, keep=True))
        if size != 4:
            columns = shape.padded_vocabulary(layout.tensor) // layout.tensor
            formula = f"{columns:,} tokens x {shape.hidden:,} x 4 B, summed in fp32"
            lines.append(MemoryLine("head gradient", columns * shape.hidden * 4, formula))
    return MemoryPlan("actor_train", f"pipeline stage {stage} of {layout.pipeline}", lines)


def _activations(config: BaseConfig, worker: ActorTrainConfig, shape: ModelShape, stage: int) -> MemoryLine:
    """Values that the forward pass keeps for the backward pass.

    Without recompute a layer keeps, per token, the inputs of both norms and of both first matrices (4 hidden), q, k
    and v before and after the rotation, the attention's output, and the MLP's two halves, their activation and their
    product. Attention scores are never kept, so `selective` saves nothing on top. A pipeline stage keeps this for
    each micro-batch in flight, which is the number of stages from it to the last.
    """
    layout, megatron = worker.layout, worker.strategy_args.strategy_config
    size, tensor = DTYPE_BYTES[worker.model_args.dtype], layout.tensor
    tokens = _training_tokens(config, worker)
    sequence_parallel = tensor if megatron.sequence_parallel else 1
    query, kv = shape.query_width(tensor), shape.kv_width(tensor)
    per_layer = 4 * shape.hidden // sequence_parallel + 3 * query + 3 * kv + 4 * shape.intermediate // tensor
    layers = stage_layers(shape.layers, megatron)[stage]
    in_flight = min(layout.pipeline - stage, worker.training_args.gradient_accumulation_steps)
    if megatron.recompute_granularity == "full":
        kept = shape.hidden // sequence_parallel
        values = tokens * (layers * in_flight * kept + per_layer)
        inputs = f"{layers} layers x {in_flight} in flight x {kept:,}"
        formula = f"{tokens:,} tokens x ({inputs} + one layer {per_layer:,}) x {size} B"
    else:
        values = tokens * layers * in_flight * per_layer
        formula = f"{tokens:,} tokens x {layers} layers x {in_flight} in flight x {per_layer:,} values x {size} B"
    return MemoryLine("activations", values * size, formula)


def _head(tokens: int, shape: ModelShape, tensor: int, platform: str, keep: bool) -> MemoryLine:
    columns = shape.padded_vocabulary(tensor) // tensor
    whole = tokens * columns * 4
    kept = whole if keep and whole <= HEAD_KEPT_BYTES else 0
    chunk = HEAD_CHUNK_BYTES[platform]
    at_once = f"two chunks of {chunk >> 20} MiB at once"
    formula = f"logits of {tokens:,} tokens x {columns:,} x 4 B = {gibibytes(whole)}, {at_once}"
    return MemoryLine("output head", 2 * min(whole, chunk) + kept, formula + (" and kept" if kept else ""))


def _training_tokens(config: BaseConfig, worker: ActorTrainConfig) -> int:
    """Tokens of the largest training micro-batch of one data-parallel rank."""
    samples = worker.training_args.per_device_train_batch_size
    return worker.training_token_limit or samples * (config.sequence_length or 0)


def _forward(config: BaseConfig, role: str, worker: MegatronRoleConfig, shape: ModelShape, platform: str) -> MemoryPlan:
    """A frozen model: weights and one layer's values of a forward pass."""
    layout, size = worker.layout, DTYPE_BYTES[worker.model_args.dtype]
    last = layout.pipeline - 1
    layers = stage_layers(shape.layers, worker.strategy_args.strategy_config)
    count = max(shape.stage_parameters(stage, layers, layout.tensor) for stage in range(layout.pipeline))
    tokens = worker.forward_token_limit or worker.infer_batch_size * (config.sequence_length or 0)
    per_token = 4 * shape.hidden + 3 * shape.intermediate // layout.tensor
    lines = [
        MemoryLine("weights", count * size, f"{count:,} parameters x {size} B"),
        MemoryLine("activations", tokens * per_token * size, f"{tokens:,} tokens x {per_token:,} values x {size} B"),
        _head(tokens, shape, layout.tensor, platform, keep=False),
    ]
    return MemoryPlan(role, "fullest pipeline stage" if last else "every device", lines)


def _generation(config: RLConfig, worker: ActorInferConfig, shape: ModelShape) -> MemoryPlan:
    """Weights, and the KV cache that the engine needs to keep `max_running_requests` full sequences at once."""
    tensor, size = worker.layout.tensor, DTYPE_BYTES[worker.model_args.dtype]
    count = shape.stage_parameters(0, [shape.layers], tensor)
    per_token = 2 * shape.layers * shape.kv_width(tensor) * size
    requests = min(worker.max_running_requests, config.requests_per_engine)
    tokens = requests * (config.sequence_length or 0)
    share = worker.strategy_args.strategy_config.get("mem_fraction_static")
    limit = f"; weights and KV together get mem_fraction_static {share} of the device" if share else ""
    lines = [
        MemoryLine("weights", count * size, f"{count:,} parameters x {size} B"),
        MemoryLine(
            "KV cache",
            tokens * per_token,
            f"{requests} requests x {config.sequence_length:,} tokens x 2 x {shape.layers} layers x "
            f"{shape.kv_width(tensor):,} values x {size} B ({per_token:,} B per token), at most{limit}",
        ),
    ]
    return MemoryPlan("actor_infer", "every device", lines)


def gibibytes(count: int) -> str:
    """Bytes as text, in MiB below 1 GiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
