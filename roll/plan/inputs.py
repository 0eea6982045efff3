"""The models and datasets that a configuration gives by name: what a run would fetch, and fetching it.

`look_up` asks for sizes and fetches each config.json, so that a plan knows the model; `fetch_inputs` fetches the rest
and writes the commit into the configuration, so that every process and a later resume use the same files.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from roll.base.errors import Problem
from roll.configs.arguments import DataArguments
from roll.configs.learning.lora import check_lora_model, fill_in_adapter
from roll.configs.pipeline import BaseConfig
from roll.hub.find import Finder, LookUp, folder_files
from roll.hub.generated import generate, is_generated
from roll.hub.names import HubError, HubName, hub_name
from roll.hub.splits import wanted_splits
from roll.models.gguf_files import convert_gguf

logger = logging.getLogger(__name__)

ADAPTER_KEY = "actor_train.model_args.adapter_name_or_path"


def model_names(config: BaseConfig) -> dict[str, list[str]]:
    """The models of all roles that own devices, with the keys that name them."""
    names: dict[str, list[str]] = {}
    for role, worker in config.device_roles().items():
        name = worker.model_args.model_name_or_path
        if name is not None:
            key = "pretrain" if name == config.pretrain else f"{role}.model_args.model_name_or_path"
            keys = names.setdefault(name, [])
            keys += [key] if key not in keys else []
    return names


def look_up(config: BaseConfig, say: Callable[[str], None] = logger.info) -> LookUp:
    """Asks for the commit and sizes of everything that is given by name, and fetches each model's config.json.

    `say` is called with a line before the first request.
    """
    prepare_environment(config)
    result, finder = LookUp(), Finder(whole=False, say=say)
    for text, keys in model_names(config).items():
        name = hub_name(text, "model")
        try:
            if name is None:
                convert_gguf(text, weights=False)
            else:
                result.downloads.append(finder.model(name).download(name, keys))
        except HubError as error:
            result.problems.append(Problem(keys[0], str(error)))
    if (adapter := _adapter_name(config)) is not None:
        try:
            found = finder.model(adapter, adapter=True)
            result.downloads.append(found.download(adapter, [ADAPTER_KEY]))
            fill_in_adapter(config)
            result.problems += [each for each in check_lora_model(config) if each.kind == "error"]
        except HubError as error:
            result.problems.append(Problem(ADAPTER_KEY, str(error)))
    for role in config.data_roles():
        key, args = f"{role}.data_args.file_name", getattr(config, role).data_args
        for text in args.file_name:
            name = hub_name(text, "dataset")
            try:
                if is_generated(text):
                    generate(text)
                elif name is not None:
                    found = finder.data(name, args.subset, wanted_splits(role, args.split))
                    result.downloads.append(found.download(name, [key]))
            except HubError as error:
                result.problems.append(Problem(key, str(error)))
    return result


def fetch_inputs(config: BaseConfig) -> None:
    """Fetches the models and data files of a run, and replaces their names by names with the commit.

    Raises:
        HubError: with the key, what was looked for, and what to place where.
    """
    prepare_environment(config)
    finder = Finder(whole=True)
    for text, keys in model_names(config).items():
        name = hub_name(text, "model")
        try:
            if name is None:
                convert_gguf(text, weights=True)
            else:
                _replace_model(config, text, finder.model(name).name.uri)
        except HubError as error:
            raise HubError(f"{keys[0]}: {error}") from error
    if (adapter := _adapter_name(config)) is not None:
        try:
            config.actor_train.model_args.adapter_name_or_path = finder.model(adapter, adapter=True).name.uri
        except HubError as error:
            raise HubError(f"{ADAPTER_KEY}: {error}") from error
    for role in config.data_roles():
        args = getattr(config, role).data_args
        try:
            args.file_name = [file for text in args.file_name for file in _data_files(text, role, args, finder)]
        except HubError as error:
            raise HubError(f"{role}.data_args.file_name: {error}") from error
        args.subset = args.split = None  # the names of the files say them now


def prepare_environment(config: BaseConfig) -> None:
    """Sets the variables of `system_envs` and `model_download_type` in this process, and so in those it starts."""
    os.environ.update(config.system_envs)
    if config.model_download_type is not None:
        os.environ["USE_MODELSCOPE"] = str(int(config.model_download_type == "MODELSCOPE"))
        config.system_envs.setdefault("USE_MODELSCOPE", os.environ["USE_MODELSCOPE"])


def _adapter_name(config: BaseConfig) -> HubName | None:
    """The adapter that training starts from, if it is given by name."""
    return hub_name(config.actor_train.model_args.adapter_name_or_path or "", "model")


def _replace_model(config: BaseConfig, text: str, pinned: str) -> None:
    for worker in config.device_roles().values():
        if worker.model_args.model_name_or_path == text:
            worker.model_args.model_name_or_path = pinned
    if config.pretrain == text:
        config.pretrain = pinned


def _data_files(text: str, role: str, args: DataArguments, finder: Finder) -> list[str]:
    """The files that an entry of `file_name` stands for, those of a hub fetched, generated rows written."""
    if is_generated(text):
        return [str(generate(text))]
    name, splits = hub_name(text, "dataset"), wanted_splits(role, args.split)
    if name is not None:
        found = finder.data(name, args.subset, splits)
        return [replace(found.name, path=path).uri for path in found.paths]
    return folder_files(Path(text), args.subset, splits) if os.path.isdir(text) else [text]
