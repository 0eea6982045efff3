"""The options of the installed SGLang, read from its source without importing it."""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

DECLARATIONS = Path("srt", "arg_groups", "fields")
"""Folder of the sglang package whose classes declare the fields of ServerArgs."""

OWNED = {
    "model_path": "set model_args.model_name_or_path",
    "tokenizer_path": "the tokenizer is the model's",
    "skip_tokenizer_init": "token ids go in and come out",
    "dtype": "set model_args.dtype",
    "tp_size": "set num_gpus_per_worker",
    "tensor_parallel_size": "set num_gpus_per_worker",
    "tensor_model_parallel_size": "set num_gpus_per_worker",
    "dp_size": "engines follow from device_mapping and num_gpus_per_worker",
    "data_parallel_size": "engines follow from device_mapping and num_gpus_per_worker",
    "pp_size": "an engine has one pipeline stage",
    "pipeline_parallel_size": "an engine has one pipeline stage",
    "nnodes": "an engine lives on one node",
    "node_rank": "an engine lives on one node",
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
}
"""Option -> what to write instead; setting these by hand would contradict the rest of the file."""


@cache
def server_options() -> frozenset[str] | None:
    """Names of every option, or None when SGLang is not installed or keeps its options elsewhere."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    files = sorted((Path(next(iter(spec.submodule_search_locations))) / DECLARATIONS).glob("*.py"))
    names = [name for file in files for name in _declared(file)]
    return frozenset(names) or None


def _declared(file: Path) -> list[str]:
    """Annotated names of the classes of one module."""
    return [
        item.target.id
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and not item.target.id.startswith("_")
    ]
