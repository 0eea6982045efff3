"""An environment of verifiers, as a program: `command: [PYTHON, verifiers_env.py, "{task_file}"]`.

PYTHON is that of an environment with the package `verifiers`; this project need not be in it.
"""

import json
import os
import sys
from pathlib import Path

import verifiers
from datasets import Dataset
from verifiers.types import ClientConfig


def multiply(left: int, right: int) -> int:
    """Multiplies two numbers."""
    return left * right


def right_answer(completion, answer) -> float:  # type: ignore[no-untyped-def]
    """1 where the last message is the answer."""
    return float(str(completion[-1].content).strip() == answer)


task = json.loads(Path(sys.argv[1]).read_text())
rows = Dataset.from_list([{"question": task["question"], "answer": task["answer"]}])
environment = verifiers.ToolEnv(
    tools=[multiply],
    max_turns=5,
    eval_dataset=rows,
    rubric=verifiers.Rubric(funcs=[right_answer]),
    system_prompt="Answer with the number alone.",
)
client = ClientConfig(api_key_var="OPENAI_API_KEY", api_base_url=os.environ["OPENAI_BASE_URL"])
played = environment.evaluate_sync(client, "policy", num_examples=1)["outputs"][0]
print(json.dumps({"reward": played["reward"]}))
