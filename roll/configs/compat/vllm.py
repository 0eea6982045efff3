"""Options of vLLM, and the same options of SGLang."""

from __future__ import annotations

from typing import Any

OPTIONS = {
    "gpu_memory_utilization": "mem_fraction_static",
    "block_size": "page_size",
    "load_format": "load_format",
    "max_model_len": "context_length",
    "max_num_batched_tokens": "chunked_prefill_size",
    "enforce_eager": "disable_cuda_graph",
    "kv_cache_dtype": "kv_cache_dtype",
}
"""vLLM option -> SGLang option with the same meaning."""

ROLE_OPTIONS = {"tensor_parallel_size": "num_gpus_per_worker", "max_num_seqs": "max_running_requests"}
"""vLLM option -> key of the role."""

NEGATED_OPTIONS = {"enable_prefix_caching": "disable_radix_cache"}
"""vLLM option -> SGLang option with the opposite meaning."""

RENAMED_VALUES: dict[str, dict[Any, Any]] = {"top_k": {-1: 0}}
