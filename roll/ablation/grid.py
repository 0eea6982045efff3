"""The runs of a grid: their names, their overrides, and whether each of them can be run at all."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from roll.configs.errors import ConfigError, Problem
from roll.configs.hardware import prepare_run
from roll.configs.load import load_config, read_pipeline
from roll.configs.pipeline import RLConfig
from roll.configs.policy import VARIANT_KNOBS
from roll.configs.yaml_files import leaves, override_tree
from roll.pipeline.extensions import load_extensions

OWNED = {
    "actor_train.pg_variant": "use --variants",
    "async_generation_ratio": "use --ratios",
    "seed": "use --seeds",
    "output_dir": "use --out",
    "logging_dir": "logs stand in the folder of each run",
    "resume_from_checkpoint": "a run that was cut off goes on by itself",
}
"""Keys that the grid sets, and what to do instead of overriding them."""


@dataclass(frozen=True)
class Cell:
    """One run of a grid."""

    variant: str
    ratio: float
    seed: int

    @property
    def name(self) -> str:
        """Its folder below the grid's: `<variant>-ratio<r>-seed<s>`."""
        return f"{self.variant}-ratio{exact(self.ratio)}-seed{self.seed}"

    def overrides(self, out: Path, given: Sequence[str] = ()) -> list[str]:
        """`key=value` of this run: those given for all, without knobs that belong to other variants, then its own."""
        folder = out / self.name
        return [
            *(text for text in given if self.variant in VARIANT_KNOBS.get(_key(text), (self.variant,))),
            f"actor_train.pg_variant={self.variant}",
            f"async_generation_ratio={exact(self.ratio)}",
            f"seed={self.seed}",
            f"output_dir={json.dumps(str(folder))}",
            f"logging_dir={json.dumps(str(folder / 'logs'))}",
        ]


def exact(number: float) -> str:
    """The shortest text that is read back as the same number."""
    return f"{number:g}" if float(f"{number:g}") == number else repr(number)


def cells(variants: Sequence[str], ratios: Sequence[float], seeds: Sequence[int]) -> list[Cell]:
    """Every combination once; all variants of a ratio and seed follow each other, so that a grid cut short compares."""
    product = itertools.product(dict.fromkeys(ratios), dict.fromkeys(seeds), dict.fromkeys(variants))
    return [Cell(variant, ratio, seed) for ratio, seed, variant in product]


def check_grid(
    config: str | Path, grid: Sequence[Cell], out: Path, given: Sequence[str] = ()
) -> tuple[dict[Cell, RLConfig], list[str]]:
    """Loads and checks every run of the grid as `roll run` would, before the first one starts.

    Returns:
        The configuration of each run, and the warnings, each once.

    Raises:
        ConfigError: with every problem of every run; one that not all runs have says which do.
    """
    if read_pipeline(config, given) == "sft":
        message = "sft has no policy loss to compare; use a file of another pipeline"
        raise ConfigError([Problem("pipeline", message)], str(config))
    misplaced = _misplaced(given, {cell.variant for cell in grid})
    if misplaced:
        raise ConfigError(misplaced, str(config))
    loaded: dict[Cell, RLConfig] = {}
    problems: dict[Problem, list[str]] = {}
    warnings: list[str] = []
    for cell in grid:
        try:
            loaded[cell], said = _load(config, cell.overrides(out, given))
            warnings += said
        except ConfigError as error:
            for problem in error.problems:
                problems.setdefault(problem, []).append(cell.name)
    if problems:
        raise ConfigError([_of(problem, names, len(grid)) for problem, names in problems.items()], str(config))
    return loaded, list(dict.fromkeys(warnings))


def _misplaced(given: Sequence[str], variants: set[str]) -> list[Problem]:
    """What is given and set by the grid, or read by none of its variants."""
    problems = []
    for key in leaves(override_tree(given, [])):
        owners = VARIANT_KNOBS.get(key)
        if key in OWNED:
            problems.append(Problem(key, f"is set by the grid: {OWNED[key]}"))
        elif owners is not None and variants.isdisjoint(owners):
            problems.append(Problem(key, f"belongs to {' or '.join(owners)}, none of which is in --variants"))
    return problems


def _load(config: str | Path, overrides: Sequence[str]) -> tuple[RLConfig, list[str]]:
    loaded = load_config(config, overrides)
    assert isinstance(loaded, RLConfig)
    if not loaded.eval_steps:
        raise ConfigError([Problem("eval_steps", "0 validates nothing, so there is nothing to compare; set it")])
    warnings = prepare_run(loaded)
    load_extensions(loaded)
    return loaded, warnings


def _of(problem: Problem, names: list[str], count: int) -> Problem:
    """The problem, with the runs that have it where not all do."""
    if len(names) == count:
        return problem
    return Problem(problem.path, f"{problem.message} (in {', '.join(names)})")


def _key(override: str) -> str:
    return override.partition("=")[0].strip()
