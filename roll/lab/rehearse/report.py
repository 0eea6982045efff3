"""What a rehearsal exercised, what it shrank and what a CPU cannot tell, as values and as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from roll.configs.agentic import AgenticConfig
from roll.configs.devices.parallel_layout import spans
from roll.configs.pipeline import BaseConfig, PreferenceConfig, RLConfig, RLVRConfig
from roll.configs.roles import EngineRoleConfig
from roll.configs.scoring.built_in_rewards import scoring_role
from roll.configs.scoring.rewards import rewards_of
from roll.datasets.preferences import load_preferences
from roll.datasets.prompts import load_prompts
from roll.datasets.sft import load_sft_data
from roll.lab.rehearse.runs import RunRecord
from roll.lab.rehearse.shrink import Change
from roll.lab.rehearse.sizes import Placement
from roll.tools.show.formatting import format_number, sanitize
from roll.tools.show.layout import MODEL_STYLE, OBSERVATION_STYLE, step_view
from roll.tools.show.samples import SampleGroup, groups_of
from roll.tools.show.tokens import Pieces

CPU_LIMITS = (
    "memory: whether weights, optimizer, activations and KV cache fit a GPU (`roll plan` estimates it)",
    "NCCL and CUDA IPC: collectives and weight updates ran over gloo and shared memory",
    "CUDA kernels: flash attention, Transformer Engine, fused operators, CUDA graphs",
    "half precision: the rehearsal computes in fp32, so log-probs of both engines agree more closely than on a GPU",
    "speed, and the balance of generation and training",
    "whether the model learns: a random model of a few hundred thousand weights shows nothing about that",
)
"""What no rehearsal shows."""

VALUE_WIDTH = 60
"""Characters of a value in the list of changes."""


@dataclass(frozen=True)
class Part:
    """One part of the recipe: whether it was exercised, what was seen, and what of it a rehearsal cannot exercise."""

    name: str
    passed: bool
    detail: str
    not_exercised: list[str] = field(default_factory=list)


def findings(recipe: BaseConfig, small: BaseConfig, placement: Placement, runs: Sequence[RunRecord]) -> list[Part]:
    """What the run and the resumed one exercised; the second is missing if the first failed."""
    first = runs[0]
    made = [_placement(role, recipe, placement) for role in placement.layouts]
    made.append(_steps(small, first))
    if isinstance(small, RLConfig):
        made += [_weight_updates(first), _policy(small, first), _schedule(small, first)]
    if isinstance(small, RLVRConfig):
        made += _rewards(small, first)
    elif isinstance(small, AgenticConfig):
        made += _environments(small, first)
    if small.eval_steps:
        made.append(_validation(first))
    steps = small.max_steps
    has_checkpoint = steps - 1 in first.checkpoints
    made.append(Part("checkpoint", has_checkpoint, f"of steps {', '.join(map(str, first.checkpoints)) or 'none'}"))
    made.append(_resume(small, runs))
    if small.track_with:
        made.append(_trackers(small, first))
    return made


def _placement(role: str, recipe: BaseConfig, placement: Placement) -> Part:
    section, layout = getattr(recipe, role), placement.layouts[role]
    before = section.layout
    if isinstance(section, EngineRoleConfig):
        copies = "number of engines"
        shape = f"{layout.data} SGLang engine{'s' if layout.data > 1 else ''}, tensor parallel {layout.tensor}"
    else:
        copies, megatron = "data parallel", section.strategy_args.strategy_config
        shape = f"Megatron TP{layout.tensor} PP{layout.pipeline} DP{layout.data}"
        shape += ", sequence parallel" if megatron.sequence_parallel and layout.tensor > 1 else ""
    sizes = {"tensor": "tensor parallel", "pipeline": "pipeline parallel", "data": copies}
    lost = [
        f"{text} {getattr(before, name)} is 1 here"
        for name, text in sizes.items()
        if getattr(before, name) > 1 and getattr(layout, name) == 1
    ]
    others = [name for name, own in placement.devices.items() if name != role and own == placement.devices[role]]
    shared = f"; shares its devices here with {' and '.join(others)}" if others else ""
    own = {*section.device_mapping}
    apart = [name for name in others if not own & {*getattr(recipe, name).device_mapping}]
    lost += [f"devices apart from {' and '.join(apart)}"] if apart else []
    return Part(role, True, f"{shape}{shared}", lost)


def _steps(small: BaseConfig, run: RunRecord) -> Part:
    done = [line for line in run.lines if line["step"]]
    per_batch = small.optimizer_steps_per_batch
    accumulation = small.actor_train.training_args.gradient_accumulation_steps
    norms = run.values("actor/grad_norm")
    detail = f"{len(done)} of {small.max_steps}, each of {per_batch} optimizer step{'s' if per_batch > 1 else ''}"
    detail += f" of {accumulation} micro-batches a rank; gradient norm {', '.join(map(format_number, norms)) or 'none'}"
    return Part("training steps", run.finished and len(done) == small.max_steps, detail)


def _weight_updates(run: RunRecord) -> Part:
    verified = run.values("weight_update/verified")
    bytes_sent = max(run.values("weight_update/bytes"), default=0)
    detail = f"{int(sum(verified))} of {len(verified)} verified by checksum, {bytes_sent / 2**20:.1f} MiB each"
    return Part("weight updates", bool(verified) and all(verified), detail)


def _policy(small: RLConfig, run: RunRecord) -> Part:
    parts = [f"pg_variant {small.actor_train.pg_variant}", f"adv_estimator {small.adv_estimator}"]
    parts += ["KL loss"] if small.use_kl_loss else []
    parts += ["KL in the reward"] if small.add_token_level_kl else []
    parts += ["off-policy correction"] if small.correction.active else []
    losses = run.values("actor/loss")
    detail = f"{', '.join(parts)}; loss {', '.join(map(format_number, losses))}"
    learned = any(run.values("actor/grad_norm"))
    if losses and not learned:
        detail += "; no gradient, since all scores of a group were equal: try more --steps"
    return Part("policy loss", bool(losses) and learned, detail)


def _schedule(small: RLConfig, run: RunRecord) -> Part:
    stale = run.values("staleness/max")
    detail = f"async_generation_ratio {small.async_generation_ratio:g}, {small.in_flight_policy} at a weight update"
    if not small.async_generation_ratio:
        detail = "synchronous"
    return Part("schedule", bool(stale), f"{detail}; largest staleness {format_number(max(stale, default=0))}")


def _rewards(small: RLVRConfig, run: RunRecord) -> list[Part]:
    args = small.actor_train.data_args
    tags = {prompt.id: prompt.tag for prompt in load_prompts(args.file_name, args, lambda tag: {})}
    scores: dict[str, list[float]] = {name: [] for name in small.rewards}
    prompts: dict[str, set[str]] = {name: set() for name in small.rewards}
    for sample in run.all_samples:
        for owner in rewards_of(small.rewards, tags.get(sample["id"], "")):
            scores[owner].append(sample["score"])
            prompts[owner].add(sample["id"])
    made = []
    for name, own in scores.items():
        if not own:
            tags_here = ", ".join(small.rewards[name].tag_included)
            made.append(Part(f"reward {name}", False, f"no response to a prompt tagged {tags_here}; use more --steps"))
            continue
        values = ", ".join(f"{format_number(value)} ({count})" for value, count in sorted(Counter(own).items())[:4])
        detail = f"{len(own)} responses to {len(prompts[name])} prompts; scores (responses): {values}"
        lost = ["grade_pattern"] if scoring_role(small.rewards[name]) == "judge" else []
        made.append(Part(f"reward {name}", True, detail, lost))
    return made


def _environments(small: AgenticConfig, run: RunRecord) -> list[Part]:
    made = []
    for tag in small.tags_of(small.train_env_manager):
        episodes = [sample["episode"] for sample in run.all_samples if sample["episode"]["tag"] == tag]
        trajectories = {episode["trajectory"] for episode in episodes}
        turns = sum(len(episode["turns"]) for episode in episodes)
        made.append(Part(f"environment {tag}", bool(episodes), f"{len(trajectories)} trajectories, {turns} turns"))
    return made


def _validation(run: RunRecord) -> Part:
    values = [
        f"{name} {format_number(line[name])} at step {int(line['step'])}"
        for line in run.lines
        for name in ("val/score", "val/loss")
        if line.get(name) is not None
    ]
    return Part("validation", bool(values), "; ".join(values) or "none")


def _resume(small: BaseConfig, runs: Sequence[RunRecord]) -> Part:
    if len(runs) < 2:
        return Part("resume", False, "not tried, since the first run failed or wrote no checkpoint")
    last = [line for line in runs[1].lines if line["step"] == small.max_steps]
    passed = runs[1].finished and bool(last)
    detail = f"a new run continued at step {small.max_steps - 1} and made step {small.max_steps}"
    return Part("resume", passed, detail if passed else "the resumed run failed")


def _trackers(small: BaseConfig, run: RunRecord) -> Part:
    missing = [name for name in small.track_with if name != "stdout" and name not in run.entries]
    detail = f"{', '.join(small.track_with)}, and metrics.jsonl"
    return Part("trackers", not missing, f"{', '.join(missing)} wrote nothing" if missing else detail)


def summary_of(made: Sequence[Part], changes: Sequence[Change], seconds: float) -> dict[str, Any]:
    """The report as values for JSON."""
    return {
        "passed": all(finding.passed for finding in made),
        "seconds": round(seconds, 1),
        "exercised": [asdict(finding) for finding in made],
        "shrunk": [asdict(change) for change in changes],
    }


def verdict(made: Sequence[Part]) -> str:
    lost = [f"{text} ({finding.name})" for finding in made for text in finding.not_exercised]
    passed = "every part" if all(finding.passed for finding in made) else "not every part"
    return f"{passed} was exercised" + (f", except {', '.join(lost)}" if lost else "")


def tables(made: Sequence[Part], changes: Sequence[Change]) -> RenderableType:
    """The report as tables."""
    exercised = Table(box=box.SIMPLE_HEAD, title="Exercised", title_justify="left", title_style="bold")
    for column in ("", "part", "what was seen"):
        exercised.add_column(column, overflow="fold")
    for finding in made:
        mark = Text("ok", "green") if finding.passed else Text("NO", "bold red")
        lost = [f"not exercised: {text}" for text in finding.not_exercised]
        exercised.add_row(mark, Text(finding.name), Text("; ".join([finding.detail, *lost])))
    by_reason: dict[str, list[Change]] = {}
    for change in changes:
        by_reason.setdefault(change.reason, []).append(change)
    shrunk = [Text("Changed for the rehearsal", "bold")]
    for reason, same in by_reason.items():
        shrunk.append(Text(f"  {reason}", "italic"))
        shrunk += [
            Text(f"    {change.path}: {_shown(change.before)} -> {_shown(change.after, 'left out')}") for change in same
        ]
    limits = [Text(""), Text("Not told by a CPU", "bold"), *(Text(f"  - {limit}") for limit in CPU_LIMITS)]
    return Group(exercised, *shrunk, *limits)


def _shown(value: Any, none: str = "null") -> str:
    if isinstance(value, list) and len(value) > 1 and all(type(item) is int for item in value):
        return spans(value)
    if isinstance(value, float):
        return format_number(value)
    text = none if value is None else str(value)
    return text if len(text) <= VALUE_WIDTH else f"{text[: VALUE_WIDTH - 3]}..."


def sample_view(small: BaseConfig, run: RunRecord, pieces: Pieces) -> RenderableType | None:
    """In full, the best sample of a group, or one example of what is learned; None if there is none."""
    if not isinstance(small, RLConfig):
        return _example_view(small)
    groups = groups_of(run.samples[max(run.samples)]) if run.samples else []
    if not groups:
        return None
    best = max(groups[0].samples, key=lambda sample: sample.score)
    group = SampleGroup(groups[0].number, [best])
    return Group(Text("One sample in full", "bold"), step_view(max(run.samples), [group], None, pieces, whole=True))


def _example_view(small: BaseConfig) -> RenderableType:
    """The first pair of preferences, or the first prompt of SFT with its answer."""
    args = small.actor_train.data_args
    if isinstance(small, PreferenceConfig):
        pair = load_preferences(args.file_name, args)[0]
        title = "One pair in full"
        texts = [("better response", pair.chosen, MODEL_STYLE), ("worse response", pair.rejected, MODEL_STYLE)]
    else:
        example = load_sft_data(args.file_name, args)[0]
        title = "One example in full"
        messages = example.question.messages or ({"role": "user", "content": example.question.text or ""},)
        texts = [(message["role"], message["content"], OBSERVATION_STYLE) for message in messages]
        texts.append(("answer that is learned", example.response, MODEL_STYLE))
    parts = [part for name, text, style in texts for part in (Text(name, "dim"), sanitize(str(text), style))]
    return Group(Text(title, "bold"), *parts)
