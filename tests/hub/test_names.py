"""What is a name on a hub and what is a path, and what the cache has; nothing is asked over a network."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.hub.names import HubName, hub_name, local_model, other_reading

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", HubName("model", "Qwen/Qwen2.5-0.5B-Instruct")),
        ("Qwen/Qwen3-8B@v1.0", HubName("model", "Qwen/Qwen3-8B", "v1.0")),
        (f"hf://a/b@{COMMIT}", HubName("model", "a/b", COMMIT)),
        ("modelscope://a/b", HubName("model", "a/b", modelscope=True)),
        ("openai/gsm8k", HubName("dataset", "openai/gsm8k")),
        ("hf://datasets/a/b@main/data/x.parquet", HubName("dataset", "a/b", "main", "data/x.parquet")),
        (
            "hf://datasets/a/b@refs/convert/parquet/x/train/0.parquet",
            HubName("dataset", "a/b", "refs/convert/parquet", "x/train/0.parquet"),
        ),
    ],
)
def test_what_has_an_owner_is_a_name_on_the_hub(text: str, name: HubName) -> None:
    assert hub_name(text, name.kind) == name
    assert hub_name(name.uri, name.kind) == name


@pytest.mark.parametrize(
    "text",
    ["gpt2", "./a/b", "../a/b", "/a/b", "~/a", "a/b/c", "models/Qwen", "data/train.jsonl", "a/b.safetensors"]
    + ["a b/c", "a/"],
)
def test_everything_else_is_a_path(text: str) -> None:
    assert hub_name(text, "model") is None
    assert hub_name(text, "dataset") is None


def test_a_folder_that_exists_wins_and_so_does_a_misspelt_one_beside_it(here: Path) -> None:
    (here / "runs" / "first").mkdir(parents=True)
    assert hub_name("runs/first", "model") is None
    assert hub_name("runs/frist", "model") is None
    assert other_reading("runs/frist", "model") == " (runs has first); for the name on the hub write hf://runs/frist"
    assert hub_name("hf://runs/first", "model") == HubName("model", "runs/first")


def test_modelscope_is_chosen_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USE_MODELSCOPE", "1")
    assert hub_name("a/b", "model") == HubName("model", "a/b", modelscope=True)
    assert hub_name("a/b", "dataset") == HubName("dataset", "a/b")
    assert hub_name("hf://a/b", "model") == HubName("model", "a/b")


def test_a_cached_model_is_found_by_branch_and_commit(here: Path) -> None:
    storage = here / "cache" / "hub" / "models--a--b"
    snapshot = storage / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (storage / "refs").mkdir()
    (storage / "refs" / "main").write_text(COMMIT)
    assert local_model("a/b") == local_model(f"hf://a/b@{COMMIT}") == snapshot
    assert local_model("a/b@v2") == Path("a/b@v2")
