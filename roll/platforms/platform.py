"""The platform of a machine, CPU or CUDA: its devices, collective backend, memory, and settings of the engines."""

from __future__ import annotations

import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch


POLL_S = 0.0005

PROMPT_INTERVAL = 8
"""Steps of running requests between two batches of prompts in an engine on a CPU."""

LOOPBACK = "127.0.0.1"
"""Address of a run on one machine, which no other machine reaches."""


BF16_TFLOPS = {
    "NVIDIA A10": 125.0,
    "NVIDIA A40": 149.7,
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA L4": 121.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA H20": 148.0,
    "NVIDIA H100 80GB HBM3": 989.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H200": 989.0,
    "NVIDIA H200 NVL": 835.0,
    "NVIDIA GH200 480GB": 989.0,
    "NVIDIA B200": 2250.0,
    "NVIDIA GeForce RTX 3090": 71.0,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 5090": 209.5,
}
"""Dense peak with fp32 sums by the name of the GPU, from NVIDIA's data sheets."""


class Platform(ABC):
    """Interface of a platform."""

    name: ClassVar[str]
    """Value of the YAML key `platform`."""
    device_type: ClassVar[str]
    """As in `torch.device`."""
    collective_backend: ClassVar[str]
    """As in `torch.distributed.init_process_group`."""

    environment: ClassVar[dict[str, str]] = {}
    """Environment variables of every process with a device."""
    deterministic_environment: ClassVar[dict[str, str]] = {}
    """Added to it with `deterministic: true`."""
    engines_take_free_memory: ClassVar[bool] = False
    """Whether an engine sizes its cache by the memory that is free on its device when it starts."""

    @abstractmethod
    def device_count(self) -> int:
        """Devices of this node: cores the process may use, or visible GPUs."""

    @abstractmethod
    def torch_device(self, local_index: int) -> torch.device:
        """The device with this index among those visible to the process."""

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Bytes: `used` and `peak` by this process on its device, `total` and `available` of the device."""

    def peak_tflops(self, dtype: str) -> float | None:
        """Dense peak of matrix products of `dtype` on a device, by its data sheet; None where it is not known."""
        return None

    @abstractmethod
    def wait_for_device(self, timeout_s: float) -> None:
        """Waits until this process's work on its device is done.

        Raises:
            TimeoutError: it was not done within `timeout_s`.
        """

    @abstractmethod
    def release_cached_memory(self) -> None:
        """Returns the memory of freed tensors to the device, for other processes."""

    def worker_environment(self) -> dict[str, str]:
        """`environment`, with the values of variables that are set where the run starts."""
        return {name: os.environ.get(name, value) for name, value in self.environment.items()}

    def engine_environment(self, dtype: str) -> dict[str, str]:
        """Environment variables of the processes of an engine of `dtype`."""
        return {}

    @abstractmethod
    def engine_arguments(
        self, dtype: str, deterministic: bool = False, releases_memory: bool = False
    ) -> dict[str, Any]:
        """SGLang's ServerArgs that this platform requires.

        Args:
            dtype: of the engine, such as fp32.
            deterministic: the same requests give the same tokens.
            releases_memory: a trainer uses the devices while the engine does not generate.
        """

    @abstractmethod
    def use_deterministic_kernels(self) -> None:
        """Makes torch add in a fixed order in this process, and raise an error where it cannot."""

    def prepare_megatron(self) -> None:
        """Prepares this process for Megatron-Core; call it before importing Megatron-Core.

        Megatron-Core imports wandb where it is installed, for an inference engine that no rank runs. That takes a
        second of every start, so wandb cannot be imported in such a process; trackers have processes of their own.
        """
        sys.modules.setdefault("wandb", None)  # type: ignore[arg-type]

    def setup_process(self, cores: Sequence[int], threads: int) -> None:
        """Pins this process to `cores` and sets the thread count of torch and OpenMP.

        A pinned process with more threads than cores is slow because the threads spin against each other: two OpenMP
        threads on one core gave 405 tokens/s instead of 9,630.

        Args:
            cores: core numbers to run on; empty leaves the affinity unchanged.
            threads: threads of one operator; 0 means one per given core, or unchanged without cores.

        Raises:
            ValueError: more threads than cores.
        """
        if cores and threads > len(cores):
            raise ValueError(f"threads: {threads} threads cannot run on {len(cores)} cores {list(cores)}")
        if cores:
            os.sched_setaffinity(0, cores)
        threads = threads or len(cores)
        if threads:
            import torch

            os.environ["OMP_NUM_THREADS"] = str(threads)
            torch.set_num_threads(threads)


class CpuPlatform(Platform):
    """A machine without GPUs: a device is a slot of CPU cores, and ranks communicate with gloo."""

    name: ClassVar[str] = "cpu"
    device_type: ClassVar[str] = "cpu"
    collective_backend: ClassVar[str] = "gloo"

    def device_count(self) -> int:
        return len(os.sched_getaffinity(0))

    def torch_device(self, local_index: int) -> torch.device:
        import torch

        return torch.device("cpu")

    def memory(self) -> dict[str, int]:
        """`used` and `peak` are resident bytes of this process, `total` and `available` those of the node."""
        import resource

        import psutil

        node = psutil.virtual_memory()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        used = psutil.Process().memory_info().rss
        return {"used": used, "peak": max(used, peak), "total": node.total, "available": node.available}

    def wait_for_device(self, timeout_s: float) -> None:
        """Returns at once: an operator has done its work when it returns."""

    def release_cached_memory(self) -> None:
        """Nothing to do: large tensors are returned when they are freed."""

    def use_deterministic_kernels(self) -> None:
        """Nothing to do: with a fixed number of threads the order is fixed."""

    def engine_environment(self, dtype: str) -> dict[str, str]:
        """SGLang sends the tokens of a response when it ends, not those of each request after every 50.

        With 138 tokens to an answer, those messages took a third of the processor time of the engine's Ray actor. They
        matter to a request that is retracted because the cache is full and then aborted: it keeps the tokens that were
        sent. By default, the cache of an engine on a CPU has room for all requests that it runs.
        """
        return {"SGLANG_FORCE_STREAM_INTERVAL": str(1 << 30)}

    def engine_arguments(
        self, dtype: str, deterministic: bool = False, releases_memory: bool = False
    ) -> dict[str, Any]:
        """SGLang on torch operators, without CUDA graphs; `sleep_on_idle` frees the core of an idle engine.

        SGLang does not overlap scheduling and computing: operators of a CPU are synchronous, so it would gain nothing,
        and every request would be computed for one token more than it has.

        Prompts that arrive one by one wait up to PROMPT_INTERVAL steps and are computed together, because a batch of
        them has a fixed cost. With answers of 20 tokens that saves 7 to 10 % of the engine's time; with answers of 3
        tokens a step is a few percent longer, and `strategy_config.prefill_decode_interval: 0` is better.
        """
        return {
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_cuda_graph": True,
            "sleep_on_idle": True,
            "disable_overlap_schedule": True,
            "prefill_decode_interval": PROMPT_INTERVAL,
            "lora_backend": "torch_native",
        }

    def prepare_megatron(self) -> None:
        """Patches torch, so that Megatron-Core runs without CUDA, with the faster of two matrix products."""
        super().prepare_megatron()
        from roll.platforms.cpu import matmul
        from roll.platforms.cpu.megatron_cpu import patch_megatron_for_cpu

        never_compile()
        patch_megatron_for_cpu()
        matmul.use_fast_matmul()


class CudaPlatform(Platform):
    """A machine with NVIDIA GPUs: one device per rank, and ranks communicate with NCCL."""

    name: ClassVar[str] = "cuda"
    device_type: ClassVar[str] = "cuda"
    collective_backend: ClassVar[str] = "nccl"
    environment: ClassVar[dict[str, str]] = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    """What SGLang sets in its processes: both sides of a weight update have to agree."""
    deterministic_environment: ClassVar[dict[str, str]] = {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "NCCL_ALGO": "Ring",
    }
    """For cuBLAS, Transformer Engine and NCCL, which choose algorithms by speed otherwise."""
    engines_take_free_memory: ClassVar[bool] = True

    def device_count(self) -> int:
        import torch

        return torch.cuda.device_count()

    def torch_device(self, local_index: int) -> torch.device:
        import torch

        return torch.device("cuda", local_index)

    def memory(self) -> dict[str, int]:
        """`used` and `peak` are bytes that torch allocated on the current GPU, the other two those of the GPU."""
        import torch

        available, total = torch.cuda.mem_get_info()
        return {
            "used": torch.cuda.memory_allocated(),
            "peak": torch.cuda.max_memory_allocated(),
            "total": total,
            "available": available,
        }

    def peak_tflops(self, dtype: str) -> float | None:
        import torch

        return None if dtype == "fp32" else BF16_TFLOPS.get(torch.cuda.get_device_name())

    def wait_for_device(self, timeout_s: float) -> None:
        """Polls the device: a blocking call would never return where a kernel waits for a dead process."""
        import torch

        done, deadline = torch.cuda.Event(), time.monotonic() + timeout_s
        done.record()
        while not done.query():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the GPU was not done within {timeout_s:g} s")
            time.sleep(POLL_S)

    def release_cached_memory(self) -> None:
        """Memory that was shared with an engine too, once the engine has closed it."""
        import torch

        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()

    def engine_environment(self, dtype: str) -> dict[str, str]:
        """Triton rounds fp32 operands to 10 bits by default."""
        return {"TRITON_F32_DEFAULT": "ieee"} if dtype == "fp32" else {}

    def use_deterministic_kernels(self) -> None:
        import torch

        torch.use_deterministic_algorithms(True)

    def engine_arguments(
        self, dtype: str, deterministic: bool = False, releases_memory: bool = False
    ) -> dict[str, Any]:
        """SGLang chooses its settings by the GPU; on some that is an attention that has no fp32."""
        arguments: dict[str, Any] = {"attention_backend": "triton"} if dtype == "fp32" else {}
        if deterministic:
            arguments["enable_deterministic_inference"] = True
        if releases_memory:
            arguments |= {"enable_memory_saver": True, "sleep_on_idle": True}
        return arguments

    def prepare_megatron(self) -> None:
        """Sets one hardware queue, so that collectives start before the matrix products that overlap them."""
        super().prepare_megatron()
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def never_compile() -> None:
    """From now on `torch.compile` gives functions of this process as they are.

    Megatron-Core and SGLang decorate functions with it while they are imported, which imports torch's compiler: 0.9 to
    1.7 s of every start. On a CPU, compiling small functions at their first call costs more than it saves.
    """
    import torch

    def unchanged(model: Any = None, **options: Any) -> Any:
        return (lambda decorated: decorated) if model is None else model

    torch.compile = unchanged


PLATFORMS: dict[str, type[Platform]] = {"cpu": CpuPlatform, "cuda": CudaPlatform}


def detect() -> str:
    """`cuda` if torch finds a GPU, else `cpu`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def get_platform(name: str = "auto") -> Platform:
    """The platform of that name; `auto` calls `detect`.

    Raises:
        ValueError: unknown name.
    """
    name = detect() if name == "auto" else name
    if name not in PLATFORMS:
        raise ValueError(f"platform: {name!r} is unknown; use auto, {' or '.join(PLATFORMS)}")
    return PLATFORMS[name]()
