"""What passes between prompts, engines and the learner: requests, results, and trajectories of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class SamplingParams:
    """How one response is drawn; the engine's full-softmax log-probs are at `temperature`."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class GenerateRequest:
    """One response to draw for the exact ids of one prompt."""

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int | None = None


@dataclass(frozen=True)
class GenerateResult:
    """One response: ids as sampled (the stop token included), and for each its log-prob and weight version.

    `finish_reason` is why it ended: a stop token, the length limit, or an abort (then it is not a sample).
    """

    request_id: str
    response_ids: list[int]
    log_probs: list[float]
    versions: list[int]
    finish_reason: Literal["stop", "length", "abort"]
    cached_prompt_tokens: int = 0
    error: str | None = field(default=None)


NOT_SAMPLED = -1
"""`versions` of a token that no policy sampled: prompt, environment, template."""

StopReason = Literal["terminated", "truncated", "sequence_length"]
"""Why a trajectory ended: by the environment's rules, after its last action, or because no token fits any more."""


class TrajectoryError(RuntimeError):
    """The sequence of a turn does not begin with that of the turn before it, token for token."""


@dataclass
class Turn:
    """One answer of the model and what came of it.

    Attributes:
        observation: what the model read last before it answered.
        start: position of the answer's first token in the trajectory.
        end: position after its last.
        text: the answer, as the environment read it.
        reward: of this answer; 0 where it was cut off and never reached the environment.
        metrics: of this answer, by the environment.
        cached: prompt tokens that the engine had in its cache.
        reusable: prompt tokens that it could have had: those of the turn before, drawn by the same weights.
    """

    observation: str
    start: int
    end: int
    text: str
    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    cached: int = 0
    reusable: int = 0


@dataclass
class Trajectory:
    """Ids, and for each what sampled it; `turns` says which tokens are whose answer.

    Attributes:
        ids: of the whole sequence.
        log_probs: as many; 0 where the token was not sampled.
        versions: as many; NOT_SAMPLED there.
        turns: in order.
        stop: why it ended; None while it goes on.
        outcome: the last observation, which nobody answered; empty where there was none.
        metrics: of the episode, made of those of its actions as the environment says.
    """

    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    stop: StopReason | None = None
    outcome: str = ""
    metrics: dict[str, float] = field(default_factory=dict)

    def say(self, ids: Sequence[int]) -> None:
        """Appends tokens that no policy sampled."""
        self._append(ids, [0.0] * len(ids), [NOT_SAMPLED] * len(ids))

    def answer(self, prompt_ids: Sequence[int], result: GenerateResult, observation: str, text: str) -> Turn:
        """Appends what the model answered to `prompt_ids`.

        Raises:
            TrajectoryError: the prompt is not this trajectory, or ids, log-probs and versions differ in number.
        """
        if list(prompt_ids) != self.ids:
            pairs = zip(prompt_ids, self.ids, strict=False)
            first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(prompt_ids), len(self.ids)))
            raise TrajectoryError(
                f"turn {len(self.turns)}: the engine was asked with {len(prompt_ids)} tokens and the trajectory has "
                f"{len(self.ids)}, different from position {first} on"
            )
        counts = len(result.response_ids), len(result.log_probs), len(result.versions)
        if len(set(counts)) != 1 or not counts[0]:
            raise TrajectoryError(
                f"turn {len(self.turns)}: ids, log-probs and versions of an answer are {counts}, not equally many"
            )
        start = len(self.ids)
        reusable = (
            self.turns[-1].end if self.turns and self.versions[self.turns[-1].end - 1] == result.versions[0] else 0
        )
        self._append(result.response_ids, result.log_probs, result.versions)
        turn = Turn(observation, start, len(self.ids), text, cached=result.cached_prompt_tokens, reusable=reusable)
        self.turns.append(turn)
        return turn

    def _append(self, ids: Sequence[int], log_probs: Sequence[float], versions: Sequence[int]) -> None:
        self.ids.extend(ids)
        self.log_probs.extend(log_probs)
        self.versions.extend(versions)

    @property
    def score(self) -> float:
        """Sum of the rewards of all turns."""
        return sum(turn.reward for turn in self.turns)

    @property
    def sampled(self) -> list[int]:
        """Version of each sampled token, in order."""
        return [version for version in self.versions if version != NOT_SAMPLED]

    @property
    def oldest_version(self) -> int:
        """Weight version of its oldest sampled token."""
        return min(self.sampled)

    def state_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Trajectory:
        """Restores `state_dict`."""
        return cls(**{**state, "turns": [Turn(**turn) for turn in state["turns"]]})
