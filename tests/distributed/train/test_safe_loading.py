"""No file of a checkpoint runs code when it is loaded."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint

from roll.base.errors import RunError
from roll.distributed.train.checkpoint.safe_loading import WEIGHTS_ONLY, check_metadata, only_data


class Planted:
    """Runs a command where it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = {"weight": torch.ones(3, 4), "half": torch.zeros(2, dtype=torch.bfloat16), "steps": 3}
    checkpoint.save(state, checkpoint_id=tmp_path / "saved")
    return tmp_path / "saved" / ".metadata"


def test_the_description_of_a_checkpoint_is_read(saved):
    check_metadata(saved)


@pytest.mark.parametrize("payload", ["planted", "truncated", "empty", "text"])
def test_a_description_that_names_anything_else_or_is_damaged_is_refused(saved, tmp_path, payload):
    file = tmp_path / "ran"
    contents = {
        "planted": pickle.dumps(Planted(f"touch {file}")),
        "truncated": saved.read_bytes()[:100],
        "empty": b"",
        "text": b"no pickle",
    }
    saved.write_bytes(contents[payload])
    with pytest.raises(
        ValueError, match="is not the metadata of a checkpoint: " + ("it names posix.system" * (payload == "planted"))
    ):
        check_metadata(saved)
    assert not file.exists()


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"cpathlib\nPosixPath\n(N}S'is_dir'\nctorch\nSize\nstb.", "it sets attributes of <class 'pathlib.PosixPath'>"),
        (b"ctorch.serialization\n_get_layout\n}S'cache'\nNsb.", "it sets attributes of <function _get_layout"),
        (b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n(K\x00tR}S'_value_'\nK\x01sb.", "it sets"),
        (b"\x8e" + (1 << 62).to_bytes(8, "little") + b".", "EOFError"),
        (b"\x96" + (1 << 62).to_bytes(8, "little") + b".", "it has a bytearray"),
        (b"\x95" + (1 << 62).to_bytes(8, "little") + b".", "IndexError"),
        (b"ctorch.distributed.checkpoint.metadata\nMetadata\n(}tRr\xff\xff\xff\x7f.", "its memo has gaps"),
        (b"\x8e\x01", "struct.error|error: unpack"),
        (b"(" * 200_000 + b"t" * 200_000 + b".", "it holds a tuple"),
    ],
)
def test_a_description_changes_no_class_and_takes_no_more_memory_than_its_file(saved, content, cause):
    saved.write_bytes(content)
    with pytest.raises(RunError, match=f"^{saved}: is not the metadata of a checkpoint: .*({cause})"):
        check_metadata(saved)
    assert callable(Path.is_dir)


def test_torch_loads_data_alone_inside_the_block(tmp_path, monkeypatch):
    monkeypatch.delenv(WEIGHTS_ONLY, raising=False)
    file = tmp_path / "ran"
    torch.save({"a": torch.ones(2), "b": {"n": 3}}, tmp_path / "data")
    torch.save(Planted(f"touch {file}"), tmp_path / "planted")
    with only_data():
        assert torch.load(tmp_path / "data", weights_only=False)["b"] == {"n": 3}
        with pytest.raises(pickle.UnpicklingError, match="posix.system"):
            torch.load(tmp_path / "planted", weights_only=False)
    assert not file.exists() and WEIGHTS_ONLY not in os.environ
