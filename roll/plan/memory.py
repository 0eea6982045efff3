"""Memory of one device of each role, estimated from the model's shape; formulas carry their numbers.

Estimates count what grows with the model, the batch and the context. Communication buffers, kernels' workspaces and
fragmentation come on top: leave some of the device free.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from fractions import Fraction

from roll.base.text import gibibytes
from roll.configs.arguments import DTYPE_BYTES, OLD_LOG_PROBS
from roll.configs.asynchronous import versions_ahead
from roll.configs.devices.megatron import part_layers, stage_layers, virtual_stages
from roll.configs.learning.lora import adapter_arguments, adapter_parameters, by_policy
from roll.configs.pipeline import BaseConfig, PreferenceConfig, RLConfig
from roll.configs.roles import EngineRoleConfig, MegatronRoleConfig, TrainedRoleConfig
from roll.configs.scoring.scoring_roles import ScoringEngineConfig
from roll.hub.names import local_model
from roll.models.families.frozen import frozen_names, frozen_parameters
from roll.models.families.hf_config import UnsupportedModel
from roll.models.families.shape import HEAD_CHUNK_BYTES, HEAD_KEPT_BYTES, ModelShape, read_model_shape
from roll.plan.update_size import kept_bytes

TOP_TOKEN_BYTES = 48
"""Memory of one of the teacher's `opd_top_k` tokens in a training micro-batch: twelve fp32 values of it, its id, its
log-probs and probabilities, and what the backward pass of the divergence keeps."""

STATE_LINES = ("weights", "gradients", "optimizer")
"""Lines of memory that a role always needs; the others exist while it computes."""

GRAPHS = "CUDA graphs"
"""Line of an engine's memory outside `mem_fraction_static`; it stays on a GPU that the engine shares in turns."""


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
    host: list[MemoryLine] = field(default_factory=list)
    """In host memory, not on the device."""

    @property
    def total(self) -> int:
        return sum(line.bytes for line in self.lines)


def model_shapes(config: BaseConfig) -> dict[str, ModelShape]:
    """The shape of each role's model, of those whose config.json is on this machine and known."""
    shapes: dict[str, ModelShape] = {}
    for role, worker in config.device_roles().items():
        with contextlib.suppress(UnsupportedModel):  # of a judge; the rules of the configuration refuse the others
            shape = read_model_shape(local_model(worker.model_args.model_name_or_path or ""), worker.value_head)
            if shape is not None:
                shapes[role] = shape
    return shapes


def memory_plans(config: BaseConfig, shapes: dict[str, ModelShape], platform: str) -> list[MemoryPlan]:
    """One plan for each role whose model's shape is known, on `platform`, cpu or cuda."""
    plans = []
    for role, worker in config.device_roles().items():
        if role not in shapes:
            continue
        shape = shapes[role]
        if isinstance(worker, TrainedRoleConfig):
            plans.append(_training(config, role, worker, shape, platform))
        elif isinstance(worker, EngineRoleConfig) and isinstance(config, RLConfig):
            plans.append(_generation(config, role, worker, shape, platform))
        elif isinstance(worker, MegatronRoleConfig):
            plans.append(_forward(config, role, worker, shape, platform))
    return plans


def _training(config: BaseConfig, role: str, worker: TrainedRoleConfig, shape: ModelShape, platform: str) -> MemoryPlan:
    stages = worker.layout.pipeline
    plans = [_training_stage(config, role, worker, shape, stage, platform) for stage in range(stages)]
    return max(plans, key=lambda plan: plan.total)


def _training_stage(
    config: BaseConfig, role: str, worker: TrainedRoleConfig, shape: ModelShape, stage: int, platform: str
) -> MemoryPlan:
    layout, megatron = worker.layout, worker.strategy_args.strategy_config
    size, critic = DTYPE_BYTES[worker.model_args.dtype], worker.value_head
    dense, experts = _stage_parameters(worker, shape, stage)
    count = dense + experts
    gradient = 4 if megatron.accumulate_allreduce_grads_in_fp32 else size
    model, adapters = worker.model_args, 0
    trained = dense - _frozen(worker, shape, stage) + experts
    if model.trains_adapters:
        layers = stage_layers(shape.layers, megatron)[stage]
        of_policies = by_policy(model, config.policies).values()
        trained = adapters = sum(adapter_parameters(shape, each, layers, layout.tensor) for each in of_policies)
    optimizer, host = _optimizer(worker, trained - experts * (not adapters), experts * (not adapters), gradient)
    states = [
        _weights(count + adapters, experts, size, shape, layout.expert),
        MemoryLine("gradients", trained * gradient, f"{trained:,} parameters x {gradient} B"),
        optimizer,
    ]
    last = stage == layout.pipeline - 1
    training = [_activations(config, worker, shape, stage, platform)]
    tokens = _of_rank(_training_tokens(config, worker), worker)
    training += _gathered(_training_tokens(config, worker), worker, shape, with_gradient=True)
    if last and critic:
        copies = f"hidden states and gradients in fp32 2 x {tokens:,} tokens x {shape.hidden:,} x 4 B"
        training += [MemoryLine("value head", 2 * tokens * shape.hidden * 4, copies)]
    elif last:
        training += [_head(tokens, shape, layout.tensor, platform, keep=True)]
        training += [_head_gradient(tokens, shape, layout.tensor, size, trained=not model.trains_adapters)]
        training += _teacher_tokens(config, _training_tokens(config, worker), shape)
    passes = [training]
    if isinstance(config, RLConfig) and OLD_LOG_PROBS.holds(config, worker):
        passes += [_forward_lines(config, worker, shape, platform, last and not critic)]
    kept, formula = kept_bytes(config, worker, shape, stage)
    host += [MemoryLine("copy of the weights in host memory", kept, formula)] if kept else []
    largest = max(passes, key=lambda lines: sum(line.bytes for line in lines))
    return MemoryPlan(role, f"pipeline stage {stage} of {layout.pipeline}", [*states, *largest], host)


def _frozen(worker: TrainedRoleConfig, shape: ModelShape, stage: int) -> int:
    """Parameters of a rank that are not trained; 0 where `freeze_module_prefix` is wrong, which a check reports."""
    with contextlib.suppress(ValueError):
        frozen = frozen_names(shape, worker.model_args.freeze_module_prefix)
        layers = stage_layers(shape.layers, worker.strategy_args.strategy_config)
        return frozen_parameters(shape, frozen, stage, layers, worker.layout.tensor) if frozen else 0
    return 0


def _stage_parameters(worker: MegatronRoleConfig, shape: ModelShape, stage: int) -> tuple[int, int]:
    """Parameters of one rank of a stage: without experts, and of experts."""
    layout, layers = worker.layout, stage_layers(shape.layers, worker.strategy_args.strategy_config)
    experts = shape.expert_parameters(stage, layers, layout.expert, layout.expert_ranks // layout.expert)
    return shape.stage_parameters(stage, layers, layout.tensor), experts


def _weights(count: int, experts: int, size: int, shape: ModelShape, ranks: int) -> MemoryLine:
    held = f"; {experts:,} of these are of {shape.experts // ranks} of {shape.experts} experts" if experts else ""
    return MemoryLine("weights", count * size, f"{count:,} parameters x {size} B{held}")


def _optimizer(
    worker: TrainedRoleConfig, dense: int, experts: int, gradient: int
) -> tuple[MemoryLine, list[MemoryLine]]:
    """Adam's state on the device, and with `optimizer_cpu_offload` in host memory.

    The state of experts is split over the ranks that have equal experts, the other over data-parallel ranks.

    Adam of Transformer Engine keeps, of fp32 weights, the two bytes that bf16 weights do not have. Megatron's Adam for
    host memory computes in fp32, whatever the dtypes say, on copies of weights and gradients.
    """
    layout, megatron = worker.layout, worker.strategy_args.strategy_config
    size = DTYPE_BYTES[worker.model_args.dtype]
    sharded = megatron.use_distributed_optimizer
    shards, copies = (layout.data * layout.context, max(1, layout.expert_copies)) if sharded else (1, 1)
    moments = "Adam 4 + 4"
    each = 8 + (4 if size < 4 else 0)
    if megatron.precision_aware and not megatron.optimizer_cpu_offload:
        first, second = DTYPE_BYTES[megatron.exp_avg_dtype], DTYPE_BYTES[megatron.exp_avg_sq_dtype]
        moments, each = f"Adam {first} + {second}", first + second + (2 if size < 4 else 0)
        master = "rest of the fp32 weights 2 + " if megatron.main_params_dtype == "fp32" else "fp16 weights 2 + "
    else:
        master = "fp32 weights 4 + "
        if gradient < 4:
            moments, each = f"{moments} + fp32 gradients 4", each + 4

    def split(values: str) -> str:
        of_experts = f" + {experts:,} of experts x ({values}) B / {copies} expert copies" if experts else ""
        return f"{dense:,} parameters x ({values}) B / {shards} data-parallel shards{of_experts}"

    state = split(f"{master if size < 4 else ''}{moments}")
    total = dense * each // shards + experts * each // copies
    if not megatron.optimizer_cpu_offload:
        return MemoryLine("optimizer", total, state), []
    share = megatron.optimizer_offload_fraction
    formula = split("fp32 weights 4 + gradients 4 + Adam 4 + 4")
    in_host = int(dense * 16 * share) // shards + int(experts * 16 * share) // copies
    host = MemoryLine("optimizer in host memory", in_host, f"{formula} x {share:g} offloaded")
    return MemoryLine("optimizer", total - int(total * share), f"{state} x {1 - share:g} not offloaded"), [host]


def _of_rank(tokens: int, worker: MegatronRoleConfig) -> int:
    """Tokens of a micro-batch that one context rank computes."""
    return -(-tokens // worker.layout.context)


def _gathered(tokens: int, worker: MegatronRoleConfig, shape: ModelShape, with_gradient: bool) -> list[MemoryLine]:
    """Under context parallelism: keys and values of all ranks, which one layer at a time has, and the log-probs."""
    layout, size = worker.layout, DTYPE_BYTES[worker.model_args.dtype]
    if layout.context == 1:
        return []
    kv, copies = shape.kv_width(layout.tensor), 3 if with_gradient else 2
    formula = f"{tokens:,} tokens of {layout.context} context ranks x ({copies} x 2 x {kv:,} keys and values x {size} B"
    return [MemoryLine("context gather", tokens * (copies * 2 * kv * size + 16), f"{formula} + log-probs 16 B)")]


@dataclass(frozen=True)
class _LayerValues:
    """Values per token of one layer on one rank.

    Attributes:
        inputs: its input alone, which recomputation of the whole layer keeps.
        saved: for the backward pass, with `recompute_modules` if that is chosen.
        recomputed: of `recompute_modules`, which are recomputed one at a time.
    """

    inputs: int
    saved: int
    recomputed: int


def _layer_values(worker: TrainedRoleConfig, shape: ModelShape, platform: str) -> _LayerValues:
    """Counts the inputs of operators: attention scores are never kept, and dropout is 0.

    Both norms and the matrices behind them keep their inputs, split by sequence parallel; a CPU's norm in half
    precision keeps input and result in fp32 too. Attention keeps q, k, v and its output. Layers that Transformer
    Engine does not compute also keep q, k and v before the rotation, and the output in another memory order. The MLP
    keeps its two halves and their product, and without `bias_activation_fusion` the activated half. Transformer Engine
    is assumed where it could be used: on cuda, but not in fp32 or with `attn_implementation: sdpa`.
    """
    megatron, tensor, model = worker.strategy_args.strategy_config, worker.layout.tensor, worker.model_args
    fused = platform == "cuda" and megatron.bias_activation_fusion is not False
    engine = platform == "cuda" and model.dtype != "fp32" and model.attn_implementation != "sdpa" and shape.is_plain
    hidden = shape.hidden // (tensor if megatron.sequence_parallel else 1)
    norm = (5 if platform == "cpu" and model.dtype != "fp32" else 2) * hidden
    query, kv = shape.query_width(tensor), shape.kv_width(tensor)
    attention = 2 * query + 2 * kv if engine else 4 * query + 3 * kv
    if worker.layout.context > 1 and not engine:  # a CPU gathers keys and values again
        attention = 3 * query + 2 * kv * (1 if platform == "cpu" else 1 + worker.layout.context)
    mlp = (3 if fused else 4) * shape.intermediate // tensor
    if shape.mixture is not None:
        mlp = _expert_values(worker, shape, fused)
    norms = 2 * norm + (2 * hidden if shape.family.traits.output_norms else 0)
    saved, recomputed = norms + attention + mlp, 0
    if megatron.recompute_granularity == "selective":
        if "core_attn" in megatron.recompute_modules and not engine:
            saved, recomputed = saved - query - kv, 2 * query + kv
        if "mlp" in megatron.recompute_modules:
            saved, recomputed = saved + hidden - norm - mlp, max(recomputed, norm - hidden + mlp)
    return _LayerValues(hidden, saved, recomputed)


def _expert_values(worker: MegatronRoleConfig, shape: ModelShape, fused: bool) -> int:
    """Values per token of the experts of a layer on one rank, where every expert has as many tokens as others.

    An expert keeps its input, the two halves, with their activated half unless fused, and their product before and
    after it is weighted; the router keeps logits and weights in fp32, and the shared expert is a dense MLP.
    """
    layout, mixture = worker.layout, shape.mixture
    assert mixture is not None
    tensor = layout.expert_ranks // layout.expert
    split = layout.tensor if worker.strategy_args.strategy_config.sequence_parallel else 1
    routed = mixture.per_token * (shape.hidden + (4 if fused else 5) * mixture.width // tensor)
    shared = (3 if fused else 4) * mixture.shared_width // layout.tensor
    return routed * tensor // split + shared + 4 * mixture.experts // split


def _activations(
    config: BaseConfig, worker: TrainedRoleConfig, shape: ModelShape, stage: int, platform: str
) -> MemoryLine:
    """Values that the forward pass keeps for the backward pass, for every micro-batch in flight.

    Recomputation of whole layers keeps the input of each group, and all values of the one that is recomputed. The
    stage's output is one more hidden state.
    """
    megatron, size = worker.strategy_args.strategy_config, DTYPE_BYTES[worker.model_args.dtype]
    tokens, values = _training_tokens(config, worker), _layer_values(worker, shape, platform)
    parts = part_layers(shape.layers, megatron)[stage]
    layers, virtual, part = sum(parts), len(parts), max(parts)
    inputs, whole, recomputed = virtual, layers, values.recomputed
    if megatron.recompute_granularity == "full":
        number = min(megatron.recompute_num_layers or 1, part)
        if megatron.recompute_method == "block":
            inputs, whole = inputs + min(number * virtual, layers), max(layers - number * virtual, 0)
            recomputed = 0 if whole else values.saved - values.inputs
        else:
            inputs, whole = inputs + virtual * -(-part // number), 0
            recomputed = number * values.saved - values.inputs
    in_flight = min(_in_flight(worker, stage), Fraction(_tokens_of_a_step(config, worker), max(tokens, 1)))
    tokens = _of_rank(tokens, worker)
    total = tokens * (in_flight * (whole * values.saved + inputs * values.inputs) + recomputed)
    saved = " + ".join(
        [f"{whole} layers x {values.saved:,}"] * bool(whole) + [f"{inputs} hidden states x {values.inputs:,}"]
    )
    formula = f"{tokens:,} tokens x ({float(in_flight):g} in flight x ({saved})"
    formula += f" + {recomputed:,} recomputed) x {size} B" if recomputed else f") x {size} B"
    return MemoryLine("activations", int(total * size), formula)


def _in_flight(worker: TrainedRoleConfig, stage: int) -> Fraction:
    """Micro-batches whose values a stage keeps at once.

    In Megatron's 1F1B schedule as many as there are stages from it to the last. In the interleaved schedule, which
    counts parts of a stage, 2 (p - 1 - stage) + (v - 1) p + 1 parts: for the first stage p (1 + (p - 1) / (p v)) whole
    stages, as in Megatron-LM's own estimate.
    """
    stages, parts = worker.layout.pipeline, virtual_stages(worker.strategy_args.strategy_config)
    micro_batches = worker.training_args.gradient_accumulation_steps
    if worker.training_token_limit is not None:  # as many as samples, if each is as long as it can be
        micro_batches *= worker.training_args.per_device_train_batch_size
    if parts is None:
        return Fraction(min(stages - stage, micro_batches))
    scheduled = -(-micro_batches // stages) * stages * parts
    return Fraction(min(2 * (stages - 1 - stage) + (parts - 1) * stages + 1, scheduled), parts)


def _head(tokens: int, shape: ModelShape, tensor: int, platform: str, keep: bool) -> MemoryLine:
    """Logits of one chunk, or of all tokens where they are kept; on a GPU a chunk more for its gradient."""
    columns = shape.padded_vocabulary(tensor) // tensor
    whole, chunk = tokens * columns * 4, HEAD_CHUNK_BYTES[platform]
    kept = keep and whole <= HEAD_KEPT_BYTES
    formula = f"logits of {tokens:,} tokens x {columns:,} x 4 B = {gibibytes(whole)}, "
    formula += "kept" if kept else f"in chunks of {chunk >> 20} MiB"
    gradient = min(whole, chunk) if platform == "cuda" else 0
    formula += ", and a chunk of gradients" if gradient else ""
    return MemoryLine("output head", (whole if kept else min(whole, chunk)) + gradient, formula)


def _head_gradient(tokens: int, shape: ModelShape, tensor: int, size: int, trained: bool) -> MemoryLine:
    """Hidden states with their gradient, and of a trained head the sum in fp32 over chunks, with its rounded copy."""
    columns = shape.padded_vocabulary(tensor) // tensor
    each = 4 if size == 4 else 4 + size
    summed = f"{columns:,} vocabulary rows x {shape.hidden:,} x {each} B, summed in fp32; " if trained else ""
    states = f"hidden states and gradients 2 x {tokens:,} x {shape.hidden:,} x {size} B"
    total = columns * shape.hidden * each * trained + 2 * tokens * shape.hidden * size
    return MemoryLine("head gradient", total, f"{summed}{states}")


def _teacher_tokens(config: BaseConfig, tokens: int, shape: ModelShape) -> list[MemoryLine]:
    if not isinstance(config, RLConfig) or config.opd_top_k is None:
        return []
    count = min(config.opd_top_k, shape.vocabulary)
    formula = f"{tokens:,} tokens x {count:,} of the teacher x {TOP_TOKEN_BYTES} B"
    return [MemoryLine("teacher's tokens", tokens * count * TOP_TOKEN_BYTES, formula)]


def _training_tokens(config: BaseConfig, worker: TrainedRoleConfig) -> int:
    samples = worker.training_args.per_device_train_batch_size * _rows_of_a_sample(config)
    if worker.training_token_limit is None:
        return samples * (config.sequence_length or 0)
    return min(worker.training_token_limit, _tokens_of_a_step(config, worker))


def _rows_of_a_sample(config: BaseConfig) -> int:
    """Sequences that count as one sample: two in a pair."""
    return 2 if isinstance(config, PreferenceConfig) else 1


def _tokens_of_a_step(config: BaseConfig, worker: TrainedRoleConfig) -> int:
    training = worker.training_args
    samples = training.per_device_train_batch_size * training.gradient_accumulation_steps * _rows_of_a_sample(config)
    return samples * (config.sequence_length or 0)


def _forward(config: BaseConfig, role: str, worker: MegatronRoleConfig, shape: ModelShape, platform: str) -> MemoryPlan:
    layout, size = worker.layout, DTYPE_BYTES[worker.model_args.dtype]
    last = layout.pipeline - 1
    dense, experts = max((_stage_parameters(worker, shape, stage) for stage in range(layout.pipeline)), key=sum)
    weights = _weights(dense + experts, experts, size, shape, layout.expert)
    lines = [weights, *_forward_lines(config, worker, shape, platform, with_head=not worker.value_head)]
    return MemoryPlan(role, "fullest pipeline stage" if last else "every device", lines)


def _forward_lines(
    config: BaseConfig, worker: MegatronRoleConfig, shape: ModelShape, platform: str, with_head: bool
) -> list[MemoryLine]:
    tensor, size = worker.layout.tensor, DTYPE_BYTES[worker.model_args.dtype]
    whole = worker.forward_token_limit or worker.infer_batch_size * (config.sequence_length or 0)
    tokens = _of_rank(whole, worker)
    mlp = _expert_values(worker, shape, platform == "cuda") if shape.mixture else 3 * shape.intermediate // tensor
    per_token = 4 * shape.hidden + mlp
    formula = f"forward pass of {tokens:,} tokens x {per_token:,} values x {size} B"
    head = [_head(tokens, shape, tensor, platform, keep=False)] if with_head else []
    gathered = _gathered(whole, worker, shape, with_gradient=False)
    return [MemoryLine("activations", tokens * per_token * size, formula), *gathered, *head]


def _generation(config: RLConfig, role: str, worker: EngineRoleConfig, shape: ModelShape, platform: str) -> MemoryPlan:
    """Weights, and the KV cache that the engine needs to keep `max_running_requests` full sequences at once."""
    tensor, size = worker.layout.tensor, DTYPE_BYTES[worker.model_args.dtype]
    experts = shape.expert_parameters(0, [shape.layers], 1, tensor)
    count = shape.stage_parameters(0, [shape.layers], tensor, repeats_kv=True) + experts
    per_token = 2 * shape.layers * shape.kv_width(tensor) * size
    requests, length = min(worker.max_running_requests, config.requests_per_engine), config.sequence_length or 0
    if isinstance(worker, ScoringEngineConfig):
        requests, length = worker.max_running_requests, worker.sequence_length or shape.max_positions or 0
    tokens = requests * length
    share = worker.strategy_args.strategy_config.get("mem_fraction_static")
    limit = ""
    if platform == "cuda":
        part = f"mem_fraction_static {share}" if share else "most (mem_fraction_static)"
        limit = f"; SGLang takes {part} of the memory it finds free for weights and KV, whatever is needed"
    lines = [
        MemoryLine("weights", count * size, f"{count:,} parameters x {size} B"),
        MemoryLine(
            "KV cache",
            tokens * per_token,
            f"{requests} requests x {length:,} tokens x 2 x {shape.layers} layers x "
            f"{shape.kv_width(tensor):,} values x {size} B ({per_token:,} B per token){limit}",
        ),
    ]
    if role == "actor_infer" and (of_policies := config.adapters(platform)) is not None:
        models, ahead = of_policies.values(), versions_ahead(config.async_generation_ratio)
        places = adapter_arguments(models, shape, ahead)["max_loras_per_batch"]
        each = max(adapter_parameters(shape, model, shape.layers, tensor) for model in models)
        lines.append(MemoryLine("adapters", places * each * size, f"{places} places x {each:,} parameters x {size} B"))
    if platform == "cuda":
        lines += _graphs(worker)
    return MemoryPlan(role, "every device", lines)


def _graphs(worker: EngineRoleConfig) -> list[MemoryLine]:
    """What SGLang reserves for CUDA graphs: 2 MiB for each request and 8 MiB for each length of prompts.

    The defaults of GPUs with 60 GiB or more: at most 256 requests, or 512, and 58 lengths of up to 8,192 tokens.
    """
    options, largest = worker.strategy_args.strategy_config, 256 if worker.layout.tensor < 4 else 512
    if options.get("disable_cuda_graph"):
        return []
    largest = min(options.get("cuda_graph_max_bs_decode") or largest, worker.max_running_requests)
    requests = 0 if options.get("disable_decode_cuda_graph") else largest
    lengths = 0 if options.get("disable_prefill_cuda_graph") else 58
    formula = f"{requests} requests x 2 MiB + {lengths} lengths of prompts x 8 MiB, at most"
    return [MemoryLine(GRAPHS, (2 * requests + 8 * lengths) << 20, formula)]
