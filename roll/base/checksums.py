"""Checksums of the files of a checkpoint: written with its completion marker, compared before a run continues there."""

from __future__ import annotations

import functools
import json
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CHUNK = 1 << 22
THREADS = 4
"""Files read at a time; the checksum releases Python's lock."""


def write_checksums(folder: Path, marker: Path) -> None:
    """Writes size and CRC-32 of every file of `folder` into the file `marker`, as JSON."""
    marker.write_text(json.dumps({"files": _files(folder, marker.name)}, indent=1))


def damage(folder: Path, marker: Path) -> str | None:
    """What is wrong with the first file that differs from `marker`; None for an intact folder."""
    try:
        text = marker.read_text()
        if not text:
            return f"{marker.name} is empty"
        {name: (int(size), int(checksum)) for name, (size, checksum) in json.loads(text)["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        return f"{marker.name} cannot be read: {error}"
    try:
        state = tuple((str(path), *_stat(path)) for path in _paths(folder))
        return _compare(folder, marker.name, text, state)
    except OSError as error:
        return f"a file cannot be read: {error}"


@functools.lru_cache(maxsize=16)
def _compare(folder: Path, marker: str, text: str, state: tuple[tuple[str, int, int], ...]) -> str | None:
    """Reads the files; not again while sizes and times of all are as in `state`."""
    expected = json.loads(text)["files"]
    sizes = {str(Path(name).relative_to(folder)): size for name, size, _ in state if name != str(folder / marker)}
    for name, (size, _) in sorted(expected.items()):
        if name not in sizes:
            return f"{name} is missing"
        if sizes[name] != size:
            return f"{name} has {sizes[name]} bytes instead of {size}"
    found = _files(folder, marker)
    changed = sorted(name for name, (_, checksum) in expected.items() if found[name][1] != checksum)
    return f"{changed[0]} has changed since it was written (its checksum differs)" if changed else None


def _files(folder: Path, without: str) -> dict[str, tuple[int, int]]:
    paths = [path for path in _paths(folder) if path != folder / without]
    with ThreadPoolExecutor(THREADS) as pool:
        sums = pool.map(size_and_checksum, paths)
        return {str(path.relative_to(folder)): each for path, each in zip(paths, sums, strict=True)}


def _paths(folder: Path) -> list[Path]:
    return sorted(Path(base, name) for base, _, names in os.walk(folder, followlinks=True) for name in names)


def size_and_checksum(path: Path) -> tuple[int, int]:
    """Bytes and CRC-32 of a file."""
    checksum = size = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            checksum, size = zlib.crc32(chunk, checksum), size + len(chunk)
    return size, checksum


def _stat(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
