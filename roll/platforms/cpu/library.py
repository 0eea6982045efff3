"""Builds the C++ of `cpp/`, the kernels of a CPU engine; needs torch and a C++ compiler, not SGLang.

The library is built at its first use, in two seconds, and kept in a cache folder under a name that stands for the
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
from pathlib import Path

SOURCES = Path(__file__).with_name("cpp")
"""Folder of the source; `kernels.cpp` includes the others."""

COMPILERS = ("g++", "c++")
"""Tried in this order, after the command in the environment variable CXX."""

FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-ffp-contract=fast"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-freciprocal-math"),
)
"""Sums keep their order, which makes rows independent of each other, except in the loops that say otherwise.
-ffast-math would reorder all, and round denormals of torch to zero."""

NATIVE = {"x86_64": "-march=native", "aarch64": "-mcpu=native"}
"""Flag for all instructions of this processor, by machine."""

BUILD_TIMEOUT_S = 120.0

_POINTER, _INTEGER, _NUMBER, _FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int32
FUNCTIONS: dict[str, tuple[list[type], type | None]] = {
    "paged_attention": ([*[_POINTER] * 10, _NUMBER, _FLAG], None),
    "multiply_rows": ([*[_POINTER] * 4, *[_INTEGER] * 3, _POINTER], None),
    "rms_norm": ([*[_POINTER] * 5, _INTEGER, _INTEGER, _NUMBER], None),
    "rotate": ([*[_POINTER] * 4, *[_INTEGER] * 4], _FLAG),
    "silu_multiply": ([_POINTER, _POINTER, _INTEGER, _INTEGER], None),
    "decoder_room": ([_POINTER, _INTEGER], _INTEGER),
    "decoder_forward": ([*[_POINTER] * 6, _INTEGER, *[_POINTER] * 8, _NUMBER], _FLAG),
    "sample": ([*[_POINTER] * 4, _INTEGER, _INTEGER, _POINTER, _POINTER], None),
    "copy_tokens": ([_POINTER, _INTEGER, _POINTER, _POINTER, *[_INTEGER] * 3], None),
}
"""Types of the arguments and of the result of each function of kernels.cpp."""


class BuildError(RuntimeError):
    """The library could not be built; the message says why."""


def build_folder() -> Path:
    """Folder of built libraries: `$XDG_CACHE_HOME/roll/kernels`, by default below `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "roll" / "kernels"


@functools.cache
def load_library(head_dim: int) -> ctypes.CDLL:
    """The library for this head size, with the types of its functions; built if it is not there.

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    library = _open(build(head_dim, build_folder()))
    for name, (arguments, result) in FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
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


def _read_sources() -> list[str]:
    try:
        return [path.read_text() for path in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")])]
    except OSError as error:
        raise BuildError(f"{SOURCES} cannot be read: {error}") from error


def build(head_dim: int, folder: Path) -> Path:
    """The library for this head size in `folder`; several processes may build it at once.

    Raises:
        BuildError: there is no compiler, or it failed, or the folder cannot be written.
    """
    compiler = find_compiler()
    sources = _read_sources()
    flags = [*FLAGS, *filter(None, [NATIVE.get(platform.machine())]), f"-DHEAD_DIM={head_dim}"]
    key = hashlib.sha256("\0".join([*sources, *flags, _version(compiler), _processor()]).encode())
    target = folder / f"cpu_kernels-{head_dim}-{key.hexdigest()[:16]}.so"
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            compiled, linked = Path(scratch, "kernel.o"), Path(scratch, "kernel.so")
            _run([compiler, *flags, "-c", str(SOURCES / "kernels.cpp"), "-o", str(compiled)])
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
