"""First measurements on one GPU, with torch and Megatron-Core: no Ray, SGLang, Transformer Engine or transformers.

    scripts/gpu_check.sh gpu_first                     (one GPU, a model that is trained in seconds)
    scripts/gpu_check.sh gpu_first --big               (the shape of Qwen2.5-0.5B, with an output head of its own)
    scripts/gpu_check.sh gpu_first --platform cpu      (the same on a CPU)

Every row is measured on the product's own code: the training rank, its weight sender and its host copies. A check that
raises is a failed row, and the others still run. The exit code is 0 if every row holds.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from roll.configs.arguments import ModelArguments, TrainingArguments, TrainModelArguments
from roll.configs.defaults import fill_in_defaults
from roll.configs.pipeline import RLVRConfig
from roll.configs.roles import ActorInferConfig, ActorTrainConfig
from roll.datasets.batch import Batch
from roll.datasets.collate import collate_samples
from roll.datasets.micro_batches import plan_optimizer_steps
from roll.distributed.infer.sglang_checksums import EngineChecksums, cuda_checksum
from roll.distributed.process_groups import hold_port
from roll.distributed.processes import gc_unfreeze
from roll.distributed.train.host_copies import ALL_STATES
from roll.distributed.train.train_worker import TrainWorker
from roll.distributed.weights.plan import make_buckets
from roll.distributed.weights.shm_buckets import DEVICE_ARGUMENT
from roll.distributed.worker import WorkerRank
from roll.models.families.shape import ModelShape, read_model_shape
from roll.models.fused_linear_logprobs import HeadSpec, fused_linear_logprobs
from roll.pipeline.learning.shards import LOG_PROB_KEYS, sample_lengths, training_shards
from roll.plan.memory import memory_plans
from roll.platforms import get_platform
from roll.platforms.cpu import shared_memory
from scripts.gpu_table import LOSS_BOUNDS, Dtype, GpuTable, Platform, make_parser
from scripts.reference_model import LEARNING_RATE, Reference, largest_relative_difference, write_random_model

SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
BIG: dict[str, Any] = SMALL | {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "head_dim": 64,
}

STEPS = 4
"""Optimizer steps of a comparison or a measurement."""

BIG_LEARNING_RATE = 1e-5
"""At LEARNING_RATE the large model's loss falls from 28 to 0.1 in 4 steps, and rounding grows with every one."""

PROMPT_TOKENS = 8
COMPARED = (4, 128)
"""Samples and tokens of the steps that the CPU reference takes too."""

HEAD_ROWS = {"cpu": 512, "cuda": 8192}
"""Tokens of the head's gradient: several chunks of logits."""

HEAD_GRADIENT_BOUND = 3e-3
"""Relative error of the head's weight gradient in bf16; its own rounding is 0.2 %."""

MEMORY_BOUND = 0.1
CHILD_TIMEOUT_S = 120.0


def configuration(
    platform: Platform, dtype: Dtype, folder: Path, learning_rate: float, deterministic: bool = False
) -> RLVRConfig:
    """A training role on one device; its bounds of the first step are the defaults of `dtype`."""
    config = RLVRConfig(
        platform=platform,
        pretrain=str(folder),
        prompt_length=PROMPT_TOKENS,
        response_length=BIG["max_position_embeddings"] - PROMPT_TOKENS,
        deterministic=deterministic,
        actor_train=ActorTrainConfig(
            model_args=TrainModelArguments(dtype=dtype),
            training_args=TrainingArguments(learning_rate=learning_rate),
            device_mapping=[0],
        ),
        actor_infer=ActorInferConfig(model_args=ModelArguments(dtype=dtype), device_mapping=[0]),
    )
    problems = fill_in_defaults(config)
    if problems:
        raise ValueError("; ".join(map(str, problems)))
    return config


@contextmanager
def training_rank(config: RLVRConfig) -> Iterator[TrainWorker]:
    """The only rank of actor_train, in this process; its memory is free again after the block."""
    rank = WorkerRank("actor_train", platform=config.platform, master_port=hold_port())
    os.environ.update(rank.environment())
    worker = TrainWorker(rank, config.actor_train, config)
    try:
        worker.initialize()
        yield worker
    finally:
        from roll.distributed.train.megatron_infer import leave_process_group  # imports Megatron

        leave_process_group()
        vars(worker).clear()  # the caller still has it
        gc_unfreeze()
        gc.collect()
        get_platform(config.platform).release_cached_memory()


def random_batch(samples: int, tokens: int, vocabulary: int) -> Batch:
    """Samples of a quarter to the whole of `tokens`, to be trained on with the loss of SFT."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(tokens // 4, tokens + 1, (samples,), generator=generator).tolist()
    ids = [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]
    parts = [(each[:PROMPT_TOKENS], each[PROMPT_TOKENS:]) for each in ids]
    return Batch(collate_samples([(p, r, [0.0] * len(r), [0] * len(r)) for p, r in parts]))


def log_probs(rank: TrainWorker, data: Batch, size: int) -> torch.Tensor:
    """Log-probs in micro-batches of `size` samples."""
    inputs = data.select(*LOG_PROB_KEYS)
    count = len(data)
    micro_batches = [list(range(start, min(start + size, count))) for start in range(0, count, size)]
    inputs.meta_info = {"temperature": 1.0, "micro_batches": micro_batches}
    return rank.compute_log_probs(inputs).batch["log_probs"]


def train(rank: TrainWorker, data: Batch, steps: int = STEPS) -> list[float]:
    """Optimizer steps on the whole of `data`, in micro-batches of 4; returns their losses."""
    (plan,) = plan_optimizer_steps(sample_lengths(data), 1, samples_per_step=len(data), micro_batch_size=4)
    (shard,) = training_shards(data, plan, {"temperature": 1.0, "loss": "sft", "loss_config": None})
    return [rank.train_step(shard)["loss"] for _ in range(steps)]


def check_micro_batches(table: GpuTable, rank: TrainWorker, data: Batch, config: RLVRConfig) -> None:
    """Both are the trainer's own passes, so in fp32 their bound is that of the first optimizer step."""
    dtype = config.actor_train.model_args.dtype
    largest = config.mean_logprob_mismatch if dtype == "fp32" else None
    eight, four, mask = log_probs(rank, data, 8), log_probs(rank, data, 4), data.batch["response_mask"]
    table.add_log_probs(f"{dtype}: log-probs in micro-batches of 8 and 4", eight, four, mask, config, largest)
    rank.train_strategy.forward.packed = True
    packed = log_probs(rank, data, 8)
    rank.train_strategy.forward.packed = False
    table.add_log_probs(f"{dtype}: log-probs of packed samples and with padding", packed, eight, mask, config)


def check_steps(table: GpuTable, rank: TrainWorker, reference: Reference, vocabulary: int, dtype: Dtype) -> None:
    data = random_batch(*COMPARED, vocabulary)
    losses, expected = train(rank, data), [reference.train_step(data) for _ in range(STEPS)]
    difference = largest_relative_difference(losses, expected)
    table.add(f"{dtype}: loss of {STEPS} steps against CPU fp32, relative", difference, "", LOSS_BOUNDS[dtype])


def check_memory(table: GpuTable, rank: TrainWorker, config: RLVRConfig, shape: ModelShape, dtype: Dtype) -> None:
    """What leaves a GPU with the states of the rank; on a CPU the platform cannot tell, so the bytes of the tensors."""
    platform = get_platform(config.platform)
    [plan] = [each for each in memory_plans(config, {"actor_train": shape}, config.platform)]
    planned = sum(line.bytes for line in plan.lines if line.name in ("weights", "gradients", "optimizer"))
    before = platform.memory()["used"]
    moved = rank.offload_states(ALL_STATES)
    left = platform.memory()["used"]
    rank.load_states(ALL_STATES)
    measured = before - left if config.platform == "cuda" else moved
    name = f"{dtype}: weights, gradients and optimizer of {measured / 1e6:.4g} MB against the plan"
    table.add(name, abs(measured / planned - 1), "", MEMORY_BOUND)
    if config.platform == "cuda":
        table.add(f"{dtype}: left on the GPU without them", left / 1e6, "MB")


def check_speed(table: GpuTable, rank: TrainWorker, data: Batch, shape: ModelShape, dtype: Dtype) -> None:
    """Tokens per second of training, and the share of the GPU's peak that they use (MFU).

    Every token counts as scored, see `ModelShape.training_operations`.
    """
    train(rank, data, 1)
    start = time.perf_counter()
    train(rank, data)
    seconds = (time.perf_counter() - start) / STEPS
    lengths = torch.tensor(sample_lengths(data), dtype=torch.float64)
    tokens = lengths.sum().item()
    operations = shape.training_operations(tokens, lengths.square().sum().item(), tokens)
    table.add(f"{dtype}: training", tokens / seconds, "tokens/s")
    peak = get_platform(rank.rank.platform).peak_tflops(dtype)
    mfu = operations / seconds / peak / 1e12 if peak else "-"
    table.add(f"{dtype}: MFU", mfu)


def check_head(table: GpuTable, rank: TrainWorker, shape: ModelShape, platform: Platform) -> None:
    """The gradient of the head's weights from bf16 matrices, against that from the same numbers in fp32."""
    weight = rank.train_strategy.stages[-1].head_weight().detach()
    generator = torch.Generator().manual_seed(2)
    rows = HEAD_ROWS[platform]
    hidden = torch.randn(rows, shape.hidden, generator=generator).to(weight)
    targets = torch.randint(0, shape.vocabulary, (rows,), generator=generator).to(weight.device)
    gradients = []
    for dtype in (torch.bfloat16, torch.float32):
        matrix = weight.to(dtype, copy=True).requires_grad_()
        found, _ = fused_linear_logprobs(hidden.to(dtype), matrix, targets, HeadSpec(0, shape.vocabulary))
        gradients.append(torch.autograd.grad(found.sum(), matrix)[0].float())
    error = ((gradients[0] - gradients[1]).norm() / gradients[1].norm()).item()
    table.add("bf16: gradient of the output head against fp32, relative", error, "", HEAD_GRADIENT_BOUND)


def check_sharing(table: GpuTable, rank: TrainWorker, config: RLVRConfig) -> None:
    """A weight update through the memory of this device, which another process opens as an engine would."""
    source = rank.describe_weights()
    assert source is not None
    buckets = [make_buckets(source.specs, config.model_update_buffer_size_mb << 20)]
    if config.platform == "cpu":
        rank.create_shm([max(bucket.bytes for bucket in buckets[0])])
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=receive, args=(theirs, rank.train_strategy.weights.folder), daemon=True)
    child.start()
    theirs.close()
    sent: dict[str, str] = {}
    seconds = 0.0
    try:
        _answer(ours)  # the child is ready
        for index in range(len(buckets[0])):
            start = time.perf_counter()
            filled = rank.fill_bucket(buckets, index, [[0]])
            assert filled is not None
            ours.send(filled.handles[0])
            received = _answer(ours)
            seconds += time.perf_counter() - start
            sent |= rank.checksum_bucket(buckets, index, 1) or {}
        ours.send(None)
        received = _answer(ours)
    finally:
        rank.release_buckets()
        child.join(10)
        child.kill()
    wrong = sum(received.get(name) != checksum for name, checksum in sent.items()) + len(received.keys() - sent.keys())
    way = "CUDA IPC" if config.platform == "cuda" else "shared memory"
    table.add(f"{len(sent)} parameters through {way}: checksums that differ", wrong, "", 0)
    table.add("their transfer, checksums included", seconds, "s")


def _answer(pipe: Connection) -> Any:
    """What the child answers; its exception is raised here."""
    if not pipe.poll(CHILD_TIMEOUT_S):
        raise TimeoutError(f"the receiving process did not answer within {CHILD_TIMEOUT_S:g} s")
    answer = pipe.recv()
    if isinstance(answer, Exception):
        raise answer
    return answer


def receive(pipe: Connection, folder: Path) -> None:
    """The other process: opens every handle it gets, and answers the last message with all checksums."""
    try:
        checksums = EngineChecksums.of_model(folder, 1)
        pipe.send("ready")
        while (handle := pipe.recv()) is not None:
            for name, tensor in open_tensors(handle):
                checksums.add(name, tensor)
            pipe.send("loaded")
        pipe.send(checksums.result())
    except Exception as error:
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))


def open_tensors(handle: bytes) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a handle; its GPU is looked up by UUID, as SGLang does."""
    if shared_memory.is_handle(handle):
        return shared_memory.open_handle(handle)
    from torch.multiprocessing import reductions

    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    rebuild: Callable[..., torch.Tensor] = reductions.rebuild_cuda_tensor

    def rebuild_by_uuid(*arguments: Any) -> torch.Tensor:
        device = uuids.index(arguments[DEVICE_ARGUMENT])
        return rebuild(*arguments[:DEVICE_ARGUMENT], device, *arguments[DEVICE_ARGUMENT + 1 :])

    reductions.rebuild_cuda_tensor = rebuild_by_uuid
    try:
        return pickle.loads(handle)
    finally:
        reductions.rebuild_cuda_tensor = rebuild


def check_checksum(table: GpuTable, rank: TrainWorker) -> None:
    """The project's checksum of GPU tensors against SGLang's kernel."""
    name = "checksums that differ from those of SGLang's kernel"
    try:
        from sglang.kernels.ops.memory.gpu_tensor_hash import gpu_tensor_hash
    except ImportError:
        table.add(f"{name}: needs sglang", "not checked")
        return
    weights = [tensor for _, tensor in rank.train_strategy.weights.full_tensors()]
    table.add(name, sum(f"{gpu_tensor_hash(each):016x}" != cuda_checksum(each) for each in weights), "", 0)


def check_resume(table: GpuTable, config: RLVRConfig, data: Batch, folder: Path) -> None:
    """Steps of a rank, of one that resumes from its checkpoint, and of that one with hand-overs in between."""
    with training_rank(config) as rank:
        train(rank, data, 2)
        rank.begin_checkpoint(folder)
        losses, weights = train(rank, data, 2), weights_of(rank)
    with training_rank(config) as rank:
        rank.load_checkpoint(folder)
        resumed = train(rank, data, 1)
        table.add("resumed: difference of the next step's loss", abs(resumed[0] - losses[0]), "", 0)
        rank.load_checkpoint(folder)
        repeated = []
        for _ in losses:
            rank.offload_states(ALL_STATES)
            rank.load_states(ALL_STATES)
            repeated += train(rank, data, 1)
        table.add("hand-overs: losses that differ", sum(a != b for a, b in zip(losses, repeated, strict=True)), "", 0)
        changed = sum(not torch.equal(tensor, weights[name]) for name, tensor in weights_of(rank).items())
        table.add("hand-overs: weights that differ after the steps", changed, "", 0)
        for name, move in (("to host memory", rank.offload_states), ("back", rank.load_states)):
            start = time.perf_counter()
            moved = move(ALL_STATES)
            seconds = time.perf_counter() - start
            table.add(f"hand-over {name} of {moved / 1e6:.4g} MB", seconds, "s")
            table.add(f"hand-over {name}", moved / seconds / 1e9, "GB/s")


def check_offloaded_optimizer(table: GpuTable, config: RLVRConfig, folder: Path, vocabulary: int) -> None:
    """Steps and a resume with Megatron's `optimizer_cpu_offload`, which no CPU can run."""
    from roll.distributed.train.megatron_model import transformer_engine_available  # imports Megatron

    if config.platform == "cpu" or not transformer_engine_available():
        missing = "a GPU" if config.platform == "cpu" else "Transformer Engine"
        table.add(f"optimizer in host memory: needs {missing}", "not checked")
        return
    config.actor_train.strategy_args.strategy_config.optimizer_cpu_offload = True
    rate = config.actor_train.training_args.learning_rate
    with training_rank(config) as rank:
        check_steps(table, rank, Reference(folder / "bf16", rate), vocabulary, "bf16")
    check_resume(table, config, random_batch(*COMPARED, vocabulary), folder / "offloaded")


def weights_of(rank: TrainWorker) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in rank.train_strategy.weights.full_tensors()}


def measure(table: GpuTable, platform: Platform, big: bool, folder: Path) -> None:
    """All checks: those in each dtype first, since deterministic kernels stay on in this process."""
    sizes = BIG if big else SMALL
    learning_rate = BIG_LEARNING_RATE if big else LEARNING_RATE
    vocabulary = sizes["vocab_size"]
    data = random_batch(*((32, 1536) if big else (8, 64)), vocabulary)
    dtypes: tuple[Dtype, ...] = ("bf16", "fp32")
    for dtype in dtypes:
        model = write_random_model(folder / dtype, sizes, dtype)
        shape = read_model_shape(model)
        config = configuration(platform, dtype, model, learning_rate)
        assert shape is not None
        with table.check(f"{dtype}: training rank"), training_rank(config) as rank:
            with table.check(f"{dtype}: log-probs of micro-batches"):
                check_micro_batches(table, rank, data, config)
            with table.check(f"{dtype}: optimizer steps"):
                check_steps(table, rank, Reference(model, learning_rate), vocabulary, dtype)
            with table.check(f"{dtype}: memory"):
                check_memory(table, rank, config, shape, dtype)
            with table.check(f"{dtype}: speed"):
                check_speed(table, rank, data, shape, dtype)
            if dtype == "bf16":
                with table.check("gradient of the output head"):
                    check_head(table, rank, shape, platform)
                with table.check("weights in another process"):
                    check_sharing(table, rank, config)
                if platform == "cuda":
                    with table.check("checksum"):
                        check_checksum(table, rank)
    with table.check("resume and hand-over"):
        config = configuration(platform, "bf16", folder / "bf16", learning_rate, deterministic=True)
        check_resume(table, config, random_batch(*COMPARED, vocabulary), folder / "checkpoint")
    with table.check("optimizer in host memory"):
        check_offloaded_optimizer(table, config, folder, vocabulary)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--big", action="store_true", help="the shape of Qwen2.5-0.5B")
    arguments = parser.parse_args()
    platform = get_platform(arguments.platform)
    os.environ.update(platform.environment | platform.deterministic_environment)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    table = GpuTable()
    with tempfile.TemporaryDirectory(prefix="roll_gpu_first_") as folder:
        measure(table, arguments.platform, arguments.big, Path(folder))
    return table.show(arguments.platform)


if __name__ == "__main__":
    sys.exit(main())
