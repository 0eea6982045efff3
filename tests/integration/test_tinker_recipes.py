"""Two recipes of Tinker's cookbook as they are, through `roll serve` on the CPU engines, and requests beside them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from examples.tinker.sums import write_sums
from examples.tiny_math.prepare import prepare

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "tinker==0.38.0 tinker-cookbook==0.6.1 blobfile==3.3.0 chz==0.4.0 datasets==5.2.0 h2==4.4.1 hpack==4.2.0 "
    "hyperframe==6.1.0 lxml==6.1.3 multiprocess==0.70.19 pandas==3.1.1 pycryptodomex==3.24.2 pylatexenc==2.11 "
    "pyqwest==0.12.0 pyrage==1.4.0 termcolor==3.3.0 tiktoken==0.14.0 zstandard==0.25.0"
)
"""What the recipes import and this project does not have; without dependencies, since torch would be one."""


@dataclass
class Served:
    """A server, and the environment whose programs call it."""

    model: str
    python: str
    environment: dict[str, str]

    def run(self, *arguments: str) -> str:
        """The output of a Python program that is a client of the server."""
        command = [self.python, *arguments]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An environment with Tinker's packages, which finds all others in that of this project."""
    folder = tmp_path_factory.mktemp("tinker") / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    own = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    (Path(own) / "project.pth").write_text(sysconfig.get_path("purelib"))
    python = str(folder / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *PACKAGES.split()], check=True)
    return python


@pytest.fixture
def served(python: str, tmp_path: Path) -> Iterator[Served]:
    """`roll serve` on the configuration of the example, ended by Ctrl-C."""
    model = str(prepare(tmp_path / "base"))
    command = [sys.executable, "-m", "roll", "serve", "examples/tinker/serve_config.yaml"]
    overrides = [f"pretrain={model}", f"output_dir={tmp_path}/serve"]
    process = subprocess.Popen([*command, *overrides], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        printed = ""
        while "TINKER_API_KEY" not in printed:
            line = process.stdout.readline()
            assert line, f"the server ended: {printed}"
            printed += line
        names = dict(re.findall(r"export (\w+)=(\S+)", printed))
        yield Served(model, python, {**os.environ, **names, "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"})
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()


def metrics_of(folder: Path, name: str) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line]


def test_two_recipes_of_the_cookbook_learn(served: Served, tmp_path: Path) -> None:
    common = [f"model_name={served.model}", "renderer_name=role_colon", "save_every=0", "eval_every=0"]
    sums = write_sums(tmp_path / "sums.jsonl", 4096)
    served.run(
        *("-m", "tinker_cookbook.recipes.chat_sl.train", *common, f"log_path={tmp_path}/sl", f"dataset={sums}"),
        *("train_on_what=last_assistant_message", "learning_rate=4e-3", "batch_size=64", "max_steps=30"),
    )
    loss = metrics_of(tmp_path / "sl", "train_mean_nll")
    assert len(loss) == 30 and loss[-1] < loss[0] / 4
    [state] = re.findall(r'"state_path": "([^"]*)"', (tmp_path / "sl" / "checkpoints.jsonl").read_text())
    served.run(
        *("-m", "tinker_cookbook.recipes.math_rl.train", *common, f"log_path={tmp_path}/rl", "env=arithmetic"),
        *(f"load_checkpoint_path={state}", "loss_fn=importance_sampling", "learning_rate=5e-4", "max_tokens=12"),
        *("groups_per_batch=24", "group_size=8", "max_steps=12"),
    )
    reward = metrics_of(tmp_path / "rl", "env/all/reward/total")
    assert len(reward) == 12 and sum(reward[-3:]) / 3 > sum(reward[:3]) / 3 + 0.01
    assert max(map(abs, metrics_of(tmp_path / "rl", "optim/kl_sample_train_v1"))) < 1e-3


def test_requests_beside_those_of_recipes(served: Served) -> None:
    found = json.loads(served.run("tests/integration/tinker_client.py", served.model).splitlines()[-1])
    assert found["repeats"] and found["newer"] == 3
    assert found["gap"] < 1e-4
    assert found["loss_ratio"] == pytest.approx(2.0, rel=1e-4)
    assert found["step"]["optim/lr"] == 0.0 and found["step"]["optim/grad_norm"] > 0
    fresh, untouched, continued = found["losses"]
    assert fresh == pytest.approx(untouched, rel=1e-6) and abs(continued - fresh) > 1e-3 * fresh
    assert "was replaced; this server has one model" in found["replaced_model"]
    assert "start it with actor_train.training_args.adam_beta2=0.5" in found["other_betas"]
    assert "there are no gradients" in found["no_gradients"]
    assert "it samples from weights" in found["replaced_sampler"]
    assert "stable_reinforce is not served; use cross_entropy" in found["loss"]
    assert f"Qwen/Qwen3-8B is not served; use {served.model}" in found["base_model"]
    assert "start roll serve again, or load saved ones" in found["trained"]
    url, key = served.environment["TINKER_BASE_URL"], served.environment["TINKER_API_KEY"]
    assert url.startswith("http://127.0.0.1:")
    assert httpx.get(f"{url}/api/v1/healthz").status_code == 401
    answer = httpx.get(f"{url}/api/v1/training_runs", headers={"X-API-Key": key})
    assert answer.status_code == 404 and "/api/v1/training_runs: is not served" in answer.json()["error"]
