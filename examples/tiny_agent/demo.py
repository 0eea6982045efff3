"""The whole recipe in one command: create a model and example episodes, fine-tune on them, then train the agent.

    python -m examples.tiny_agent.demo --out output/demo-agent

The agent (solver.py) knows nothing of the training: it calls a model through the `openai` client, and runs the tools
that the model calls. Writes to the output folder: `summary.json` (share of right answers to 200 new problems before and
after reinforcement learning, seconds, peak memory), `curves.png`, and `last_step.html`, the episodes of the last step.
"""

from __future__ import annotations

import time
from pathlib import Path

from examples import stages
from examples.tiny_agent import episodes
from examples.tiny_agent.model import make_model

HERE = Path(__file__).parent


def demo(out: Path, seed: int, overrides: list[str]) -> dict[str, float]:
    """Runs every stage below `out`, with `overrides` for the reinforcement learning run, and returns the summary."""
    start = time.perf_counter()
    stages.heading("[bold]An agent with the openai client learns to use its tool")
    base = make_model(out / "base", seed)
    data = episodes.write_episodes(out / "data", seed, episodes.TRAIN_EPISODES, episodes.VALIDATION_EPISODES)
    return train(out, seed, start, warm_inputs(base, data), HERE / "agent_config.yaml", overrides)


def warm_inputs(base: Path, data: Path) -> list[str]:
    """The overrides that let the warm start begin with the model `base` and learn from the episodes in `data`."""
    return [
        f"pretrain={base}",
        f"actor_train.data_args.file_name=[{data}/train.jsonl]",
        f"validation.data_args.file_name=[{data}/val.jsonl]",
    ]


def train(out: Path, seed: int, start: float, warm: list[str], file: Path, overrides: list[str]) -> dict[str, float]:
    """Both stages of training, below `out`; returns the summary.

    Args:
        out: output folder.
        seed: of both runs.
        start: `time.perf_counter()` when the recipe began.
        warm: `key=value` for the warm start.
        file: the reinforcement learning run.
        overrides: `key=value` for it.
    """
    from roll.tools.show.command import show
    from roll.trackers.curves import draw_curves

    stages.heading("1/2  Warm start: supervised fine-tuning on episodes, of which half guess")
    summary = stages.train(HERE / "sft_config.yaml", [f"output_dir={out}/sft", f"seed={seed}", *warm])
    stages.heading("2/2  Reinforcement learning: the agent calls the policy through an OpenAI-compatible endpoint")
    places = [f"pretrain={out}/sft/hf_model", f"output_dir={out}/agent", f"seed={seed}"]
    rl = stages.train(file, [*places, *overrides])
    draw_curves([out / "agent"], out / "curves.png")
    show(out / "agent", html=out / "last_step.html")
    return stages.summarise(out, seed, start, summary, rl, "val/score")


if __name__ == "__main__":
    stages.main(__doc__ or "", "output/demo-agent", "right answers ... to 200 new problems", demo)
