"""A run from Python: `roll run` in a process of its own, with a reward that is a function of the caller."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from roll.api.checked import checked_config, write_keys
from roll.base.errors import RunError
from roll.base.terminal import EXIT_INTERRUPTED
from roll.configs.pipeline import RLVRConfig
from roll.configs.trackers import METRICS_FILE
from roll.sandbox.isolation import signal_at_parents_end
from roll.trackers.files import read_metrics

REWARD_SOURCE = '''"""The function that `roll.train` was given as the reward of this run."""

import pathlib
import pickle

{name} = pickle.loads(pathlib.Path(__file__).with_suffix(".pickle").read_bytes())
'''


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended.

    Attributes:
        folder: its `output_dir`, for `roll show`, `report` and `explain`.
        interrupted: whether Ctrl-C ended it, after a step.
    """

    folder: Path
    interrupted: bool = False

    @property
    def metrics(self) -> list[dict[str, float]]:
        """Every line of metrics.jsonl; `pandas.DataFrame` takes it as it is."""
        return read_metrics(self.folder / METRICS_FILE)

    def report(self) -> Path:
        """Writes the page of the run, one HTML file, and returns its path."""
        if code := _follow([sys.executable, "-m", "roll", "report", str(self.folder)], os.environ):
            raise RunError(f"{self.folder}: `roll report` ended with exit code {code}")
        return self.folder / "report.html"


RewardFunction = Callable[..., float | dict[str, float]]


def train(config: str | Path | Mapping[str, Any], *overrides: str, reward: RewardFunction | None = None) -> FinishedRun:
    """Runs a configuration to its end, and prints what `roll run` prints. Works in a notebook too.

    Args:
        config: a YAML file, or its keys; files that `defaults` names in keys are relative to the current folder.
        overrides: `a.b=value`, values in YAML.
        reward: the only reward of the run: a function with parameters such as `response` and `ground_truth`
            (docs/rewards/own.md). It may be defined in a notebook; what it refers to there is copied.

    Raises:
        ConfigError: the configuration cannot be used; nothing was started.
        RunError: the run failed.
    """
    given = checked_config(config, overrides)
    checked, tree, folder = given.config, given.tree, Path(given.config.output_dir)
    if reward is not None:
        if not isinstance(checked, RLVRConfig):
            raise RunError(f"reward: a run with pipeline {checked.pipeline} scores by itself; leave it out")
        module, name = _save_reward(reward, folder)
        tree["rewards"] = {**dict.fromkeys(checked.rewards), name: {"function": f"{module}:{name}"}}
    file = given.file if given.file and reward is None else write_keys(tree, folder)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    code = _follow([sys.executable, "-m", "roll", "run", str(file), *overrides], environment)
    if code not in (0, EXIT_INTERRUPTED):
        raise RunError(f"{folder}: the run ended with exit code {code}; its messages are above")
    return FinishedRun(folder, code == EXIT_INTERRUPTED)


def _save_reward(reward: RewardFunction, folder: Path) -> tuple[str, str]:
    """Writes the function as a module of the run's folder, which a run that goes on there does not read.

    Returns:
        The module, and the name of the function in it: `reward` for one without a name.
    """
    import cloudpickle

    name = reward.__name__ if getattr(reward, "__name__", "").isidentifier() else "reward"
    data = cloudpickle.dumps(reward)
    module = f"reward_{sha256(data).hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{module}.pickle").write_bytes(data)
    (folder / f"{module}.py").write_text(REWARD_SOURCE.format(name=name), encoding="utf-8")
    return module, name


def _follow(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Prints what a command prints, and returns its exit code; Ctrl-C is passed on, and it ends with this process."""
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=partial(signal_at_parents_end, signal.SIGTERM),  # which ends a run in order
    ) as process:
        assert process.stdout is not None
        ended = False
        while not ended:
            try:
                for line in process.stdout:
                    print(line, end="", flush=True)
                ended = True
            except KeyboardInterrupt:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGINT)
            except BaseException:
                process.terminate()
                raise
    return process.returncode
