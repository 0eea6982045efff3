"""Packaging of `roll`."""

import os
import re
import sysconfig
from pathlib import Path

from setuptools import Distribution, find_packages, setup

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


# The package brings what every machine needs. The engines come from requirements/cpu.txt or gpu-lock.txt: SGLang's own
# dependencies hold the whole CUDA stack, which a machine without an accelerator cannot use.
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
    "gymnasium",
    "megatron-core",
    "torch",
)

# Files that go into site-packages as they are, so that Python reads the *.pth file among them.
SITE_FILES = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "requirements/site-packages").glob("*.p*"))]
SITE_PACKAGES = os.path.relpath(sysconfig.get_path("purelib"), sysconfig.get_path("data"))


class WithDataFiles(Distribution):
    def has_data(self) -> bool:
        """Asked by an editable installation, which otherwise leaves `data_files` out."""
        return bool(self.data_files)


setup(
    name="roll",
    version=version(),
    description="Post-training of language models: Megatron-Core trains, SGLang generates, Ray connects them.",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["roll", "roll.*"]),
    package_data={"roll.platforms.cpu": ["cpp/*"], "roll.report": ["static/*"]},
    data_files=[(SITE_PACKAGES, SITE_FILES)],
    distclass=WithDataFiles,
    python_requires=">=3.11",
    classifiers=["Programming Language :: Python :: 3.11", "Programming Language :: Python :: 3.12"],
    install_requires=pinned("cpu.txt", *BASE),
    extras_require={
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
        "console_scripts": ["roll=roll.cli:main"],
        "sglang.srt.platforms": ["roll_cpu=roll.platforms.sglang_cpu_plugin:activate"],
        "sglang.srt.plugins": [
            "roll_cpu=roll.platforms.sglang_cpu_plugin:sleep_while_paused",
            "roll_loopback=roll.platforms.sglang_cpu_plugin:serve_on_loopback",
            "roll_gloo=roll.platforms.sglang_cpu_plugin:use_one_gloo_device",
        ],
    },
)
