"""The whole recipe in one command: create a model and example episodes, fine-tune on them, then train the agent.

    python -m examples.tiny_agent.demo --out output/demo-agent

The agent (solver.py) knows nothing of the training: it calls a model through the `openai` client, and runs the tools
that the model calls. Writes to the output folder: `summary.json` (share of right answers to 200 new problems before and
after reinforcement learning, seconds, peak memory), `curves.png`, and `last_step.html`, the episodes of the last step.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from examples import stages

if TYPE_CHECKING:
    from roll.pipeline.summary import RunSummary

HERE = Path(__file__).parent


def demo(out: Path, seed: int, overrides: list[str]) -> dict[str, float]:
    """Runs every stage below `out` and returns the summary.

    Args:
        out: output folder.
        seed: of the weights, the episodes, the problems and both runs.
        overrides: `key=value` for the reinforcement learning run.
    """
    from roll.tools.show.command import show
    from roll.trackers.curves import draw_curves

    start = time.perf_counter()
    stages.heading("[bold]An agent with the openai client learns to use its tool")
    stages.heading("1/2  Warm start: supervised fine-tuning on episodes, of which half guess")
    warm = warm_start(out, seed)
    stages.heading("2/2  Reinforcement learning: the agent calls the policy through an OpenAI-compatible endpoint")
    places = [f"pretrain={out}/sft/hf_model", f"output_dir={out}/agent", f"seed={seed}"]
    rl = stages.train(HERE / "agent_config.yaml", [*places, *overrides])
    draw_curves([out / "agent"], out / "curves.png")
    show(out / "agent", html=out / "last_step.html")
    return stages.summarise(out, seed, start, warm, rl, "val/score")


def warm_start(out: Path, seed: int) -> RunSummary:
    """Makes the model and the episodes below `out`, and trains the model on them."""
    from examples.tiny_agent import episodes
    from examples.tiny_agent.model import make_model

    base = make_model(out / "base", seed)
    data = episodes.write_episodes(out / "data", seed, episodes.TRAIN_EPISODES, episodes.VALIDATION_EPISODES)
    files = [
        f"actor_train.data_args.file_name=[{data}/train.jsonl]",
        f"validation.data_args.file_name=[{data}/val.jsonl]",
    ]
    return stages.train(HERE / "sft_config.yaml", [f"pretrain={base}", f"output_dir={out}/sft", f"seed={seed}", *files])


if __name__ == "__main__":
    stages.main(__doc__ or "", "output/demo-agent", "right answers ... to 200 new problems", demo)
