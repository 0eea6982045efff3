"""New weights for a running SGLang engine: the session, the two ways tensors arrive, and their verification."""

from __future__ import annotations

import contextlib
from typing import Any

from roll.distributed.strategy.base import WeightSpec
from roll.distributed.strategy.sglang_checksums import engine_parameter
from roll.distributed.strategy.sglang_engine import Engine, EngineError

FLATTENED = "flattened_bucket"
"""SGLang's name for a bucket that arrives as one tensor of bytes."""


class WeightUpdates:
    """One update session at a time: `begin`, any number of `receive_*`, `end`.

    SGLang answers (False, reason) where something is refused; every such answer is raised here. After an error the
    weights may be part old, part new: the engine must serve nothing until a whole update succeeded.
    """

    def __init__(self, engine: Engine, timeout_s: float) -> None:
        """Every message to `engine` must be answered within `timeout_s` seconds."""
        self._engine = engine
        self._timeout_s = timeout_s
        self._open = False
        self._parameters: set[str] = set()

    async def init_group(
        self, address: str, port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Joins the broadcast group; rank t of the engine becomes rank `rank_offset + t`, the sender is rank 0."""
        from sglang.srt.managers.io_struct import InitWeightsUpdateGroupReqInput

        message = InitWeightsUpdateGroupReqInput(
            master_address=address,
            master_port=port,
            rank_offset=rank_offset,
            world_size=world_size,
            group_name=group_name,
            backend=backend,
        )
        await self._ask("init_weights_update_group", message, f"join group {group_name} at {address}:{port}")

    async def destroy_group(self, group_name: str) -> None:
        """Leaves the broadcast group."""
        from sglang.srt.managers.io_struct import DestroyWeightsUpdateGroupReqInput

        message = DestroyWeightsUpdateGroupReqInput(group_name=group_name)
        await self._ask("destroy_weights_update_group", message, f"leave group {group_name}")

    async def begin(self) -> None:
        """Opens the session; one that a failed update left open is closed first."""
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        if self._open:
            with contextlib.suppress(EngineError):  # a close that came too late may have closed it meanwhile
                await self.close()
            self._open = False
        if not self._parameters:
            self._parameters = {name.rpartition("@")[0] for name in await self.checksums()}
        await self._ask("begin_weight_update", BeginWeightUpdateReqInput(), "begin the update")
        self._open = True

    async def close(self) -> None:
        """Closes the session without a new version."""
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        await self._ask("end_weight_update", EndWeightUpdateReqInput(), "end the update")
        self._open = False

    async def receive_broadcast(self, specs: list[WeightSpec], group_name: str, flattened: bool) -> None:
        """Receives tensors from rank 0 of the group, which broadcasts them in the order of `specs`.

        Args:
            specs: what is sent.
            group_name: group joined by `init_group`.
            flattened: the sender broadcasts one uint8 tensor, the bytes of all tensors one after the other; tensors
                of one bucket then need one dtype. Otherwise it broadcasts each tensor by itself.

        Raises:
            EngineError: a tensor has another shape than the engine's, or a name the engine does not know. The bucket
                was received by then, so that the sender does not hang.
        """
        from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqInput

        message = UpdateWeightsFromDistributedReqInput(
            names=[spec.name for spec in specs],
            dtypes=[spec.dtype for spec in specs],
            shapes=[list(spec.shape) for spec in specs],
            group_name=group_name,
            load_format=FLATTENED if flattened else None,
            flush_cache=False,
            abort_all_requests=False,
        )
        await self._ask("update_weights_from_distributed", message, f"receive {_describe(specs)}")
        unknown = [spec.name for spec in specs if engine_parameter(spec.name) not in self._parameters]
        if unknown:  # SGLang drops these with a line in its log
            raise EngineError(f"{self._engine.name}: the model has no parameter for {', '.join(unknown)}")

    async def receive_tensors(self, handles: list[bytes]) -> None:
        """Loads tensors that another process on this node shares.

        Args:
            handles: one per rank of the engine, made by `roll.platforms.shared_memory.make_handle` or, for GPU
                tensors, by `sglang_handles.share`. SGLang ends on a tensor of the wrong shape and drops one of an
                unknown name; `checksums` shows the second.
        """
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        message = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=handles, flush_cache=False, abort_all_requests=False
        )
        await self._ask("update_weights_from_tensor", message, "load shared tensors")

    async def end(self, version: int) -> None:
        """Closes the session and names the weights `version`: tokens sampled from now on carry it."""
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        await self.close()
        message = UpdateWeightVersionReqInput(new_version=str(version), abort_all_requests=False)
        what = f"set weight version {version}"
        await self._engine.guard(self._engine.manager.update_weight_version(message), what, self._timeout_s)

    async def checksums(self) -> dict[str, str]:
        """Checksum of every parameter the engine computes with, on each of its ranks, as `name@rank`.

        The names are SGLang's, which fuses query, key and value, and gate and up; `EngineChecksums` computes the same
        from tensors under HF names.
        """
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        answer = self._engine.manager.check_weights(CheckWeightsReqInput(action="checksum"))
        success, reason, ranks, _ = await self._engine.guard(answer, "checksums", self._timeout_s)
        if not success:
            raise EngineError(f"{self._engine.name}: checksums: {reason}")
        return {
            f"{name}@{rank['parallelism_info'][0]['tp_rank']}": value
            for rank in ranks
            for name, value in rank["checksums"].items()
        }

    async def _ask(self, method: str, message: Any, what: str) -> None:
        answer = getattr(self._engine.manager, method)(message, None)
        success, reason = await self._engine.guard(answer, what, self._timeout_s)
        if not success:
            raise EngineError(f"{self._engine.name}: {what}: {reason}")


def _describe(specs: list[WeightSpec]) -> str:
    if not specs:
        return "no tensors"
    names = specs[0].name if len(specs) == 1 else f"{specs[0].name} to {specs[-1].name}"
    return f"{len(specs)} tensors ({names})"
