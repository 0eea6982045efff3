"""What a rehearsal exercised, what it shrank and what a CPU cannot tell, as values and as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from roll.base.text import format_count
from roll.configs.agentic import AgenticConfig
from roll.configs.devices.parallel_layout import spans
from roll.configs.pipeline import BaseConfig, PreferenceConfig, RLConfig, RLVRConfig
from roll.configs.roles import EngineRoleConfig
from roll.configs.scoring.built_in_rewards import scoring_role
from roll.configs.scoring.rewards import rewards_of
from roll.datasets.preferences import load_preferences
from roll.datasets.prompts import load_prompts
from roll.datasets.sft import load_sft_data
from roll.lab.rehearse.overrides import Change
from roll.lab.rehearse.runs import RunRecord
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


def findings(recipe: BaseConfig, small: BaseConfig, placement: Placement, runs: Sequence[RunRecord]) -> Iterator[Part]:
    """What the run and the resumed one exercised; the second is missing if the first failed."""
    first, steps = runs[0], small.max_steps
    yield from [_placement(role, recipe, placement) for role in placement.layouts]
    yield _steps(small, first)
    if isinstance(small, RLConfig):
        yield from [_weight_updates(first), *(_policy(small, first, name) for name in _policies(small))]
        yield _schedule(small, first)
    if isinstance(small, RLVRConfig):
        yield from _rewards(small, first)
    elif isinstance(small, AgenticConfig):
        yield from _environments(small, first)
    if small.eval_steps:
        values = [
            f"{name} {format_number(line[name])} at step {int(line['step'])}"
            for line in first.lines
            for name in ("val/score", "val/loss")
            if line.get(name) is not None
        ]
        yield Part("validation", bool(values), "; ".join(values) or "none")
    yield Part("checkpoint", steps - 1 in first.checkpoints, f"of steps {_joined(first.checkpoints)}")
    resumed = len(runs) > 1 and runs[1].finished and any(line["step"] == steps for line in runs[1].lines)
    detail = f"a new run continued at step {steps - 1} and made step {steps}" if resumed else "the resumed run failed"
    untried = "not tried, since the first run failed or wrote no checkpoint"
    yield Part("resume", resumed, detail if len(runs) > 1 else untried)
    if small.track_with:
        missing = [name for name in small.track_with if name not in ("stdout", *first.entries)]
        seen = f"{_joined(missing)} wrote nothing" if missing else f"{_joined(small.track_with)}, and metrics.jsonl"
        yield Part("trackers", not missing, seen)


def _joined(values: Iterable[Any]) -> str:
    return ", ".join(format_number(each) if isinstance(each, float) else str(each) for each in values) or "none"


def _placement(role: str, recipe: BaseConfig, placement: Placement) -> Part:
    section, layout = getattr(recipe, role), placement.layouts[role]
    sizes = {name: f"{name} parallel" for name in ("tensor", "context", "pipeline", "data", "expert")}
    if isinstance(section, EngineRoleConfig):
        sizes["data"] = "number of engines"
        shape = f"{format_count(layout.data, 'SGLang engine')}, tensor parallel {layout.tensor}"
    else:
        context = f" CP{layout.context}" if layout.context > 1 else ""
        shape = f"Megatron TP{layout.tensor}{context} PP{layout.pipeline} DP{layout.data}"
        if section.strategy_args.strategy_config.sequence_parallel and layout.tensor > 1:
            shape += ", sequence parallel"
        if layout.expert > 1:
            shape += f", experts on {layout.expert} ranks"
    before = {name: getattr(section.layout, name) for name in sizes if getattr(layout, name) == 1}
    lost = [f"{sizes[name]} {size} is 1 here" for name, size in before.items() if size > 1]
    others = [name for name, own in placement.devices.items() if name != role and own == placement.devices[role]]
    if others:
        shape += f"; shares its devices here with {' and '.join(others)}"
    apart = [name for name in others if not {*section.device_mapping} & {*getattr(recipe, name).device_mapping}]
    if apart:
        lost.append(f"devices apart from {' and '.join(apart)}")
    return Part(role, True, shape, lost)


def _steps(small: BaseConfig, run: RunRecord) -> Part:
    done = sum(line["step"] > 0 for line in run.lines)
    accumulation = small.actor_train.training_args.gradient_accumulation_steps
    detail = f"{done} of {small.max_steps}, each of {format_count(small.optimizer_steps_per_batch, 'optimizer step')}"
    norms = [norm for name in _policies(small) for norm in run.values(f"{name}actor/grad_norm")]
    detail += f" of {accumulation} micro-batches a rank; gradient norm {_joined(norms)}"
    return Part("training steps", run.finished and done == small.max_steps, detail)


def _weight_updates(run: RunRecord) -> Part:
    verified = run.values("weight_update/verified")
    size = max(run.values("weight_update/bytes"), default=0) / 2**20
    detail = f"{int(sum(verified))} of {len(verified)} verified by checksum, {size:.1f} MiB each"
    return Part("weight updates", bool(verified) and all(verified), detail)


def _policies(small: BaseConfig) -> list[str]:
    """What the metrics of each policy begin with: nothing, unless there are several."""
    return [f"{name}/" for name in getattr(small, "policies", {})] or [""]


def _policy(small: RLConfig, run: RunRecord, name: str) -> Part:
    options = {
        f"pg_variant {small.actor_train.pg_variant}": True,
        f"adv_estimator {small.adv_estimator}": True,
        "KL loss": small.use_kl_loss,
        "KL in the reward": small.add_token_level_kl,
        "off-policy correction": small.correction.active,
    }
    losses, learned = run.values(f"{name}actor/loss"), any(run.values(f"{name}actor/grad_norm"))
    detail = f"{_joined(name for name, used in options.items() if used)}; loss {_joined(losses)}"
    if losses and not learned:
        detail += "; no gradient, since all scores of a group were equal: try more --steps"
    return Part(f"policy loss {name}".strip(" /"), bool(losses) and learned, detail)


def _schedule(small: RLConfig, run: RunRecord) -> Part:
    stale, ratio = run.values("staleness/max"), small.async_generation_ratio
    detail = (
        f"async_generation_ratio {ratio:g}, {small.in_flight_policy} at a weight update" if ratio else "synchronous"
    )
    return Part("schedule", bool(stale), f"{detail}; largest staleness {format_number(max(stale, default=0))}")


def _rewards(small: RLVRConfig, run: RunRecord) -> Iterator[Part]:
    args = small.actor_train.data_args
    tags = {prompt.id: prompt.tag for prompt in load_prompts(args.file_name, args, lambda tag: {})}
    samples = [sample for of_step in run.samples.values() for sample in of_step]
    for name, reward in small.rewards.items():
        own = [sample for sample in samples if name in rewards_of(small.rewards, tags.get(sample["id"], ""))]
        detail = f"no response to a prompt tagged {', '.join(reward.tag_included)}; use more --steps"
        if own:
            counts = sorted(Counter(sample["score"] for sample in own).items())[:4]
            values = _joined(f"{format_number(score)} ({count})" for score, count in counts)
            prompts = len({sample["id"] for sample in own})
            detail = f"{len(own)} responses to {prompts} prompts; scores (responses): {values}"
        lost = ["grade_pattern"] if own and scoring_role(reward) == "judge" else []
        yield Part(f"reward {name}", bool(own), detail, lost)


def _environments(small: AgenticConfig, run: RunRecord) -> Iterator[Part]:
    episodes = [sample["episode"] for of_step in run.samples.values() for sample in of_step]
    for tag in small.tags_of(small.train_env_manager):
        own = [episode for episode in episodes if episode["tag"] == tag]
        trajectories, turns = {episode["trajectory"] for episode in own}, sum(len(each["turns"]) for each in own)
        yield Part(f"environment {tag}", bool(own), f"{len(trajectories)} trajectories, {turns} turns")


def summary_of(made: Sequence[Part], changes: Sequence[Change], seconds: float) -> dict[str, Any]:
    """The report as values for JSON."""
    return {
        "passed": all(part.passed for part in made),
        "seconds": round(seconds, 1),
        "exercised": [asdict(part) for part in made],
        "shrunk": [asdict(change) for change in changes],
    }


def verdict(made: Sequence[Part]) -> str:
    lost = [f"{text} ({part.name})" for part in made for text in part.not_exercised]
    passed = "every part" if all(part.passed for part in made) else "not every part"
    return f"{passed} was exercised" + (f", except {', '.join(lost)}" if lost else "")


def tables(made: Sequence[Part], changes: Sequence[Change]) -> RenderableType:
    """The report as tables."""
    exercised = Table(box=box.SIMPLE_HEAD, title="Exercised", title_justify="left", title_style="bold")
    for column in ("", "part", "what was seen"):
        exercised.add_column(column, overflow="fold")
    for part in made:
        mark = Text("ok", "green") if part.passed else Text("NO", "bold red")
        lost = [f"not exercised: {text}" for text in part.not_exercised]
        exercised.add_row(mark, Text(part.name), Text("; ".join([part.detail, *lost])))
    shrunk = [Text("Changed for the rehearsal", "bold")]
    for reason in dict.fromkeys(change.reason for change in changes):
        shrunk.append(Text(f"  {reason}", "italic"))
        for change in [each for each in changes if each.reason == reason]:
            after = _shown(change.after, "left out")
            shrunk.append(Text(f"    {change.path}: {_shown(change.before, 'null')} -> {after}"))
    limits = [Text(""), Text("Not told by a CPU", "bold"), *(Text(f"  - {limit}") for limit in CPU_LIMITS)]
    return Group(exercised, *shrunk, *limits)


def _shown(value: Any, none: str) -> str:
    if isinstance(value, list) and len(value) > 1 and all(type(item) is int for item in value):
        return spans(value)
    text = none if value is None else format_number(value) if isinstance(value, float) else str(value)
    return text if len(text) <= VALUE_WIDTH else f"{text[: VALUE_WIDTH - 3]}..."


def sample_view(small: BaseConfig, run: RunRecord, pieces: Pieces) -> Group:
    """In full, the best sample of a group, or one example of what is learned; empty if there is none."""
    if not isinstance(small, RLConfig):
        return _example_view(small)
    groups = groups_of(run.samples[max(run.samples)]) if run.samples else []
    if not groups:
        return Group()
    best = SampleGroup(groups[0].number, [max(groups[0].samples, key=lambda sample: sample.score)])
    return Group("", Text("One sample in full", "bold"), step_view(max(run.samples), [best], None, pieces, whole=True))


def _example_view(small: BaseConfig) -> Group:
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
    return Group("", Text(title, "bold"), *parts)
