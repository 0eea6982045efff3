from __future__ import annotations

import pytest

from scripts.gpu_table import GpuTable


@pytest.mark.parametrize(
    ("value", "bound", "code"), [(0.9, 1.0, 0), (1.1, 1.0, 1), (float("nan"), 1.0, 1), (1e9, None, 0), ("-", None, 0)]
)
def test_the_exit_code_is_one_where_a_row_is_beyond_its_bound(
    value: float | str, bound: float | None, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    table = GpuTable()
    table.add("within", 0.0, "s", 0)
    table.add("figure", value, "", bound)
    assert table.show("cpu") == code
    assert ("MISSED" in capsys.readouterr().out) == bool(code)


def test_an_exception_is_a_failed_row_and_later_checks_run(capsys: pytest.CaptureFixture[str]) -> None:
    table = GpuTable()
    with table.check("broken"):
        raise RuntimeError("out of memory\nmore lines")
    with table.check("sound"):
        table.add("later", 0.0, "", 1.0)
    assert capsys.readouterr().out.splitlines() == [
        "broken:  RuntimeError: out of memory  FAILED",
        "later:  0  bound 1  ok",
    ]
    assert table.show("cpu") == 1
    failed, later = [line for line in capsys.readouterr().out.splitlines() if "broken" in line or "later" in line]
    assert "RuntimeError: out of memory" in failed and "FAILED" in failed and "more lines" not in failed
    assert " ok " in later
