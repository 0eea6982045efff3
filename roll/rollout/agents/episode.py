"""One episode: model and environment alternate until the environment ends it or the sequence is full."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from roll.configs.environments import first_messages, turn_message
from roll.configs.pipeline import role_seed
from roll.datasets.templates import ConversationEncoder
from roll.envs.base import Aggregation, episode_metrics, metrics_without_action
from roll.rollout.ledger import GENERATION_FAILED
from roll.rollout.types import (
    ROUTING_INCOMPLETE,
    GenerateRequest,
    GenerateResult,
    SamplingParams,
    Trajectory,
    missing_routing,
)
from roll.usercode.env_pool import EnvHandle, EnvPool, EnvSpec


class EpisodeFailed(RuntimeError):
    """An episode that cannot be learned from.

    Attributes:
        reason: drop reason of its group.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Task:
    """Settings shared by the episodes of one tag.

    Attributes:
        tag: name in `custom_envs`.
        spec: the environment.
        max_actions: after which the environment truncates the episode.
        max_tokens: of one response.
        system: text of the system message; empty for none.
        template: text of every message after it.
    """

    tag: str
    spec: EnvSpec
    max_actions: int
    max_tokens: int
    system: str
    template: str


class Episode:
    """One episode in one environment: `request` makes the next request, `add_response` takes its result."""

    grace_s = 0.0

    def __init__(
        self,
        name: str,
        task: Task,
        env_seed: int,
        seed: int,
        sampling: SamplingParams,
        sequence_length: int,
        version: int | None,
        chat: ConversationEncoder,
    ) -> None:
        """Sets up the episode; `begin` opens the environment, and resets it with `env_seed`.

        `name` is unique among running episodes: names of requests derive from it, and seeds of the responses from
        `seed`.
        """
        self.trajectory = Trajectory()
        self._name, self._task, self._env_seed, self._seed = name, task, env_seed, seed
        self._sampling, self._sequence_length, self._version, self._chat = sampling, sequence_length, version, chat
        self._env: EnvHandle | None = None
        self._rules: Mapping[str, Aggregation] = {}
        self._observation = ""

    async def begin(self, pool: EnvPool) -> None:
        """Opens the environment and adds the first message.

        Raises:
            EnvFailure: the environment could not be opened.
            EpisodeFailed: the first message alone fills the sequence.
        """
        self._env, reset = await pool.open(self._task.spec, self._env_seed)
        self._rules, self._observation = reset.metric_rules, reset.observation
        task, longest = self._task, self._longest
        messages = first_messages(
            task.system, task.template, reset.instruction, self._observation, task.max_actions, longest
        )
        self.trajectory.add_context(self._chat.start(messages))
        if len(self.trajectory.ids) >= self._sequence_length:
            raise EpisodeFailed(
                "prompt_too_long",
                f"{self._name}: the first message has {len(self.trajectory.ids)} tokens and leaves none of "
                f"sequence_length {self._sequence_length} for an answer",
            )

    def request(self) -> GenerateRequest | None:
        """The next request to the model; None when the episode is over."""
        trajectory, turn = self.trajectory, len(self.trajectory.turns)
        if trajectory.stop is not None:
            return None
        limit = min(self._longest, self._sequence_length - len(trajectory.ids))
        return GenerateRequest(
            request_id=f"{self._name}-{turn}",
            prompt_ids=list(trajectory.ids),
            sampling=replace(self._sampling, max_new_tokens=limit),
            seed=role_seed(self._seed, self._name, turn),
            version=self._version,
            routed=0 if trajectory.routing is None else len(trajectory.routing),
        )

    async def add_response(self, request: GenerateRequest, result: GenerateResult, text: str) -> None:
        """Adds a response and, unless the sequence is full, steps the environment with it.

        Raises:
            EpisodeFailed: the result is aborted or empty.
            EnvFailure: the environment failed.
        """
        assert self._env is not None, "begin comes first"
        if result.finish_reason == "abort":
            raise EpisodeFailed(GENERATION_FAILED, f"{request.request_id}: {result.error or 'generation was aborted'}")
        if not result.response_ids:
            raise EpisodeFailed(
                GENERATION_FAILED, f"{request.request_id}: the response is empty, without even a stop token"
            )
        if lack := missing_routing(request, result):
            raise EpisodeFailed(ROUTING_INCOMPLETE, lack)
        trajectory = self.trajectory
        turn = trajectory.add_response(request.prompt_ids, result, self._observation, text)
        if result.finish_reason == "length" and len(trajectory.ids) >= self._sequence_length:
            trajectory.stop = "sequence_length"  # the response was cut off, so it is not an action
            if len(trajectory.turns) == 1:
                trajectory.metrics = metrics_without_action(self._rules)
            return
        step = await self._env.step(text)
        turn.reward, turn.metrics = step.reward, dict(step.metrics)
        trajectory.metrics = episode_metrics(self._rules, [turn.metrics for turn in trajectory.turns])
        if step.terminated or step.truncated:
            trajectory.stop = "terminated" if step.terminated else "truncated"
            trajectory.outcome = step.observation
            return
        self._observation = step.observation
        turns, actions = len(trajectory.turns), self._task.max_actions
        text = turn_message(self._task.template, turns, self._observation, actions, self._longest)
        message = self._chat.follow(result.response_ids[-1], [{"role": "user", "content": text}])
        if len(trajectory.ids) + len(message) >= self._sequence_length:
            trajectory.stop, trajectory.outcome = "sequence_length", step.observation
            return
        trajectory.add_context(message)

    def start_close(self) -> None:
        """Closes the environment, after its running call if there is one; does not wait for that."""
        if self._env is not None:
            self._env.start_close()

    @property
    def _longest(self) -> int:
        return min(self._task.max_tokens, self._sampling.max_new_tokens)
