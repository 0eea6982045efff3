"""The trials of a grid: their names and overrides, and the check that each of them can run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from roll.algorithms.options.policy_options import VARIANT_KEYS
from roll.base.errors import ConfigError, Problem
from roll.base.schema import leaves
from roll.configs.pipeline import RLConfig
from roll.envs.registry import try_environment
from roll.loading.load import load_config, read_pipeline
from roll.loading.yaml_files import override_tree
from roll.pipeline.extensions import load_extensions
from roll.plan.hardware import prepare_run

GRID_KEYS = {
    "actor_train.pg_variant": "use --variants",
    "async_generation_ratio": "use --ratios",
    "seed": "use --seeds",
    "output_dir": "use --out",
    "logging_dir": "logs are written to the folder of each trial",
    "checkpoint_dir": "checkpoints are written to the folder of each trial",
    "resume_from_checkpoint": "interrupted trials resume automatically",
}
"""Keys that the grid sets for each trial, and what to use instead of overriding them."""


@dataclass(frozen=True)
class Trial:
    """One run of a grid."""

    variant: str
    ratio: float
    seed: int

    @property
    def name(self) -> str:
        """Subfolder of the trial: `<variant>-ratio<ratio>-seed<seed>`."""
        return f"{self.variant}-ratio{format_exact(self.ratio)}-seed{self.seed}"

    def all_overrides(self, out: Path, overrides: Sequence[str] = ()) -> list[str]:
        """`key=value` of this trial: the common ones, except those of other variants, then its own."""
        folder = out / self.name
        return [
            *(text for text in overrides if self.variant in VARIANT_KEYS.get(_key(text), (self.variant,))),
            f"actor_train.pg_variant={self.variant}",
            f"async_generation_ratio={format_exact(self.ratio)}",
            f"seed={self.seed}",
            f"output_dir={json.dumps(str(folder))}",
            f"logging_dir={json.dumps(str(folder / 'logs'))}",
            "checkpoint_dir=null",
        ]


def format_exact(number: float) -> str:
    return f"{number:g}" if float(f"{number:g}") == number else repr(number)


def make_grid(variants: Sequence[str], ratios: Sequence[float], seeds: Sequence[int]) -> list[Trial]:
    """Every combination once, variants innermost: an interrupted grid has all variants of its first ratio and seed."""
    product = itertools.product(dict.fromkeys(ratios), dict.fromkeys(seeds), dict.fromkeys(variants))
    return [Trial(variant, ratio, seed) for ratio, seed, variant in product]


def check_grid(
    config: str | Path, trials: Sequence[Trial], out: Path, overrides: Sequence[str] = ()
) -> tuple[dict[Trial, RLConfig], list[str]]:
    """Loads and checks the configuration of every trial as `roll run` would.

    Returns:
        The configuration of each trial, and the warnings without duplicates.

    Raises:
        ConfigError: with the problems of all trials; a problem of only some trials names them.
    """
    pipeline = read_pipeline(config, overrides)
    if pipeline in ("sft", "dpo", "reward_model"):
        message = f"{pipeline} has no policy loss to compare; use a configuration of another pipeline"
        raise ConfigError([Problem("pipeline", message)], str(config))
    problems = _override_problems(overrides, {trial.variant for trial in trials})
    if problems:
        raise ConfigError(problems, str(config))
    configs: dict[Trial, RLConfig] = {}
    trials_of: dict[Problem, list[str]] = {}
    warnings: list[str] = []
    for trial in trials:
        try:
            configs[trial], trial_warnings = _load(config, trial.all_overrides(out, overrides))
            warnings += trial_warnings
        except ConfigError as error:
            for problem in error.problems:
                trials_of.setdefault(problem, []).append(trial.name)
    if trials_of:
        named = [_name_trials(problem, names, len(trials)) for problem, names in trials_of.items()]
        raise ConfigError(named, str(config))
    return configs, list(dict.fromkeys(warnings))


def _override_problems(overrides: Sequence[str], variants: set[str]) -> list[Problem]:
    """Overrides of keys that the grid sets, or that none of its variants reads."""
    problems = []
    for key in leaves(override_tree(overrides, [])):
        owners = VARIANT_KEYS.get(key)
        if key in GRID_KEYS:
            problems.append(Problem(key, f"is set by the grid: {GRID_KEYS[key]}"))
        elif owners is not None and variants.isdisjoint(owners):
            problems.append(Problem(key, f"belongs to {' or '.join(owners)}, none of which is in --variants"))
    return problems


def _load(config: str | Path, overrides: Sequence[str]) -> tuple[RLConfig, list[str]]:
    loaded = load_config(config, overrides, try_environment=try_environment)
    assert isinstance(loaded, RLConfig)
    if not loaded.eval_steps:
        message = "0 disables validation, so there are no scores to compare; set it to 1 or more"
        raise ConfigError([Problem("eval_steps", message)])
    warnings = prepare_run(loaded)
    load_extensions(loaded)
    return loaded, warnings


def _name_trials(problem: Problem, names: list[str], trial_count: int) -> Problem:
    if len(names) == trial_count:
        return problem
    return Problem(problem.path, f"{problem.message} (in {', '.join(names)})")


def _key(override: str) -> str:
    return override.partition("=")[0].strip()
