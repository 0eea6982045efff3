"""What loading says of overrides; `python -m tests.configs.golden_findings` writes it to tests/data/findings.txt.

A block of the file is a sample with overrides, two spaces between them, and below it every error, or else every
warning; `ok` if there is none. MODELS is tests/data/models. To add a case, write its first line and run the command.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from roll.base.errors import ConfigError
from roll.configs.check import check
from roll.envs.registry import try_environment
from roll.loading.load import load_config
from tests.configs.samples import AGENTIC, DATA, DPO, REWARD_MODEL, RLVR, SFT, write

FILE, MODELS = DATA / "findings.txt", str(DATA / "models")
SAMPLES = {"rlvr": RLVR, "sft": SFT, "agentic": AGENTIC, "dpo": DPO, "reward_model": REWARD_MODEL}
BLANK = "\n\n"


def cases() -> dict[str, str]:
    """The findings of each case as they are in the file."""
    blocks = [block.partition("\n") for block in FILE.read_text().strip().split(BLANK)]
    return {case: found for case, _, found in blocks}


def findings(case: str) -> str:
    """The findings of today's code, a line each."""
    sample, *overrides = case.replace("MODELS", MODELS).split("  ")
    with tempfile.TemporaryDirectory() as folder:
        try:
            config = load_config(write(Path(folder), SAMPLES[sample]), overrides, try_environment=try_environment)
            found = [f"warning {problem}" for problem in check(config).warnings]
        except ConfigError as error:
            found = [f"error {problem}" for problem in error.problems]
    texts = (text.replace(MODELS, "MODELS").replace(folder, "FOLDER").replace("\n", r"\n") for text in found)
    return "\n".join(f"    {text}" for text in sorted(texts)) or "    ok"


if __name__ == "__main__":
    FILE.write_text(BLANK.join(f"{case}\n{findings(case)}" for case in cases()) + "\n")
