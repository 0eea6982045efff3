"""The reference of every key, generated from the dataclasses: `python -m roll.configs.reference` writes it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from roll.configs.agentic import AgenticConfig, AgenticOptions, CustomEnvConfig, EnvManagerConfig, RewardNormalization
from roll.configs.asynchronous import AsyncOptions, AsyncTrainingConfig
from roll.configs.compat import UnsupportedKey
from roll.configs.compat.apply import MOVED_KEYS, MOVED_VALUES, RENAMED_KEYS, RENAMED_VALUES, UNSUPPORTED_KEYS
from roll.configs.model_config import ARCHITECTURES
from roll.configs.pipeline import BaseConfig, RewardConfig, RLConfig, RLVRConfig, SFTConfig
from roll.configs.policy import (
    ADV_ESTIMATORS,
    PG_VARIANTS,
    AdvantageOptions,
    CorrectionOptions,
    KLOptions,
    PolicyOptions,
    RejectionOptions,
    WeightOptions,
)
from roll.configs.roles import (
    TEMPLATES,
    ActorInferConfig,
    ActorTrainConfig,
    DataArguments,
    GeneratingArguments,
    MegatronConfig,
    MegatronModelArguments,
    MegatronRoleConfig,
    MegatronTrainConfig,
    ModelArguments,
    ReferenceConfig,
    RoleConfig,
    TrainDataArguments,
    TrainingArguments,
    TrainModelArguments,
    ValidationConfig,
)
from roll.configs.schema import Key, declared, describe
from roll.configs.sglang_options import OWNED

PATH = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
"""The generated page."""

SECTIONS: tuple[tuple[str, str, type, tuple[type, ...]], ...] = (
    ("All pipelines", "", BaseConfig, ()),
    ("Reinforcement learning", "", RLConfig, (BaseConfig, AsyncOptions, PolicyOptions, AdvantageOptions)),
    ("Advantages", "", AdvantageOptions, ()),
    ("The policy loss", "", PolicyOptions, (KLOptions,)),
    ("KL to the reference", "", KLOptions, ()),
    ("The off-policy correction", "correction.", CorrectionOptions, ()),
    ("Weights of the correction", "correction.weights.", WeightOptions, ()),
    ("Rejection by the correction", "correction.rejection.", RejectionOptions, ()),
    ("Running ahead", "", AsyncOptions, ()),
    ("Asynchronous training", "async_training.", AsyncTrainingConfig, ()),
    ("`pipeline: rlvr`", "", RLVRConfig, (RLConfig,)),
    ("A reward", "rewards.<name>.", RewardConfig, ()),
    ("`pipeline: sft`", "", SFTConfig, (BaseConfig,)),
    ("`pipeline: agentic`", "", AgenticConfig, (RLConfig, AgenticOptions)),
    ("Losses and advantages of agents", "", AgenticOptions, ()),
    ("Normalisation of agents' rewards", "reward_normalization.", RewardNormalization, ()),
    ("An environment", "custom_envs.<name>.", CustomEnvConfig, ()),
    ("Environment managers", "<train or val>_env_manager.", EnvManagerConfig, ()),
    ("Roles with devices", "<actor_train, actor_infer or reference>.", RoleConfig, ()),
    ("Models of roles", "<actor_train, actor_infer or reference>.model_args.", ModelArguments, ()),
    ("Roles that run Megatron", "<actor_train or reference>.", MegatronRoleConfig, (RoleConfig,)),
    ("Models that Megatron runs", "<actor_train or reference>.model_args.", MegatronModelArguments, (ModelArguments,)),
    ("Options of Megatron", "<actor_train or reference>.strategy_args.strategy_config.", MegatronConfig, ()),
    ("`actor_train`", "actor_train.", ActorTrainConfig, (MegatronRoleConfig,)),
    ("The trained model", "actor_train.model_args.", TrainModelArguments, (MegatronModelArguments,)),
    ("Megatron in training", "actor_train.strategy_args.strategy_config.", MegatronTrainConfig, (MegatronConfig,)),
    ("The optimizer", "actor_train.training_args.", TrainingArguments, ()),
    ("Data", "<actor_train or validation>.data_args.", DataArguments, ()),
    ("Training data", "actor_train.data_args.", TrainDataArguments, (DataArguments,)),
    ("`reference`", "reference.", ReferenceConfig, (MegatronRoleConfig,)),
    ("`actor_infer`", "actor_infer.", ActorInferConfig, (RoleConfig,)),
    ("Sampling", "<actor_infer or validation>.generating_args.", GeneratingArguments, ()),
    ("`validation`", "validation.", ValidationConfig, ()),
)
"""Title, path, dataclass, and the bases whose keys are in other sections."""

INTRODUCTION = """# Configuration

Generated from `roll/configs` by `python -m roll.configs.reference`.

A run is one YAML file. `${key}` repeats the value of another key; `defaults: [base.yaml]` includes other files,
relative to the file, which overrides them; `key=value` on the command line overrides all. For a key without effect,
`roll plan FILE` gives the reason; an unknown key, a wrong type or sizes that do not divide are errors that name values
that work. A role has only the keys that it reads.

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
        "name, except those that are set by other keys:\n\n" + _rows(("option", "instead"), OWNED.items())
    )
    parts.append("## Other spellings\n\n" + _rows(("in other recipes", "here"), _spellings()))
    unsupported = ((f"`{item.pattern}`{_of(item)}", item.reason) for item in UNSUPPORTED_KEYS)
    parts.append(
        "## Keys of other projects\n\nThese have no counterpart. A value that changes nothing is a warning, any other "
        "an error.\n\n" + _rows(("key", "reason"), unsupported)
    )
    return "\n".join(parts)


def _table(cls: type, path: str, bases: tuple[type, ...]) -> str:
    inherited = {name for base in bases for name in declared(base)}
    rows = [_row(key, path) for name, key in declared(cls).items() if name not in inherited]
    return _rows(("key", "type", "default", "meaning"), rows)


def _row(key: Key, path: str) -> tuple[str, str, str, str]:
    metadata = key.field.metadata
    variants = [name for condition in metadata["only_for"] for name in condition.variants]
    help = f"{', '.join(variants)}: {metadata['help']}" if variants else metadata["help"]
    return (f"`{path}{key.path}`", describe(key.hint) + _bounds(key), _default(key.default), help)


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
        return "a section"
    if isinstance(value, dict) and any(is_dataclass(item) for item in value.values()):
        return f"`{', '.join(value)}`"
    return f"`{json.dumps(value)}`"


def _of(item: UnsupportedKey) -> str:
    """The pipelines of an unsupported key if it belongs to some only."""
    return "" if item.pipelines == UnsupportedKey("", bool, "").pipelines else f" ({', '.join(item.pipelines)})"


def _names() -> str:
    rows = (
        ("`adv_estimator`", ", ".join(ADV_ESTIMATORS)),
        ("`actor_train.pg_variant`", ", ".join(PG_VARIANTS)),
        ("`<role>.data_args.template`", ", ".join(TEMPLATES)),
        ("`architectures` of the model's config.json", ", ".join(ARCHITECTURES)),
    )
    return _rows(("key", "known"), rows)


def _spellings() -> Iterator[tuple[str, str]]:
    for other, name in RENAMED_KEYS.items():
        yield f"`{other}`", f"`{name}`"
    for other, name in MOVED_KEYS.items():
        if other not in MOVED_VALUES:
            yield f"`{other}`", f"`{name}`"
        for value, here in MOVED_VALUES.get(other, {}).items():
            yield f"`{other}: {json.dumps(value)}`", f"`{name}: {here}`"
    yield (
        "`importance_sampling: true` with `is_clip_range: [0.5, 2.0]`",
        "`correction.weights: {level: token, mode: clamp, lower: 0.5, upper: 2.0}`",
    )
    for key, values in RENAMED_VALUES.items():
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
