"""The files for clusters are valid, and start recipes that exist with commands that exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from roll.cli import HELP
from roll.loading.load import load_config

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"
FILES = sorted(path for path in CLUSTER.rglob("*") if path.is_file())


def test_every_file_is_listed_on_the_page() -> None:
    page = (ROOT / "docs" / "cluster.md").read_text()
    assert len(FILES) == 3
    assert all(f"`{file.relative_to(ROOT)}`" in page for file in FILES)


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_recipes_and_commands_exist(file: Path) -> None:
    text = file.read_text()
    recipes = re.findall(r"examples/[\w./-]+\.yaml", text)
    assert all((ROOT / recipe).is_file() for recipe in recipes)
    commands = re.findall(r"(?:bin/|entrypoint: )roll\"? (\w+)", text)
    assert commands and set(commands) <= set(HELP)


def scripts() -> dict[str, str]:
    """The shell scripts in the files, by name."""
    sky = yaml.safe_load((CLUSTER / "skypilot" / "roll.yaml").read_text())
    return {"slurm": (CLUSTER / "slurm.sh").read_text(), "setup": sky["setup"], "run": sky["run"]}


@pytest.mark.parametrize("script", scripts())
def test_scripts_are_valid_bash(script: str) -> None:
    done = subprocess.run(["bash", "-n"], input=scripts()[script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_nodes_are_those_that_the_recipe_needs() -> None:
    job = yaml.safe_load((CLUSTER / "kuberay" / "rayjob.yaml").read_text())["spec"]
    sky = yaml.safe_load((CLUSTER / "skypilot" / "roll.yaml").read_text())
    workers = job["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"]
    recipe = re.search(r"/roll/(\S+)", job["entrypoint"])
    assert recipe is not None and sky["envs"]["CONFIG"] == recipe[1]
    roles = load_config(ROOT / recipe[1]).device_roles().values()
    nodes = 1 + max(device for role in roles for device in role.device_mapping) // 8
    assert 1 + workers == sky["num_nodes"] == nodes


def test_the_nodes_of_the_ray_job_are_alike() -> None:
    spec = yaml.safe_load((CLUSTER / "kuberay" / "rayjob.yaml").read_text())["spec"]["rayClusterSpec"]
    head, (workers,) = spec["headGroupSpec"], spec["workerGroupSpecs"]
    assert head["template"] == workers["template"]
    (container,) = head["template"]["spec"]["containers"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in head["template"]["spec"]["volumes"]}
