"""Wheel, source distribution, Dockerfiles, and the refusal of another package of the import name."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from roll.base.installation import check_installation

ROOT = Path(__file__).parents[1]

WHEEL = "roll_posttraining-0.1.0-py3-none-any.whl"

RECIPE = ROOT / "examples/tiny_math/rlvr_config.yaml"


def run(*command: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and a wheel that was built from it."""
    folder, source = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("source")
    script = f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})"
    made = run(sys.executable, "-c", script, cwd=copy_of_sources(source))
    assert made.returncode == 0, made.stderr
    (archive,) = folder.glob("*.tar.gz")
    flags = ("--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", folder)
    made = run(sys.executable, "-m", "pip", "wheel", *flags, archive, cwd=folder)
    assert made.returncode == 0, made.stderr
    return folder


def copy_of_sources(target: Path) -> Path:
    """The files of the repository, so that a build leaves nothing in it."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if name.startswith(("roll/", "requirements/", "tests/test_")) or "/" not in name:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes((ROOT / name).read_bytes())
    return target


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    flags = ("--no-deps", "--no-index", "--quiet", "--target", target)
    done = run(sys.executable, "-m", "pip", "install", *flags, built / WHEEL, cwd=target)
    assert done.returncode == 0, done.stderr
    return target


@pytest.mark.slow
def test_the_source_distribution_has_what_a_wheel_is_built_from(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CHANGELOG.md", "LICENSE", "requirements/cpu.txt", "requirements/gpu-lock.txt"} <= names
    assert not [name for name in names if name.startswith("tests")]  # they need the rest of the repository


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package_and_the_finder_of_torchvision_beside_it(built: Path) -> None:
    with zipfile.ZipFile(built / WHEEL) as wheel:
        names = set(wheel.namelist())
    packaged = subprocess.run(["git", "ls-files", "roll"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert set(packaged) <= names
    assert {"torchvision_on_cpu.pth", "torchvision_on_cpu.py", "roll_posttraining.py"} <= names


@pytest.mark.slow
def test_extras_are_the_requirement_files_without_sglang(built: Path) -> None:
    with zipfile.ZipFile(built / WHEEL) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith("/METADATA"))
        required = message_from_bytes(wheel.read(name)).get_all("Requires-Dist") or []
    for extra, file in (("cpu", "cpu.txt"), ("gpu", "gpu-lock.txt")):
        listed = (ROOT / "requirements" / file).read_text().splitlines()
        pins = {line for line in listed if re.match(r"(?!sglang==|triton==3\.9)\w", line)}
        assert {line.partition(";")[0] for line in required if f'extra == "{extra}"' in line} == pins


@pytest.mark.slow
def test_the_installed_wheel_plans_an_example_outside_the_repository(installed: Path, tmp_path: Path) -> None:
    program = "import roll_posttraining, sys; sys.exit(roll_posttraining.main())"
    command = (sys.executable, "-c", program, "plan", RECIPE, "--elsewhere")
    done = run(*command, cwd=tmp_path, PYTHONPATH=str(installed))
    assert done.returncode == 0 and "tiny_math" in done.stdout, done.stderr
    found = run(sys.executable, "-c", "import roll; print(roll.__file__)", cwd=tmp_path, PYTHONPATH=str(installed))
    assert found.stdout.strip() == str(installed / "roll/__init__.py")


@pytest.mark.slow
def test_the_command_names_a_package_of_another_project_that_is_first_on_the_path(
    installed: Path, tmp_path: Path
) -> None:
    (tmp_path / "theirs/roll").mkdir(parents=True)
    (tmp_path / "theirs/roll/__init__.py").touch()
    program = "import roll_posttraining, sys; sys.exit(roll_posttraining.main())"
    path = f"{tmp_path / 'theirs'}:{installed}"
    done = run(sys.executable, "-c", program, "--version", cwd=tmp_path, PYTHONPATH=path)
    assert (done.returncode, done.stderr.partition(":")[0]) == (2, str(tmp_path / "theirs/roll"))
    assert "`pip uninstall roll` and reinstall roll-posttraining" in done.stderr


def another(folder: Path, name: str, entry_points: str = "") -> Path:
    (folder / name).mkdir()
    (folder / name / "entry_points.txt").write_text(entry_points)
    return folder / name


def test_another_distribution_of_the_same_import_name_is_refused_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    another(tmp_path, "roll-9.9.9.dist-info", "[console_scripts]\nroll = roll.cli:main\n")
    another(tmp_path, "roll_posttraining-0.1.0.dist-info")
    check_installation()
    theirs = another(tmp_path, "roll-0.3.0.dist-info")
    with pytest.raises(ImportError, match=re.escape(f"{theirs}: ")):
        check_installation()


def test_the_import_itself_is_refused_beside_another_distribution(tmp_path: Path) -> None:
    theirs = another(tmp_path, "roll-0.3.0.dist-info")
    done = run(sys.executable, "-c", "import roll", cwd=tmp_path, PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert f"ImportError: {theirs}: " in done.stderr


@pytest.mark.parametrize("file", sorted((ROOT / "docker").iterdir()), ids=lambda path: path.name)
def test_every_path_that_a_dockerfile_names_exists(file: Path) -> None:
    lines = [shlex.split(line) for line in file.read_text().splitlines() if line.startswith("COPY ")]
    lists = re.findall(r"requirements/[\w-]+\.txt", file.read_text())
    copied = [name for words in lines for name in words[1:-1]]
    assert {"requirements", "roll", "setup.py", "roll_posttraining.py", "MANIFEST.in"} <= set(copied) and lists
    assert [name for name in [*copied, *lists] if not (ROOT / name).exists()] == []
