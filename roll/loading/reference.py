"""Generates the pages of keys, those here and those of other systems, and the tables of docs/algorithms.

Run `python -m roll.loading.reference`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path

from roll.algorithms.estimators import ADV_ESTIMATORS
from roll.algorithms.policy_loss import POLICY_LOSSES
from roll.algorithms.registry import Algorithm
from roll.base.schema import Key, declared, describe, keys_by_path, known_keys, section_of
from roll.compat.rules import PIPELINES_WITH_RULES
from roll.compat.systems.verl import VERL_KEYS
from roll.compat.translate import MOVED, RENAMED, RULES, VALUES
from roll.configs.devices.sglang_options import OWNED
from roll.configs.pipeline import BaseConfig, RLVREngineRewardConfig
from roll.configs.roles import ROLES
from roll.configs.trackers import PACKAGES, TRACKER_OPTIONS
from roll.loading.load import PIPELINES
from roll.models.families.registry import architectures, template_names

DOCS = Path(__file__).resolve().parents[2] / "docs"

ALGORITHMS: dict[str, tuple[str, Mapping[str, Algorithm]]] = {
    "algorithms/policy_loss.md": ("pg_variant", POLICY_LOSSES),
    "algorithms/advantages.md": ("adv_estimator", ADV_ESTIMATORS),
}
"""Pages with a table between `<!-- KEY -->` and `<!-- end -->` -> the key, and the rows of the table."""

PAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "run": ("Keys of a run", ("Keys of all pipelines", "Keys of `sft`", "Keys of `dpo`", "Keys of `reward_model`")),
    "learning": ("Keys of reinforcement learning", ("Keys of `rlvr` and `agentic`",)),
    "agentic": (
        "Keys of agents",
        (
            "Keys of `agentic`",
            "`custom_envs`",
            "`train_env_manager`",
            "`val_env_manager`",
            "`gateway`",
            "`reward_normalization`",
        ),
    ),
    "asynchronous": ("Running ahead and correction", ("`async_training`", "`correction`")),
}
"""Pages of several groups of keys: file -> title, groups. Any other group is on the page of its section."""

INTRODUCTION = """# Configuration

Generated from `roll/configs` by `python -m roll.loading.reference`.

A run is one YAML file. `${key}` repeats the value of another key; `defaults: [base.yaml]` includes other files,
relative to the file, which overrides them, and null removes one of their `rewards` or `custom_envs`; `key=value` on
the command line overrides all. For a key without effect, `roll plan FILE` gives the reason (`--json`: for every key);
an unknown key, a wrong type or sizes that do not divide are errors that name values that work. Keys of other systems
that are read or dropped are in [other_spellings.md](other_spellings.md).

A relative path (`pretrain`, `file_name`, `output_dir`) starts in the folder in which `roll` is called; base files in
`defaults` are relative to the file. Python modules (`module:function`) are found beside the file and in that folder.

A file needs few keys:

- all: `pretrain`, `actor_train.device_mapping`, and `response_length` or `sequence_length`
- `rlvr`: `actor_infer.device_mapping`, `actor_train.data_args.file_name`, and `num_return_sequences_in_group`, which
  the default `adv_estimator` requires to be at least 2; without `rewards` the built-in math rule scores
- `agentic`: `actor_infer.device_mapping`, `max_tokens_per_step`; without `custom_envs` the environment is FrozenLake
- `sft`: `actor_train.data_args.file_name`
- `dpo`: `actor_train.data_args.file_name` and `reference.device_mapping`
- `reward_model`: `actor_train.data_args.file_name`

Roles are `actor_train`, `actor_infer`, `reference`, `critic`, `reward`, `judge` and `validation`; each has only the
keys that it reads. Devices are global ranks; rank r is on node r // `num_devices_per_node`. Two roles with equal
`device_mapping` share their devices, roles on disjoint devices run concurrently.
"""


SPELLINGS_INTRODUCTION = """# Keys of other systems

Generated from `roll/compat` by `python -m roll.loading.reference`.

Files of other systems may keep these spellings; `roll convert FILE` prints a file with the keys of this project, and
[coming_from.md](coming_from.md) explains how the systems differ.
"""


def generated_pages() -> dict[Path, str]:
    """Every generated page, and those with a generated table, as Markdown."""
    pages = {DOCS / "other_spellings.md": render_spellings()}
    for name in ALGORITHMS:
        pages[DOCS / name] = with_table(name, (DOCS / name).read_text(encoding="utf-8"))
    contents = []
    for stem, (title, groups) in _configuration().items():
        pages[DOCS / "configuration" / f"{stem}.md"] = "\n".join([f"# {title}\n", *groups.values()])
        names = [group for group in groups if group != title]
        contents.append((f"[{title}](configuration/{stem}.md)", ", ".join(names)))
    known = "## Names\n\n" + _table(("key", "known"), _names())
    pages[DOCS / "configuration.md"] = "\n".join([INTRODUCTION, _table(("page", "groups"), contents), known])
    return pages


def _configuration() -> dict[str, tuple[str, dict[str, str]]]:
    """Pages of the keys by file: the title, and each group with its table."""
    owners = {group: stem for stem, (_, groups) in PAGES.items() for group in groups}
    pages: dict[str, tuple[str, dict[str, str]]] = {stem: (title, {}) for stem, (title, _) in PAGES.items()}
    for group, keys in _groups().items():
        stem = owners.get(group) or group.split("`")[1]
        title, groups = pages.setdefault(stem, (group, {}))
        head = "" if group == title else f"## {group}\n\n"
        groups[group] = head + _table(("key", "type", "default", "meaning"), map(_row, keys))
    pages["actor_infer"][1]["options of SGLang"] = (
        "## Options of SGLang\n\n`strategy_config` of `actor_infer` takes every option of SGLang's `ServerArgs` by "
        "name, except the options that other keys set:\n\n" + _table(("option", "instead"), OWNED.items())
    )
    packages = ", ".join(package for _, package in PACKAGES.values())
    trackers = (
        f"`tracker_kwargs` of each tracker in `track_with`. {', '.join(PACKAGES)} need a package (`pip install` "
        f"{packages}) and run in processes of their own: a server that does not answer is warned about once and "
        "delays nothing. Their local files are in `output_dir`. opentelemetry sends the spans of the run, the others "
        "metrics and samples.\n\n" + _table(("key", "type", "default", "meaning"), map(_row, _tracker_keys()))
    )
    pages["trackers"] = ("Options of trackers", {"Options of trackers": trackers})
    return pages


def render_spellings() -> str:
    """The page of other systems' keys as Markdown."""
    rules = ((f"`{rule.pattern}`{_only(rule.pipelines)}", rule.reason) for rule in RULES.rules)
    return "\n".join(
        [
            SPELLINGS_INTRODUCTION,
            "## Other spellings\n\n" + _table(("in other recipes", "here"), _spellings()),
            "## Keys without a counterpart\n\nA value that changes nothing is a warning, any other an error.\n\n"
            + _table(("key", "reason"), rules),
        ]
    )


def _groups() -> dict[str, list[Key]]:
    """Every key once: those of a section under the name of the section, the others by the pipelines that have them."""
    keys = {key.path: key for root in PIPELINES.values() for key in known_keys(root) if section_of(key.hint)[0] is None}
    keys |= {key.path: key for key in known_keys(BaseConfig) if key.path == "pipeline"}  # the others allow one value
    owners = {path: tuple(name for name, root in PIPELINES.items() if path in _paths(root)) for path in keys}
    combinations = sorted(dict.fromkeys(owners.values()), key=len, reverse=True)
    groups: dict[str, list[Key]] = {f"Keys of {_all_or(names)}": [] for names in combinations}
    for role in ROLES:
        groups[f"`{role}`"] = []
        if role == "reward":
            groups["`reward` with `strategy_name: sglang`"] = [
                key
                for key in known_keys(RLVREngineRewardConfig)
                if key.path not in keys and section_of(key.hint)[0] is None
            ]
    for path, key in keys.items():
        section = path.partition(".")[0]
        groups.setdefault(f"`{section}`" if section != path else f"Keys of {_all_or(owners[path])}", []).append(key)
    return {title: group for title, group in groups.items() if group}


def _paths(root: type) -> Collection[str]:
    return keys_by_path(root)


def _all_or(pipelines: tuple[str, ...]) -> str:
    return "all pipelines" if len(pipelines) == len(PIPELINES) else " and ".join(f"`{name}`" for name in pipelines)


def _row(key: Key) -> tuple[str, str, str, str]:
    metadata = key.field.metadata
    variants = [name for condition in metadata["only_for"] for name in condition.variants]
    labels = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    bounds = " and ".join(f"{label} {metadata[name]:g}" for name, label in labels.items() if metadata[name] is not None)
    allowed = describe(key.hint) + (f", {bounds}" if bounds else "")
    default = "a section" if is_dataclass(key.default) else f"`{json.dumps(key.default)}`"
    return f"`{key.path}`", allowed, default, ", ".join(variants) + (": " if variants else "") + metadata["help"]


def _tracker_keys() -> Iterator[Key]:
    for name, options in TRACKER_OPTIONS.items():
        yield from known_keys(options, f"tracker_kwargs.{name}")


def _names() -> Iterator[tuple[str, str]]:
    yield "`adv_estimator`", ", ".join(ADV_ESTIMATORS)
    yield "`actor_train.pg_variant`", ", ".join(POLICY_LOSSES)
    yield "`<role>.data_args.template`", ", ".join(template_names())
    yield "`architectures` of the model's config.json", ", ".join(architectures())


def _only(pipelines: tuple[str, ...]) -> str:
    return "" if pipelines == PIPELINES_WITH_RULES else f" ({', '.join(pipelines)})"


def _spellings() -> Iterator[tuple[str, str]]:
    for other, name in RENAMED.items():
        yield f"`{other}`", f"`{name}`"
    for other, name in MOVED.items():
        if other in VERL_KEYS:  # docs/coming_from.md has them
            continue
        if other not in VALUES:
            yield f"`{other}`", f"`{name}`"
        for value, ours in VALUES.get(other, {}).items():
            yield f"`{other}: {json.dumps(value)}`", f"`{name}: {ours}`"
    yield (
        "`importance_sampling: true` with `is_clip_range: [0.5, 2.0]`",
        "`correction.weights: {level: token, mode: clamp, lower: 0.5, upper: 2.0}`",
    )
    for key, values in VALUES.items():
        for other, value in values.items() if key not in MOVED else ():
            yield f"`{key}: {other}`", f"`{key}: {value}`"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(re.sub(r"\|", r"\\|", cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def with_table(name: str, page: str) -> str:
    """A page of ALGORITHMS with its table replaced."""
    key, registry = ALGORITHMS[name]
    table = _table((f"`{key}`", "formula", "source", "keys"), map(_algorithm_row, registry.values()))
    before, mark, rest = page.partition(f"<!-- {key} -->\n\n")
    return before + mark + table + "\n" + rest[rest.index("<!-- end -->") :]


def _algorithm_row(algorithm: Algorithm) -> tuple[str, ...]:
    """Name, first paragraph and source of the docstring of the formula, and own keys."""
    text = re.sub(r"\s*\n\s*", " ", (algorithm.formula.__doc__ or "").partition("\n\n")[0])
    whole = re.sub(r"\s+", " ", algorithm.formula.__doc__ or "")
    source = re.search(r"Source: (.*?)\.(?= Raises:| Returns:| Like| $|$)", whole)
    keys = declared(algorithm.options) if is_dataclass(algorithm.options) else ()
    return f"`{algorithm.name}`", text.rstrip("."), source[1] if source else "", ", ".join(f"`{key}`" for key in keys)


if __name__ == "__main__":
    for file in (DOCS / "configuration").glob("*.md"):
        file.unlink()
    for file, text in generated_pages().items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
