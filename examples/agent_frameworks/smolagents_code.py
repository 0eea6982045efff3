"""A CodeAgent of smolagents, as a program: `command: [PYTHON, smolagents_code.py, "{task_file}"]`.

PYTHON is that of an environment with the package `smolagents[openai]`. What the model writes is run by the interpreter
of smolagents, which allows few imports and is no sandbox.
"""

import json
import os
import sys
from pathlib import Path

from smolagents import CodeAgent, LogLevel, OpenAIModel

task = json.loads(Path(sys.argv[1]).read_text())
model = OpenAIModel(model_id="policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = CodeAgent(tools=[], model=model, max_steps=3, verbosity_level=LogLevel.OFF)
answer = agent.run(task["question"])
print(
    json.dumps({"reward": float(str(answer).strip() == task["answer"]), "metrics": {"steps": len(agent.memory.steps)}})
)
