"""What every rank of a layout does for test_megatron_strategy.py, in one spawn."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from roll.base.custom_modules import use_custom_modules
from roll.datasets.batch import Batch
from tests.integration.rank_pool import RankContext

STEPS = 20
TEMPERATURE = 0.7
SAMPLES, WIDTH = 8, 24
LENGTHS = (24, 10, 15, 7, 20, 4, 12, 18)
SHARED = {1: (0, 3), 3: (0, 5), 5: (0, 4), 4: (2, 9), 7: (2, 12)}
"""Sample -> an earlier one, and the number of its first tokens that are equal."""
PROMPT = 2


def token_batch(side: str = "right", vocabulary: int = 101) -> dict[str, torch.Tensor]:
    """The same samples in every process, padded on either side; they share prefixes, and one is a prefix of another."""
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(0, vocabulary, (SAMPLES, WIDTH), generator=generator)
    for row, (like, tokens) in SHARED.items():
        ids[row, :tokens] = ids[like, :tokens]
    mask = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
    if side == "left":
        mask = mask.flip(1)
        ids = torch.stack([row.roll(WIDTH - length) for row, length in zip(ids, LENGTHS, strict=True)])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask.long(), "position_ids": positions}


def training_batch(data_rank: int, data_ranks: int, size: int) -> Batch:
    """This data rank's share, cut into micro-batches of `size` samples."""
    tensors = token_batch()
    tensors["response_mask"] = tensors["attention_mask"].bool() & (torch.arange(WIDTH) >= PROMPT)
    rows = list(range(data_rank, SAMPLES, data_ranks))
    micro_batches = [list(range(start, min(start + size, len(rows)))) for start in range(0, len(rows), size)]
    data = Batch({key: value[rows] for key, value in tensors.items()})
    tokens = float(sum(length - PROMPT for length in LENGTHS))
    plan = {"micro_batches": micro_batches, "tokens": tokens, "sequences": float(SAMPLES)}
    data.meta_info = {"loss": "sft", "loss_config": None, "optimizer_steps": [plan], "temperature": 1.0}
    return data


def run(context: RankContext) -> None:
    """Everything; `arguments`: custom_modules, models (family to folder), variants (name to options)."""
    use_custom_modules(context.arguments["custom_modules"])
    _timed(context, "join", _join, context)
    for family, model in context.arguments["models"].items():
        _timed(context, f"score {family}", _score_and_export, context, family, Path(model))
    for name, options in context.arguments["variants"].items():
        _timed(context, f"train {name}", _train, context, name, Path(context.arguments["trained"]), dict(options))
    for name, options in context.arguments["policies"].items():
        _timed(context, f"policy {name}", _policy, context, name, Path(context.arguments["trained"]), dict(options))
    for name, options in context.arguments["resumed"].items():
        _timed(context, f"resume {name}", _resume, context, name, Path(context.arguments["trained"]), dict(options))


def _timed(context: RankContext, name: str, function: Any, *arguments: Any) -> None:
    start = time.monotonic()
    function(*arguments)
    context.results.setdefault("seconds", {})[name] = time.monotonic() - start


def _join(context: RankContext) -> None:
    """Records what a rank does with torch.distributed while it joins the others."""
    from roll.distributed.train.megatron_infer import join_process_group, leave_process_group
    from roll.platforms import get_platform

    calls = context.results["joining"] = []
    distributed = torch.distributed

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(("all_reduce", tensor.device, args, kwargs))
        return reduce(tensor, *args, **kwargs)

    def new_group(*args: Any, **kwargs: Any) -> Any:
        calls.append(("new_group",))
        return group(*args, **kwargs)

    reduce, group = distributed.all_reduce, distributed.new_group
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(context.ports.pop(0)))
    platform = get_platform("cpu")
    with patch.object(distributed, "all_reduce", all_reduce), patch.object(distributed, "new_group", new_group):
        join_process_group(platform, context.layout, context.rank, 60, 60)
    leave_process_group()


def _score_and_export(context: RankContext, family: str, model: Path) -> None:
    from roll.distributed.train import megatron_forward

    make = megatron_forward.make_micro_batch
    shared = context.results.setdefault("shared", [])

    def recorded(*arguments: Any) -> Any:
        micro = make(*arguments)
        shared.append(micro.expand is not None)
        return micro

    strategy = context.strategy(model, megatron={"sequence_parallel": context.layout.tensor > 1}, infer=True)
    for side in ("right", "left"):
        data = Batch(token_batch(side))
        data.meta_info = {"temperature": TEMPERATURE, "micro_batches": [[0, 3, 5], [1, 2, 7, 4], [6]]}
        scored = strategy.compute_log_probs(data)
        context.results[f"log_probs/{family}/{side}"] = scored.batch["log_probs"].clone() if len(scored) else None
        strategy.forward.packed = True
        data.meta_info["sum_pi_squared"] = True
        with patch.object(megatron_forward, "make_micro_batch", recorded):
            scored = strategy.compute_log_probs(data)
        strategy.forward.packed = False
        for name in ("log_probs", "sum_pi_squared"):
            context.results[f"{name}/{family}/{side}/packed"] = scored.batch[name].clone() if len(scored) else None
    strategy.shutdown()
    trainer = context.strategy(model)
    specs, weights = trainer.weights.specs(), list(trainer.weights.full_tensors())
    context.results[f"specs/{family}"] = [(spec.name, spec.shape, spec.dtype) for spec in specs]
    context.results[f"names/{family}"] = [
        (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in weights
    ]
    trainer.weights.export_hf(context.folder / family)
    trainer.shutdown()


def _train(context: RankContext, name: str, model: Path, options: dict[str, Any]) -> None:
    """Steps, one call each, or all of them in one call (`at_once`), where one step may overlap with the next."""
    from roll.distributed.train import megatron_strategy

    size, at_once = options.pop("micro_batch_size"), options.pop("at_once", False)
    strategy = context.strategy(model, **options)
    data = training_batch(strategy.coordinates.data, context.layout.data, size)
    if at_once:
        data.meta_info["optimizer_steps"] *= STEPS
        with patch.object(megatron_strategy, "over_optimizer_steps", return_value={}) as steps:
            strategy.train_step(data)
        context.results[f"steps/{name}"] = steps.call_args.args[0]
    else:
        context.results[f"steps/{name}"] = [strategy.train_step(data) for _ in range(STEPS)]
    strategy.weights.export_hf(context.folder / name)
    context.results[f"memory/{name}"] = strategy.memory()
    strategy.shutdown()


def _policy(context: RankContext, name: str, model: Path, options: dict[str, Any]) -> None:
    """Old log-probs by the same weights, two policy steps, then a learning rate that destroys the model.

    The last micro-batch has no response token: it must cost nothing and break nothing.
    """
    from roll.algorithms.options.policy_options import PolicySettings
    from roll.distributed.train.megatron_optimizer import NonFiniteError

    size = options.pop("micro_batch_size")
    strategy = context.strategy(model, **options)
    data = training_batch(strategy.coordinates.data, context.layout.data, size)
    plan = data.meta_info["optimizer_steps"][0]
    data.batch["response_mask"][plan["micro_batches"][-1]] = False
    plan["tokens"] = float(data.batch["response_mask"].sum())
    data.meta_info |= {"temperature": TEMPERATURE, "micro_batches": plan["micro_batches"], "loss": "policy"}
    data.meta_info["loss_config"] = PolicySettings(pg_variant="ppo", entropy_loss_coef=0.01)
    scored = strategy.compute_log_probs(data)
    shape = data.batch["input_ids"].shape
    data.batch["old_log_probs"] = scored.batch["log_probs"] if len(scored) else torch.zeros(shape)
    data.batch["advantages"] = torch.linspace(-1.0, 1.0, shape[0])[:, None].expand(shape).clone()
    first, answer = strategy.train_step_with_log_probs(data)
    if len(scored):  # the last pipeline stage
        context.results[f"log_probs_of_step/{name}"] = (answer.batch["log_probs"], scored.batch["log_probs"].clone())
    context.results[f"policy/{name}"] = [first, strategy.train_step(data)]
    [policy] = strategy.policies.values()
    policy.schedule = replace(policy.schedule, peak=1e30)
    try:
        for _ in range(2):
            strategy.train_step(data)
    except NonFiniteError as error:
        context.results[f"non-finite/{name}"] = str(error)
    strategy.shutdown()


def _resume(context: RankContext, name: str, model: Path, options: dict[str, Any]) -> None:
    """Three steps, two more while a checkpoint is written; then a new strategy loads it and repeats the two."""
    from roll.distributed.train.checkpoint import background_save, megatron_checkpoint

    size, written_as = options.pop("micro_batch_size"), options.pop("written_as", None)
    folder = context.folder / f"checkpoint_{name}"
    training = {"lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1}
    strategy = context.strategy(model, training=training, max_steps=6, **options)
    data = training_batch(strategy.coordinates.data, context.layout.data, size)
    for _ in range(3):
        strategy.train_step(data)
    copied = _copied_share(strategy)
    written = (
        {megatron_checkpoint.FORMAT_KEY: written_as} if written_as else megatron_checkpoint._format(strategy.optimizer)
    )
    stepping = threading.Event()
    save_pieces, write = megatron_checkpoint.save_pieces, megatron_checkpoint.InProcessSave.write
    with (
        patch.object(megatron_checkpoint, "_format", lambda optimizer: written),
        patch.object(megatron_checkpoint, "save_pieces", _after(stepping, save_pieces)),
        patch.object(megatron_checkpoint.InProcessSave, "write", _after(stepping, write)),
        patch.object(background_save, "wait", _telling(stepping, background_save.wait)),
    ):
        strategy.begin_checkpoint(folder)
        unbroken = [strategy.train_step(data) for _ in range(2)]
    waited = strategy.saving.seconds_waited()
    assert waited is not None and waited > 0
    weights = {key: value.clone() for key, value in strategy.weights.full_tensors()}
    strategy.shutdown()
    strategy = context.strategy(model, training=training, max_steps=6, **options)
    strategy.load_checkpoint(folder)
    freed = [_hand_over(strategy) for _ in range(10)]
    held = sum(strategy.memory()[kind] for kind in ("parameters", "gradients"))
    resumed = [strategy.train_step(data) for _ in range(2)]
    same = all(torch.equal(weights[key], value) for key, value in strategy.weights.full_tensors())
    outcome = {"unbroken": unbroken, "resumed": resumed, "same_weights": same, "copied": copied}
    outcome |= {"freed": freed, "held": held}
    context.results[f"resume/{name}"] = outcome
    strategy.shutdown()


def _after(stepping: threading.Event, write: Callable[..., None]) -> Callable[..., None]:
    """As `write`, once the optimizer step that would change what it writes is waiting for it."""

    def written(*arguments: Any) -> None:
        if not stepping.wait(60):
            raise TimeoutError("no optimizer step waited for the checkpoint")
        write(*arguments)

    return written


def _telling(stepping: threading.Event, wait: Callable[..., Any]) -> Callable[..., Any]:
    """As `wait`, after it has set `stepping`."""

    def waited(*arguments: Any) -> Any:
        stepping.set()
        return wait(*arguments)

    return waited


def _hand_over(strategy: Any) -> int:
    """Moves everything to host memory and back; returns the bytes that were free meanwhile, once they are."""
    from roll.distributed.train.host_copies import ALL_STATES

    freed = strategy.states.offload(ALL_STATES)
    tensors = [tensor for kind in ALL_STATES for tensor in strategy._state_tensors(kind)]
    assert tensors and not sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert strategy.states.load(ALL_STATES) == freed
    return freed


def _copied_share(strategy: Any) -> float:
    """Share of the optimizer's state that a checkpoint does not write from where it lies."""
    from roll.distributed.train.checkpoint.megatron_checkpoint import PIECES, _format, _models, parts
    from roll.distributed.train.checkpoint.optimizer_pieces import held_states, pieces_of
    from roll.distributed.train.host_copies import ALL_STATES

    if _format(strategy.optimizer) != PIECES:
        return 0.0
    held = [tensor for kind in ALL_STATES for tensor in strategy._state_tensors(kind)]
    live = {tensor.untyped_storage().data_ptr() for tensor in held}
    (part,) = parts(strategy.optimizer)
    tensors = [piece.tensor for piece in pieces_of(list(held_states(part)), _models(strategy.wrapped))]
    copied = sum(tensor.nbytes for tensor in tensors if tensor.untyped_storage().data_ptr() not in live)
    return copied / sum(tensor.nbytes for tensor in tensors)


def moved(context: RankContext) -> None:
    """Loads `read`, if given; trains `steps`; saves to `write`; results: log-probs before and after, and the steps."""
    strategy = context.strategy(
        Path(context.arguments["model"]),
        training={"lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1},
        max_steps=9,
        **context.arguments["options"],
    )
    rows = 8 // context.layout.data
    data = training_batch(strategy.coordinates.data, context.layout.data, rows)
    data.meta_info["micro_batches"] = [list(range(rows))]
    if context.arguments["read"]:
        strategy.load_checkpoint(Path(context.arguments["read"]))
    scored = [strategy.compute_log_probs(data)]
    context.results["steps"] = [strategy.train_step(data) for _ in range(context.arguments["steps"])]
    strategy.begin_checkpoint(Path(context.arguments["write"]))
    strategy.saving.wait()
    assert strategy.saving.seconds_waited() is not None
    scored.append(strategy.compute_log_probs(data))
    if len(scored[0]):  # the last pipeline stage
        context.results["log_probs"] = [each.batch["log_probs"].clone() for each in scored]
    context.results["data"] = strategy.coordinates.data
    strategy.shutdown()
