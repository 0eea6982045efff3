"""The options of the installed SGLang, read from its source without importing it."""

from __future__ import annotations

import ast
import importlib.util
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Optional, Union

from roll.base.errors import Finding, error, warning
from roll.base.schema import describe
from roll.base.text import nearest

DECLARATIONS = Path("srt", "arg_groups", "fields")
"""Folder of the sglang package whose classes declare the fields of ServerArgs."""

OWNED = {
    "model_path": "set model_args.model_name_or_path",
    "tokenizer_path": "the tokenizer is the model's",
    "chat_template": "set data_args.template",
    "download_dir": "models are downloaded to the folder of HF_HOME",
    "skip_tokenizer_init": "token ids go in and come out",
    "is_embedding": "the engines of a reward model have it",
    "dtype": "set model_args.dtype",
    "tp_size": "set num_gpus_per_worker",
    "tensor_parallel_size": "set num_gpus_per_worker",
    "tensor_model_parallel_size": "set num_gpus_per_worker",
    "dp_size": "engines follow from device_mapping and num_gpus_per_worker",
    "data_parallel_size": "engines follow from device_mapping and num_gpus_per_worker",
    "pp_size": "an engine has one pipeline stage",
    "pipeline_parallel_size": "an engine has one pipeline stage",
    "nnodes": "nodes of an engine follow from device_mapping and num_gpus_per_worker",
    "node_rank": "nodes of an engine follow from device_mapping and num_gpus_per_worker",
    "base_gpu_id": "devices follow from device_mapping",
    "gpu_id_step": "devices follow from device_mapping",
    "device": "set platform",
    "host": "ports and addresses are allocated",
    "port": "ports and addresses are allocated",
    "nccl_port": "ports and addresses are allocated",
    "dist_init_addr": "ports and addresses are allocated",
    "random_seed": "set seed",
    "max_running_requests": "set actor_infer.max_running_requests",
    "weight_version": "versions follow from training",
    "enable_deterministic_inference": "set deterministic",
    "enable_lora": "set actor_train.model_args.lora_target",
    "lora_paths": "set actor_train.model_args.adapter_name_or_path",
    "max_loaded_loras": "adapters are unloaded by their version",
}
"""Option -> what to write instead; setting these directly would contradict other keys."""

RUNS_CODE = "runs code that the framework does not check"

REFUSED = {
    name: why
    for why, names in {
        RUNS_CODE: """trust_remote_code custom_sigquit_handler custom_weight_loader forward_hooks warmups
            enable_custom_logit_processor stat_loggers tool_server sidecar use_ray""",
        "makes the model that generates another one than is trained": """json_model_override_args revision uno_lora_path
            quantization_param_path quantize_and_serve modelopt_quant rl_quant_profile modelopt_checkpoint_restore_path
            decrypted_config_file model_config_parser kt_weight_path dllm_algorithm encoder_only language_only
            kv_cache_dtype""",
        "reads files of another format than the framework checks": "load_format",
        "changes how tokens are sampled": "preferred_sampling_params sampling_defaults",
    }.items()
    for name in names.split()
}
"""Option -> why it is refused; a model that scores and is not trained may be another one."""

ALLOWED = {"kv_cache_dtype": ("auto", "bf16", "bfloat16"), "load_format": ("auto", "safetensors", "dummy")}
"""Option of REFUSED -> its values that are not refused."""

VLLM_NAMES = {
    "gpu_memory_utilization": "mem_fraction_static",
    "block_size": "page_size",
    "load_format": "load_format",
    "max_model_len": "context_length",
    "max_num_batched_tokens": "chunked_prefill_size",
    "enforce_eager": "disable_cuda_graph",
    "kv_cache_dtype": "kv_cache_dtype",
}
"""Option of vLLM -> option with the same meaning."""

VLLM_ROLE_NAMES = {"tensor_parallel_size": "num_gpus_per_worker", "max_num_seqs": "max_running_requests"}
"""Option of vLLM -> key of the role."""

SMALLEST_SHARE, LARGEST_SHARE = 0.02, 0.98
"""Values of `mem_fraction_static` beyond which it is warned of."""

TYPES: dict[str, Any] = {"bool": bool, "int": int, "float": float, "str": str, "None": type(None)}
"""Names in annotations that are checked; options of other types accept any value."""


@dataclass(frozen=True)
class ServerOption:
    """Values of an option of SGLang: of a type, and one of `choices` if there are any.

    A plugin of SGLang may add to `open` choices.
    """

    hint: Any
    choices: tuple[Any, ...] = ()
    open: bool = False

    def error(self, value: Any) -> str:
        """Why a value is not allowed; empty if it is."""
        shown = "null" if value is None else repr(value)
        if not _is_of(value, self.hint):
            return f"{shown} is not {describe(self.hint)}"
        return f"{shown} is not one of {self._listed()}" if self._unlisted(value) and not self.open else ""

    def remark(self, value: Any) -> str:
        """A remark on a value that only a plugin can have added; empty for values of SGLang itself."""
        unknown = self._unlisted(value) and self.open and not self.error(value)
        return f"{value!r} is not one of SGLang's own: {self._listed()}; only a plugin can add it" if unknown else ""

    def _unlisted(self, value: Any) -> bool:
        return bool(self.choices) and isinstance(value, str | int | float) and value not in self.choices

    def _listed(self) -> str:
        return ", ".join(str(choice) for choice in self.choices)


@cache
def server_options() -> dict[str, ServerOption] | None:
    """Every option by its name, or None when SGLang is not installed or keeps its options elsewhere."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations))) / DECLARATIONS
    lists = _lists(folder.parent / "choices.py")
    return dict(item for file in sorted(folder.glob("*.py")) for item in _declared(file, lists)) or None


def _declared(file: Path, lists: dict[str, tuple[Any, ...]]) -> Iterator[tuple[str, ServerOption]]:
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        for item in node.body if isinstance(node, ast.ClassDef) else []:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                if not item.target.id.startswith("_"):
                    yield item.target.id, _option(item.annotation, lists)


def _option(annotation: ast.expr, lists: dict[str, tuple[Any, ...]]) -> ServerOption:
    """From `A[type, Arg(choices=...)]`, `A[type, "help"]` or a bare type; a `type_parser` lets text in too."""
    if not (isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "A"):
        return ServerOption(_hint(annotation))
    parts = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
    calls = [part for part in parts[1:] if isinstance(part, ast.Call)]
    given = {keyword.arg: keyword.value for call in calls for keyword in call.keywords}
    hint = Any if "type_parser" in given else _hint(parts[0])
    choices = given.get("choices")
    if isinstance(choices, ast.Name):
        return ServerOption(hint, lists.get(choices.id, ()), open=True)
    return ServerOption(hint, _constants(choices))


def _lists(file: Path) -> dict[str, tuple[Any, ...]]:
    body = ast.parse(file.read_text(encoding="utf-8")).body if file.is_file() else []
    assigned = [node for node in body if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)]
    return {ast.unparse(node.targets[0]): _constants(node.value) for node in assigned}


def _constants(node: ast.expr | None) -> tuple[Any, ...]:
    """The items of a list of constants; none where it is anything else."""
    if not isinstance(node, ast.List | ast.Tuple) or not all(isinstance(item, ast.Constant) for item in node.elts):
        return ()
    return tuple(ast.literal_eval(node))


def _hint(node: ast.expr) -> Any:
    if not isinstance(node, ast.Subscript):
        return TYPES.get(ast.unparse(node), Any)
    inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    match ast.unparse(node.value).rpartition(".")[2].lower():
        case "literal":
            return Literal[tuple(ast.literal_eval(item) for item in inner)]
        case "optional":
            return Optional[_hint(inner[0])]  # noqa: UP045  (built from a value)
        case "union":
            return Union[tuple(_hint(item) for item in inner)]  # noqa: UP007  (built from a value)
        case "list":
            return list[_hint(inner[0])]  # type: ignore[misc]
        case "dict":
            return dict
    return Any


def _is_of(value: Any, hint: Any) -> bool:
    """Whether a value of a YAML file is of a type made by `_hint`."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin is Union:
        return any(_is_of(value, item) for item in inner)
    if origin is Literal:
        return any(value == item and type(value) is type(item) for item in inner)
    if origin is list:
        return isinstance(value, list) and all(_is_of(item, inner[0]) for item in value)
    return type(value) is hint or (hint is float and type(value) is int)


def check_engine_options(role: str, options: Mapping[str, Any], scores: bool) -> Iterator[Finding]:
    """Options of `strategy_config` are SGLang's, with values that it takes, and none that other keys decide.

    A model that `scores`, and is not trained, may be another one than the framework would load.
    """
    path, known = f"{role}.strategy_args.strategy_config", server_options()
    for name, value in options.items():
        if name in OWNED:
            yield error(f"{path}.{name}", f"{value!r}: the framework sets this option; {OWNED[name]}")
        elif known is not None and name not in known:
            like = VLLM_NAMES.get(name) or nearest(name, known.keys() - OWNED.keys())
            hint = f"; did you mean {like}?" if like else ""
            if name in VLLM_ROLE_NAMES:
                hint = f"; set {role}.{VLLM_ROLE_NAMES[name]}"
            yield error(f"{path}.{name}", f"SGLang has no option of this name{hint}")
        elif _is_refused(name, value, (known or {}).get(name)) and (not scores or REFUSED[name] == RUNS_CODE):
            yield error(f"{path}.{name}", f"{value!r} {REFUSED[name]}; leave it out")
        elif name == "mem_fraction_static":
            yield from _check_share(f"{path}.{name}", value)
        elif known is not None:
            yield from _check_value(f"{path}.{name}", value, known[name])
    if known is None and options:
        yield warning(path, f"sglang is not installed here: {', '.join(options)} were not checked against its options")


def _is_refused(name: str, value: Any, option: ServerOption | None) -> bool:
    if name in ALLOWED and option is not None and (option.error(value) or option.remark(value)):
        return False  # `_check_value` reports what SGLang does not know
    return name in REFUSED and bool(value) and value not in ALLOWED.get(name, ("{}",))


def _check_share(path: str, share: Any) -> Iterator[Finding]:
    if share is not None and not (isinstance(share, int | float) and 0 < share < 1):
        yield error(path, f"{share!r} is not a share of the device's memory between 0 and 1, such as 0.8")
    elif share is not None and not SMALLEST_SHARE <= share <= LARGEST_SHARE:
        yield warning(path, f"{share:g} is unusual: usual values are between {SMALLEST_SHARE:g} and {LARGEST_SHARE:g}")


def _check_value(path: str, value: Any, option: ServerOption) -> Iterator[Finding]:
    refusal, doubt = option.error(value), option.remark(value)
    if refusal:
        yield error(path, refusal)
    if doubt:
        yield warning(path, doubt)
