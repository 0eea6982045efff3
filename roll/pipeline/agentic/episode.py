"""One episode: a model and an environment take turns until either has no more to say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from roll.configs.seeds import role_seed
from roll.datasets.templates import ConversationEncoder
from roll.distributed.env_pool.pool import EnvHandle, EnvPool
from roll.distributed.env_pool.types import EnvSpec
from roll.envs.base import Aggregation, episode_metrics, metrics_without_action
from roll.rollout.trajectory import Trajectory
from roll.rollout.types import GenerateRequest, GenerateResult, SamplingParams


class EpisodeFailed(RuntimeError):
    """An episode that cannot be learned from.

    Attributes:
        reason: its class, for the account of dropped prompts.
    """

    def __init__(self, reason: str, message: str) -> None:
        """Takes the class and the words."""
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Task:
    """What the episodes of one tag have in common.

    Attributes:
        tag: name in `custom_envs`.
        spec: the environment.
        max_actions: after which the environment cuts the episode off.
        max_tokens: of one answer.
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
    """Plays one environment. `request` says what to ask the model, `accept` takes its answer to the environment."""

    def __init__(
        self,
        name: str,
        task: Task,
        env_seed: int,
        seed: int,
        sampling: SamplingParams,
        sequence_length: int,
        chat: ConversationEncoder,
    ) -> None:
        """Starts nothing yet.

        Args:
            name: unique among what runs; requests are called after it.
            task: of its tag.
            env_seed: decides the environment.
            seed: from which those of the answers derive.
            sampling: of the answers; none is longer than it allows.
            sequence_length: most tokens of the whole trajectory.
            chat: from messages to ids.
        """
        self.trajectory = Trajectory()
        self._name, self._task, self._env_seed, self._seed = name, task, env_seed, seed
        self._sampling, self._sequence_length, self._chat = sampling, sequence_length, chat
        self._env: EnvHandle | None = None
        self._rules: Mapping[str, Aggregation] = {}
        self._observation = ""

    async def begin(self, pool: EnvPool) -> None:
        """Opens the environment and says the first words.

        Raises:
            EnvFailure: it could not be opened.
            EpisodeFailed: the first words alone fill the sequence.
        """
        self._env, opened = await pool.open(self._task.spec, self._env_seed)
        self._rules, self._observation = opened.metric_rules, opened.observation
        messages = [{"role": "user", "content": self._first(opened.instruction)}]
        if self._task.system:
            system = self._task.system.format(env_instruction=opened.instruction)
            messages.insert(0, {"role": "system", "content": system})
        self.trajectory.say(self._chat.start(messages))
        if len(self.trajectory.ids) >= self._sequence_length:
            raise EpisodeFailed(
                "prompt_too_long",
                f"{self._name}: the first message has {len(self.trajectory.ids)} tokens and leaves none of "
                f"sequence_length {self._sequence_length} for an answer",
            )

    def request(self) -> GenerateRequest | None:
        """What to ask next; None when the episode is over."""
        trajectory, turn = self.trajectory, len(self.trajectory.turns)
        if trajectory.stop is not None:
            return None
        room = min(self._longest, self._sequence_length - len(trajectory.ids))
        return GenerateRequest(
            request_id=f"{self._name}-{turn}",
            prompt_ids=list(trajectory.ids),
            sampling=replace(self._sampling, max_new_tokens=room),
            seed=role_seed(self._seed, self._name, turn),
        )

    async def accept(self, request: GenerateRequest, result: GenerateResult, text: str) -> None:
        """Takes an answer and, unless the sequence is full, lets the environment react.

        Raises:
            EpisodeFailed: there is no answer.
            EnvFailure: the environment failed.
        """
        assert self._env is not None, "begin comes first"
        if result.finish_reason == "abort":
            raise EpisodeFailed(
                "generation_failed", f"{request.request_id}: {result.error or 'generation was aborted'}"
            )
        if not result.response_ids:
            raise EpisodeFailed(
                "generation_failed", f"{request.request_id}: the answer is empty, not even its end came"
            )
        trajectory = self.trajectory
        turn = trajectory.answer(request.prompt_ids, result, self._observation, text)
        if result.finish_reason == "length" and len(trajectory.ids) >= self._sequence_length:
            trajectory.stop = "sequence_length"  # the answer was cut off in mid-word, so it is none
            if len(trajectory.turns) == 1:
                trajectory.metrics = metrics_without_action(self._rules)
            return
        stepped = await self._env.step(text)
        turn.reward, turn.metrics = stepped.reward, dict(stepped.metrics)
        trajectory.metrics = episode_metrics(self._rules, [turn.metrics for turn in trajectory.turns])
        if stepped.terminated or stepped.truncated:
            trajectory.stop, trajectory.outcome = (
                "terminated" if stepped.terminated else "truncated",
                stepped.observation,
            )
            return
        self._observation = stepped.observation
        said = self._chat.follow(result.response_ids[-1], [{"role": "user", "content": self._filled()}])
        if len(trajectory.ids) + len(said) >= self._sequence_length:
            trajectory.stop, trajectory.outcome = "sequence_length", stepped.observation
            return
        trajectory.say(said)

    def leave(self) -> None:
        """Gives the environment back; one that is in a call leaves after it, and nobody waits for that."""
        if self._env is not None:
            self._env.start_close()

    @property
    def _longest(self) -> int:
        """Tokens an answer may have where the sequence has room for them; sampling may allow fewer than the task."""
        return min(self._task.max_tokens, self._sampling.max_new_tokens)

    def _first(self, instruction: str) -> str:
        """The first message: the rules stand before it, unless a template says where."""
        if any("{env_instruction}" in template for template in (self._task.system, self._task.template)):
            return self._filled(instruction)
        return f"{instruction}\n{self._filled()}"

    def _filled(self, instruction: str = "") -> str:
        turn = len(self.trajectory.turns)
        fields: dict[str, Any] = {
            "turn_idx": turn + 1,
            "observation": self._observation,
            "actions_left": self._task.max_actions - turn,
            "max_response_length": self._longest,
            "env_instruction": instruction,
        }
        return self._task.template.format(**fields)
