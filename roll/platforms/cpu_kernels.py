"""Builds and calls cpu_kernels.cpp, the kernels of a CPU engine; needs torch and a C++ compiler, not SGLang.

The library is built at its first use, in about a second, and kept in a cache folder under a name that stands for the
source, the compiler and the processor. Threads are those of torch: the library has no OpenMP runtime of its own and
finds the functions of torch's.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

SOURCE = Path(__file__).with_suffix(".cpp")

COMPILERS = ("g++", "c++")
"""Tried in this order, after the command in the environment variable CXX."""

FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fopenmp"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math", "-freciprocal-math"),
)
"""Sums may be reordered, so that loops are vectorised. -ffast-math would also round denormals of torch to zero."""

NATIVE = {"x86_64": "-march=native", "aarch64": "-mcpu=native"}
"""Flag for all instructions of this processor, by machine."""

BUILD_TIMEOUT_S = 120.0
CACHE_DTYPES = (torch.float32, torch.bfloat16)
"""Supported dtypes of the key-value cache; queries of another dtype are converted to float32 and back."""


class BuildError(RuntimeError):
    """The library could not be built; the message says why."""


def cache_folder() -> Path:
    """Folder of built libraries: `$XDG_CACHE_HOME/roll/kernels`, by default below `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "roll" / "kernels"


@dataclass(frozen=True)
class Requests:
    """The requests of one forward pass, as all layers of it read them; made by `CpuKernels.requests`.

    The queries of a request are the last of its keys.
    """

    tensors: tuple[torch.Tensor, ...]
    """Slot table [rows, context] int32; row, keys, queries and first query [B] int64 of each request."""

    addresses: tuple[int, ...]


class CpuKernels:
    """The kernels for heads of one size; see the functions of cpu_kernels.cpp."""

    def __init__(self, head_dim: int) -> None:
        """Builds the library, or finds it built.

        Raises:
            BuildError: there is no compiler, or it failed.
        """
        self.head_dim = head_dim
        library = _load(head_dim)
        self._attend, self._rms_norm = library.paged_attention, library.rms_norm
        self._rotate, self._silu_multiply = library.rotate, library.silu_multiply

    @staticmethod
    def requests(
        slot_table: torch.Tensor, rows: torch.Tensor, key_lengths: torch.Tensor, query_lengths: torch.Tensor | None
    ) -> Requests:
        """What attention reads of the requests of a batch.

        Args:
            slot_table: [rows, context] int32, cache slot of each position.
            rows: [B] row of each request in `slot_table`.
            key_lengths: [B] keys of each request.
            query_lengths: [B] new queries of each request, at most its keys; None: one each.
        """
        queries = torch.ones_like(rows) if query_lengths is None else query_lengths
        integers = [x.to(torch.int64).contiguous() for x in (rows, key_lengths, queries)]
        starts = torch.cumsum(integers[2], 0) - integers[2]
        tensors = (slot_table.to(torch.int32), *integers, starts)
        return Requests(tensors, tuple(tensor.data_ptr() for tensor in tensors))

    def attends(self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
        """Whether `attend` takes tensors of these shapes and types."""
        sizes = {query.shape[-1], k_cache.shape[-1], v_cache.shape[-1]}
        caches = k_cache.dtype == v_cache.dtype and k_cache.dtype in CACHE_DTYPES
        return sizes == {self.head_dim} and caches and k_cache.stride(-1) == v_cache.stride(-1) == 1

    def attend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        requests: Requests,
        scale: float,
    ) -> None:
        """Writes causal attention into `output`.

        Args:
            query: [tokens, heads, D] of all requests, one after the other.
            output: [tokens, heads, D], written.
            k_cache: [slots, key heads, D] float32 or bfloat16, with any strides of slots and heads.
            v_cache: the same of values.
            requests: of the batch.
            scale: of the scores.
        """
        queries = query.to(torch.float32).contiguous()
        result = output if output.dtype == torch.float32 and output.is_contiguous() else torch.empty_like(queries)
        table, rows = requests.tensors[:2]
        strides = (*k_cache.stride()[:2], *v_cache.stride()[:2])
        sizes = (ctypes.c_int64 * 8)(len(rows), query.shape[1], k_cache.shape[1], table.stride(0), *strides)
        addresses = (x.data_ptr() for x in (queries, result, k_cache, v_cache))
        self._attend(*addresses, *requests.addresses, sizes, scale, k_cache.dtype == torch.bfloat16)
        if result is not output:
            output.copy_(result)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The norm of float32 x [..., H], or of x + residual, and that sum."""
        x = x.contiguous()
        out, total = torch.empty_like(x), None
        if residual is not None:
            residual, total = residual.contiguous(), torch.empty_like(x)
        hidden = x.shape[-1]
        inputs = (x.data_ptr(), _address(residual), _address(total), weight.data_ptr(), out.data_ptr())
        self._rms_norm(*inputs, x.numel() // hidden, hidden, epsilon)
        return out, total

    def rotate(self, x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Float32 x [tokens, heads * D] with the halves of each head rotated.

        Args:
            x: rows may lie apart, such as those of a part of the projections of queries, keys and values.
            positions: [tokens] int64.
            table: [positions, D] float32: cosines, then sines.
        """
        x = x if x.stride(-1) == 1 else x.contiguous()
        out = torch.empty(x.shape)
        heads = x.shape[1] // self.head_dim
        self._rotate(
            x.data_ptr(), out.data_ptr(), positions.data_ptr(), table.data_ptr(), len(x), heads, x.stride(0)
        )  # fmt: skip
        return out

    def silu_multiply(self, x: torch.Tensor) -> torch.Tensor:
        """SiLU of the first half times the second half of float32 x [..., 2 F]."""
        x, size = x.contiguous(), x.shape[-1] // 2
        out = torch.empty(*x.shape[:-1], size)
        self._silu_multiply(x.data_ptr(), out.data_ptr(), out.numel() // size, size)
        return out


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@functools.cache
def _load(head_dim: int) -> ctypes.CDLL:
    """The library for this head size, with the types of its functions' arguments."""
    library = _open(build(head_dim, cache_folder()))
    pointer, integer, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    library.paged_attention.argtypes = [*[pointer] * 10, number, ctypes.c_int32]
    library.rms_norm.argtypes = [*[pointer] * 5, integer, integer, number]
    library.rotate.argtypes = [*[pointer] * 4, integer, integer, integer]
    library.silu_multiply.argtypes = [pointer, pointer, integer, integer]
    for function in (library.paged_attention, library.rms_norm, library.rotate, library.silu_multiply):
        function.restype = None
    return library


def _open(path: Path) -> ctypes.CDLL:
    """The library.

    Raises:
        BuildError: it cannot be loaded, such as one of a compiler that needs another OpenMP than torch's.
    """
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path.name} cannot be loaded: {error}") from error


def _read_source() -> str:
    try:
        return SOURCE.read_text()
    except OSError as error:
        raise BuildError(f"{SOURCE.name} cannot be read: {error}") from error


def build(head_dim: int, folder: Path) -> Path:
    """The library for this head size in `folder`; several processes may build it at once.

    Raises:
        BuildError: there is no compiler, or it failed, or the folder cannot be written.
    """
    compiler = find_compiler()
    source = _read_source()
    flags = [*FLAGS, *filter(None, [NATIVE.get(platform.machine())]), f"-DHEAD_DIM={head_dim}"]
    key = hashlib.sha256("\0".join([source, *flags, _version(compiler), _processor()]).encode())
    target = folder / f"cpu_kernels-{head_dim}-{key.hexdigest()[:16]}.so"
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            compiled, linked = Path(scratch, "kernel.o"), Path(scratch, "kernel.so")
            _run([compiler, *flags, "-c", str(SOURCE), "-o", str(compiled)])
            _run([compiler, "-shared", str(compiled), "-o", str(linked)])  # without OpenMP: torch has loaded it
            _open(linked)
            os.replace(linked, target)
    except OSError as error:
        raise BuildError(f"{folder} cannot be written: {error}") from error
    return target


def find_compiler() -> str:
    """The C++ compiler.

    Raises:
        BuildError: there is none.
    """
    for command in (os.environ.get("CXX"), *COMPILERS):
        if command and (found := shutil.which(command)):
            return found
    raise BuildError("no C++ compiler (c++ or g++) was found")


def _version(compiler: str) -> str:
    return _run([compiler, "--version"])


def _processor() -> str:
    """Names the processor and its instructions, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=True)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines()
        raise BuildError(f"{command[0]} failed: {lines[0] if lines else error}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} failed: {error}") from error
    return done.stdout
