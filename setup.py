"""Packaging: the distribution `roll-posttraining` has the import package and the command `roll`."""

import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


def version() -> str:
    """`__version__` of the package, read without importing it."""
    found = re.search(r'__version__ = "(.+)"', (ROOT / "roll/__init__.py").read_text())
    if found is None:
        raise RuntimeError("roll/__init__.py: has no __version__")
    return found[1]


def pinned(file: str, *names: str) -> list[str]:
    """Lines of a requirement file that pin `names` (all lines when none is given)."""
    lines = [line for line in (ROOT / "requirements" / file).read_text().splitlines() if line and line[0] != "#"]
    return [line for line in lines if not names or re.split(r"[\[=]", line)[0] in names]


def without(file: str, *names: str) -> list[str]:
    """Lines of a requirement file without the pins of `names`."""
    left_out = set(pinned(file, *names))
    return [line for line in pinned(file) if line not in left_out]


def base_requirements(*names: str) -> list[str]:
    """Pins of `names` in both lists; the lower version as the least one where the lists differ."""
    lists = [dict(line.split("==") for line in pinned(file, *names)) for file in ("cpu.txt", "gpu-lock.txt")]
    cpu, gpu = lists
    lower = {name: min(cpu[name], gpu[name], key=lambda text: [int(part) for part in text.split(".")]) for name in cpu}
    return [f"{name}=={cpu[name]}" if cpu[name] == gpu[name] else f"{name}>={lower[name]}" for name in cpu]


# The package brings what every machine needs, an extra the rest of its list. SGLang is in no extra, because pip cannot
# resolve what its wheel requires; on a CPU it needs another triton too. The commands are in docs/install.md.
BASE = ("ray", "transformers", "tensordict", "safetensors", "omegaconf", "pyarrow", "mpmath", "psutil")
BASE += (
    "huggingface-hub",
    "aiohttp",
    "httpx",
    "filelock",
    "gguf",
    "rich",
    "tensorboard",
    "matplotlib",
    "numpy",
    "protobuf",
    "gymnasium",
    "megatron-core",
    "torch",
)

# Files that go into site-packages as they are, so that Python reads the *.pth file among them. An editable installation
# takes them as data files of this Python; a wheel has them beside the package, for any Python.
SITE_FILES = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "requirements/site-packages").glob("*.p*"))]
SITE_PACKAGES = os.path.relpath(sysconfig.get_path("purelib"), sysconfig.get_path("data"))


class WithSiteFiles(build_py):
    def run(self) -> None:
        """Copies the files for site-packages to the root of the wheel."""
        super().run()
        for file in [] if self.editable_mode else SITE_FILES:
            shutil.copy(ROOT / file, self.build_lib)


class WithDataFiles(Distribution):
    def has_data(self) -> bool:
        """Asked by an editable installation, which otherwise leaves `data_files` out."""
        return bool(self.data_files)


setup(
    name="roll-posttraining",
    version=version(),
    description="Post-training of language models: Megatron-Core trains, SGLang generates, Ray connects them.",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["roll", "roll.*"]),
    py_modules=["roll_posttraining"],
    package_data={"roll.platforms.cpu": ["cpp/*"], "roll.report": ["static/*"]},
    data_files=[(SITE_PACKAGES, SITE_FILES)] if "editable_wheel" in sys.argv else [],
    cmdclass={"build_py": WithSiteFiles},
    distclass=WithDataFiles,
    python_requires=">=3.11",
    classifiers=["Programming Language :: Python :: 3.11", "Programming Language :: Python :: 3.12"],
    install_requires=base_requirements(*BASE),
    extras_require={
        "cpu": without("cpu.txt", "sglang", "triton"),
        "gpu": without("gpu-lock.txt", "sglang"),
        "dev": pinned(
            "dev.txt",
            "hypothesis",
            "mypy",
            "playwright",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "types-pyyaml",
        ),
        "mcp": pinned("dev.txt", "mcp"),
        "reasoning-gym": pinned("dev.txt", "reasoning-gym"),
        "trackers": pinned(
            "dev.txt", "wandb", "swanlab", "mlflow-skinny", "trackio", "opentelemetry-exporter-otlp-proto-http"
        ),
        "docs": pinned("cpu.txt", "matplotlib"),
    },
    entry_points={
        "console_scripts": ["roll=roll_posttraining:main"],
        "sglang.srt.platforms": ["roll_cpu=roll.platforms.sglang_cpu_plugin:activate"],
        "sglang.srt.plugins": [
            "roll_cpu=roll.platforms.sglang_cpu_plugin:sleep_while_paused",
            "roll_loopback=roll.platforms.sglang_cpu_plugin:serve_on_loopback",
            "roll_gloo=roll.platforms.sglang_cpu_plugin:use_one_gloo_device",
        ],
    },
)
