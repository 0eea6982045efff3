"""`roll.open`: a run whose loop the caller writes, in a notebook too."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import logging
import threading
from collections.abc import Awaitable, Callable, Generator, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from transformers import PreTrainedTokenizerBase

from roll.api.checked import checked_config
from roll.api.step_learner import StepLearner
from roll.api.user_samples import UserSamples
from roll.api.verbs import IN_LOSS, Verbs
from roll.base.errors import ConfigError, Problem, RunError
from roll.base.terminal import configure_logging, log_to_console
from roll.configs.pipeline import RLVRConfig, RLVREngineRewardConfig
from roll.datasets.templates import PromptEncoder, template_variables
from roll.distributed.infer.infer_worker import EngineClient
from roll.pipeline.health import lock_folders
from roll.pipeline.kinds.rl import RLPipeline, make_pool
from roll.pipeline.kinds.rlvr import RLVRPipeline, make_sampler
from roll.pipeline.kinds.scoring_models import ScoringModels
from roll.pipeline.launch import run_with_restarts
from roll.pipeline.session import Session
from roll.plan.check_inputs import check_inputs
from roll.plan.hardware import prepare_run
from roll.plan.inputs import fetch_inputs, look_up
from roll.rollout.source import SampleSource
from roll.trackers import TrackerGroup

P = ParamSpec("P")
T = TypeVar("T")

CLOSE_TIMEOUT_S = 120.0
"""Longest wait for the processes of a run to end."""

_open: OpenRun | None = None
"""The run that is open in this process; Ray is shared by all of a process."""


class OpenPipeline(RLVRPipeline):
    """RLVR whose prompts, rewards and steps are the caller's; it reads data where the configuration names some."""

    loop, learner = Verbs, StepLearner
    opened: Callable[[Verbs], None]

    async def prepare(self) -> None:
        """Reads the tokenizer, and prompts where there is data."""
        self._prompts = {"train": [], "val": []}
        if self._config.actor_train.data_args.file_name:
            await super().prepare()
        else:
            await RLPipeline.prepare(self)

    def _start_rollouter(self, session: Session) -> SampleSource:
        config = self._config
        args = config.actor_train.data_args
        variables = template_variables(args.template_kwargs, config.template_time)
        scorer, prompts = self._scorer, self._prompts["train"]
        if scorer is not None:
            scorer.connect(ScoringModels.of(session, config))
            scorer.stop_token_ids = frozenset(self._sampling["train"].stop_token_ids)
        return UserSamples(
            make_pool(config, EngineClient(session.infer_clusters["actor_infer"].client())),
            self._tokenizer,
            PromptEncoder(self._tokenizer, args.template, variables),
            self._sampling["train"],
            config.seed,
            config.max_sequence_length,
            prompts,
            make_sampler(config, prompts) if prompts else None,
            scorer,
        )

    async def build(self, session: Session, trackers: TrackerGroup) -> Verbs:
        """The loop that does what it is asked to."""
        loop = await super().build(session, trackers)
        assert isinstance(loop, Verbs)
        loop.opened = self.opened
        return loop


class Pending(Generic[T]):
    """An answer that is still computed: wait for it with `result()`, or `await` it on any event loop."""

    def __init__(self, future: Future[T], why: Callable[[], str | None]) -> None:
        """`why` says why the run has ended, for a call that ended with it; None while it goes on."""
        self._future, self._why = future, why

    def result(self, timeout: float | None = None) -> T:
        """Waits for the answer, `timeout` seconds at most.

        Raises:
            TimeoutError: it takes longer; it is still computed.
            RunError: the run has ended before, or the call was wrong.
            CancelledError: `cancel` was called.
        """
        try:
            return self._future.result(timeout)
        except CancelledError:
            if (why := self._why()) is not None:
                raise RunError(why) from None
            raise

    def done(self) -> bool:
        return self._future.done()

    def cancel(self) -> bool:
        """Asks a call of `sample` to end; others end with what they have begun."""
        return self._future.cancel()

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    async def _wait(self) -> T:
        try:
            return await asyncio.wrap_future(self._future)
        except asyncio.CancelledError:
            if (why := await asyncio.to_thread(self._why)) is not None:
                raise RunError(why) from None
            raise


def blocking(method: Callable[Concatenate[Verbs, P], Awaitable[T]]) -> Callable[Concatenate[OpenRun, P], T]:
    """A coroutine of `Verbs` as a method of `OpenRun` that waits for its answer."""

    @functools.wraps(method)
    def verb(run: OpenRun, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return run.start(method, args, kwargs).result()

    return verb


def pending(method: Callable[Concatenate[Verbs, P], Awaitable[T]]) -> Callable[Concatenate[OpenRun, P], Pending[T]]:
    """A coroutine of `Verbs` as a method of `OpenRun` that returns at once."""

    @functools.wraps(method)
    def verb(run: OpenRun, /, *args: P.args, **kwargs: P.kwargs) -> Pending[T]:
        return run.start(method, args, kwargs)

    return verb


class OpenRun:
    """A run that is open: the verbs of `Verbs`, which wait for their answers; `<verb>_async` returns a `Pending`.

    Its event loop is in a thread of its own; it may be used from any thread. Leaving the block, or `close`, ends it.
    """

    next_prompts = blocking(Verbs.next_prompts)
    sample, sample_async = blocking(Verbs.sample), pending(Verbs.sample)
    score, score_async = blocking(Verbs.score), pending(Verbs.score)
    log_probs, log_probs_async = blocking(Verbs.log_probs), pending(Verbs.log_probs)
    advantages, advantages_async = blocking(Verbs.advantages), pending(Verbs.advantages)
    forward_backward, forward_backward_async = blocking(Verbs.forward_backward), pending(Verbs.forward_backward)
    optim_step, optim_step_async = blocking(Verbs.optim_step), pending(Verbs.optim_step)
    update_weights, update_weights_async = blocking(Verbs.update_weights), pending(Verbs.update_weights)
    save_state, save_state_async = blocking(Verbs.save_state), pending(Verbs.save_state)
    load_state, load_state_async = blocking(Verbs.load_state), pending(Verbs.load_state)
    save_hf, save_hf_async = blocking(Verbs.save_hf), pending(Verbs.save_hf)

    def __init__(self, config: str | Path | Mapping[str, Any], overrides: tuple[str, ...]) -> None:
        """Starts the processes and waits until the engines serve; see `open_run`."""
        self._opened: Future[Verbs] = Future()
        self._ended: BaseException | None = None
        self._ending = self._closing = False
        """Whether the run has ended, and whether it was asked to."""
        self._pipeline: OpenPipeline
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._main, args=(config, overrides), name="roll.open", daemon=True)
        self._thread.start()
        try:
            self._verbs = self._opened.result()
        except KeyboardInterrupt:
            self.close()
            raise
        atexit.register(self.close)

    def _main(self, config: str | Path | Mapping[str, Any], overrides: tuple[str, ...]) -> None:
        logger = logging.getLogger("roll")
        before = logger.handlers, logger.level
        try:
            with contextlib.ExitStack() as held:
                log_to_console()
                self.config = _prepared(config, overrides, held)
                asyncio.run(self._serve())
        except BaseException as error:
            self._ended = error
        finally:
            for handler in logger.handlers:
                handler.close()
            logger.handlers = before[0]
            logger.setLevel(before[1])
            if not self._opened.done():
                self._opened.set_exception(self._ended or RunError("the run was closed before it was open"))

    async def _serve(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        if self._closing:
            return

        def assemble(own: Any) -> Any:
            self._pipeline = OpenPipeline(own)
            self._pipeline.opened = self._opened.set_result
            return self._pipeline

        try:
            await run_with_restarts(self.config, assemble)
        finally:
            self._ending = True

    def start(
        self, method: Callable[..., Awaitable[T]], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Pending[T]:
        """Starts a coroutine of `Verbs` on the run's event loop.

        Raises:
            RunError: the run has ended, or a loss calls it.
        """
        if IN_LOSS.get():
            raise RunError("loss: calls the run, which waits for it; call the run before forward_backward")
        if (why := self.why_ended()) is not None:
            raise RunError(why)

        async def call() -> T:
            work = asyncio.ensure_future(method(self._verbs, *args, **kwargs))
            return await (work if method is Verbs.sample else asyncio.shield(work))

        return Pending(asyncio.run_coroutine_threadsafe(call(), self._loop), self.why_ended)

    def why_ended(self) -> str | None:
        """Why the run has ended, and what to do; None while it is open."""
        if self._thread.is_alive() and not self._ending:
            return None
        self._thread.join(CLOSE_TIMEOUT_S)
        return f"the run {'was closed' if self._ended is None else f'has ended: {self._ended}'}; open it again"

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """That of the model."""
        return self._pipeline._tokenizer

    @property
    def folder(self) -> Path:
        """Its `output_dir`."""
        return Path(self.config.output_dir)

    @property
    def version(self) -> int:
        """Of the weights that the engines have; 0 first."""
        return self._verbs.state.version

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        return self._verbs.state.step

    def close(self) -> None:
        """Ends the processes of the run; may be called twice."""
        atexit.unregister(self.close)
        self._closing = True
        if self._thread.is_alive() and hasattr(self, "_loop"):
            with contextlib.suppress(RuntimeError):  # the event loop has ended by itself
                self._loop.call_soon_threadsafe(self._end)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _end(self) -> None:
        if self._opened.done() and not self._opened.exception():
            self._opened.result().closed.set()
        elif self._task is not None:
            self._task.cancel()

    def __enter__(self) -> OpenRun:
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the run."""
        self.close()


def open_run(config: str | Path | Mapping[str, Any], *overrides: str) -> OpenRun:
    """Starts trainer and engines of a configuration, for a training loop of the caller (docs/python.md).

    Args:
        config: a YAML file of pipeline rlvr, or its keys; data and rewards may be left out.
        overrides: `a.b=value`, values in YAML.

    Raises:
        ConfigError: the configuration cannot be used; nothing was started.
        RunError: a run is open already, or it could not be started.
    """
    global _open
    if _open is not None and _open._thread.is_alive():
        raise RunError(f"roll.open: {_open.folder} is open in this process; close it first")
    _open = OpenRun(config, overrides)
    return _open


def _prepared(
    given: str | Path | Mapping[str, Any], overrides: tuple[str, ...], held: contextlib.ExitStack
) -> RLVRConfig:
    """The checked configuration of a run without validations and restarts; what `held` holds ends with the run."""
    config: Any = checked_config(given, overrides, needs_data=False).config
    _refuse(config)
    if problems := look_up(config).problems:
        raise ConfigError(problems, config.source.file)
    warnings = prepare_run(config)
    held.enter_context(lock_folders(config))
    configure_logging(Path(str(config.logging_dir)), config.source.file)
    fetch_inputs(config)
    inputs = check_inputs(config)
    if inputs.errors or inputs.missing:
        raise ConfigError(inputs.errors + inputs.missing)
    for remark in (*warnings, *inputs.warnings):
        logging.getLogger(__name__).warning("%s", remark)
    prepared: RLVRConfig = replace(config, eval_steps=0, max_restarts=0)
    return prepared


def _refuse(config: Any) -> None:
    """What the loop of a caller does itself, or cannot do.

    Raises:
        ConfigError: the configuration asks for it.
    """
    if not isinstance(config, RLVRConfig | RLVREngineRewardConfig):
        problem = Problem("pipeline", f"{config.pipeline} cannot be opened; use rlvr, or roll.train")
        raise ConfigError([problem], config.source.file)
    filtered = "cannot be used with roll.open; leave samples out of forward_backward instead"
    problems = [
        Problem(name, f"true {filtered}") for name in ("max_len_mask", "difficulty_mask") if getattr(config, name)
    ]
    if config.policies:
        problems.append(Problem("policies", "a loop of the caller trains one policy; leave it out, or use roll.train"))
    estimator = config.adv_estimator
    if config.uses_critic or config.uses_greedy_responses or config.uses_reward_parts:
        what = f"{estimator} needs more than the scores of responses; use another one, or your own advantages"
        problems.append(Problem("adv_estimator", what))
    if config.async_training.trainer_class or config.async_training.rollouter_class:
        what = "trainer_class and rollouter_class have no effect here; leave them out"
        problems.append(Problem("async_training", what))
    if problems:
        raise ConfigError(problems, config.source.file)
