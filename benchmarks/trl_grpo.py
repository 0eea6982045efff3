"""TRL's GRPO on the model and problems of a workload, in a process of its own: `benchmarks.against_trl` starts it.

    python -m benchmarks.trl_grpo SETTINGS.json RESULT.json

The settings are `model`, `data` (paths), `prompts`, `group`, `response_length`, `micro_batch`, `steps` and
`dtype`. The result
has the seconds of each step, those of its generation, and the mean number of tokens of a response.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.overlap_runs import digits


def main(settings_file: str, result_file: str) -> None:
    """One optimizer step for each batch of `prompts` times `group` samples, on all cores of this process."""
    import torch
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    settings: dict[str, Any] = json.loads(Path(settings_file).read_text())
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    lines = [json.loads(line) for line in Path(settings["data"]).read_text().splitlines()]
    problems = Dataset.from_list([{"prompt": [{"role": "user", "content": line["prompt"]}]} for line in lines])
    samples = settings["prompts"] * settings["group"]
    micro_batches = samples // settings["micro_batch"]
    ends, generating = [time.perf_counter()], [0.0]

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())
            generating.append(0.0)

    class TimedTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL is not typed
        def _generate(self, *arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = super()._generate(*arguments, **options)
            generating[-1] += time.perf_counter() - start
            return result

    def reward(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
        return [digits(completion[0]["content"], "", None) for completion in completions]

    arguments = GRPOConfig(
        output_dir=str(Path(result_file).parent / "trl"),
        per_device_train_batch_size=settings["micro_batch"],
        gradient_accumulation_steps=micro_batches,
        num_generations=settings["group"],
        max_completion_length=settings["response_length"],
        max_steps=settings["steps"],
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",
        learning_rate=1e-5,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": settings["dtype"]},
        use_cpu=True,
        bf16=False,
        fp16=False,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(settings["model"])
    trainer = TimedTrainer(
        model=settings["model"],
        reward_funcs=reward,
        args=arguments,
        train_dataset=problems,
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    ends[0] = time.perf_counter()
    trainer.train()
    lengths = [
        entry["completions/mean_length"] for entry in trainer.state.log_history if "completions/mean_length" in entry
    ]
    result = {
        "step_seconds": [after - before for before, after in zip(ends, ends[1:], strict=False)],
        "generate_seconds": generating[: settings["steps"]],
        "response_tokens": sum(lengths) / len(lengths),
    }
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
