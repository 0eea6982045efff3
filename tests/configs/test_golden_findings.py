"""Errors and warnings of configurations are those of tests/data/findings.txt; golden_findings.py rewrites the file."""

from __future__ import annotations

import pytest

from tests.configs.golden_findings import cases, findings


@pytest.mark.parametrize(("case", "expected"), cases().items())
def test_a_configuration_has_its_findings(case: str, expected: str) -> None:
    assert findings(case) == expected
