"""The page of one or several runs: their values as HTML and JSON in one file, which requests nothing."""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from roll.report.findings import PARTS, RunFinding, find
from roll.report.history import MOST_LANES, drop_reasons, histograms, lanes
from roll.report.read import SHARED, WAITING, Run, is_number
from roll.report.samples import shown_steps, step_groups, token_pieces
from roll.report.text import Text, bilingual, digits, percent, static_text, text
from roll.trackers.metrics import SECTIONS

MOST_POINTS = 2_000
"""Values of a curve; a longer run keeps the least, the mean and the largest of each bucket of steps."""

MOST_PARTS = 8
"""Numbers of rewards that are drawn among the curves; `all metrics` has all of them."""

PLAIN_BYTES = 100_000
"""Data up to this size stands in the page as it is; more is compressed."""

WORDS_OF_SCRIPT = ("constant", "no_text", "not_shown", "mean", "key_a", "key_lr", "key_h", "key_v")
"""Texts that the script shows."""

SCRIPTS = ("uplot.min.js", "page.js")
LIVE_SCRIPTS = ("uplot.min.js", "live.js", "page.js")


REWARD = "rollout/reward_mean"
"""Metric whose means by tag have the name of the tag behind it."""


@dataclass(frozen=True)
class Chart:
    """A chart: its title in both languages, its metrics or how they begin, and whether they are shares from 0 to 1."""

    section: str
    english: str
    chinese: str
    metrics: Sequence[str] | str
    share: bool = False


CHARTS = (
    Chart("curves", "Validation score", "验证得分", ["val/score"]),
    Chart("curves", "Validation loss", "验证损失", ["val/loss"]),
    Chart("curves", "Reward", "奖励", [REWARD]),
    Chart("curves", "Reward by tag", "各标签的奖励", f"{REWARD}/"),
    Chart("curves", "Training loss", "训练损失", ["actor/loss"]),
    Chart("lengths", "Response length", "回答长度", [f"rollout/response_length_{p}" for p in ("mean", "p90", "max")]),
    Chart("curves", "Entropy", "熵", ["actor/entropy"]),
    Chart("curves", "Gradient norm", "梯度范数", ["actor/grad_norm"]),
    Chart("curves", "Distance to the sampling policy", "与采样策略的距离", ["correction/behavior_k3"]),
    Chart("curves", "Clipped, rejected", "裁剪、拒绝", ["actor/clip_fraction", "correction/masked_fraction"]),
    Chart("curves", "Groups without a gradient", "无梯度的组", ["advantage/zero_variance_group_fraction"], True),
    Chart("time", "Time of a step", "每步时间", ["time/step", "time/generate"]),
    Chart("time", "Idle", "空闲", ["throughput/trainer_idle", "throughput/rollout_idle"], True),
    Chart("freshness", "Staleness", "滞后", ["staleness/mean", "staleness/max"]),
    Chart("freshness", "From submission to training", "从提交到训练", ["time/sample_age_mean", "time/sample_age_max"]),
    Chart("freshness", "Effective samples", "有效样本", ["correction/ess"], True),
    Chart("lengths", "Responses cut at the limit", "被截断的回答", ["rollout/truncated_fraction"], True),
)


def make_page(runs: Sequence[Run], live: Mapping[str, Any] | None = None) -> str:
    """The page of these runs; curves are laid over each other, all else is that of the run that is chosen.

    `live` is what `roll watch` gives its script: the state of the run, from which that asks for more.
    """
    names = "".join(_chip(index, run) for index, run in enumerate(runs))
    chips = f"<div class=chips>{names}</div>" if len(runs) > 1 else ""
    sections = ("curves", "time", "freshness", "lengths", "samples", "configuration")
    links = "".join(f"<a href=#{name}>{text(name).html()}</a>" for name in sections)
    body = [
        _each(runs, "figures", "findings"),
        _section("curves", f"<div class=grid data-charts=curves></div>{_all_metrics()}"),
        _section("time", _each(runs, "time", "lanes") + "<div class=grid data-charts=time></div>", "time_title"),
        _section("freshness", "<div class=grid data-charts=freshness></div>" + _each(runs, "ages", "drops")),
        _section("lengths", "<div class=grid data-charts=lengths></div>" + _each(runs, "lengths")),
        _section("samples", _each(runs, "samples")),
        _section("configuration", _configuration([run for run in runs if not run.policy])),
    ]
    scripts = "".join(f"<script>{static_text(name)}</script>" for name in (SCRIPTS if live is None else LIVE_SCRIPTS))
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width,initial-scale=1"><meta name=color-scheme content="light dark">'
        f"<title>{html.escape(' · '.join(run.name for run in runs))} · roll report</title>"
        f"<style>{static_text('uplot.min.css')}{static_text('page.css')}</style></head><body>"
        f"<header>{_each(runs, 'head')}{chips}<nav>{links}"
        f"<button id=language>{text('language').html()}</button></nav></header><main>{''.join(body)}</main>"
        f"{_data(_payload(runs, live))}{scripts}</body></html>"
    )


def _chip(index: int, run: Run) -> str:
    pressed = "false" if index else "true"
    colour = f"<i style=background:var(--r{index + 1})></i>"
    return f"<button class=chip data-run={index} aria-pressed={pressed}>{colour}{html.escape(run.name)}</button>"


def _each(runs: Sequence[Run], *names: str) -> str:
    """Parts of each run, of which the page shows those of the run that is chosen."""
    return "".join(
        f"<div class=of-run data-run={index}{' hidden' if index else ''}>"
        + "".join(f"<div data-part={name}>{PARTS_OF_RUN[name](run)}</div>" for name in names)
        + "</div>"
        for index, run in enumerate(runs)
    )


def _section(name: str, content: str, title: str = "") -> str:
    return f"<section id={name}><h2>{text(title or name).html()}</h2>{content}</section>"


def _head(run: Run) -> str:
    facts = []
    if run.steps:
        facts.append(text("steps", steps=f"{int(run.steps[-1]['step']):,}"))
    if run.config:
        devices = run.key("num_devices_per_node") or "?"
        facts.append(text("platform", platform=run.key("platform", "?"), devices=devices))
        if "adv_estimator" in run.config:
            loss, ratio = run.key("actor_train.pg_variant", "?"), run.key("async_generation_ratio", "?")
            facts.append(text("algorithm", loss=loss, estimator=run.key("adv_estimator"), ratio=ratio))
        facts.append(text("seed", seed=run.key("seed", "?")))
    if isinstance(devices := run.origin.get("devices"), dict) and devices:
        facts.append(text("devices", names=", ".join(devices)))
    if run.origin.get("commit"):
        facts.append(text("commit", commit=run.origin["commit"]))
    seconds = run.summary.get("seconds")
    if isinstance(seconds, int | float) and is_number(seconds):
        facts.append(text("seconds", minutes=f"{seconds // 60:.0f}", seconds=f"{seconds % 60:.0f}"))
    good = "ok" if run.status in ("finished", "running", WAITING) else "bad"
    described = " · ".join(fact.html() for fact in facts)
    return (
        f'<div class=bar><b>{html.escape(run.name)}</b><span class="pill {good}">{text(run.status).html()}</span>'
        f"<span class=dim>{described}</span></div>"
    )


def _key_figures(run: Run) -> str:
    figures: list[tuple[str, str, str, Text]] = []
    scores = [score for _, score in run.series("val/score")]
    if not run.steps and not scores:
        return f"<section class=kpis><p class=empty>{text('no_steps').html()}</p></section>"
    if scores:
        validated = text("validations", count=len(scores))
        figures.append(("validation", "val/score", f"{digits(scores[0])} → {digits(scores[-1])}", validated))
    main = ("reward", REWARD) if run.values(REWARD) else ("loss", "actor/loss")
    values = run.values(main[1])
    figures.append((*main, f"{digits(values[0])} → {digits(values[-1])}" if values else "–", text("batch_mean")))
    times, rates = run.values("time/step"), run.values("throughput/tokens_per_second")
    rate = text("rate", rate=digits(median(rates))) if rates else text("absent")
    figures.append(("step", "time/step", f"{median(times):.2f} s" if times else "–", rate))
    trainer, engines = run.values("throughput/trainer_idle"), run.values("throughput/rollout_idle")
    if trainer and engines:
        waited = text("engines_idle", idle=percent(fmean(engines)))
        figures.append(("idle", "throughput/trainer_idle", percent(fmean(trainer)), waited))
    if ages := run.values("staleness/mean"):
        most, ess = max(run.values("staleness/max"), default=0), run.values("correction/ess")
        oldest = text("staleness_max", most=f"{most:.0f}", ess=percent(fmean(ess)) if ess else "–")
        figures.append(("staleness", "staleness/mean", f"{fmean(ages):.1f}", oldest))
    last = run.steps[-1] if run.steps else {}
    if is_number(last.get("ledger/submitted")):
        dropped = sum(value or 0 for name, value in last.items() if name.startswith("ledger/dropped_"))
        of = text("submitted", count=f"{last['ledger/submitted']:,.0f}")
        figures.append(("dropped", "ledger/dropped_*", f"{dropped:,.0f}", of))
    cells = "".join(
        f"<div title={metric}><span>{text(label).html()}</span><b>{value}</b><small>{note.html()}</small></div>"
        for label, metric, value, note in figures
    )
    return f"<section class=kpis>{cells}</section>"


def _findings(run: Run) -> str:
    remarks = [RunFinding("warn", text("remark", what=remark)) for remark in run.remarks]
    return "<section class=find>" + "".join(_finding(each) for each in [*find(run), *remarks]) + "</section>"


def _finding(finding: RunFinding) -> str:
    metric = f" <code>{html.escape(finding.metric)}</code>" if finding.metric else ""
    return f"<div class={finding.kind}><i></i><p>{finding.text.html()}{metric}</p></div>"


def _all_metrics() -> str:
    return (
        f"<details id=all><summary>{text('all_metrics').html()}</summary>"
        f"<label class=dim>{text('filter').html()} <input id=filter type=search></label>"
        "<div class=grid></div></details>"
    )


def _time(run: Run) -> str:
    """One bar with the shares of all steps, and one column for each step or bucket of steps."""
    steps = [row for row in run.steps if is_number(row.get("time/step"))]
    if not steps:
        return f"<p class=empty>{text('no_time').html()}</p>"
    total = sum(row["time/step"] for row in steps) or 1.0
    sums = {name: sum(row.get(metric) or 0.0 for row in steps) for name, metric in PARTS}
    sums["other"] = max(0.0, total - sum(sums.values()))
    shown = {name: seconds for name, seconds in sums.items() if seconds > 0.001 * total}
    bar = "".join(f'<span class=c-{name} style="flex:{value / total:.4f}"></span>' for name, value in shown.items())
    legend = "".join(
        f"<li><i class=c-{name}></i>{text(name).html()} <b>{percent(value / total)}</b></li>"
        for name, value in shown.items()
    )
    return f"<div class=stack>{bar}</div><ul class=legend>{legend}</ul>"


def _lanes(run: Run) -> str:
    """The frame that the script draws lanes in, and a sentence that it shows where there are none."""
    widths = "".join(
        f"<button data-width={width} aria-pressed=false>{width or text('all').html()}</button>"
        for width in (1, 5, 20, 0)
    )
    more = len({span["who"] for span in run.spans}) - MOST_LANES
    left = f"<p class=dim>{text('lanes_left', count=more).html()}</p>" if more > 0 else ""
    return (
        f"<p class=empty>{text('no_spans').html()}</p>"
        f"<div class=lanes hidden><h3>{text('lanes').html()}</h3><div class=tools>"
        f"<label>{text('first_step').html()} <input type=range min=0 value=0></label>"
        f"<span>{text('steps_shown').html()} {widths}</span>"
        f"<button class=save>{text('perfetto').html()}</button></div><div class=drawn></div>"
        f"{left}<ul class=legend></ul></div>"
    )


def _drops(run: Run) -> str:
    """Why groups were dropped."""
    if not run.groups:
        return f"<p class=empty>{text('no_groups').html()}</p>"
    rows = "".join(
        f"<tr><td><code>{html.escape(reason)}</code><td>{count:,}<td>{example.html()}"
        for reason, count, example in drop_reasons(run)
    )
    dropped = f"<div class=wide><table>{rows}</table></div>" if rows else f"<p class=dim>{text('no_drops').html()}</p>"
    return f"<h3>{text('reasons').html()}</h3>{dropped}"


def _samples(run: Run) -> str:
    if not run.dumped:
        return f"<p class=empty>{text('samples_of_policies' if run.policies else 'no_samples').html()}</p>"
    tints = "".join(
        f"<button data-tint={key} aria-pressed={'true' if key == 'a' else 'false'}>{text(name).html()}</button>"
        for key, name in (("a", "tint_advantage"), ("lr", "tint_ratio"), ("h", "tint_entropy"), ("v", "tint_version"))
    )
    steps = "".join(f"<button data-step={step}>{step}</button>" for step in shown_steps(run))
    tools = f"<span>{text('step_number').html()} {steps}</span><span>{tints}</span><span class=key></span>"
    return f"<p class=dim>{text('weighing').html()}</p><div class=tools>{tools}</div>"


def _configuration(runs: Sequence[Run]) -> str:
    """Keys that the file gave; of several runs the keys and versions that differ."""
    if not any(run.config for run in runs):
        return f"<p class=empty>{text('no_config').html()}</p>"
    given = [_given(run) for run in runs]
    keys = list(dict.fromkeys(key for each in given for key in each))
    rows = [
        (key, [each.get(key, json.dumps(run.key(key))) for each, run in zip(given, runs, strict=True)]) for key in keys
    ]
    if len(runs) == 1:
        note = text("keys_given", given=len(keys))
    else:
        names = dict.fromkeys(name for run in runs for name in run.versions)
        rows += [(name, [run.versions.get(name, "–") for run in runs]) for name in names]
        rows = [(key, values) for key, values in rows if len({*values}) > 1]
        note = text("keys_differ") if rows else text("same_keys")
    head = "" if len(runs) == 1 else "<tr><th><th>" + "<th>".join(html.escape(run.name) for run in runs)
    lines = "".join(
        f"<tr><td><code>{html.escape(key).replace('.', '.<wbr>')}</code>"
        + "".join(f"<td><code>{html.escape(value)}</code>" for value in values)
        for key, values in rows
    )
    return f"<p class=dim>{note.html()}</p><div class=wide><table>{head}{lines}</table></div>"


def _given(run: Run) -> dict[str, str]:
    keys = run.key("source.given")
    return {str(k): json.dumps(run.key(str(k)), ensure_ascii=False) for k in keys} if isinstance(keys, list) else {}


def _payload(runs: Sequence[Run], live: Mapping[str, Any] | None) -> Mapping[str, Any]:
    meanings = {metric.name: [metric.unit, metric.meaning] for metrics in SECTIONS.values() for metric in metrics}
    names = sorted({name for run in runs for row in run.rows for name in row})
    parts = [name for name in names if name.startswith("reward/")][:MOST_PARTS]
    charts = [*CHARTS, *(Chart("curves", name, name, [name]) for name in parts)]
    return {
        "runs": [run_curves(run) for run in runs],
        "charts": [asdict(chart) | {"title": bilingual(chart.english, chart.chinese)} for chart in charts],
        "units": {name: meanings[name] for name in (sorted(meanings) if live else names) if name in meanings},
        "lanes": [lanes(run) for run in runs],
        "histograms": [histograms(run) for run in runs],
        "samples": [[] if live else _run_samples(run) for run in runs],
        "words": {name: text(name).html() for name in WORDS_OF_SCRIPT},
        "live": live,
    }


def run_curves(run: Run) -> Mapping[str, Any]:
    """Every metric of a run by step, thinned where there are many steps."""
    rows = run.rows
    left = ("step", *(SHARED if run.policy else ()))
    names = sorted({name for row in rows for name in row if not name.startswith(left)})
    values = {name: [row.get(name) if is_number(row.get(name)) else None for row in rows] for name in names}
    steps = [int(row["step"]) for row in rows]
    if len(rows) > MOST_POINTS:
        size = -(-3 * len(rows) // MOST_POINTS)
        starts, offsets = range(0, len(rows), size), (0, size // 3, 2 * size // 3)
        steps = [steps[min(start + offset, len(rows) - 1)] for start in starts for offset in offsets]
        values = {
            name: [v for start in starts for v in _summary(each[start : start + size])] for name, each in values.items()
        }
    return {
        "name": run.name,
        "step": steps,
        "data": {
            name: [_short(value) for value in each] for name, each in values.items() if any(v is not None for v in each)
        },
    }


def _summary(values: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Least, mean and largest value of a bucket; the largest first where it occurs first."""
    known = [value for value in values if value is not None]
    if not known:
        return None, None, None
    least, mean, largest = min(known), fmean(known), max(known)
    return (least, mean, largest) if known.index(least) <= known.index(largest) else (largest, mean, least)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def _run_samples(run: Run) -> list[dict[str, Any]]:
    pieces = token_pieces(run)
    return [step_groups(run, step, pieces) for step in shown_steps(run)]


def _data(payload: Mapping[str, Any]) -> str:
    plain = json.dumps(payload, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")
    if len(plain) <= PLAIN_BYTES:
        return f"<script type=application/json id=data>{plain}</script>"
    packed = base64.b64encode(gzip.compress(plain.encode(), mtime=0)).decode()
    return f"<script type=application/gzip id=data>{packed}</script>"


RUN_PARTS: Mapping[str, Callable[[Run], str]] = {
    "head": _head,
    "figures": _key_figures,
    "findings": _findings,
    "time": _time,
    "drops": _drops,
    "samples": _samples,
}
"""Parts of the page whose HTML follows from one run; `roll watch` replaces them as the run goes on."""

PARTS_OF_RUN: Mapping[str, Callable[[Run], str]] = {
    **RUN_PARTS,
    "lanes": _lanes,
    "ages": lambda run: "<div class=grid data-hist=freshness></div>",
    "lengths": lambda run: "<div class=grid data-hist=lengths></div>",
}
"""These, and the frames that the script draws in."""
