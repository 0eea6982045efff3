"""Packaging of `roll`."""

from setuptools import find_packages, setup

setup(
    name="roll",
    version="0.1.0",
    packages=find_packages(include=["roll", "roll.*"]),
    python_requires=">=3.11",
    entry_points={
        "console_scripts": ["roll=roll.cli:main"],
        "sglang.srt.platforms": ["roll_cpu=roll.platforms.sglang_cpu_plugin:activate"],
    },
)
