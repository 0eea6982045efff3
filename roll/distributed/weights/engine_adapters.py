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


ONLY = "policy"
"""In SGLang's names of the adapters of a run with one policy."""


@dataclass
class LoadedAdapter:
    """An adapter in the engine.

    Attributes:
        policy: that it is of; empty for the only one.
        version: of the weights that it is.
        name: SGLang's name of it, in loads and unloads.
        lora_id: SGLang's id of it, in requests.
        checksums: of what it was loaded from.
        requests: names of requests that were sent with it and may not have ended.
    """

    policy: str
    version: int
    name: str
    lora_id: str
    checksums: list[str]
    requests: set[str] = field(default_factory=set)


class EngineAdapters:
    """Loads adapters of rising versions into an engine, from its start to its end.

    Attributes:
        newest: of each policy, the one that its new requests get.
    """

    def __init__(self, engine: Engine, ratio: float, timeout_s: float) -> None:
        """Versions up to ceil(`ratio`) below the newest stay loaded; SGLang answers within `timeout_s`."""
        self._engine, self._kept, self._timeout_s = engine, versions_ahead(ratio), timeout_s
        self._loaded: dict[tuple[str, int], LoadedAdapter] = {}
        self._one_change = asyncio.Lock()
        self._numbers = itertools.count()
        """For names: SGLang refuses a second adapter of a name, also of one that it has loaded too late."""
        self.newest: dict[str, LoadedAdapter] = {}

    @property
    def names(self) -> list[str]:
        return [adapter.name for _, adapter in sorted(self._loaded.items())]

    def use(self, adapter: LoadedAdapter, request: str) -> str:
        """SGLang's id of the adapter, for a request that is sent now.

        Raises:
            ValueError: it is not loaded any more.
        """
        if self._loaded.get((adapter.policy, adapter.version)) is not adapter:
            raise ValueError(f"the adapter {adapter.name} is not loaded; loaded are {', '.join(self.names)}")
        adapter.requests.add(request)
        return adapter.lora_id

    async def load(self, policy: str, version: int, stages: Sequence[StageAdapters]) -> LoadedAdapter:
        """Loads a version of a policy, which no request gets before it is in `newest`; nothing where it is loaded.

        Raises:
            EngineError: the bytes differ from those sent, SGLang refuses them, or has others of this version.
        """
        async with self._one_change:
            checksums = [sha256(stage.data).hexdigest() for stage in stages]
            name = f"{policy or ONLY}@{version}.{next(self._numbers)}"
            if checksums != [stage.checksum for stage in stages]:
                raise EngineError(f"{self._engine.name}: the adapter {name} arrived damaged")
            known = self._loaded.get((policy, version))
            if known is not None and known.checksums != checksums:
                raise EngineError(f"{self._engine.name}: has another adapter {known.name}")
            if known is None:
                known = LoadedAdapter(policy, version, name, await self._load(name, stages), checksums)
                self._loaded[policy, version] = known
            return known

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
        newest = max((adapter.version for adapter in self.newest.values()), default=0)
        await self.unload(lambda adapter: adapter.version < newest - self._kept)

    async def unload(self, chosen: Callable[[LoadedAdapter], bool]) -> None:
        """Unloads the chosen adapters, unless requests compute with them.

        Raises:
            EngineError: SGLang refuses it.
        """
        async with self._one_change:
            states = self._engine.manager.rid_to_state
            for key, adapter in sorted(self._loaded.items()):
                adapter.requests &= states.keys()
                if not adapter.requests and chosen(adapter):
                    del self._loaded[key]
                    await self._unload(adapter.name)

    async def _unload(self, name: str) -> None:
        from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

        message = UnloadLoRAAdapterReqInput(lora_name=name)
        answer = await self._answer("unload", name, self._engine.manager.unload_lora_adapter(message))
        if not answer.success:
            raise EngineError(f"{self._engine.name}: unload {name}: {answer.error_message}")

    async def _answer(self, what: str, name: str, answer: Any) -> Any:
        return await self._engine.wait_for(answer, f"{what} {name}", self._timeout_s)
