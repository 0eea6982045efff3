"""`roll` whose engines write down what they generate: `python -m tests.integration.recorded_engines run CONFIG`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from roll.distributed.infer.infer_worker import InferWorker
from roll.distributed.worker import register
from roll.rollout.types import GenerateRequest, GenerateResult


class RecordingInferWorker(InferWorker):
    """Appends the log-probs of every response to `generated-<rank>.jsonl` in the run's folder."""

    @register()
    async def generate(self, requests: list[GenerateRequest]) -> list[GenerateResult]:
        results = await super().generate(requests)
        with generated_by(Path(self.pipeline_config.output_dir), self.rank.rank).open("a") as file:
            file.writelines(json.dumps(result.log_probs) + "\n" for result in results)
        return results


def generated_by(folder: Path, engine: int) -> Path:
    """The file of one engine."""
    return folder / f"generated-{engine}.jsonl"


def main() -> int:
    from roll.cli import main as roll
    from roll.pipeline import session

    session.InferWorker = RecordingInferWorker  # type: ignore[misc]
    return roll(sys.argv[1:])


if __name__ == "__main__":
    from tests.integration import recorded_engines  # actors import the class by this name, not as __main__'s

    sys.exit(recorded_engines.main())
