"""What a reader should know first about a run: rules from its values to sentences, the most serious first."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import correlation, fmean, median, stdev
from typing import Literal

from roll.base.events import EVENTS_FILE
from roll.report.read import DIED, Run, is_number
from roll.report.samples import token_pieces
from roll.report.text import Text, digits, percent, text
from roll.tools.show.samples import sample_weight
from roll.trackers.files import HEALTH_FILE

MOST = 5
"""Findings that the page shows."""

PARTS = (
    ("wait", "time/wait_prev_gen"),
    ("log_probs", "time/old_log_probs"),
    ("train", "time/train"),
    ("hand_over", "time/hand_over"),
    ("update", "time/weight_update"),
    ("val", "time/val"),
    ("checkpoint", "time/checkpoint"),
)
"""Parts of a step that do not overlap, by their text and metric."""

LEAST_SAMPLES = 8
"""Samples below which their mean score says nothing."""

LEAST_TOKENS = 100
"""Tokens below which means of tokens say nothing."""

LEAST_REPEATED = 16
"""Tokens of a response below which a token that makes up half of it is no repetition."""

Kind = Literal["bad", "warn", "ok"]


@dataclass(frozen=True)
class RunFinding:
    """One sentence with the number that made it; `metric` names where that number stands."""

    kind: Kind
    text: Text
    metric: str = ""


def find(run: Run) -> list[RunFinding]:
    """At most MOST findings: what failed, whether it learned, whether it was slow."""
    found = [finding for rule in RULES for finding in rule(run)]
    order = {"bad": 0, "warn": 1, "ok": 2}
    return sorted(found, key=lambda finding: order[finding.kind])[:MOST]


def ended_early(run: Run) -> Iterator[RunFinding]:
    """A run that did not finish, and why."""
    if run.status == DIED:
        yield RunFinding("bad", text("f_died"), HEALTH_FILE)
    elif run.status in ("failed", "interrupted"):
        event = f"{run.events[-1].get('component', '')} {run.events[-1]['message']}" if run.events else "-"
        yield RunFinding("bad", text("f_failed", status=text(run.status), event=event), EVENTS_FILE)


def not_finite(run: Run) -> Iterator[RunFinding]:
    """JSON has no NaN, so the log has null where a number was not finite."""
    for metric in ("actor/loss", "actor/grad_norm", "critic/loss"):
        broken = [int(row["step"]) for row in run.steps if metric in row and row[metric] is None]
        if broken:
            yield RunFinding("bad", text("f_nan", metric=metric, step=broken[0]), metric)
            return


def learned(run: Run) -> Iterator[RunFinding]:
    """First against last validation; a change below the noise of the scores is none."""
    scores = run.series("val/score")
    if len(scores) < 2:
        return
    (_, first), (_, last) = scores[0], scores[-1]
    best_step, best = max(scores, key=lambda score: score[1])
    noise = _noise([score for _, score in scores])
    if best - last > max(2 * noise, 0.05 * abs(best)) and best_step != scores[-1][0]:
        yield RunFinding("bad", text("f_fell", best=digits(best), step=best_step, last=digits(last)), "val/score")
    elif last - first > noise:
        yield RunFinding("ok", text("f_learned", first=digits(first), last=digits(last)), "val/score")
    else:
        values = text("f_flat", first=digits(first), last=digits(last), noise=digits(noise))
        yield RunFinding("warn", values, "val/score")


def reward_hacked(run: Run) -> Iterator[RunFinding]:
    """Reward, or a part of it, rises while validation falls."""
    scores = [score for _, score in run.series("val/score")]
    if len(scores) < 3:
        return
    fall = max(scores) - scores[-1]
    if fall <= max(2 * _noise(scores), 0.02 * abs(max(scores))):
        return
    if (rise := _rise(run.values("rollout/reward_mean"))) > 0.1:
        yield RunFinding("bad", text("f_hacked", reward=digits(rise), val=digits(fall)), "rollout/reward_mean")
    for name in _names(run, "reward/"):
        values = run.values(name)
        if (rise := _rise(values)) > 0.1 * max(1.0, abs(fmean(values))):
            yield RunFinding(
                "bad",
                text("f_part", part=name.removeprefix("reward/"), rise=digits(rise), val=digits(fall)),
                name,
            )
            return


def tag_against_others(run: Run) -> Iterator[RunFinding]:
    """The validation of one tag falls while the others rise."""
    tags = [name for name in _names(run, "val/") if name.endswith("/score") and name != "val/score"]
    moves = {name: (values[0], values[-1]) for name in tags if len(values := [v for _, v in run.series(name)]) > 1}
    falls = {name: move for name, move in moves.items() if move[1] < move[0] - max(0.03, 0.05 * abs(move[0]))}
    if len(moves) > 1 and len(falls) == 1 and any(last > first for first, last in moves.values()):
        ((name, (first, last)),) = falls.items()
        yield RunFinding(
            "bad", text("f_tag", tag=name[len("val/") : -len("/score")], first=digits(first), last=digits(last)), name
        )


def no_gradient(run: Run) -> Iterator[RunFinding]:
    """Groups with equal scores teach nothing."""
    metric = "advantage/zero_variance_group_fraction"
    if (values := run.values(metric, 0.1)) and (share := fmean(values)) > 0.5:
        rewards = run.values("rollout/reward_mean")
        if len(rewards) >= 10 and _rise(rewards) < 0.05 and share > 0.8:
            yield RunFinding("bad", text("f_nothing", share=percent(share), reward=digits(rewards[-1])), metric)
        else:
            yield RunFinding("warn", text("f_no_gradient", share=percent(share)), metric)


def length_hacking(run: Run) -> Iterator[RunFinding]:
    """Reward and length move together, and responses became much longer."""
    rewards, lengths = run.values("rollout/reward_mean"), run.values("rollout/response_length_mean")
    if len(rewards) != len(lengths) or len(rewards) < 10:
        return
    r, tenth = _correlation(rewards, lengths), max(1, len(lengths) // 10)
    times = fmean(lengths[-tenth:]) / max(fmean(lengths[:tenth]), 1e-9)
    if r > 0.7 and times > 1.5:
        yield RunFinding("warn", text("f_length", r=f"{r:.2f}", times=f"{times:.1f}"), "rollout/response_length_mean")


def entropy(run: Run) -> Iterator[RunFinding]:
    """Entropy that fell to nearly nothing, or rose to more than twice its start."""
    values = run.values("actor/entropy")
    if len(values) < 5:
        return
    first, last = fmean(values[: max(1, len(values) // 10)]), fmean(run.values("actor/entropy", 0.1))
    named = {"first": digits(first), "last": digits(last)}
    if last < 0.02 and last < first / 10:
        yield RunFinding("warn", text("f_entropy_low", **named), "actor/entropy")
    elif last > 2 * first and last > first + 0.5:
        yield RunFinding("bad", text("f_entropy_high", **named), "actor/entropy")


def stale(run: Run) -> Iterator[RunFinding]:
    """Corrections that leave few samples, and a policy that moves far in a step."""
    if (values := run.values("correction/ess", 0.25)) and (share := fmean(values)) < 0.5:
        yield RunFinding("warn", text("f_ess", ess=percent(share)), "correction/ess")
    distances = [(value, step) for step, value in run.series("correction/behavior_k3") if step > 0]
    if distances and (most := max(distances))[0] > 0.1:
        yield RunFinding("bad", text("f_far", k3=digits(most[0]), step=most[1]), "correction/behavior_k3")


def mismatch(run: Run) -> Iterator[RunFinding]:
    """Log-probs of engine and trainer differ although no sample is older than the weights."""
    name = "actor/log_ratio_abs_mean"
    fresh = [row[name] for row in run.steps if row.get("staleness/token_max") == 0 and isinstance(row.get(name), float)]
    half = run.key("actor_infer.model_args.dtype") != "fp32" or run.key("actor_train.model_args.dtype") != "fp32"
    if fresh and (value := median(fresh)) > (0.1 if half else 1e-3):
        yield RunFinding("bad", text("f_mismatch", value=digits(value)), name)


def right_scores_less(run: Run) -> Iterator[RunFinding]:
    """Responses of a tag with its ground truth score less than those without it: the reward may be flipped."""
    rows, pieces = run.samples(run.dumped[0]) if run.dumped else [], token_pieces(run)
    scores: defaultdict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for row in rows:
        truth = str(row.get("ground_truth") or "")
        if 0 < len(truth) <= 40:
            found = re.search(rf"(?<!\w){re.escape(truth)}(?!\w)", "".join(pieces(row["response_ids"])))
            scores[str(row.get("tag", ""))][found is None].append(row["score"])
    for tag, (right, others) in scores.items():
        if min(len(right), len(others)) >= LEAST_SAMPLES and fmean(right) < fmean(others):
            values = {"tag": tag, "right": digits(fmean(right)), "others": digits(fmean(others))}
            yield RunFinding("bad", text("f_flipped", **values), "samples")


def not_the_sum(run: Run) -> Iterator[RunFinding]:
    """Scores of the last kept step that are not the weighted sum of the scores of their rewards."""
    step, known = run.dumped[-1] if run.dumped else 0, 0
    wrong: Counter[str] = Counter()
    for row in run.samples(step):
        parts = row.get("parts")
        if isinstance(parts, dict) and parts and all(map(is_number, parts.values())):
            weights = {name: run.key(f"rewards.{name}.weight", 1.0) for name in parts}
            total = sum(parts[name] * weight for name, weight in weights.items() if is_number(weight))
            known, tag = known + 1, str(row.get("tag", ""))
            wrong[tag] += abs(total - row["score"]) > 1e-3 * max(1.0, abs(total))
    if count := sum(wrong.values()):
        tag = wrong.most_common(1)[0][0]
        yield RunFinding("warn", text("f_sum", count=count, total=known, step=step, tag=tag), "samples")


def one_engine_apart(run: Run) -> Iterator[RunFinding]:
    """The samples of one engine are much further from the trainer's log-probs than the samples of other engines."""
    if not run.dumped:
        return
    distances: defaultdict[int, list[float]] = defaultdict(list)
    for row in run.samples(run.dumped[-1]):
        trained, sampled = row.get("train_log_probs") or row.get("old_log_probs"), row.get("behavior_log_probs")
        if isinstance(row.get("engine"), int) and trained and sampled:
            distances[row["engine"]] += [abs(a - b) for a, b in zip(trained, sampled, strict=False)]
    means = {engine: fmean(values) for engine, values in distances.items() if len(values) >= LEAST_TOKENS}
    if len(means) > 1:
        worst = max(means, key=lambda engine: means[engine])
        others = median(value for engine, value in means.items() if engine != worst)
        if means[worst] > max(3 * others, 0.02):
            values = {"engine": worst, "value": digits(means[worst]), "others": digits(others), "step": run.dumped[-1]}
            yield RunFinding("bad", text("f_engine", **values), "samples")


def truncated_sampling(run: Run) -> Iterator[RunFinding]:
    """Sampled tokens are more likely than tokens drawn from the policy: -log p is below the entropy on average."""
    gaps, entropies = [], []
    for row in run.samples(run.dumped[-1]) if run.dumped else []:
        for log_prob, each in zip(row.get("train_log_probs") or (), row.get("entropy") or (), strict=False):
            gaps.append(-log_prob - each)
            entropies.append(each)
    sampling = "actor_infer.generating_args"
    cuts = run.key(f"{sampling}.top_p", 1) < 1 or run.key(f"{sampling}.top_k", 0) > 0
    if len(gaps) < LEAST_TOKENS or (cuts and run.key("on_truncated_sampling") == "replay"):
        return
    gap, noise = fmean(gaps), stdev(gaps) / math.sqrt(len(gaps))
    if gap < -max(6 * noise, 0.1 * fmean(entropies)):
        yield RunFinding("bad", text("f_truncated", gap=digits(-gap), entropy=digits(fmean(entropies))), "samples")


def gradient_spike(run: Run) -> Iterator[RunFinding]:
    """A gradient norm of more than ten times the median."""
    norms = [(value, step) for step, value in run.series("actor/grad_norm") if step > 0]
    if len(norms) >= 10:
        middle, (most, step) = median(value for value, _ in norms), max(norms)
        if middle > 0 and most > 10 * middle:
            values = {"most": digits(most), "step": step, "times": f"{most / middle:.0f}"}
            yield RunFinding("warn", text("f_norm", **values), "actor/grad_norm")


def cut(run: Run) -> Iterator[RunFinding]:
    """Many responses end at the length limit."""
    metric = "rollout/truncated_fraction"
    if (values := run.values(metric, 0.25)) and (share := fmean(values)) > 0.2:
        yield RunFinding("warn", text("f_cut", share=percent(share), length=run.key("response_length", "-")), metric)
    metric = "gateway/cut_answers"
    asked = sum(run.values("gateway/requests", 0.25))
    if asked and (share := sum(run.values(metric, 0.25)) / asked) > 0.2:
        yield RunFinding("warn", text("f_cut_agents", share=percent(share)), metric)


def drops(run: Run) -> Iterator[RunFinding]:
    """More than a twentieth of the prompts were dropped."""
    last = run.steps[-1] if run.steps else {}
    reasons = {name: count for name, count in last.items() if name.startswith("ledger/dropped_") and count}
    submitted = last.get("ledger/submitted") or 0
    if submitted and (share := sum(reasons.values()) / submitted) > 0.05:
        name = max(reasons, key=lambda reason: reasons[reason])
        yield RunFinding(
            "warn", text("f_drops", share=percent(share), reason=name.removeprefix("ledger/dropped_")), name
        )


def idle(run: Run) -> Iterator[RunFinding]:
    """A side that waits for more than a third of the time, and what the run advises."""
    advice = str(run.summary.get("bottleneck") or "").partition(" (")[0]
    advice = f"{advice[:1].upper()}{advice[1:]}." if advice else ""
    for who, metric in (("who_trainer", "throughput/trainer_idle"), ("who_engines", "throughput/rollout_idle")):
        values = run.values(metric)[1:]
        if len(values) > 2 and (share := fmean(values)) > 0.3:
            yield RunFinding("warn", text("f_idle", who=text(who), idle=percent(share), advice=advice), metric)
            return


def slow_step(run: Run) -> Iterator[RunFinding]:
    """A step of more than three medians, without the time of its validation."""
    times = [(row["time/step"] - (row.get("time/val") or 0), row) for row in run.steps[1:] if row.get("time/step")]
    if len(times) < 5:
        return
    middle, (seconds, row) = median(value for value, _ in times), max(times, key=lambda entry: entry[0])
    if seconds > 3 * middle and seconds > middle + 1:
        part = max(PARTS, key=lambda each: row.get(each[1]) or 0)
        values = {"step": int(row["step"]), "seconds": f"{seconds:.1f}", "times": f"{seconds / middle:.0f}"}
        yield RunFinding("warn", text("f_slow", **values, part=text(part[0])), part[1])


def few_samples(run: Run) -> Iterator[RunFinding]:
    """Samples of the last kept step: equal responses, repetition, and weight that few of them carry."""
    if not run.dumped:
        return
    step = run.dumped[-1]
    rows = run.samples(step)
    if len(rows) < 16:
        return
    responses = Counter(tuple(row["response_ids"]) for row in rows)
    prompts = {tuple(row["prompt_ids"]) for row in rows}
    share = responses.most_common(1)[0][1] / len(rows)
    if share > 0.5 and len(prompts) > 4:
        yield RunFinding("bad", text("f_same", share=percent(share), step=step), "samples")
    long = [response for response in responses.elements() if len(response) >= LEAST_REPEATED]
    repeats = sum(2 * Counter(response).most_common(1)[0][1] > len(response) for response in long) / len(rows)
    if repeats > 0.5:
        yield RunFinding("bad", text("f_repeat", share=percent(repeats), step=step), "samples")
    weights = sorted((sample_weight(row) for row in rows), reverse=True)
    count, left = 0, sum(weights) / 2
    while left > 0:
        left -= weights[count]
        count += 1
    if 0 < count < len(rows) / 20:
        yield RunFinding("warn", text("f_few", step=step, samples=count, total=f"{len(rows):,}"), "samples")


def faults(run: Run) -> Iterator[RunFinding]:
    """Faults that the run survived, or that there was none."""
    dropped = any(
        count for name, count in (run.rows[-1] if run.rows else {}).items() if name.startswith("ledger/dropped_")
    )
    if run.events and run.status not in ("failed", "interrupted"):
        event = f"{run.events[-1].get('component', '')} {run.events[-1]['message']}"
        yield RunFinding("warn", text("f_faults", count=len(run.events), event=event), EVENTS_FILE)
    elif not run.events and not dropped and run.status in ("finished", "running") and run.steps:
        yield RunFinding("ok", text("f_ok"), EVENTS_FILE)


RULES: Sequence[Callable[[Run], Iterator[RunFinding]]] = (
    ended_early, not_finite, reward_hacked, right_scores_less, tag_against_others, one_engine_apart, not_the_sum,
    no_gradient, mismatch, stale, truncated_sampling, entropy, learned, length_hacking, gradient_spike, few_samples,
    cut, drops, idle, slow_step, faults,
)  # fmt: skip
"""The rules; findings of one kind keep this order."""


def _noise(scores: Sequence[float]) -> float:
    """Standard deviation of the changes between neighbouring scores around a line, as that of one score."""
    changes = [after - before for before, after in zip(scores, scores[1:], strict=False)]
    return stdev(changes) / math.sqrt(2) if len(changes) > 1 else 0.0


def _rise(values: Sequence[float]) -> float:
    """Mean of the last tenth less that of the first; 0 for fewer than ten values."""
    tenth = len(values) // 10
    return fmean(values[-tenth:]) - fmean(values[:tenth]) if tenth else 0.0


def _correlation(left: Sequence[float], right: Sequence[float]) -> float:
    try:
        return correlation(left, right)
    except ValueError:  # one of them is constant
        return 0.0


def _names(run: Run, prefix: str) -> list[str]:
    """Names of metrics that begin so, sorted."""
    counts = Counter(name for row in run.rows for name in row if name.startswith(prefix))
    return sorted(name for name, count in counts.items() if count > 1)
