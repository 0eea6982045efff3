"""The process of one external tracker: reads steps as JSON lines and gives them to wandb, swanlab or mlflow.

Standard input has the request, then one line a step; its end is the end of the run. Standard output answers with one
JSON line a step (`{"accepted": 3}`), `{"error": ...}`, and `{"complete": true}` at the end. What the package prints
goes to standard error, the log file of the tracker.

The process runs this file alone and imports nothing of roll, so that it starts in milliseconds.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

FINISH_S = 60.0
"""Time to finish after the end of the input; the run waits less, and so this holds if the run was killed."""

START_S = 30
"""Time for a server to answer before a run is kept on disk instead."""

DEFAULT_PROJECT = "roll"


@dataclass
class Request:
    """What the run tells the process first; see `ExternalTracker`."""

    tracker: str
    options: dict[str, Any]
    config: dict[str, Any]
    run_name: str
    output_dir: str
    resumed: bool

    @property
    def id_file(self) -> Path:
        return Path(self.output_dir) / f"{self.tracker}_run_id"

    def previous_id(self) -> str | None:
        """Id of the run to continue; None for a new run."""
        return self.id_file.read_text().strip() if self.resumed and self.id_file.exists() else None


class LoggedRun:
    """A run of one tracker, started or continued by the constructor; with `offline`, on disk and without a server.

    `_run`, with `log` and `finish`, is what `init` of most packages returns.
    """

    _run: Any

    def __init__(self, request: Request, offline: bool) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self) -> None:
        self._run.finish()


class WandbRun(LoggedRun):
    """Weights & Biases."""

    def __init__(self, request: Request, offline: bool) -> None:
        import wandb

        options = without_empty(request.options)
        if "api_key" in options:
            os.environ["WANDB_API_KEY"] = options.pop("api_key")
        settings = {"console": "off", "init_timeout": START_S, **options.pop("settings", {})}
        chosen: Any = options.pop("mode", None)
        self._run = wandb.init(
            project=options.pop("project", DEFAULT_PROJECT),
            name=options.pop("name", request.run_name),
            dir=options.pop("log_dir", request.output_dir),
            id=request.previous_id(),
            resume="allow",
            mode="offline" if offline else chosen,
            settings=settings,
            config=request.config,
            **options,
        )
        request.id_file.write_text(self._run.id)


class SwanlabRun(LoggedRun):
    """SwanLab."""

    def __init__(self, request: Request, offline: bool) -> None:
        import swanlab

        options = without_empty(request.options)
        login = options.pop("login_kwargs", {})
        mode = options.pop("mode", None)
        mode = "offline" if offline else {"cloud": "online"}.get(mode, mode)
        if login and mode not in ("offline", "local", "disabled"):
            swanlab.login(**login)
        folder = options.pop("logdir", str(Path(request.output_dir) / "swanlab"))
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._run = swanlab.init(
            project=options.pop("project", DEFAULT_PROJECT),
            name=options.pop("experiment_name", request.run_name),
            log_dir=folder,
            id=request.previous_id(),
            resume="allow",
            mode=mode,
            config=request.config,
            **options,
        )
        request.id_file.write_text(self._run.id)


class MlflowRun(LoggedRun):
    """MLflow; without a server, files that `mlflow ui` reads."""

    PARAMETERS_PER_CALL = 100
    VALUE_LENGTH = 500
    """Limits of the server."""

    def __init__(self, request: Request, offline: bool) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(START_S))
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        import mlflow

        options = without_empty(request.options)
        files = (Path(request.output_dir) / "mlflow").as_uri()
        chosen = options.pop("tracking_uri", None) or os.environ.get("MLFLOW_TRACKING_URI") or files
        self._mlflow = mlflow
        mlflow.set_tracking_uri(files if offline else chosen)
        mlflow.set_experiment(options.pop("experiment_name", DEFAULT_PROJECT))
        previous = None if offline else request.previous_id()
        run = mlflow.start_run(
            run_id=previous, run_name=None if previous else options.pop("run_name", request.run_name), **options
        )
        request.id_file.write_text(run.info.run_id)
        if previous is None:
            parameters = [(name, str(value)[: self.VALUE_LENGTH]) for name, value in leaf_values(request.config)]
            for start in range(0, len(parameters), self.PARAMETERS_PER_CALL):
                mlflow.log_params(dict(parameters[start : start + self.PARAMETERS_PER_CALL]))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step)

    def finish(self) -> None:
        self._mlflow.end_run()


RUNS: dict[str, type[LoggedRun]] = {"wandb": WandbRun, "swanlab": SwanlabRun, "mlflow": MlflowRun}


def without_empty(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value not in (None, {}, [])}


def leaf_values(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of everything that is not a mapping."""
    for name, value in tree.items():
        path = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, Mapping):
            yield from leaf_values(value, path)
        else:
            yield path, value


def log_steps(lines: Iterator[str], answer: IO[str]) -> None:
    """Runs one tracker until the lines end; an error is answered and ends neither the run nor the process."""

    def say(**content: Any) -> None:
        print(json.dumps(content), file=answer, flush=True)

    def text(error: Exception) -> str:
        traceback.print_exc()
        return f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0]

    request, failures = Request(**json.loads(next(lines))), list[str]()
    run: LoggedRun | None = None
    while run is None and len(failures) < 2:
        try:
            run = RUNS[request.tracker](request, offline=bool(failures))
        except Exception as error:
            failures.append(text(error))
    if failures:
        say(error=failures[0] + ("; it was started again offline and keeps every step on disk" if run else ""))
    if run is None:
        for _ in lines:  # read on, so that the other side never waits
            pass
        return
    for line in lines:
        step = json.loads(line)
        try:
            run.log(step["step"], {n: v for n, v in step["metrics"].items() if n != "step" and math.isfinite(v)})
        except Exception as error:
            say(error=text(error))
        say(accepted=step["step"])
    deadline = threading.Timer(FINISH_S, os._exit, [1])
    deadline.daemon = True
    deadline.start()
    try:
        run.finish()
    except Exception as error:
        say(error=text(error))
    say(complete=True)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    log_steps(iter(sys.stdin), answers)
