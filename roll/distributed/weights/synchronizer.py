"""Weight updates, driven from here: `WeightSynchronizer.update_weights` is one transaction over all engines that run.

When an engine dies within an update, the step of the transaction that it takes part in fails, and so does the attempt;
this attempt does not count against `max_sync_retries`. `_recover_from_failed_attempt` has the `EngineMonitor` restart
the engines whose processes are dead, disconnects the transport, which frees the other engines, and restarts the engines
that still do not answer. The next attempt begins the transaction again with the engines that run then; where there is
none, it waits until one has been restarted. An engine whose restart takes longer gets the weights in the next update,
or earlier from `while_idle`, while the trainer is idle.

The weights are lost with a training rank that died, and out of reach where one does not answer until the attempts are
used up: the update ends with the error of that rank, so that the run starts again with new ones.

The training ranks' side of each call is in `weight_sender.py`, the engines' side in `weight_receiver.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from roll.base.errors import RunError
from roll.base.events import EventLog
from roll.distributed.calls.remote_call import ALL
from roll.distributed.calls.remote_errors import PROCESS_DIED, ClusterError, deadline_scope, one_line
from roll.distributed.infer.engine_monitor import EngineMonitor
from roll.distributed.infer.infer_worker import InferWorker
from roll.distributed.train.train_worker import TrainWorker
from roll.distributed.weights import broadcast, shared_memory  # noqa: F401  (register them)
from roll.distributed.weights.plan import check_stages, checksum_differences
from roll.distributed.weights.report import Transfer, UpdateReport
from roll.distributed.weights.transport import TRANSPORTS, Transport, on_cpu, shares_devices

if TYPE_CHECKING:
    from roll.configs.run_options import EngineOptions
    from roll.distributed.cluster import Cluster
    from roll.distributed.shared_devices import SharedDevices

T = TypeVar("T")

STEP_GRACE_S = 1.0
"""What a step gets beyond the deadline of its remote calls, so that they can report which rank did not answer."""
SHOWN_DIFFERENCES = 5
"""Tensors named in the message of a failed verification."""
MEGABYTE = 1 << 20


class WeightUpdateError(RuntimeError):
    """Every attempt of a weight update failed; once an update was begun, the engines stay paused and do not serve."""


class VerificationError(RuntimeError):
    """The weights of `engines` differ from the weights that were sent."""

    def __init__(self, message: str, engines: Sequence[int]) -> None:
        super().__init__(message)
        self.engines = engines


class WeightSynchronizer:
    """Transfers the weights of a training cluster to the engines of an inference cluster.

    An update takes effect completely or not at all. From `begin` to `commit` the engines' weights are stale, and only a
    complete attempt makes them serve again: after the last failed attempt they stay paused and refuse requests.

    Attributes:
        stale_weights: whether the engines hold weights of no version.
    """

    def __init__(
        self,
        train: Cluster[TrainWorker],
        infer: Cluster[InferWorker],
        config: EngineOptions,
        transport: type[Transport] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        devices: SharedDevices | None = None,
        monitor: EngineMonitor | None = None,
        fatal_errors: Sequence[Callable[[], Coroutine[Any, Any, None]]] = (),
    ) -> None:
        """Connects nothing yet.

        Each of `fatal_errors` waits until a part of the run has failed that cannot be restarted, and raises its error.
        `monitor` is by default one that restarts dead engines when an attempt fails.
        """
        self._fatal_errors = fatal_errors
        self._devices = devices
        self._monitor = monitor or EngineMonitor(infer, config, EventLog(config.output_dir))
        self._version: int | None = None
        self._train, self._infer, self._config, self._sleep = train, infer, config, sleep
        self._transport = (transport or choose_transport(train, infer, config.weight_transport))(
            train, infer, config.sync_timeout_s, config.model_update_buffer_size_mb * MEGABYTE
        )
        self._to_verify = 1 if devices is None else 2
        """Updates still to verify with `verify_weights: first`: the first one, and with shared devices also the second,
        which is the first to engines that have discarded their weights."""
        self._complete = set[int]()
        """Engines that have the frozen weights, which the next update leaves out."""
        self._frozen_parameters = frozenset[str]()
        self._frozen_checksums: dict[str, str] = {}
        self._failures = 0
        self._unanswered = 0
        """Updates of restarted engines, one after the other, in which a training rank did not answer."""
        self.stale_weights = False

    @property
    def verifies_all(self) -> bool:
        """Whether every update is verified."""
        return self._config.verify_weights == "always"

    async def setup(self) -> None:
        """Collects what every pipeline stage sends, and checks it.

        Each attempt of an update connects the transport itself, so that it can recover from the death of an engine.

        Raises:
            PlanError: two stages send the same tensor, or none sends one of the model's.
            ClusterError: a training rank failed.
        """
        described = await self._train.call(ALL, TrainWorker.describe_weights)
        sources = sorted((source for source in described if source is not None), key=lambda source: source.stage)
        check_stages([source.specs for source in sources], sources[0].names if sources else None)
        self._frozen_parameters = frozenset[str]().union(*(source.frozen_parameters for source in sources))
        self._transport.sources = sources

    async def update_weights(self, version: int) -> UpdateReport:
        """Transfers the weights of `version` to all engines that run, in at most `1 + max_sync_retries` attempts.

        The first update is always verified, and so is one that restarted engines get; later ones as `verify_weights`
        configures. An attempt that failed because an engine died is not counted. Where no engine runs, it waits until
        one is restarted.

        Raises:
            WeightUpdateError: every attempt failed; the message contains each cause.
            ClusterError: a training rank died, or did not answer in the last attempt.
            EnginesLostError: no engine runs, and none is restarted.
        """
        start = time.perf_counter()
        causes: list[str] = []
        failed = 0
        last: Exception
        while True:
            engines = await self._running_engines()
            restarted = not {*engines}.isdisjoint(self._monitor.started)
            verify = self.verifies_all or restarted or self._to_verify > 0
            try:
                with self._monitor.updating() as died:
                    pause_seconds, sent = await self._attempt(version, verify, engines)
            except Exception as error:
                if self._trainer_died(error):
                    raise
                self._failures += 1
                causes.append(f"attempt {len(causes) + 1}: {type(error).__name__}: {error}")
                message = f"to version {version}: attempt {len(causes)} failed: {one_line(error)}"
                self._monitor.events.record("weight update", "attempt failed", message)
                last = await self._recover_from_failed_attempt(error, causes)
                if died.isdisjoint(engines):
                    failed += 1
                if failed > self._config.max_sync_retries and not await self._leave_out_unverified(last, engines):
                    break
                await self._sleep(self._config.sync_retry_delay_s)
            else:
                self._to_verify -= 1
                self._version = version
                await self._monitor.updated([engine for engine in engines if engine not in died])
                return UpdateReport(
                    version,
                    time.perf_counter() - start,
                    pause_seconds,
                    sent.bytes,
                    sent.seconds,
                    verify,
                    len(causes) + 1,
                    self._failures,
                    self._monitor.metrics() | sent.metrics,
                )
        abort = partial(self._infer.call, self._transport.engines, InferWorker.abort_update)
        await self._clean_up("abort", abort, causes)
        if self._trainer_failed(last):
            raise last from WeightUpdateError("\n".join(causes))
        state = "the engines are paused and not serving" if self.stale_weights else "no weights were sent"
        raise WeightUpdateError(
            f"weight update to version {version} failed in {len(causes)} attempt(s) (max_sync_retries); {state}\n"
            + "\n".join(causes)
        ) from last

    async def while_idle(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, during which the trainer is idle; meanwhile restarted engines get the weights.

        Raises:
            EnginesLostError: no engine of a role runs, and none is restarted.
            ClusterError: a training rank died, or did not answer a weight update.
        """
        return await self.unless_failed(self._with_updates(work))

    async def unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, or the error of a part of the run that fails meanwhile and cannot be restarted."""
        task, failures = asyncio.ensure_future(work), [asyncio.ensure_future(wait()) for wait in self._fatal_errors]
        try:
            await asyncio.wait([task, *failures], return_when=asyncio.FIRST_COMPLETED)
            for failure in failures:
                if failure.done():
                    failure.result()
            return await task
        finally:
            for each in (task, *failures):
                each.cancel()
            await asyncio.gather(task, *failures, return_exceptions=True)

    async def _with_updates(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; restarted engines get the weights meanwhile."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                started = asyncio.ensure_future(self._monitor.wait_for_started())
                try:
                    await asyncio.wait([task, started], return_when=asyncio.FIRST_COMPLETED)
                    if task.done():
                        break
                    await started
                finally:
                    started.cancel()
                await self.update_restarted()
            return await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def wait_for_restarted(self) -> None:
        """Waits until there is a restarted engine that has no weights yet."""
        await self._monitor.wait_for_started()

    def health(self) -> dict[str, str]:
        return self._monitor.health()

    async def update_restarted(self) -> None:
        """Gives restarted engines the weights that the others have; one that fails is restarted again."""
        assert self._version is not None, "the engines got their first weights from update_weights"
        engines = self._monitor.started
        try:
            with self._monitor.updating() as died:
                await self._attempt(self._version, True, engines, alone=True)
        except Exception as error:
            if self._trainer_died(error):
                raise
            self._failures += 1
            causes = [f"{type(error).__name__}: {error}"]
            message = f"of restarted engines failed: {one_line(error)}"
            self._monitor.events.record("weight update", "attempt failed", message)
            last = await self._recover_from_failed_attempt(error, causes)
            if self._trainer_failed(last):
                self._unanswered += 1
                if self._unanswered > self._config.max_sync_retries:
                    raise last from WeightUpdateError(causes[0])
                await self._sleep(self._config.sync_retry_delay_s)  # the engines still wait for weights
            elif died.isdisjoint(engines):
                cause = f"it did not get the current weights: {one_line(error)}"
                for engine in engines:
                    await self._monitor.failed(engine, cause)
        else:
            self._unanswered = 0
            await self._monitor.updated([engine for engine in engines if engine not in died])

    async def _running_engines(self) -> list[int]:
        await self.unless_failed(self._monitor.wait_for_engine())
        return sorted([*self._monitor.serving, *self._monitor.started])

    def _trainer_died(self, error: Exception) -> bool:
        """Whether the process of a training rank is dead, which no further attempt changes."""
        return isinstance(error, ClusterError) and self._trainer_failed(error) and error.kind == PROCESS_DIED

    def _trainer_failed(self, error: Exception) -> bool:
        train, infer = self._train.role, self._infer.role
        return isinstance(error, ClusterError) and error.process_failed and error.role == train != infer

    async def _recover_from_failed_attempt(self, error: Exception, causes: list[str]) -> Exception:
        """Restarts dead engines, leaves them out, and disconnects the transport.

        An engine may be blocked by a transfer until the transport is disconnected, so only then it has to answer.

        Returns:
            The error of the attempt, or that of a training rank that did not answer while the transport was
            disconnected.

        Raises:
            ClusterError: a training rank died.
        """
        before = {*self._transport.engines}
        await self._monitor.restart_dead()
        self._transport.engines = self._alive(before)
        then = await self._clean_up("disconnect", self._transport.disconnect, causes)
        if then is not None and self._trainer_died(then):
            raise then
        if then is not None and self._trainer_failed(then) and not self._trainer_failed(error):
            error = then
        await self._monitor.restart_unresponsive(min(self._config.sync_timeout_s, self._config.health_check_timeout_s))
        self._transport.engines = self._alive(before)
        return error

    async def _leave_out_unverified(self, error: Exception, engines: list[int]) -> bool:
        """Restarts the engines whose weights differ in the last attempt; whether others remain that have them right."""
        if not isinstance(error, VerificationError) or not {*error.engines} < {*engines}:
            return False
        for engine in error.engines:
            await self._monitor.failed(engine, one_line(error))
        return True

    def _alive(self, engines: set[int]) -> list[int]:
        return sorted(engines & {*self._monitor.serving, *self._monitor.started})

    async def _attempt(
        self, version: int, verify: bool, engines: list[int], alone: bool = False
    ) -> tuple[float, Transfer]:
        """One transaction, which ends by `sync_timeout_s`; with `alone` other engines serve, with these weights."""
        infer, transport = self._infer, self._transport
        transport.engines = engines
        known, self._complete = self._complete - {*self._monitor.started}, set()
        transport.whole = self._devices is not None or not known.issuperset(engines)
        if self._devices is not None:
            self.stale_weights = True  # engines discard their weights when the trainer gets their devices
            await self._devices.to_update()  # pauses the engines, and has the deadlines of its own calls
        deadline = time.monotonic() + self._config.sync_timeout_s
        step = partial(self._step, deadline)
        with deadline_scope(deadline):
            if not {*engines}.isdisjoint(self._monitor.started):  # they are in none of the groups that there were
                await step("disconnect", transport.disconnect())
            await step("connect", transport.connect())
            if self._devices is None:
                await step("pause", infer.call(engines, InferWorker.pause, self._config.in_flight_policy))
            self.stale_weights = self.stale_weights or not alone
            await step("begin", infer.call(engines, InferWorker.begin_update, version))
            paused = time.perf_counter()  # an engine answers once the step it was computing is done
            sent = await step("transfer", self._transfer(verify))
            await step("end", infer.call(engines, InferWorker.end_update, version))
            if self._config.in_flight_policy != "in_place":  # which keeps the cache: its entries belong to versions
                await step("flush", infer.call(engines, InferWorker.flush_cache))
            if verify:
                await step("verify", self._verify(self._expected(sent.checksums), engines))
            await step("commit", infer.call(engines, InferWorker.commit_update))
            if self._devices is not None:
                await step("hand over devices", self._devices.to_engines())
            self.stale_weights = self.stale_weights and alone
            await step("resume", infer.call(engines, InferWorker.resume))
        self._complete = known.union(engines)
        return time.perf_counter() - paused, sent

    async def _transfer(self, verify: bool) -> Transfer:
        start = time.perf_counter()
        sent = await self._transport.transfer(verify)
        return replace(sent, seconds=time.perf_counter() - start)

    def _expected(self, sent: dict[str, str]) -> dict[str, str]:
        """The checksums of all parameters of an engine; those of frozen weights are from the update that sent them."""
        if not self._transport.whole:
            return self._frozen_checksums | sent
        self._frozen_checksums = {name: value for name, value in sent.items() if self._is_frozen(name)}
        return sent

    def _is_frozen(self, name: str) -> bool:
        return name.rpartition("@")[0] in self._frozen_parameters

    async def _verify(self, checksums: dict[str, str], engines: list[int]) -> None:
        held = await self._infer.call(engines, InferWorker.checksums)
        wrong: dict[int, str] = {}
        for engine, found in zip(engines, held, strict=True):
            differences = checksum_differences(checksums, found)
            if differences:
                count = len(differences) - SHOWN_DIFFERENCES
                shown = "; ".join(differences[:SHOWN_DIFFERENCES])
                wrong[engine] = f"engine {engine}: {shown}" + (f"; and {count} more" if count > 0 else "")
        if wrong:
            raise VerificationError("; ".join(wrong.values()), list(wrong))

    async def _step(self, deadline: float, name: str, answer: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic()) + STEP_GRACE_S):  # unlike wait_for of
                return await answer  # Python 3.11, it never swallows a cancellation
        except TimeoutError as error:
            timeout_s = self._config.sync_timeout_s
            raise WeightUpdateError(f"{name} was not done {timeout_s:g} s (sync_timeout_s) after the start") from error

    async def _clean_up(self, name: str, call: Callable[[], Awaitable[object]], causes: list[str]) -> Exception | None:
        """Runs a step after a failure; its own failure is added to the last cause, and returned."""
        deadline = time.monotonic() + self._config.sync_timeout_s
        try:
            with deadline_scope(deadline):
                await self._step(deadline, name, call())
        except Exception as error:
            causes[-1] += f"\nand then {name}: {type(error).__name__}: {error}"
            return error
        return None


def choose_transport(train: Cluster[TrainWorker], infer: Cluster[InferWorker], name: str = "auto") -> type[Transport]:
    """The transport of this name; `auto`: shared memory within one node, where both own one GPU or any CPU slots.

    Raises:
        RunError: shared memory is named where it cannot be used.
    """
    shared = len(train.nodes | infer.nodes) == 1 and (shares_devices(train, infer) or on_cpu(train))
    if name == "shared_memory" and not shared:
        raise RunError("weight_transport: shared_memory needs one node and shared devices; set auto or broadcast")
    if name == "auto":
        name = "shared_memory" if shared else "broadcast"
    return TRANSPORTS[name]
