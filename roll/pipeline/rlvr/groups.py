"""A prompt and the responses drawn for it: complete and scored, or dropped with a reason."""

from __future__ import annotations

from dataclasses import dataclass, field

from roll.configs.seeds import role_seed
from roll.datasets.templates import EncodedPrompt
from roll.rollout.types import GenerateRequest, GenerateResult, SamplingParams


@dataclass
class Group:
    """`number` is the position of the prompt among all prompts ever submitted; seeds derive from it."""

    number: int
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
