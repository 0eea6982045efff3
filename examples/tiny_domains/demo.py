"""Four domains in one run, one of them graded by a judge on an engine of the run; on two cores.

    python -m examples.tiny_domains.demo --out output/demo-domains

Two models are fine-tuned, the policy on problems of all domains and the judge on comparing two words; then the policy
is trained by reinforcement learning. Writes `summary.json` and `curves.png` to the output folder.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from examples import stages

HERE = Path(__file__).parent
SFT = HERE.parent / "tiny_math" / "sft_config.yaml"
TRAIN_PROBLEMS, VALIDATION_PROBLEMS = 1200, 200
"""Problems of each domain; the judge gets four times as many questions."""


def demo(out: Path, seed: int, overrides: list[str]) -> dict[str, float]:
    """Runs every stage below `out`, with `overrides` for the reinforcement learning run, and returns the summary."""
    from examples.tiny_domains import problems
    from examples.tiny_math.prepare import prepare
    from roll.trackers.curves import draw_curves

    start = time.perf_counter()
    stages.heading("[bold]A small language model learns in four domains")
    base = prepare(out / "base", seed)
    problems.write(out / "data", seed, TRAIN_PROBLEMS, VALIDATION_PROBLEMS)
    stages.heading("1/3  A judge learns to compare two words")
    stages.train(SFT, [f"pretrain={base}", *_stage(out, "judge", "judge-", seed), "target_loss=0.003"])
    stages.heading("2/3  Warm start: supervised fine-tuning of the policy")
    warm = stages.train(SFT, [f"pretrain={base}", *_stage(out, "sft", "", seed), "target_loss=0.45"])
    stages.heading("3/3  Reinforcement learning; the judge grades one domain")
    models = [f"pretrain={out}/sft/hf_model", f"judge.model_args.model_name_or_path={out}/judge/hf_model"]
    rl = stages.train(HERE / "rlvr_config.yaml", [*models, *_stage(out, "rlvr", "", seed), *overrides])
    draw_curves([out / "rlvr"], out / "curves.png")
    summary = stages.summarise(out, seed, start, warm, rl, "val/score")
    return summary | _by_domain(out, rl.validation)


def _stage(out: Path, name: str, prefix: str, seed: int) -> list[str]:
    """Overrides of one stage: where it writes, its problems, and its seed."""
    files = f"{out}/data/{prefix}"
    data = [
        f"actor_train.data_args.file_name=[{files}train.jsonl]",
        f"validation.data_args.file_name=[{files}val.jsonl]",
    ]
    return [f"output_dir={out}/{name}", *data, f"seed={seed}"]


def _by_domain(out: Path, validation: dict[str, dict[str, float]]) -> dict[str, float]:
    """Adds the accuracy of every domain before and after to `summary.json`; that of the judged one is the truth's."""
    steps = sorted(validation, key=int)
    scores = {"sum": "val/sum/score", "choice": "val/choice/score", "ordered": "val/ordered/score"}
    scores |= {"judged": "val/judged/truth", "judged, by the judge": "val/judged/llm_judge"}
    found = {
        f"{domain} {when}": round(validation[step][name], 4)
        for domain, name in scores.items()
        for when, step in (("before", steps[0]), ("after", steps[-1]))
    }
    summary = json.loads((out / "summary.json").read_text()) | found
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    for domain in scores:
        stages.console.print(f"{domain}: {found[f'{domain} before']:.3f} -> {found[f'{domain} after']:.3f}")
    return found


if __name__ == "__main__":
    stages.main(__doc__ or "", "output/demo-domains", "mean validation score ... over four domains", demo)
