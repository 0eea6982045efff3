"""Environment variables of a run's processes, `system_envs`."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from roll.base.errors import Finding, error, missing, obstacle, warning


def environment(value: Any) -> Any:
    """Environment variables with numbers converted to text; a bool is refused because its spelling is ambiguous.

    Raises:
        ValueError: a value is a bool, a list or a mapping, or the system accepts no such name or value.
    """
    if not isinstance(value, dict):
        return value
    for name, item in value.items():
        if not str(name) or "=" in str(name) or "\0" in f"{name}{item}":
            raise ValueError(f"{name!r} cannot be the name of an environment variable, or {item!r} its value")
        if isinstance(item, bool) or not isinstance(item, str | int | float):
            raise ValueError(f"{name} is {item!r}; write the text of the variable in quotes, such as '1'")
    return {str(name): str(item) for name, item in value.items()}


THREADS = re.compile(r"[1-9]\d{0,3}(,[1-9]\d{0,3})*", re.ASCII)
"""Values that OpenMP understands: a number of threads, or one for each level."""


REFUSED_VARIABLES = {
    ("PYTHONHOME", "PYTHONINSPECT", "PYTHONSTARTUP", "PYTHONOPTIMIZE"): (
        "changes how Python starts in every process; leave it out"
    ),
    ("RAY_ADDRESS", "RAY_TMPDIR", "RAY_NAMESPACE", "RAY_AUTH_TOKEN"): "comes too late, as Ray has been started; export "
    "it in the shell before `roll run`",
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"): (
        "is set for each process by the framework; leave it out, and see device_mapping"
    ),
}
"""Variables of `system_envs` that cannot do what they are for -> why, and what to do."""


PATH_VARIABLES = ("TMPDIR", "TMP", "TEMP", "HOME", "LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "PATH")
"""Variables with paths that processes need."""


CACHE_VARIABLES = (
    "HF_HOME HF_HUB_CACHE HF_DATASETS_CACHE HF_ASSETS_CACHE TRANSFORMERS_CACHE XDG_CACHE_HOME TORCH_HOME"
    " TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR MODELSCOPE_CACHE"
).split()
"""Variables with folders that processes make."""


INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def check_variables(sections: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    """Environment variables have the values that processes can use, and none that the framework sets."""
    for path, variables in sections.items():
        for name, value in variables.items():
            if name in THREAD_VARIABLES and not THREADS.fullmatch(value):
                yield error(f"{path}.{name}", f"{value!r} is not a number of threads, such as '4'")
            if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
                yield error(path, f"{name!r} is not the name of a variable; use letters, digits and _")
            if name == "PYTHONHASHSEED" and not (value == "random" or (value.isdecimal() and int(value) < 2**32)):
                yield error(f"{path}.{name}", f"{value!r} ends every process; use random or 0 to 4294967295")
            for names, why in REFUSED_VARIABLES.items():
                if name in names:
                    yield error(f"{path}.{name}", f"{value!r} {why}")
            if name in CACHE_VARIABLES and (reason := obstacle(Path(value))):
                yield missing(f"{path}.{name}", f"{value} {reason}; use another")
            if name in INTERFACE_VARIABLES and not _has_interface(value):
                there = ", ".join(known for _, known in socket.if_nameindex())
                yield warning(f"{path}.{name}", f"{value} is not an interface of this machine, which has {there}")
            if name in PATH_VARIABLES and not any(map(os.path.exists, re.split("[: ]", value))):
                yield warning(f"{path}.{name}", f"{value} is not on this machine; use a path that every node has")


def _has_interface(value: str) -> bool:
    """Whether this machine has an interface that a variable names: by its beginning, or with `^` those to leave out."""
    names = [name for _, name in socket.if_nameindex()]
    return value.startswith("^") or any(name.startswith(tuple(value.lstrip("=").split(","))) for name in names)


def joins_ray() -> bool:
    """Whether a run joins the Ray that RAY_ADDRESS names, instead of starting its own."""
    return os.environ.get("RAY_ADDRESS", "").strip() not in ("", "local")


def compiler_problem(variables: Mapping[str, str]) -> str:
    """Why an engine with these environment variables cannot compile kernels on this machine; empty if it can.

    SGLang and FlashInfer take nvcc from CUDA_HOME or CUDA_PATH, else from PATH, else from /usr/local/cuda.
    """
    variables = {**os.environ, **variables}
    home = variables.get("CUDA_HOME") or variables.get("CUDA_PATH")
    if not home and shutil.which("nvcc", path=variables.get("PATH")):
        return ""
    folder = Path(home or "/usr/local/cuda")
    if not os.access(folder / "bin" / "nvcc", os.X_OK):
        advice = "install the CUDA toolkit, or set CUDA_HOME to its folder"
        return f"{folder}/bin/nvcc is missing, with which it compiles kernels when it starts; {advice}"
    if folder.parent.name == "nvidia" and not (folder / "lib64" / "libcudart.so").exists():
        return f"{folder}/lib64/libcudart.so is missing, with which it links kernels; see docs/gpu.md"
    return ""
