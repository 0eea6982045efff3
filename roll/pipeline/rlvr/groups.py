"""A prompt and the responses drawn for it: complete and scored, or dropped with a reason."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from roll.configs.pipeline import role_seed
from roll.datasets.templates import EncodedPrompt
from roll.rollout.types import GenerateRequest, GenerateResult, SamplingParams


@dataclass
class Group:
    """`number` is the position of the prompt among all prompts ever submitted; seeds derive from it.

    Attributes:
        index: of the prompt in the data.
        drop_reason: why it cannot be learned from; None while it can.
    """

    number: int
    index: int
    prompt: EncodedPrompt
    results: list[GenerateResult] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    drop_reason: str | None = None

    def requests(self, purpose: str, samples: int, sampling: SamplingParams, seed: int) -> list[GenerateRequest]:
        """One request for each of `samples` responses, every one with a seed of its own."""
        return [
            GenerateRequest(
                request_id=f"{purpose}-{self.number}-{index}",
                prompt_ids=self.prompt.ids,
                sampling=sampling,
                seed=role_seed(seed, purpose, self.number, index),
            )
            for index in range(samples)
        ]

    @property
    def oldest_version(self) -> int:
        """Weight version of the oldest token."""
        return min(min(result.versions) for result in self.results)

    def state_dict(self) -> dict[str, Any]:
        """All but the prompt, which `index` finds again; ready for JSON."""
        results = [asdict(result) for result in self.results]
        return {"number": self.number, "index": self.index, "results": results, "scores": self.scores}

    @classmethod
    def from_state(cls, state: dict[str, Any], prompts: list[EncodedPrompt]) -> Group:
        """Restores `state_dict`."""
        results = [GenerateResult(**result) for result in state["results"]]
        return cls(state["number"], state["index"], prompts[state["index"]], results, state["scores"])
