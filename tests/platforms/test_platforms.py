import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from roll.platforms import detect, get_platform
from roll.platforms.platform import never_compile


def test_auto_detects_the_platform():
    assert get_platform("auto").name == detect()


def test_an_unknown_platform_error_lists_the_known_ones():
    with pytest.raises(ValueError, match="'tpu' is unknown; use auto, cpu or cuda"):
        get_platform("tpu")


def test_cpu_platform_properties():
    platform = get_platform("cpu")
    memory = platform.memory()
    assert (platform.device_type, platform.collective_backend) == ("cpu", "gloo")
    assert platform.device_count() == len(os.sched_getaffinity(0))
    assert 0 < memory["used"] <= memory["peak"] < memory["total"]
    assert platform.torch_device(3).type == "cpu"


class Event:
    """A CUDA event that is done at the third question, or never."""

    def __init__(self, ends: bool) -> None:
        self.questions, self.ends, self.recorded = 0, ends, False

    def record(self) -> None:
        self.recorded = True

    def query(self) -> bool:
        assert self.recorded
        self.questions += 1
        return self.ends and self.questions == 3


def test_waiting_for_a_gpu_ends_when_its_work_does_and_never_blocks(monkeypatch):
    event = Event(ends=True)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    get_platform("cuda").wait_for_device(10)
    assert event.questions == 3
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(ends=False))
    with pytest.raises(TimeoutError, match=r"the GPU was not done within 0.01 s"):
        get_platform("cuda").wait_for_device(0.01)
    get_platform("cpu").wait_for_device(0)


def test_engines_on_gpus_get_an_attention_that_has_their_precision():
    cuda = get_platform("cuda")
    assert cuda.engine_arguments("bf16", False) == {}
    assert cuda.engine_arguments("fp32", False) == {"attention_backend": "triton"}
    assert cuda.engine_arguments("bf16", True) == {"enable_deterministic_inference": True}
    assert cuda.engine_arguments("bf16", releases_memory=True) == {
        "enable_memory_saver": True,
        "sleep_on_idle": True,
    }
    assert (cuda.engine_environment("fp32"), cuda.engine_environment("bf16")) == ({"TRITON_F32_DEFAULT": "ieee"}, {})
    assert get_platform("cpu").engine_arguments("fp32", True) == get_platform("cpu").engine_arguments("bf16", False)


def test_deterministic_kernels_are_chosen_on_gpus_alone(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", chosen.append)
    get_platform("cpu").use_deterministic_kernels()
    get_platform("cuda").use_deterministic_kernels()
    assert chosen == [True]
    assert get_platform("cpu").deterministic_environment == {}
    assert set(get_platform("cuda").deterministic_environment) == {
        "CUBLAS_WORKSPACE_CONFIG",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        "NCCL_ALGO",
    }


def test_pinning_sets_affinity_and_threads_together(monkeypatch):
    """In a thread of its own, whose affinity is its own too."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    core, threads = max(os.sched_getaffinity(0)), torch.get_num_threads()

    def pinned():
        torch.set_num_threads(2)
        get_platform("cpu").setup_process([core], 1)
        return os.sched_getaffinity(0), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]

    try:
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(pinned).result() == ({core}, 1, "1")
    finally:
        torch.set_num_threads(threads)


def test_more_threads_than_cores_is_refused():
    with pytest.raises(ValueError, match="3 threads cannot run on 2 cores"):
        get_platform("cpu").setup_process([0, 1], 3)


def test_nccl_settings_of_the_user_are_kept(monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    assert get_platform("cuda").worker_environment() == {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "1"}


def test_training_ranks_have_the_nccl_settings_of_the_engines():
    """SGLang sets these in its own processes unless they are set; a broadcast needs them equal on both sides."""
    from importlib.util import find_spec
    from pathlib import Path

    source = Path(find_spec("sglang").submodule_search_locations[0], "srt", "entrypoints", "engine.py").read_text()
    environment = get_platform("cuda").environment
    assert environment == {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    assert all(f'"{name}" not in os.environ' in source for name in environment)


def test_a_cpu_process_compiles_nothing(monkeypatch):
    monkeypatch.setattr(torch, "compile", torch.compile)  # restored at the end
    never_compile()

    def function() -> None: ...

    assert torch.compile(function) is function and torch.compile(dynamic=True)(function) is function
