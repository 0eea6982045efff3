"""The notebook of examples/python, executed by a kernel."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from runs import assert_nothing_is_left

pytestmark = pytest.mark.integration

NOTEBOOK = Path(__file__).parents[2] / "examples/python/own_reward_and_loss.ipynb"


def test_the_notebook_trains_a_model_with_a_reward_and_a_loss_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells), "the notebook is stored without outputs"
    client = NotebookClient(notebook, resources={"metadata": {"path": str(NOTEBOOK.parent)}})
    client.execute()
    text = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    rewards = [float(line.split()[3].rstrip(",")) for line in text.splitlines() if line.startswith("step ")]
    assert len(rewards) == 12 and min(rewards[-3:]) > rewards[0] + 0.2
    assert_nothing_is_left(tmp_path)
