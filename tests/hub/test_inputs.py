"""Models and data of a configuration by name: the plan, the run's inputs, and both without a network."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from examples.tiny_math.prepare import make_tokenizer
from roll import cli
from roll.configs.pipeline import RLVRConfig
from roll.datasets.prompts import load_prompts
from roll.datasets.tokenizer import load_tokenizer
from roll.hub.names import HubError, local_model
from roll.models.tiny import write_tiny_model
from roll.plan.check_inputs import check_inputs
from roll.plan.inputs import fetch_inputs, look_up
from roll.plan.plan import Plan, make_plan
from roll.plan.show import print_plan
from tests.configs.samples import RLVR, SERVER, rlvr, write
from tests.datasets.files import jsonl, row
from tests.hub_server import HubServer, commit_of, go_offline

MODEL = "tiny/qwen2"
DATA = "tiny/sums"
FITS = ("prompt_length=24", "response_length=8", "eval_steps=0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 with its tokenizer."""
    folder = write_tiny_model(tmp_path_factory.mktemp("served") / "qwen2", "qwen2")
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def served(hub: HubServer, model: Path, tmp_path: Path) -> None:
    data = tmp_path / "sums"
    for split in ("train", "test"):
        (data / split).mkdir(parents=True)
        jsonl(data / split, row(1, prompt=f"{split} 1+1="), row(2))
    hub.add("models", MODEL, model)
    hub.add("datasets", DATA, data)


def by_name(folder: Path, *overrides: str) -> RLVRConfig:
    return rlvr(folder, f"pretrain={MODEL}", f"actor_train.data_args.file_name={DATA}", *FITS, *overrides)


def planned(config: RLVRConfig) -> Plan:
    return make_plan(config, SERVER, look_up(config))


def test_a_plan_reads_the_model_and_fetches_only_its_config(hub: HubServer, tmp_path: Path, model: Path) -> None:
    config = by_name(tmp_path)
    plan = planned(config)
    checked = check_inputs(config)
    assert not [str(problem) for problem in checked.errors + checked.missing if "weights" in str(problem)]
    assert {memory.role for memory in plan.memory} == {"actor_train", "actor_infer"}
    assert plan.warnings == []
    fetched = [path for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path]
    assert fetched == [f"/{MODEL}/resolve/{commit_of(model)}/config.json"]
    weights = (model / "model.safetensors").stat().st_size
    of_model, of_data = plan.downloads
    assert (of_model.name, of_model.used_by) == (MODEL, ["pretrain"])
    assert weights < of_model.missing_bytes < of_model.bytes < weights + 100_000
    assert (of_data.name, of_data.files) == (DATA, 1)
    printed = io.StringIO()
    print_plan(plan, printed)
    assert "Models and data by name" in printed.getvalue() and "to fetch" in printed.getvalue()


def test_a_run_gets_the_commit_of_its_inputs_and_reads_them_from_the_cache(
    hub: HubServer, tmp_path: Path, model: Path
) -> None:
    config = by_name(tmp_path, "eval_steps=5", f"validation.data_args.file_name={DATA}")
    fetch_inputs(config)
    assert config.pretrain == config.actor_infer.model_args.model_name_or_path == f"hf://{MODEL}@{commit_of(model)}"
    hub.requests.clear()
    assert isinstance(load_tokenizer(config.pretrain), PreTrainedTokenizerBase)
    train, val = config.actor_train.data_args, config.validation.data_args
    assert load_prompts(train.file_name, train)[0].question.text == "train 1+1="
    assert load_prompts(val.file_name, val)[0].question.text == "test 1+1="
    assert planned(config).warnings == []
    assert [path for _, path, _ in hub.requests if "qwen2" in path] == []


@pytest.mark.parametrize("down", [False, True])
def test_everything_in_the_cache_needs_no_network_and_no_hub_that_answers(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path, down: bool
) -> None:
    fetch_inputs(by_name(tmp_path))
    hub.requests.clear()
    if down:
        hub.status = 503
    else:
        go_offline(monkeypatch)
    config = by_name(tmp_path)
    plan = planned(config)
    assert plan.warnings == [] and [item.missing_bytes for item in plan.downloads] == [0, 0]
    fetch_inputs(config)
    assert config.pretrain == f"hf://{MODEL}@{commit_of(model)}"
    assert load_prompts(config.actor_train.data_args.file_name, config.actor_train.data_args)
    assert len(hub.requests) == (2 if down else 0)


def test_a_plan_without_a_network_says_what_it_could_not_know(tmp_path: Path, monkeypatch) -> None:
    go_offline(monkeypatch)
    plan = planned(by_name(tmp_path))
    (memory,) = plan.warnings
    model, data = plan.stops[-2:]
    assert model.startswith(f"pretrain: {MODEL} is not a folder here (in ") and "HF_HUB_OFFLINE is set" in model
    assert data.startswith(f"actor_train.data_args.file_name: {DATA} is not a file or folder here")
    assert memory.startswith("no memory estimate for actor_train, actor_infer")
    assert plan.batch and plan.memory == []


def test_a_run_without_network_and_cache_ends_with_what_to_place_where(
    hub: HubServer, tmp_path: Path, monkeypatch, capsys
) -> None:
    go_offline(monkeypatch)
    file = jsonl(tmp_path, row(1))
    given = (f"pretrain={MODEL}", f"actor_train.data_args.file_name={file}", *FITS)
    assert cli.main(["run", str(write(tmp_path, RLVR)), *given]) == cli.EXIT_CONFIG_ERROR
    message = capsys.readouterr().err
    assert f"run `hf download {MODEL}` and copy models--tiny--qwen2 into that cache" in message
    assert "or write the path of a folder with config.json, tokenizer.json and *.safetensors" in message
    assert "Traceback" not in message


def test_a_model_of_which_the_cache_has_a_part_names_what_is_missing(
    hub: HubServer, tmp_path: Path, monkeypatch
) -> None:
    look_up(by_name(tmp_path))
    go_offline(monkeypatch)
    with pytest.raises(HubError, match=r"pretrain: tiny/qwen2 .* lacks model.safetensors, tokenizer.json of it"):
        fetch_inputs(by_name(tmp_path))


def test_a_misspelt_name_is_answered_with_both_readings(hub: HubServer, tmp_path: Path) -> None:
    found = look_up(by_name(tmp_path, "pretrain=tiny/qwen3"))
    message = str(found.problems[0])
    assert "pretrain: tiny/qwen3 is not a folder here (in " in message
    assert "it cannot be fetched as a model: http://127.0.0.1" in message
    assert "has no model of this name" in message


def test_a_hub_that_does_not_answer_is_asked_once(hub: HubServer, tmp_path: Path) -> None:
    hub.status = 503
    assert len(look_up(by_name(tmp_path)).problems) == 2
    assert len(hub.requests) == 1


def test_a_folder_here_wins(hub: HubServer, tmp_path: Path, model: Path) -> None:
    Path("tiny").mkdir()
    Path("tiny/qwen2").symlink_to(model)
    config = by_name(tmp_path, "actor_train.data_args.file_name=train.jsonl")
    assert look_up(config).downloads == [] and hub.requests == []
    fetch_inputs(config)
    assert config.pretrain == MODEL


def test_a_dataset_in_a_folder_has_splits_too(tmp_path: Path) -> None:
    config = by_name(tmp_path, f"actor_train.data_args.file_name={tmp_path}/sums", "actor_train.data_args.split=test")
    fetch_inputs(config)
    assert config.actor_train.data_args.file_name == [f"{tmp_path}/sums/test/data.jsonl"]


def test_a_split_that_is_missing_is_reported_with_its_key(tmp_path: Path) -> None:
    found = look_up(by_name(tmp_path, "actor_train.data_args.split=dev"))
    reported = f"actor_train.data_args.file_name: {DATA}: it has no split dev; its splits: test, train"
    assert [str(problem) for problem in found.problems] == [reported]


def test_one_file_or_a_pattern_of_a_dataset_can_be_named(tmp_path: Path) -> None:
    config = by_name(tmp_path, f"actor_train.data_args.file_name=hf://datasets/{DATA}/*/data.jsonl")
    fetch_inputs(config)
    files = config.actor_train.data_args.file_name
    assert [file.rpartition("@")[2].partition("/")[2] for file in files] == ["test/data.jsonl", "train/data.jsonl"]
    missing = by_name(tmp_path, f"actor_train.data_args.file_name=hf://datasets/{DATA}/dev.jsonl")
    with pytest.raises(HubError, match="it has no file dev.jsonl; it has test/data.jsonl, train/data.jsonl"):
        fetch_inputs(missing)


def test_modelscope_without_its_library_says_what_to_install(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("roll.hub.modelscope.installed", lambda: False)
    monkeypatch.setenv("USE_MODELSCOPE", "0")
    found = look_up(by_name(tmp_path, "model_download_type=MODELSCOPE"))
    assert "pip install modelscope" in str(found.problems[0])


def test_system_envs_choose_the_hub_and_the_cache(hub: HubServer, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "unused"))
    config = by_name(tmp_path)
    monkeypatch.setenv("MY_SERVER", "none")
    config.system_envs = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "mine"), "MY_SERVER": "here"}
    fetch_inputs(config)
    assert os.environ["MY_SERVER"] == "here", "rewards and environments are tried in children of this process"
    assert (tmp_path / "mine" / "hub" / "models--tiny--qwen2").is_dir()
    assert not (tmp_path / "unused").exists()


def test_an_adapter_by_name_gives_rank_and_layers_and_is_read_from_the_cache(hub: HubServer, tmp_path: Path) -> None:
    served = tmp_path / "adapter"
    served.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (served / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": MODEL}))
    (served / "adapter_model.safetensors").write_bytes(b"matrices")
    (served / "README.md").touch()
    hub.add("models", "tiny/adapter", served)
    name = "actor_train.model_args.adapter_name_or_path"
    loaded = by_name(tmp_path, f"{name}=tiny/adapter", "actor_train.training_args.learning_rate=1e-5")
    model = loaded.actor_train.model_args
    assert model.lora_target == ["all-linear"], "nothing is asked before the plan"
    found = look_up(loaded)
    assert (found.problems, found.downloads[1].used_by, found.downloads[1].files) == ([], [name], 2)
    assert (model.lora_rank, model.lora_alpha, model.lora_target) == (4, 8, ["q_proj"])
    fetch_inputs(loaded)
    assert model.adapter_name_or_path == f"hf://tiny/adapter@{commit_of(served)}"
    assert (local_model(model.adapter_name_or_path) / "adapter_model.safetensors").read_bytes() == b"matrices"


def test_what_an_adapter_by_name_does_not_fit_is_a_problem_of_the_plan(hub: HubServer, tmp_path: Path) -> None:
    served = tmp_path / "adapter"
    served.mkdir()
    (served / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}')
    hub.add("models", "tiny/adapter", served)
    adapter = "actor_train.model_args.adapter_name_or_path=tiny/adapter"
    rank = "actor_train.model_args.lora_rank=8"
    [problem] = look_up(by_name(tmp_path, adapter, rank)).problems
    assert "has no adapter_model.safetensors, so it is not an adapter" in str(problem)
    (served / "adapter_model.safetensors").write_bytes(b"matrices")
    [problem] = look_up(by_name(tmp_path, adapter, rank)).problems
    assert str(problem) == "actor_train.model_args.lora_rank: 8 is not 4, the rank of the adapter; leave it out"
