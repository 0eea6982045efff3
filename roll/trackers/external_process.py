"""The process of one external tracker: reads steps as JSON lines and gives them to wandb, swanlab, mlflow and so on.

Standard input has the request, then one line a step; its end is the end of the run. Standard output answers with one
JSON line a step (`{"accepted": 3}`), `{"error": ...}`, and `{"complete": true}` at the end. What the package prints
goes to standard error, the log file of the tracker. Samples and spans are read from the files that the run has written.

The process runs this file alone and imports nothing of roll, so that it starts in milliseconds.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

FINISH_S = 60.0
"""Time to finish after the end of the input; the run waits less, and so this holds if the run was killed."""

START_S = 30
"""Time for a server to answer before a run is kept on disk instead."""

DEFAULT_PROJECT = "roll"

MOST_SAMPLES, MOST_CHARACTERS = 16, 8_000
"""Samples of a step that are shown, and characters of each of their texts."""

SAMPLE_COLUMNS = ("prompt_ids", "response_ids", "episode", "group", "score", "advantages", "tag", "stop")
TRAINED_LOG_PROBS = ("train_log_probs", "old_log_probs", "behavior_log_probs")
"""Columns of the file of a step: a sample, and the log-probs of its tokens, of which the first that is there counts."""


@dataclass
class Request:
    """What the run tells the process first; see `ExternalTracker`."""

    tracker: str
    options: dict[str, Any]
    config: dict[str, Any]
    run_name: str
    output_dir: str
    resumed_after: int | None
    samples: dict[str, Any] | None

    @property
    def id_file(self) -> Path:
        return Path(self.output_dir) / f"{self.tracker}_run_id"

    def previous_id(self) -> str | None:
        """Id of the run to continue; None for a new run."""
        is_resumed = self.resumed_after is not None
        return self.id_file.read_text().strip() if is_resumed and self.id_file.exists() else None


@dataclass
class SampleFiles:
    """The samples of a run: a parquet file of each step that keeps them, of which one in `every` steps is shown."""

    folder: str
    every: int
    tokenizer: str | None

    def due(self, after: int, step: int) -> Iterator[SampleRow]:
        """Samples of the first step and of one in `every`, where these are after `after` and up to `step`."""
        for number in range(after + 1, step + 1):
            if number == 1 or number % self.every == 0:
                name, folder = f"step-{number:06d}.parquet", Path(self.folder)
                for path in [*folder.glob(name), *sorted(folder.glob(f"*/{name}"))]:  # several policies: a folder each
                    yield from self._read(path, number)

    def _read(self, path: Path, step: int) -> Iterator[SampleRow]:
        """Samples of the groups with the largest share of the weight."""
        from pyarrow import parquet

        table = parquet.ParquetFile(path).read(columns=[*SAMPLE_COLUMNS, *TRAINED_LOG_PROBS])
        weights, groups = row_weights(table), table["group"].to_pylist()
        shares, total = dict.fromkeys(groups, 0.0), sum(weights) or 1.0
        for group, weight in zip(groups, weights, strict=True):
            shares[group] += weight / total
        order = sorted(range(len(groups)), key=lambda row: (-shares[groups[row]], groups[row], -weights[row]))
        for row in table.take(order[:MOST_SAMPLES]).to_pylist():
            mean = sum(row["advantages"]) / len(row["advantages"])
            facts = {"step": step, "share": shares[row["group"]], "score": row["score"], "advantage": mean}
            yield SampleRow(self._messages(row), facts | {name: row.get(name) for name in ("tag", "stop")})

    def _messages(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        turns = json.loads(row["episode"])["turns"] if row.get("episode") else []
        if not turns:
            turns = [{"observation": self._decode(row["prompt_ids"]), "text": self._decode(row["response_ids"])}]
        parts = (("user", "observation"), ("assistant", "text"))
        return [{"role": role, "content": str(turn[part])[:MOST_CHARACTERS]} for turn in turns for role, part in parts]

    @cached_property
    def _decode(self) -> Callable[[Sequence[int]], str]:
        """Text of tokens; their ids where the tokenizer has no file."""
        if self.tokenizer is None or not Path(self.tokenizer).is_file():
            return lambda ids: " ".join(map(str, ids))
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(self.tokenizer)
        return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))


@dataclass
class SampleRow:
    """A sample as messages of a conversation, and what is known of it."""

    messages: list[dict[str, str]]
    facts: dict[str, Any]


def columns_and_data(rows: Sequence[SampleRow]) -> dict[str, list[Any]]:
    """A table as wandb and mlflow take it; a conversation is a prompt and the rest."""
    data = []
    for row in rows:
        prompt, *rest = (message["content"] for message in row.messages)
        data.append([prompt, "\n".join(rest), *row.facts.values()])
    return {"columns": ["prompt", "response", *rows[0].facts], "data": data}


def row_weights(table: Any) -> list[float]:
    """Sum over the tokens of each row of |advantage| (1 - probability), the bound on the gradient of their logits."""
    import numpy

    advantages = table["advantages"].combine_chunks()
    weights = numpy.abs(advantages.flatten().to_numpy())
    for name in [name for name in TRAINED_LOG_PROBS if name in table.column_names][:1]:
        log_probs = table[name].combine_chunks().flatten().to_numpy()
        weights = weights * -numpy.expm1(numpy.minimum(log_probs, 0.0))
    sums: list[float] = numpy.bincount(advantages.value_parent_indices(), weights, table.num_rows).tolist()
    return sums


class LoggedRun:
    """A run of one tracker, started or continued by the constructor; with `offline`, on disk and without a server.

    `_run`, with `log` and `finish`, is what `init` of most packages returns.
    """

    _run: Any

    def __init__(self, request: Request, offline: bool) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        self._run.log({"samples": self._shown(rows)}, step=step)

    def _shown(self, rows: Sequence[SampleRow]) -> Any:
        """Samples as the package shows them."""
        raise NotImplementedError

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

    def _shown(self, rows: Sequence[SampleRow]) -> Any:
        import wandb

        table = columns_and_data(rows)
        return wandb.Table(columns=table["columns"], data=table["data"])


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

    def _shown(self, rows: Sequence[SampleRow]) -> Any:
        import swanlab

        texts = ["\n\n".join("{role}: {content}".format(**message) for message in row.messages) for row in rows]
        facts = [", ".join(f"{name} {value}" for name, value in row.facts.items()) for row in rows]
        return [swanlab.Text(text, caption=fact) for text, fact in zip(texts, facts, strict=True)]


class MlflowRun(LoggedRun):
    """MLflow; without a server, files that `mlflow ui` reads."""

    PARAMETERS_PER_CALL = 100
    VALUE_LENGTH = 500
    """Limits of the server."""

    TABLES = "mlflow.loggedArtifacts"
    """Tag that lists the files with tables."""

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
        self._run = mlflow.start_run(
            run_id=previous, run_name=None if previous else options.pop("run_name", request.run_name), **options
        )
        request.id_file.write_text(self._run.info.run_id)
        if previous is None:
            parameters = [(name, str(value)[: self.VALUE_LENGTH]) for name, value in leaf_values(request.config)]
            for start in range(0, len(parameters), self.PARAMETERS_PER_CALL):
                mlflow.log_params(dict(parameters[start : start + self.PARAMETERS_PER_CALL]))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step)

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """A file that the server shows as a table; `mlflow.log_table` writes the same by way of pandas."""
        path = f"samples/step-{step:06d}.json"
        self._mlflow.log_dict(columns_and_data(rows), path)
        tags = self._mlflow.get_run(self._run.info.run_id).data.tags
        tables = [*json.loads(tags.get(self.TABLES, "[]")), {"path": path, "type": "table"}]
        self._mlflow.set_tag(self.TABLES, json.dumps(tables))

    def finish(self) -> None:
        self._mlflow.end_run()


class TrackioRun(LoggedRun):
    """Trackio; without a server or a Space, a database that `trackio show` reads."""

    def __init__(self, request: Request, offline: bool) -> None:
        options = without_empty(request.options)
        folder = options.pop("log_dir", None) or os.environ.get("TRACKIO_DIR")
        os.environ["TRACKIO_DIR"] = folder or str(Path(request.output_dir) / "trackio")
        import trackio

        for server in ("space_id", "dataset_id", "server_url") if offline else ():
            options.pop(server, None)
        previous, name = request.previous_id(), options.pop("name", request.run_name)
        self._run = trackio.init(
            project=options.pop("project", DEFAULT_PROJECT),
            name=previous or name,
            resume="allow" if previous else "never",
            config=request.config,
            embed=False,
            **options,
        )
        request.id_file.write_text(self._run.name)

    def _shown(self, rows: Sequence[SampleRow]) -> Any:
        import trackio

        return [trackio.Trace(row.messages, metadata=row.facts) for row in rows]


class OpenTelemetryRun(LoggedRun):
    """Spans of the run over OTLP: a trace of each step, which holds what trainer, rollout and engines did for it."""

    def __init__(self, request: Request, offline: bool) -> None:
        if endpoint := request.options["endpoint"]:
            os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
        os.environ.setdefault("OTEL_SERVICE_NAME", request.run_name)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self._exporter: Any = OTLPSpanExporter()
        self._ended, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._ended))
        self._tracer = provider.get_tracer(DEFAULT_PROJECT)
        self._file, self._position = Path(request.output_dir) / "spans.jsonl", 0
        self._after = -1 if request.resumed_after is None else request.resumed_after

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the spans that were recorded since the last ones that the collector accepted."""
        lines = []
        if self._file.exists():
            with self._file.open("rb") as file:
                file.seek(self._position)
                lines = [line for line in file if line.endswith(b"\n")]
        spans = [span for span in map(json.loads, lines) if span["step"] > self._after]
        for number, group in groupby(sorted(spans, key=itemgetter("step")), itemgetter("step")):
            self._trace(number, list(group))
        ended = self._ended.get_finished_spans()
        self._ended.clear()
        if ended and self._exporter.export(ended).name != "SUCCESS":
            raise ConnectionError("the collector does not accept spans; they are sent again with the next step")
        self._position += sum(map(len, lines))

    def _trace(self, step: int, spans: Sequence[Mapping[str, Any]]) -> None:
        from opentelemetry.trace import set_span_in_context

        whole = self._tracer.start_span("step", start_time=nanoseconds(min(span["start"] for span in spans)))
        whole.set_attribute("step", step)
        for span in spans:
            start, about = nanoseconds(span["start"]), {"who": span["who"], "step": step}
            part = self._tracer.start_span(span["what"], set_span_in_context(whole), start_time=start, attributes=about)
            part.end(nanoseconds(span["end"]))
        whole.end(nanoseconds(max(span["end"] for span in spans)))

    def finish(self) -> None:
        self.log(0, {})
        self._exporter.shutdown()


RUNS: dict[str, type[LoggedRun]] = {
    "wandb": WandbRun,
    "swanlab": SwanlabRun,
    "mlflow": MlflowRun,
    "trackio": TrackioRun,
    "opentelemetry": OpenTelemetryRun,
}


def nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


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
    samples, last = SampleFiles(**request.samples) if request.samples else None, request.resumed_after or 0
    for line in lines:
        content = json.loads(line)
        step, metrics = content["step"], content["metrics"]
        try:
            run.log(step, {n: v for n, v in metrics.items() if n != "step" and math.isfinite(v)})
            if samples is not None and (rows := list(samples.due(last, step))):
                run.log_samples(step, rows)
        except Exception as error:
            say(error=text(error))
        say(accepted=step)
        last = step
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
