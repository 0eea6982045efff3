"""Settings of the advantages."""

from __future__ import annotations

from dataclasses import dataclass

from roll.configs.agentic import AgenticOptions
from roll.configs.pipeline import RLConfig
from roll.configs.policy import AdvantageOptions, KLOptions, options_of


@dataclass
class AdvantageConfig(AgenticOptions, KLOptions, AdvantageOptions):
    """The keys of advantages with their defaults: the estimator, the KL in the token reward, and rewards of turns."""

    @classmethod
    def from_config(cls, config: RLConfig) -> AdvantageConfig:
        """The settings of a run; a run without turns has the defaults of the keys of turns."""
        return cls(**options_of(cls, config))
