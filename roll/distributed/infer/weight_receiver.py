"""The engine side of a weight update: one session of a running SGLang engine, and whether the engine may serve.

An update is `begin_update`, any number of `receive_*`, `end_update`, and `commit_update` once it was verified. SGLang
answers (False, reason) where it refuses something; every such answer is raised here.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from roll.distributed.infer.sglang_checksums import Place, engine_places
from roll.distributed.infer.sglang_engine import Engine, EngineError
from roll.distributed.process_groups import BroadcastGroup
from roll.distributed.weights.delta import LOADER, DeltaError, RankDelta
from roll.distributed.weights.plan import Bucket, WeightSpec
from roll.distributed.worker import WorkerRank
from roll.models.families.shape import known_model_shape

if TYPE_CHECKING:
    from roll.configs.roles import EngineRoleConfig
    from roll.configs.run_options import WeightUpdateOptions


class StaleWeightsError(RuntimeError):
    """A request reached an engine whose weights are of no version: partly updated, or never sent."""


class WeightReceiver:
    """The part of an engine in weight updates, and whether it may serve.

    The weights are stale from `begin_update` to `commit_update`: requests wait during the update, and are refused once
    it was aborted. An engine that started on dummy weights has stale weights from the start.
    """

    def __init__(
        self, rank: WorkerRank, config: EngineRoleConfig, options: WeightUpdateOptions, engine: Callable[[], Engine]
    ) -> None:
        """`engine` gives the running engine, and raises an EngineNotRunningError where there is none."""
        self.rank, self._config, self._options, self._engine = rank, config, options, engine
        self.stale_weights = ""
        """Why the engine must not serve; empty when its weights are a complete version."""
        self.version = 0
        """Version of the weights; tokens sampled from now on carry it."""
        self._updated = asyncio.Event()
        self._updated.set()
        self._session_open = False
        self._update_begun = False
        self._joined: set[str] = set()
        self._parameters: set[str] = set()
        self._places: dict[str, Place] = {}

    def reset(self) -> None:
        """Resets the state of an engine that died; the next one does not serve, and is in no group or update."""
        self.stale_weights = "it was restarted and has received no weights yet"
        self._session_open = self._update_begun = False
        self._joined.clear()
        self._parameters.clear()
        self._updated.set()

    @property
    def has_version(self) -> bool:
        """Whether the weights are a complete version that is not being replaced."""
        return self._updated.is_set() and not self.stale_weights

    async def wait_until_serving(self) -> None:
        """Waits for the end of a weight update in progress.

        Raises:
            StaleWeightsError: the engine has no complete version of the weights, and no update is in progress.
        """
        await self._updated.wait()
        if self.stale_weights:
            raise StaleWeightsError(f"{self.rank.name} is not serving: {self.stale_weights}")

    async def join_broadcast_groups(self, groups: list[BroadcastGroup], position: int) -> None:
        """Joins the broadcast group of every pipeline stage, as its engine number `position`.

        The ranks of the engines follow the source in the order of their positions.
        """
        from sglang.srt.managers.io_struct import InitWeightsUpdateGroupReqInput

        for group in groups:
            message = InitWeightsUpdateGroupReqInput(
                master_address=group.address,
                master_port=group.port,
                rank_offset=1 + position * self._config.num_gpus_per_worker,
                world_size=group.world_size,
                group_name=group.name,
                backend=group.backend,
            )
            what = f"join group {group.name} at {group.address}:{group.port}"
            await self._control("init_weights_update_group", message, what)
            self._joined.add(group.name)

    async def leave_broadcast_groups(self, groups: list[BroadcastGroup] | None = None) -> None:
        """Leaves those of these groups that the engine has joined, or all."""
        from sglang.srt.managers.io_struct import DestroyWeightsUpdateGroupReqInput

        names = self._joined if groups is None else self._joined & {group.name for group in groups}
        for name in sorted(names):
            self._joined.remove(name)
            message = DestroyWeightsUpdateGroupReqInput(group_name=name)
            await self._control("destroy_weights_update_group", message, f"leave group {name}")

    async def begin_update(self, version: int) -> None:
        """Opens an update session; closes one that a failed update left open. The weights are stale from here on."""
        self.stale_weights = f"weight update v{version} incomplete"
        self._update_begun = True
        self._updated.clear()
        await self._open_session()

    async def _open_session(self) -> None:
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        if self._session_open:
            with contextlib.suppress(
                EngineError
            ):  # an earlier attempt to close it may have succeeded after its deadline
                await self._close_session()
            self._session_open = False
        if not self._parameters:
            self._places = engine_places(known_model_shape(self._engine().arguments["model_path"]))
            self._parameters = {name.rpartition("@")[0] for name in await self.checksums()}
        await self._control("begin_weight_update", BeginWeightUpdateReqInput(), "begin the update")
        self._session_open = True

    async def _close_session(self) -> None:
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        await self._control("end_weight_update", EndWeightUpdateReqInput(), "end the update")
        self._session_open = False

    async def receive_broadcast(self, groups: list[BroadcastGroup], stages: list[list[Bucket]]) -> None:
        """Receives the buckets of every stage from that stage's source rank, one stage after the other.

        Raises:
            EngineError: a tensor has another shape than the engine's, or a name the engine does not know. The bucket
                was received by then, so that the sender does not hang.
        """
        for group, buckets in zip(groups, stages, strict=True):
            for bucket in buckets:
                await self._receive_bucket(group.name, bucket.specs)

    async def _receive_bucket(self, group_name: str, specs: tuple[WeightSpec, ...]) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqInput

        message = UpdateWeightsFromDistributedReqInput(
            names=[spec.name for spec in specs],
            dtypes=[spec.dtype for spec in specs],
            shapes=[list(spec.shape) for spec in specs],
            group_name=group_name,
            load_format="flattened_bucket",
            flush_cache=False,
            abort_all_requests=False,
        )
        names = specs[0].name if len(specs) == 1 else f"{specs[0].name} to {specs[-1].name}"
        await self._control("update_weights_from_distributed", message, f"receive {len(specs)} tensors ({names})")
        unknown = [name for name in message.names if not self._has(name)]
        if unknown:  # SGLang drops these with a line in its log
            raise EngineError(f"{self._engine().name}: the model has no parameter for {', '.join(unknown)}")

    def _has(self, name: str) -> bool:
        """Whether the engine has a parameter for a tensor, by its HF name."""
        return name in self._places and self._places[name].parameter in self._parameters

    async def receive_shared(self, handles: Sequence[Sequence[bytes]]) -> None:
        """Loads one bucket from shared memory of this node; `handles` has one for each rank of each engine.

        SGLang exits on a tensor of the wrong shape and drops one of an unknown name; `checksums` reveals the second.
        On a CPU it reads handles by a patch: `roll.platforms.cpu.sglang_platform._accept_shared_memory_handles`.
        """
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        message = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[*handles[self.rank.rank]], flush_cache=False, abort_all_requests=False
        )
        await self._control("update_weights_from_tensor", message, "load shared tensors")

    async def receive_delta(self, *stages: list[RankDelta]) -> None:
        """Writes deltas into the parameters; each of `stages` has one for each rank of the engine.

        Raises:
            EngineError: a delta is incomplete, or has a position outside of its parameter; nothing of it is written.
        """
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        for ranks in stages:
            try:
                for delta in ranks:
                    delta.check()
            except DeltaError as error:
                raise EngineError(f"{self._engine().name}: {error}") from None
            message = UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=[pickle.dumps([delta.named_tensor()]) for delta in ranks],
                load_format=LOADER,
                flush_cache=False,
                abort_all_requests=False,
            )
            await self._control("update_weights_from_tensor", message, "load a delta")

    async def end_update(self, version: int) -> None:
        """Closes the session and names the weights `version`: tokens sampled from now on carry it."""
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        await self._close_session()
        message = UpdateWeightVersionReqInput(new_version=str(version), abort_all_requests=False)
        answer = self._engine().manager.update_weight_version(message)
        await self._engine().wait_for(answer, f"set weight version {version}", self._options.sync_timeout_s)
        self.version = version

    async def checksums(self) -> dict[str, str]:
        """Checksum of every parameter the engine computes with, on each of its ranks, as `name@rank`.

        The names are SGLang's, which fuses query, key and value, and gate and up; `EngineChecksums` computes the same
        from tensors under HF names.
        """
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        answer = self._engine().manager.check_weights(CheckWeightsReqInput(action="checksum"))
        success, reason, ranks, _ = await self._engine().wait_for(answer, "checksums", self._options.sync_timeout_s)
        if not success:
            raise EngineError(f"{self._engine().name}: checksums: {reason}")
        return {
            f"{name}@{rank['parallelism_info'][0]['tp_rank']}": value
            for rank in ranks
            for name, value in rank["checksums"].items()
        }

    async def commit_update(self) -> None:
        """Marks the weights as a complete version: the engine serves again.

        Raises:
            EngineError: the engine has received none, for it was restarted since the update began.
        """
        if not self._update_begun:
            raise EngineError(f"{self.rank.name}: it was restarted within the weight update")
        self.stale_weights, self._update_begun = "", False
        self._updated.set()

    def serve(self, version: int) -> None:
        """The engine serves this version from now on, which needed no session."""
        self.version, self.stale_weights = version, ""

    async def abort_update(self) -> None:
        """Ends an update that will not be retried: an engine with stale weights refuses waiting requests."""
        self._update_begun = False
        self._updated.set()

    async def _control(self, method: str, message: object, what: str) -> None:
        answer: Any = getattr(self._engine().manager, method)(message, None)
        success, reason = await self._engine().wait_for(answer, what, self._options.sync_timeout_s)
        if not success:
            raise EngineError(f"{self._engine().name}: {what}: {reason}")
