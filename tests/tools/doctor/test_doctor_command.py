"""`roll doctor` without Ray: its errors, and what it prints."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from roll.base.terminal import make_console
from roll.cli import main
from roll.tools.doctor.command import speed_table, speeds_as_dict, summary
from roll.tools.doctor.comparison import RankSpeeds, slow_speeds
from tests.configs.samples import SFT, write

RANKS = [
    RankSpeeds(0, 0, "10.0.0.1", 0, {"matmul": 700.0, "across_nodes": 40.0}),
    RankSpeeds(1, 1, "10.0.0.2", 8, {"matmul": 350.0, "across_nodes": 40.0}),
]


def test_a_bad_file_and_missing_devices_are_errors_of_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    file = str(write(tmp_path, SFT))
    assert main(["doctor", file, "max_step=3"]) == 2
    assert "did you mean max_steps?" in capsys.readouterr().err
    assert main(["doctor", file, "platform=cuda", "num_devices_per_node=999"]) == 2
    assert "this machine has" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["0", "1.5", "nan", "x"])
def test_the_fraction_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", str(write(tmp_path, SFT)), "--slower-than", given])
    assert "--slower-than" in capsys.readouterr().err


def test_the_table_marks_slow_speeds_and_the_last_line_names_the_node() -> None:
    text = io.StringIO()
    make_console(text).print(speed_table(RANKS, slow_speeds(RANKS, 0.8)))
    assert "slow 350" in text.getvalue() and "slow 700" not in text.getvalue()
    assert "1 (10.0.0.2)" in text.getvalue() and "copy" not in text.getvalue()
    assert summary(RANKS, 30.0, 0.8) == [
        "all-reduce over 2 ranks: 30 GB/s bus bandwidth",
        "slow: node 1 at 10.0.0.2: matmul of rank 1",
    ]
    assert summary(RANKS, 30.0, 0.5)[-1] == "no rank is slower than 0.5 of the median"


def test_json_has_the_speeds_and_the_slow_nodes() -> None:
    found = speeds_as_dict(RANKS, 30.0, 0.8)
    assert found["slow_nodes"] == [1] and found["ranks"][1]["slow"] == ["matmul"]
    assert found["median"] == {"matmul": 700.0, "across_nodes": 40.0}
