"""The adapters of one engine: which are loaded, which request computes with which, and when one is unloaded.

SGLang counts the requests of an adapter where its own server starts them. Ours are sent without it, so they are counted
here; SGLang would unload an adapter that is in use, and its scheduler would end with the next step of such a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from safetensors.torch import load

from roll.configs.asynchronous import versions_ahead
from roll.distributed.infer.sglang_engine import Engine, EngineError

if TYPE_CHECKING:
    from roll.distributed.train.weight_sender import StageAdapters


@dataclass
class LoadedAdapter:
    """An adapter in the engine.

    Attributes:
        version: of the weights that it is.
        name: SGLang's name of it, in loads and unloads.
        lora_id: SGLang's id of it, in requests.
        checksums: of what it was loaded from.
        requests: names of requests that were sent with it and may not have ended.
    """

    version: int
    name: str
    lora_id: str
    checksums: list[str]
    requests: set[str] = field(default_factory=set)


class EngineAdapters:
    """Loads adapters of rising versions into an engine, from its start to its end.

    Attributes:
        newest: the one that new requests get; None before the first.
    """

    def __init__(self, engine: Engine, ratio: float, timeout_s: float) -> None:
        """Versions up to ceil(`ratio`) below the newest stay loaded; SGLang answers within `timeout_s`."""
        self._engine, self._kept, self._timeout_s = engine, versions_ahead(ratio), timeout_s
        self._loaded: dict[int, LoadedAdapter] = {}
        self._one_change = asyncio.Lock()
        self._numbers = itertools.count()
        """For names: SGLang refuses a second adapter of a name, also of one that it has loaded too late."""
        self.newest: LoadedAdapter | None = None

    @property
    def versions(self) -> list[int]:
        return sorted(self._loaded)

    def use(self, adapter: LoadedAdapter, request: str) -> str:
        """SGLang's id of the adapter, for a request that is sent now.

        Raises:
            ValueError: it is not loaded any more.
        """
        if self._loaded.get(adapter.version) is not adapter:
            raise ValueError(f"the adapter of version {adapter.version} is not loaded; loaded are {self.versions}")
        adapter.requests.add(request)
        return adapter.lora_id

    async def load(self, version: int, stages: Sequence[StageAdapters]) -> LoadedAdapter:
        """Loads a version, which no request gets before it is `newest`; does nothing where it is loaded.

        Raises:
            EngineError: the bytes differ from those sent, SGLang refuses them, or has others of this version.
        """
        async with self._one_change:
            checksums = [sha256(stage.data).hexdigest() for stage in stages]
            if checksums != [stage.checksum for stage in stages]:
                raise EngineError(f"{self._engine.name}: the adapter of version {version} arrived damaged")
            if version not in self._loaded:
                name = f"policy@{version}.{next(self._numbers)}"
                self._loaded[version] = LoadedAdapter(version, name, await self._load(name, stages), checksums)
            elif self._loaded[version].checksums != checksums:
                raise EngineError(f"{self._engine.name}: has another adapter of version {version}")
            return self._loaded[version]

    async def _load(self, name: str, stages: Sequence[StageAdapters]) -> str:
        from sglang.srt.managers.io_struct import LoadLoRAAdapterFromTensorsReqInput
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        engine = self._engine
        tensors = [item for stage in stages for item in load(stage.data).items()]
        bucket = FlattenedTensorBucket(named_tensors=tensors)
        content = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        message = LoadLoRAAdapterFromTensorsReqInput(
            lora_name=name,
            config_dict=stages[0].config,
            serialized_named_tensors=[pickle.dumps(content)] * engine.arguments["tp_size"],
            load_format="flattened_bucket",
        )
        answer = await self._answer("load", name, engine.manager.load_lora_adapter_from_tensors(message))
        if not answer.success:
            with contextlib.suppress(EngineError):  # a rank may have loaded it
                await self._unload(name)
            raise EngineError(f"{engine.name}: load {name}: {answer.error_message}")
        return str(engine.manager.lora_registry.get_all_adapters()[name].lora_id)

    async def unload_old(self) -> None:
        """Unloads the versions that are too old for a request of this run, unless one computes with them."""
        newest = self.newest
        if newest is not None:
            await self.unload(lambda version: version < newest.version - self._kept)

    async def unload(self, chosen: Callable[[int], bool]) -> None:
        """Unloads the chosen versions, unless requests compute with them.

        Raises:
            EngineError: SGLang refuses it.
        """
        async with self._one_change:
            states = self._engine.manager.rid_to_state
            for version, adapter in sorted(self._loaded.items()):
                adapter.requests &= states.keys()
                if not adapter.requests and chosen(version):
                    del self._loaded[version]
                    await self._unload(adapter.name)

    async def _unload(self, name: str) -> None:
        from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

        message = UnloadLoRAAdapterReqInput(lora_name=name)
        answer = await self._answer("unload", name, self._engine.manager.unload_lora_adapter(message))
        if not answer.success:
            raise EngineError(f"{self._engine.name}: unload {name}: {answer.error_message}")

    async def _answer(self, what: str, name: str, answer: Any) -> Any:
        return await self._engine.wait_for(answer, f"{what} {name}", self._timeout_s)
