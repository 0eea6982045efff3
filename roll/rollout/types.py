"""Data of a rollout: requests to the engines, their results, trajectories made of them, and groups of trajectories."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from roll.base.errors import RunError
from roll.configs.arguments import GeneratingArguments
from roll.datasets.stop_strings import divide_stops

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Routing = npt.NDArray[np.integer[Any]]
"""Ids of the experts [tokens, layers, k] that a sequence was sampled with.

Row t is of the forward pass that read token t and gave the log-prob of token t + 1, so the last token has none. It is
of the pass in which token t + 1 was sampled, or its prompt read first: what an engine computes once more later, for a
request that is continued or for the next turn, never replaces it."""

ROUTING_INCOMPLETE = "routing_incomplete"
"""Drop reason of a group: an engine did not return the experts of a token."""

NOT_SAMPLED = -1
"""`versions` of a token that no policy sampled: prompt, environment, template."""

StopReason = Literal["terminated", "truncated", "sequence_length"]
"""Why a trajectory ended: by the environment's rules, after its last action, or because it reached its longest length.

A single response has terminated when its stop token came, and reached its length when it was cut off."""


@dataclass(frozen=True)
class SamplingParams:
    """How one response is sampled.

    A response ends with a token of `stop_token_ids`, or the one in which a string of `stop_strings` ends in its text.
    The engine's log-probs are those of the full softmax at `temperature`; with `sampling_mask` they are those of the
    tokens that `top_k` and `top_p` kept, and the ids of these come with them. With `routing` the experts of each token
    come too.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    sampling_mask: bool = False
    stop_strings: tuple[str, ...] = ()
    routing: bool = False


def sampling_params(args: GeneratingArguments, path: str, tokenizer: PreTrainedTokenizerBase) -> SamplingParams:
    """The sampling parameters of a role; generation stops at the tokenizer's eos token and at `stop_strings`.

    Raises:
        RunError: max_new_tokens is not set.
    """
    if args.max_new_tokens is None:
        raise RunError(f"{path}.max_new_tokens: is not set")
    tokens, strings = divide_stops(tokenizer, args.stop_strings)
    return SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        repetition_penalty=args.repetition_penalty,
        stop_token_ids=(tokenizer.eos_token_id, *tokens),
        stop_strings=strings,
    )


@dataclass(frozen=True)
class GenerateRequest:
    """One response to sample for the exact ids of one prompt.

    `version` is that of the weights when the prompt was submitted. Engines start older requests first, and before
    them those without a version. The experts of the first `routed` tokens are known. `policy` answers it, of several
    that share engines.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int | None = None
    version: int | None = None
    routed: int = 0
    policy: str = ""


@dataclass(frozen=True)
class GenerateResult:
    """One response: ids as sampled (the stop token included), and for each its log-prob and weight version.

    `finish_reason` is why it ended: a stop token, the length limit, or an abort (then it is not a sample).
    `sampling_mask` has, for each token, the ids it was sampled from, if the request asked for them. `value` is the
    score of the prompt by an engine of role `reward`, which samples nothing. `engine` is the number of the engine.
    `routing` has the experts of the tokens from number `routed` of the request on, but the last, if it asked for them.
    """

    request_id: str
    response_ids: list[int]
    log_probs: list[float]
    versions: list[int]
    finish_reason: Literal["stop", "length", "abort"]
    cached_prompt_tokens: int = 0
    error: str | None = None
    sampling_mask: list[list[int]] = field(default_factory=list)
    value: float | None = None
    engine: int | None = field(default=None, compare=False)
    routing: Routing | None = field(default=None, compare=False)


def missing_routing(request: GenerateRequest, result: GenerateResult) -> str | None:
    """What the experts of a response lack, where the request asked for them; None if nothing."""
    if not request.sampling.routing:
        return None
    wanted = len(request.prompt_ids) + len(result.response_ids) - 1 - request.routed
    found = 0 if result.routing is None else len(result.routing)
    if found == wanted and (result.routing is None or result.routing.min(initial=0) >= 0):
        return None
    return f"{request.request_id}: the engine returned the experts of {found} tokens, not of {wanted}"


class TrajectoryError(RuntimeError):
    """The sequence of a turn does not begin with that of the turn before it, token for token."""


@dataclass
class SampledTurn:
    """One response of the model inside a trajectory.

    Attributes:
        observation: text the model read last before it responded; empty for a single response to a prompt.
        start: position of the response's first token in the trajectory.
        end: position after its last token.
        text: the response, as the environment or the reward function reads it.
        reward: of this response; 0 where it was cut off and never reached the environment.
        metrics: of this response, by the environment.
        cached: prompt tokens that the engine had in its prefix cache.
        reusable: prompt tokens that it could have had there: those of the turn before, if the same weights sampled it.
        engine: number of the engine; None where it is not known.
    """

    observation: str
    start: int
    end: int
    text: str
    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    cached: int = 0
    reusable: int = 0
    engine: int | None = field(default=None, compare=False)


@dataclass
class Trajectory:
    """One episode as an append-only sequence of token ids: prompt, response, observation, response, and so on.

    Attributes:
        ids: of the whole sequence.
        log_probs: one for each id; 0 where the token was not sampled.
        versions: weight version of each id; NOT_SAMPLED where it was not sampled.
        sampling_mask: for each id up to the last that was sampled, the ids it was sampled from, if `top_k` and `top_p`
            truncated them and the engine returned which; no ids where it was not sampled. Empty: nothing was truncated.
        routing: the experts of each token up to the last sampled one, without that; None where they are not recorded.
        turns: the responses in order; together they span exactly the sampled tokens.
        stop: why it ended; None while it is running.
        outcome: the last observation, after which no response was sampled; empty if there was none.
        metrics: of the episode, aggregated over its actions by the rules of the environment.
        reward_parts: score of each reward by name, before its weight, where rewards score a response; the score is
            their weighted sum. Empty in environments.
        branches: of an agent's session, what it sampled before in conversations that do not continue in this one, in
            the order of their ends. An answer that several branches have is a turn of the last of them only; rewards
            are in this one.
    """

    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    sampling_mask: list[list[int]] = field(default_factory=list)
    routing: Routing | None = field(default=None, compare=False)
    turns: list[SampledTurn] = field(default_factory=list)
    stop: StopReason | None = None
    outcome: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    reward_parts: dict[str, float] = field(default_factory=dict)
    branches: list[Trajectory] = field(default_factory=list)

    @classmethod
    def of_response(cls, prompt_ids: Sequence[int], result: GenerateResult, text: str) -> Trajectory:
        """A whole trajectory of one turn: the response to a prompt; its reward is still 0.

        Raises:
            TrajectoryError: ids, log-probs and versions differ in number, or there are none.
        """
        trajectory = cls()
        trajectory.add_context(prompt_ids)
        trajectory._add_turn(result, "", text, reusable=0)
        trajectory.stop = "sequence_length" if result.finish_reason == "length" else "terminated"
        return trajectory

    def add_context(self, ids: Sequence[int]) -> None:
        """Appends tokens that no policy sampled."""
        self.ids.extend(ids)
        self.log_probs.extend([0.0] * len(ids))
        self.versions.extend([NOT_SAMPLED] * len(ids))

    def add_response(
        self, prompt_ids: Sequence[int], result: GenerateResult, observation: str, text: str
    ) -> SampledTurn:
        """Appends the response sampled for `prompt_ids`, which must be this trajectory so far.

        Raises:
            TrajectoryError: it is not, or ids, log-probs and versions differ in number, or there are none.
        """
        if list(prompt_ids) != self.ids:
            pairs = zip(prompt_ids, self.ids, strict=False)
            first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(prompt_ids), len(self.ids)))
            raise TrajectoryError(
                f"turn {len(self.turns)}: the request had {len(prompt_ids)} prompt tokens and the trajectory has "
                f"{len(self.ids)}, different from position {first} on"
            )
        last = self.turns[-1].end if self.turns else 0
        same_weights = bool(last and result.versions) and self.versions[last - 1] == result.versions[0]
        return self._add_turn(result, observation, text, reusable=last if same_weights else 0)

    def _add_turn(self, result: GenerateResult, observation: str, text: str, reusable: int) -> SampledTurn:
        tokens = len(result.response_ids)
        if len(result.sampling_mask) not in (0, tokens):
            raise TrajectoryError(f"turn {len(self.turns)}: {tokens} tokens and {len(result.sampling_mask)} masks")
        if not tokens or tokens != len(result.log_probs) or tokens != len(result.versions):
            counts = tokens, len(result.log_probs), len(result.versions)
            raise TrajectoryError(
                f"turn {len(self.turns)}: ids, log-probs and versions of a response must be equally many and at least "
                f"one, not {counts}"
            )
        start = len(self.ids)
        if result.routing is not None:
            self._add_routing(result.routing, start + tokens - 1)
        self.ids.extend(result.response_ids)
        self.log_probs.extend(result.log_probs)
        self.versions.extend(result.versions)
        if result.sampling_mask:
            self.sampling_mask.extend([] for _ in range(start - len(self.sampling_mask)))
            self.sampling_mask.extend(result.sampling_mask)
        turn = SampledTurn(
            observation, start, start + tokens, text, cached=result.cached_prompt_tokens, reusable=reusable,
            engine=result.engine,
        )  # fmt: skip
        self.turns.append(turn)
        return turn

    def _add_routing(self, rows: Routing, wanted: int) -> None:
        """Adds the last of these rows, so that there are `wanted`; earlier ones are of a pass that came later."""
        known = 0 if self.routing is None else len(self.routing)
        if not 0 <= wanted - known <= len(rows):
            raise TrajectoryError(f"turn {len(self.turns)}: the experts of {wanted - known} tokens, not of {len(rows)}")
        new = rows[len(rows) - (wanted - known) :]
        self.routing = new if self.routing is None else np.concatenate([self.routing, new])

    @property
    def score(self) -> float:
        return sum(turn.reward for turn in self.turns)

    @property
    def rows(self) -> list[Trajectory]:
        """The sequences that are trained on: its branches, and itself last."""
        return [*self.branches, self] if self.branches else [self]

    @property
    def all_turns(self) -> list[SampledTurn]:
        """Its responses, with those of its branches."""
        return [turn for row in self.rows for turn in row.turns]

    @property
    def sampled_versions(self) -> list[int]:
        rows = ((row.versions, row.turns) for row in self.rows)
        return list(chain.from_iterable(versions[turn.start : turn.end] for versions, turns in rows for turn in turns))

    @property
    def oldest_version(self) -> int:
        """Weight version of its oldest sampled token."""
        return min(self.sampled_versions)

    def state_dict(self) -> dict[str, Any]:
        """Plain values for JSON, which share lists with this trajectory."""
        branches = [branch.state_dict() for branch in self.branches]
        turns = [dict(vars(turn)) for turn in self.turns]
        return {**vars(self), "turns": turns, "branches": branches, "routing": _plain(self.routing)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Trajectory:
        """Restores `state_dict`; those of older runs have no branches."""
        turns = [SampledTurn(**turn) for turn in state["turns"]]
        branches = [*map(cls.from_state, state.get("branches", ()))]
        routing = _from_plain(state.get("routing"))
        return cls(**{**state, "turns": turns, "branches": branches, "routing": routing})


def _plain(routing: Routing | None) -> dict[str, Any] | None:
    """For JSON."""
    if routing is None:
        return None
    ids = base64.b64encode(routing.tobytes()).decode()
    return {"type": routing.dtype.name, "shape": list(routing.shape), "ids": ids}


def _from_plain(state: dict[str, Any] | None) -> Routing | None:
    if state is None:
        return None
    return np.frombuffer(base64.b64decode(state["ids"]), state["type"]).reshape(state["shape"]).copy()


@dataclass
class Group:
    """The trajectories of one prompt or one environment: complete and scored, or dropped with a reason.

    Attributes:
        number: position among all groups submitted in the run; seeds derive from it.
        tag: decides the reward function (RLVR) or the environment (a name in `custom_envs`).
        problem: which problem of that kind: index of the prompt in the data, or seed of the environment.
        name: id of the prompt, or tag and number of the environment; for messages and dumps.
        trajectories: the samples, which are learned from.
        greedy: the response at temperature 0, whose score is a baseline; it is not a sample. None if not requested.
        drop_reason: why it cannot be learned from; None while it can.
        failure: description of the cause, for messages.
        ground_truth: of the prompt, for dumps; None for environments.
        version: of the weights when it was submitted; None: for validation. Not in checkpoints, where the request of
            its prompt has it.
        generated_s: seconds since 1970 when the last response ended; None where that is not known. Not in checkpoints.
        finished_s: when it was scored, or dropped. Not in checkpoints.
    """

    number: int
    tag: str
    problem: int
    name: str
    trajectories: list[Trajectory] = field(default_factory=list)
    greedy: Trajectory | None = None
    drop_reason: str | None = None
    failure: str | None = None
    ground_truth: Any = None
    version: int | None = field(default=None, compare=False)
    generated_s: float | None = field(default=None, compare=False)
    finished_s: float | None = field(default=None, compare=False)

    def drop(self, reason: str, failure: str) -> None:
        self.trajectories, self.greedy, self.drop_reason, self.failure = [], None, reason, failure

    @property
    def scores(self) -> list[float]:
        return [trajectory.score for trajectory in self.trajectories]

    @property
    def oldest_version(self) -> int:
        """Weight version of the oldest sampled token of any trajectory."""
        return min(trajectory.oldest_version for trajectory in self.trajectories)

    @property
    def generated_tokens(self) -> int:
        """Tokens that the engines generated, those of the greedy response among them."""
        responses = self.trajectories if self.greedy is None else [*self.trajectories, self.greedy]
        return sum(turn.end - turn.start for response in responses for turn in response.all_turns)

    def state_dict(self) -> dict[str, Any]:
        """Plain values for JSON; only of a group that is not dropped."""
        return {
            "number": self.number,
            "tag": self.tag,
            "problem": self.problem,
            "name": self.name,
            "ground_truth": self.ground_truth,
            "trajectories": [trajectory.state_dict() for trajectory in self.trajectories],
            "greedy": None if self.greedy is None else self.greedy.state_dict(),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Group:
        """Restores `state_dict`."""
        trajectories = [Trajectory.from_state(trajectory) for trajectory in state["trajectories"]]
        group = cls(state["number"], state["tag"], state["problem"], state["name"], trajectories)
        group.ground_truth = state["ground_truth"]
        if state.get("greedy") is not None:
            group.greedy = Trajectory.from_state(state["greedy"])
        return group
