"""What Tinker's requests do: sessions, the model that is trained, and its saved weights.

A server has one trainer, so it has one model at a time: a new one replaces that before it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from roll.api.responses import Response
from roll.serve.futures import Answer, Futures
from roll.serve.losses import TINKER_LOSSES, Settings, TinkerLoss, TrainedRow, tinker_loss
from roll.serve.requests import AdamParams, Body, optional_field, required_field
from roll.serve.samplers import Sampler, Samplers
from roll.serve.wire import WireError, read_train_request, train_answer

if TYPE_CHECKING:
    from roll.api.open import OpenRun

SAVED_FILE = "tinker.json"
"""File in the run's folder: path of Tinker -> folder."""

STATE, SAMPLER = "weights", "sampler_weights"
"""Kinds of saved weights in a path of Tinker: states with the optimizer, and Hugging Face folders."""

FULL_WEIGHTS = "this server trains all weights, so the LoRA rank has no effect"

Work = Callable[[], Awaitable[Answer]]


class TinkerService:
    """Answers requests with the JSON of the methods; what takes longer is in `futures`."""

    def __init__(self, run: OpenRun) -> None:
        self._run, self.base_model = run, str(run.config.pretrain)
        self.futures = Futures()
        self._samplers = Samplers(run, self.futures)
        self._sessions: set[str] = set()
        self._model: str | None = None
        self._order = asyncio.Lock()
        """Held by training requests, in the order of their arrival."""
        self._base, self._sent = run.step == 0, True
        """Whether the weights are those of the base model, and whether the engines have those of the trainer."""
        self._versions: dict[str, int] = {}
        """Version of the weights that were saved under a path."""
        self._file = run.folder / SAVED_FILE
        self._saved: dict[str, str] = json.loads(self._file.read_text()) if self._file.exists() else {}

    async def create_session(self, body: Body) -> Body:
        """A session of a ServiceClient."""
        session = secrets.token_hex(8)
        self._sessions.add(session)
        return {"session_id": session, "warning_message": None if self._adapters else FULL_WEIGHTS}

    async def session_heartbeat(self, body: Body) -> Body:
        self._session(body)
        return {"type": "session_heartbeat"}

    async def finish_session(self, session: str) -> Body:
        self._sessions.discard(session)
        return {}

    async def capabilities(self) -> Body:
        length = self._run.config.sequence_length
        model = {"model_name": self.base_model, "max_context_length": length, "trainable": True, "sampleable": True}
        return {"supported_models": [model]}

    async def create_model(self, body: Body) -> Body:
        """A model with the weights of the base model.

        Raises:
            WireError: model, adapters or optimizer are not those of the server.
        """
        self._check_base(required_field(body, "base_model", str))
        lora, optimizer = body.get("lora_config") or {}, (body.get("optimizer_config") or {}).get("type", "adamw")
        if self._adapters and lora.get("rank", self._adapters) != self._adapters:
            raise WireError(f"lora_config.rank: {lora['rank']} is not served; use {self._adapters}")
        if optimizer != "adamw":
            raise WireError(f"optimizer_config.type: {optimizer} is not served; use adamw")
        model_id = self._new_model_id(body)

        async def create() -> Answer:
            if not self._base:
                raise WireError("base_model: its weights have been trained; start roll serve again, or load saved ones")
            self._model = model_id
            return {"model_id": model_id, "type": "create_model"}

        return self._in_order(None, f"{model_id}:create", create)

    async def get_info(self, body: Body) -> Body:
        """The model, its adapters and its tokenizer."""
        data = {"model_name": self.base_model, "tokenizer_id": self.base_model}
        adapters = {"is_lora": bool(self._adapters), "lora_rank": self._adapters or None}
        return {"model_id": self._current(body), "model_data": data, **adapters}

    async def forward_backward(self, body: bytes) -> Body:
        """Adds the gradient of a loss, or computes only log-probs."""
        request = read_train_request(body)
        self._check_current(request.model_id)
        loss = tinker_loss(request.loss)
        settings = loss.settings(request.settings, "loss_fn_config")
        rows = [loss.row(datum, f"data[{number}]") for number, datum in enumerate(request.data)]
        self._check_rows(rows)
        work = partial(self._pass, loss, settings, rows, request.forward_only)
        return self._in_order(request.model_id, f"{request.model_id}:{request.seq_id}", work)

    async def _pass(
        self, loss: TinkerLoss, settings: Settings, rows: Sequence[TrainedRow], forward_only: bool
    ) -> Answer:
        responses = [Response(row.ids[:1], row.ids[1:], group=number) for number, row in enumerate(rows)]
        if forward_only:
            log_probs = await self._run.log_probs_async(responses, temperature=1.0)
        else:
            self._base = False
            backward = partial(self._run.forward_backward_async, responses, temperature=1.0)
            if loss is TINKER_LOSSES["cross_entropy"]:  # linear: its gradient is known before the forward pass
                done = await backward(gradients=[torch.from_numpy(-row.coefficients) for row in rows])
            else:
                done = await backward(loss=partial(loss.total, rows, settings))
            log_probs = done.log_probs
        answered = [row.log_probs(values.tolist()) for row, values in zip(rows, log_probs, strict=True)]
        return train_answer(answered, {"loss:sum": float(loss.total(rows, settings, log_probs))})

    async def optim_step(self, body: Body) -> Body:
        """An Adam step with the gradients so far."""
        params = AdamParams.read(body, self._run.config.actor_train.training_args)

        async def step() -> Answer:
            self._sent = False
            metrics = await self._run.optim_step_async(
                learning_rate=params.learning_rate, max_grad_norm=params.grad_clip_norm
            )
            return {"metrics": {f"optim/{name}": float(value) for name, value in metrics.items()}}

        return self._train(body, step)

    async def save_weights(self, body: Body) -> Body:
        """A state with the optimizer, under a name."""
        path = self._path(body, STATE)

        async def save() -> Answer:
            if path in self._saved and not body.get("overwrite"):
                raise WireError(f"path: {path} exists; choose another name, or give overwrite")
            written = await self._run.save_state_async()
            own = written.with_name(_folder_name(path))  # checkpoints with the name of a step may be replaced
            await asyncio.to_thread(_replace, written, own)
            self._record(path, own)
            return {"path": path, "type": "save_weights"}

        return self._train(body, save)

    async def load_weights(self, body: Body) -> Body:
        """The weights of a saved state, and its optimizer where that is asked, in a new model or in a given one."""
        path, optimizer = required_field(body, "path", str), bool(body.get("optimizer"))
        if path not in self._saved or f"/{STATE}/" not in path:
            known = [each for each in self._saved if f"/{STATE}/" in each]
            raise WireError(f"path: {path} is no state that was saved here; known: {', '.join(known) or 'none'}")
        created = "session_id" in body
        model_id = self._new_model_id(body) if created else self._current(body)

        async def load() -> Answer:
            self._base = self._sent = False
            await self._run.load_state_async(self._saved[path], optimizer=optimizer)
            self._model = model_id
            return {"path": path, "model_id": model_id, "type": "load_weights"}

        return self._in_order(None, f"{model_id}:load", load) if created else self._train(body, load)

    async def save_weights_for_sampler(self, body: Body) -> Body:
        """Gives the weights to the engines; writes them under a name, or makes a sampler of them."""
        path = self._path(body, SAMPLER) if body.get("path") is not None else None

        async def save() -> Answer:
            if path is not None:
                self._record(path, await self._run.save_hf_async(self._run.folder / SAMPLER / _folder_name(path)))
            if not self._sent:
                await self._run.update_weights_async()
                self._sent = True
            version = self._run.version
            if path is not None:
                self._versions[path] = version
                return {"path": path, "type": "save_weights_for_sampler"}
            return {
                "sampling_session_id": self._samplers.add(Sampler(None if body.get("kind") == "inflight" else version))
            }

        return self._train(body, save)

    async def create_sampling_session(self, body: Body) -> Body:
        """A sampler of saved weights that the engines have, or of the base model before it is trained."""
        self._session(body)
        path = optional_field(body, "model_path", str)
        if path is None:
            self._check_base(required_field(body, "base_model", str))
            if not self._base:
                raise WireError("base_model: its weights have been trained; sample from saved ones")
        elif path not in self._versions:
            raise WireError(f"model_path: {path} is not in the engines; known: {', '.join(self._versions) or 'none'}")
        version = self._run.version if path is None else self._versions[path]
        return {"sampling_session_id": self._samplers.add(Sampler(version, path))}

    async def get_sampler(self, sampler_id: str) -> Body:
        path = self._samplers.find(sampler_id).path
        return {"sampler_id": sampler_id, "base_model": self.base_model, "model_path": path}

    async def asample(self, body: Body) -> Body:
        return self._samplers.start(body, trained=not self._sent)

    def _train(self, body: Body, work: Work) -> Body:
        model_id = self._current(body)
        return self._in_order(model_id, f"{model_id}:{required_field(body, 'seq_id', int)}", work)

    def _in_order(self, model_id: str | None, request_id: str, work: Work) -> Body:
        """Begins a training request after those before it; it fails where its model was replaced meanwhile."""

        async def ordered() -> Answer:
            async with self._order:
                if model_id is not None:
                    self._check_current(model_id)
                return await work()

        self.futures.start(request_id, ordered)
        return {"request_id": request_id}

    @property
    def _adapters(self) -> int:
        """Rank of the adapters; 0 where all weights are trained."""
        model = self._run.config.actor_train.model_args
        return model.lora_rank if model.trains_adapters else 0

    def _session(self, body: Body) -> str:
        session = required_field(body, "session_id", str)
        if session not in self._sessions:
            raise WireError(f"session_id: {session} is unknown or finished; make a new ServiceClient")
        return session

    def _new_model_id(self, body: Body) -> str:
        return f"{self._session(body)}:train:{required_field(body, 'model_seq_id', int)}"

    def _current(self, body: Body) -> str:
        model_id = required_field(body, "model_id", str)
        self._check_current(model_id)
        return model_id

    def _check_current(self, model_id: str) -> None:
        if model_id != self._model:
            raise WireError(f"model_id: {model_id} was replaced; this server has one model, now {self._model}")

    def _check_base(self, name: str) -> None:
        if name != self.base_model and os.path.realpath(name) != os.path.realpath(self.base_model):
            raise WireError(f"base_model: {name} is not served; use {self.base_model}")

    def _check_rows(self, rows: Sequence[TrainedRow]) -> None:
        longest, vocabulary = self._run.config.sequence_length or 0, len(self._run.tokenizer)
        for number, row in enumerate(rows):
            if len(row.ids) > longest:
                raise WireError(f"data[{number}]: has {len(row.ids)} tokens; at most {longest} (sequence_length)")
            if not all(0 <= token < vocabulary for token in row.ids):
                raise WireError(f"data[{number}]: has a token that is not in the vocabulary of {vocabulary}")

    def _path(self, body: Body, kind: str) -> str:
        name = required_field(body, "path", str)
        if not re.fullmatch(r"[\w.-]{1,128}", name):
            raise WireError(f"path: {name!r} is no name; use up to 128 letters, digits, '.', '_' and '-'")
        return f"tinker://{self._current(body)}/{kind}/{name}"

    def _record(self, path: str, folder: Path) -> None:
        self._saved[path] = str(folder)
        self._file.write_text(json.dumps(self._saved, indent=1))


def _folder_name(path: str) -> str:
    return path.removeprefix("tinker://").replace("/", "_").replace(":", "_")


def _replace(written: Path, own: Path) -> None:
    import shutil

    if own.exists():
        shutil.rmtree(own)
    written.rename(own)
