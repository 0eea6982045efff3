"""SGLang's runner of a model, without an engine around it: which models does one call take? Needs a fresh process."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from roll.platforms.platform import CpuPlatform


def load_runner(folder: str) -> Any:
    """The runner of a model on one core."""
    from sglang.benchmark.one_batch import SpawnRanks
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.managers.scheduler import publish
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import PortArgs, ServerArgs

    sizes: dict[str, Any] = {"max_total_tokens": 500, "max_running_requests": 4, "mem_fraction_static": 0.3}
    options = CpuPlatform().engine_arguments("float32") | {"page_size": 1, "dtype": "float32"}
    arguments = ServerArgs(model_path=folder, skip_tokenizer_init=True, **sizes, **options)
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    config, port = ModelConfig.from_server_args(arguments), PortArgs.init_new(arguments).nccl_port
    bootstrap.init_parallel_runtime(server_args=arguments, device="cpu", dist_port=port)
    bootstrap.init_layer_runtime(model_config=config)
    runner = ModelRunner(
        model_config=config, mem_fraction_static=0.3, gpu_id=0, nccl_port=port, server_args=arguments
    )  # fmt: skip
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    return runner


@contextmanager
def changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def which_models_are_taken(folders: Sequence[str]) -> list[dict[str, bool]]:
    """What is taken of each model; a process runs one, and SGLang is imported once for all of them."""
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0"
    import sglang.benchmark.one_batch
    import sglang.srt.model_executor.model_runner  # noqa: F401

    with multiprocessing.get_context("fork").Pool(len(folders), maxtasksperchild=1) as processes:
        return processes.map(what_is_taken, folders, chunksize=1)


def what_is_taken(folder: str) -> dict[str, bool]:
    """By what is changed about a model that is taken, whether it is still taken; and which `forward` was installed."""
    from roll.platforms.cpu import sglang_model
    from roll.platforms.cpu.kernels import CpuKernels

    runner = load_runner(folder)
    model, kernels = runner.model.model, CpuKernels(runner.model_config.head_dim)
    installed = vars(model).pop("forward", None)
    taken = {"installed": isinstance(installed, sglang_model.FusedForward)}
    layer, pool = model.layers[1], runner.token_to_kv_pool
    names = ("tp_size", "pp_size", "enable_lora", "forward_hooks", "debug_tensor_dump_output_folder")
    options = {name: getattr(runner.server_args, name) for name in names}

    def with_option(**changes: Any) -> tuple[Any, str, Any]:  # SGLang's own are read-only
        return runner, "server_args", SimpleNamespace(**options | changes)

    attention = layer.self_attn
    half = [cache.bfloat16() for cache in pool.k_buffer]
    changes: dict[str, tuple[Any, str, Any]] = {
        "nothing": with_option(),
        "lora": with_option(enable_lora=True),
        "tensor parallel": with_option(tp_size=2),
        "pipeline parallel": with_option(pp_size=2),
        "hooks": with_option(forward_hooks=[{"name": "x"}]),
        "cache of another type": (pool, "dtype", torch.bfloat16),
        "cache tensors of another type": (pool, "k_buffer", half),
        "sliding window": (attention.attn, "sliding_window_size", 16),
        "capped scores": (attention.attn, "logit_cap", 30.0),
        "rotation in pairs": (attention.rotary_emb, "is_neox_style", False),
        "rotation of a part": (attention.rotary_emb, "rotary_dim", 8),
        "another rotation": (attention, "rotary_emb", torch.nn.Identity()),
        "another scale": (attention, "scaling", 0.5),
        "another epsilon": (layer.post_attention_layernorm, "variance_epsilon", 0.5),
        "another activation": (layer.mlp, "act_fn", torch.nn.GELU()),
        "quantised": (layer.mlp.down_proj, "quant_method", object()),
        "half precision": (layer.mlp.down_proj, "weight", torch.nn.Parameter(layer.mlp.down_proj.weight.bfloat16())),
    }
    for name, change in changes.items():
        with changed(*change):
            taken[name] = sglang_model.fuse_decoder(runner, kernels)
        vars(model).pop("forward", None)
    return taken
