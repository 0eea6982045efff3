"""The reference of every key, generated from the dataclasses: `python -m roll.configs.reference` writes it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from roll.configs.agentic import AgenticConfig, CustomEnvConfig, EnvManagerConfig
from roll.configs.agentic_learning import AgenticLearningOptions, RewardNormalization
from roll.configs.aliases import KEYS, PLACE_VALUES, PLACES, VALUES
from roll.configs.arguments import (
    DataArguments,
    GeneratingArguments,
    MegatronConfig,
    ModelArguments,
    StrategyArguments,
    TrainingArguments,
)
from roll.configs.asynchronous import AsyncTrainingConfig
from roll.configs.foreign import FOREIGN, ForeignKey
from roll.configs.names import ADV_ESTIMATORS, ARCHITECTURES, PG_VARIANTS, TEMPLATES
from roll.configs.pipeline import BaseConfig, RewardConfig, RLConfig, RLVRConfig, SFTConfig
from roll.configs.policy import CorrectionOptions, PolicyOptions, RejectionOptions, WeightOptions
from roll.configs.schema import Key, declared, describe
from roll.configs.sglang_options import OWNED
from roll.configs.worker import WorkerConfig

PATH = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
"""The generated page."""

SECTIONS: tuple[tuple[str, str, type, tuple[type, ...]], ...] = (
    ("Every pipeline", "", BaseConfig, ()),
    ("Reinforcement learning", "", RLConfig, (BaseConfig, PolicyOptions)),
    ("The policy loss", "", PolicyOptions, ()),
    ("The off-policy correction", "correction.", CorrectionOptions, ()),
    ("Its weights", "correction.weights.", WeightOptions, ()),
    ("Its rejection", "correction.rejection.", RejectionOptions, ()),
    ("Asynchronous training", "async_training.", AsyncTrainingConfig, ()),
    ("Learning from trajectories", "", AgenticLearningOptions, ()),
    ("Their rewards", "reward_normalization.", RewardNormalization, ()),
    ("`pipeline: rlvr`", "", RLVRConfig, (RLConfig,)),
    ("`pipeline: sft`", "", SFTConfig, (BaseConfig,)),
    ("`pipeline: agentic`", "", AgenticConfig, (RLConfig, AgenticLearningOptions)),
    ("An environment", "custom_envs.<name>.", CustomEnvConfig, ()),
    ("Who plays", "<train or val>_env_manager.", EnvManagerConfig, ()),
    ("A reward", "rewards.<name>.", RewardConfig, ()),
    ("A role", "<role>.", WorkerConfig, ()),
    ("The model of a role", "<role>.model_args.", ModelArguments, ()),
    ("The optimizer", "<role>.training_args.", TrainingArguments, ()),
    ("The data", "<role>.data_args.", DataArguments, ()),
    ("The sampling", "<role>.generating_args.", GeneratingArguments, ()),
    ("The engine", "<role>.strategy_args.", StrategyArguments, ()),
    ("Options of megatron_train and megatron_infer", "<role>.strategy_args.strategy_config.", MegatronConfig, ()),
)
"""Title, path, dataclass, and the bases whose keys stand elsewhere."""

INTRODUCTION = """# Configuration

Generated from `roll/configs` by `python -m roll.configs.reference`.

A run is one YAML file. `${key}` repeats the value of another key; `defaults: [base.yaml]` includes other files,
relative to the file, which wins over them; `key=value` on the command line wins over all. Every key below has an
effect, or `roll plan FILE` says why not; an unknown key, a wrong type or sizes that do not divide are errors that name
what works.

Roles are `actor_train`, `actor_infer`, `reference` and `validation`. Devices are global ranks; rank r is on node
r // `num_devices_per_node`. Two roles with equal `device_mapping` share their devices, disjoint ones run side by side.
"""


def render() -> str:
    """The whole page as Markdown."""
    parts = [INTRODUCTION]
    for title, path, cls, bases in SECTIONS:
        parts.append(f"## {title}\n\n" + _table(cls, path, bases))
    parts.append("## Names\n\n" + _names())
    parts.append(
        "## Options of sglang\n\n`strategy_config` of `actor_infer` takes every option of SGLang's `ServerArgs` by "
        "name, except those that follow from the rest of the file:\n\n" + _rows(("option", "instead"), OWNED.items())
    )
    parts.append("## Other spellings\n\n" + _rows(("in other recipes", "here"), _spellings()))
    foreign = ((f"`{item.pattern}`{_of(item)}", item.reason) for item in FOREIGN)
    parts.append(
        "## Keys of other projects\n\nThese have no counterpart. Where the value asks for nothing they are a warning, "
        "else an error.\n\n" + _rows(("key", "why"), foreign)
    )
    return "\n".join(parts)


def _table(cls: type, path: str, bases: tuple[type, ...]) -> str:
    inherited = {name for base in bases for name in declared(base)}
    rows = [_row(key, path) for name, key in declared(cls).items() if name not in inherited]
    return _rows(("key", "type", "default", "meaning"), rows)


def _row(key: Key, path: str) -> tuple[str, str, str, str]:
    return (f"`{path}{key.path}`", describe(key.hint) + _bounds(key), _default(key.default), key.field.metadata["help"])


def _bounds(key: Key) -> str:
    limits = key.field.metadata
    words = [
        f"{word} {limits[name]:g}"
        for name, word in (("minimum", "at least"), ("above", "above"), ("maximum", "at most"))
        if limits.get(name) is not None
    ]
    return f", {' and '.join(words)}" if words else ""


def _default(value: Any) -> str:
    if is_dataclass(value):
        return "see below"
    if isinstance(value, dict) and any(is_dataclass(item) for item in value.values()):
        return f"`{', '.join(value)}`"
    return f"`{json.dumps(value)}`"


def _of(item: ForeignKey) -> str:
    """The pipelines a foreign key is answered in, where they are not all."""
    return "" if item.pipelines == ForeignKey("", bool, "").pipelines else f" ({', '.join(item.pipelines)})"


def _names() -> str:
    rows = (
        ("`adv_estimator`", ", ".join(ADV_ESTIMATORS)),
        ("`actor_train.pg_variant`", ", ".join(PG_VARIANTS)),
        ("`<role>.data_args.template`", ", ".join(TEMPLATES)),
        ("`architectures` of the model's config.json", ", ".join(ARCHITECTURES)),
    )
    return _rows(("key", "known"), rows)


def _spellings() -> Iterator[tuple[str, str]]:
    for other, name in KEYS.items():
        yield f"`{other}`", f"`{name}`"
    for other, name in PLACES.items():
        if other not in PLACE_VALUES:
            yield f"`{other}`", f"`{name}`"
        for value, here in PLACE_VALUES.get(other, {}).items():
            yield f"`{other}: {json.dumps(value)}`", f"`{name}: {here}`"
    yield (
        "`importance_sampling: true` with `is_clip_range: [0.5, 2.0]`",
        "`correction.weights: {level: token, mode: clamp, lower: 0.5, upper: 2.0}`",
    )
    for key, values in VALUES.items():
        for other, value in values.items():
            yield f"`{key}: {other}`", f"`{key}: {value}`"


def _rows(head: tuple[str, ...], rows: Any) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Writes the page."""
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
