"""Checks that need two devices: separate lists with a broadcast, an engine that dies in it, tensor parallel 2.

    scripts/gpu_check.sh two_gpus                      (two GPUs, bf16)
    scripts/gpu_check.sh two_gpus --platform cpu       (the same on a CPU, fp32)

Two sessions, one after the other. In the first the trainer has device 0 and the engine device 1; the engine is killed
in the middle of a weight update, and the surviving trainer exports its model. In the second a trainer with tensor
parallel 2 and a new engine take turns on both devices, with that model.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import psutil
import torch

from roll.datasets.batch import Batch
from roll.distributed.calls.remote_call import ALL
from roll.distributed.infer.infer_worker import InferWorker
from roll.distributed.train.train_worker import TrainWorker
from roll.distributed.weights.broadcast import BroadcastTransport
from roll.distributed.weights.report import Transfer
from roll.distributed.weights.synchronizer import STEP_GRACE_S, WeightSynchronizer
from roll.pipeline.learning.shards import cluster_log_probs
from roll.pipeline.session import Session
from scripts.gpu_smoke import SHAPES, TEMPERATURE, compare, configuration, generate, train, train_step
from scripts.gpu_table import Dtype, GpuTable, Platform, add_dtype, make_parser
from scripts.reference_model import Reference, write_random_model

SYNC_TIMEOUT_S = 30.0
ERROR_BOUND_S = 3 * (SYNC_TIMEOUT_S + STEP_GRACE_S)
"""A failed attempt, the end of its groups, and the end of the update have this much each."""

RESTARTED_ATTEMPTS = 2
"""Attempts of an update in which an engine dies: the one with it, and the one after its restart."""

UNDER_WAY_S = 1.0
"""Time for a broadcast to begin."""


class FatalBroadcast(BroadcastTransport):
    """Kills the engine in the middle of a broadcast once `kill` is set on this class."""

    kill = False

    async def transfer(self, checksums: bool) -> Transfer:
        if not self.kill:
            return await super().transfer(checksums)
        FatalBroadcast.kill = False
        [[_, *processes]] = await self._infer.call(ALL, InferWorker.process_ids)
        schedulers = [each for each in map(psutil.Process, processes) if "scheduler" in each.name()]
        for scheduler in schedulers:
            scheduler.suspend()  # so that the broadcast cannot end before
        sending = asyncio.ensure_future(super().transfer(checksums))
        await asyncio.sleep(UNDER_WAY_S)
        for scheduler in schedulers:
            scheduler.kill()
        return await sending


async def separate(table: GpuTable, platform: Platform, dtype: Dtype, folder: Path) -> tuple[Batch, torch.Tensor]:
    """Trainer and engine on a device each; returns samples, and their log-probs under the exported model."""
    model = write_random_model(folder / "model", SHAPES[platform], dtype)
    options = {"sync_timeout_s": SYNC_TIMEOUT_S, "max_sync_retries": 0}
    config = configuration(platform, dtype, folder, [0], [1], **options)
    async with Session(config) as session:
        await session.ready()
        actor, engine = session.train_clusters["actor_train"], session.infer_clusters["actor_infer"]
        synchronizer = WeightSynchronizer(actor, engine, config, FatalBroadcast)
        await synchronizer.setup()
        report = await synchronizer.update_weights(0)
        table.add(f"separate devices: broadcast of {report.bytes / 1e6:.0f} MB, verified", report.seconds, "s")
        data, _ = await generate(engine, 0)
        await compare(table, "separate devices", actor, data, config, Reference(model))
        await train_step(actor, config, data)
        before = (await cluster_log_probs(actor, data, config.actor_train, TEMPERATURE)).batch["log_probs"]
        FatalBroadcast.kill = True
        report = await synchronizer.update_weights(1)
        if report.attempts != RESTARTED_ATTEMPTS:
            raise AssertionError(
                f"the update took {report.attempts} attempts, not one with the killed engine and one without"
            )
        bound_s = ERROR_BOUND_S + config.start_timeout_s
        table.add("engine killed in a broadcast: time until it is restarted and updated", report.seconds, "s", bound_s)
        await generate(engine, 1)
        after = (await cluster_log_probs(actor, data, config.actor_train, TEMPERATURE)).batch["log_probs"]
        table.add("log-probs of the trainer that survived: largest change", (after - before).abs().max().item(), "", 0)
        await actor.call(ALL, TrainWorker.export_hf, folder / "survived")
    return data, after


async def shared(
    table: GpuTable, platform: Platform, dtype: Dtype, folder: Path, data: Batch, expected: torch.Tensor
) -> None:
    """Trainer and engine with tensor parallel 2 take turns on both devices."""
    model = folder / "survived"
    config = configuration(platform, dtype, folder, [0, 1], [0, 1], pretrain=str(model), output_dir=str(folder / "tp2"))
    reference = Reference(model)
    async with Session(config) as session:
        await session.ready()
        actor, engine = session.train_clusters["actor_train"], session.infer_clusters["actor_infer"]
        devices = session.shared_devices
        assert devices is not None
        synchronizer = WeightSynchronizer(actor, engine, config, devices=devices)
        await synchronizer.setup()
        report = await synchronizer.update_weights(0)
        table.add(f"tensor parallel 2: update of {report.bytes / 1e6:.0f} MB, verified", report.seconds, "s")
        samples, _ = await generate(engine, 1)
        await devices.to_trainer()
        found = (await cluster_log_probs(actor, data, config.actor_train, TEMPERATURE)).batch["log_probs"]
        table.add_log_probs("tensor parallel 2 against 1", found, expected, data.batch["response_mask"], config)
        await compare(table, "tensor parallel 2", actor, samples, config, reference)
        await train(table, actor, config, samples, reference)
        checkpoint = folder / "checkpoint"
        await actor.call(ALL, TrainWorker.begin_checkpoint, checkpoint)
        loss = await train_step(actor, config, samples)
        await actor.call(ALL, TrainWorker.load_checkpoint, checkpoint)
        difference = abs(await train_step(actor, config, samples) - loss)
        table.add("resumed: difference of the next step's loss", difference, "", 0)


async def measure(table: GpuTable, platform: Platform, dtype: Dtype, folder: Path) -> None:
    with table.check("separate devices"):
        data, expected = await separate(table, platform, dtype, folder)
        with table.check("tensor parallel 2"):
            await shared(table, platform, dtype, folder, data, expected)


def main() -> int:
    parser = make_parser(__doc__, devices=2)
    add_dtype(parser)
    arguments = parser.parse_args()
    dtype: Dtype = arguments.dtype or ("bf16" if arguments.platform == "cuda" else "fp32")
    table = GpuTable()
    with tempfile.TemporaryDirectory(prefix="roll_two_gpus_") as folder:
        asyncio.run(measure(table, arguments.platform, dtype, Path(folder)))
    return table.show(arguments.platform)


if __name__ == "__main__":
    sys.exit(main())
