"""Data, tokenizer, rewards and environments are tried before a run; errors name the user's file and line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tokenizers import Tokenizer, models

from roll.base.errors import Report
from roll.cli import main
from roll.configs.pipeline import RLVRConfig
from roll.configs.user_code import search_modules_beside
from roll.loading.load import build_config
from roll.plan.check_inputs import check_inputs
from tests.configs.samples import RLVR, agentic, rlvr, sft, write
from tests.datasets.files import jsonl, row

REWARD = "def score(response, ground_truth):\n    return 1 / 0\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a user, which is not the current one."""
    known = set(sys.modules)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "path", list(sys.path))
    search_modules_beside(tmp_path / "config.yaml")
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]


def config(folder: Path, *overrides: str, function: str = "", code: str = "") -> RLVRConfig:
    """The RLVR sample with two rows of data and, if there is code, a reward in a module of its own."""
    data = jsonl(folder, row(1), row(2))
    given = [f"actor_train.data_args.file_name={data}", "pretrain=/elsewhere", *overrides]
    if code:
        write(folder, code, f"{function.partition(':')[0]}.py")
    if function:
        given.append(f'rewards={{mine: {{function: "{function}"}}}}')
    return rlvr(folder, *given)


def errors(report: Report) -> list[str]:
    return [str(problem) for problem in report.errors]


def test_a_sound_configuration_has_no_findings(folder: Path) -> None:
    report = check_inputs(config(folder))
    assert errors(report) == [] and report.missing == []


def test_a_reward_that_raises_is_reported_with_file_and_line_first(folder: Path) -> None:
    [error] = errors(check_inputs(config(folder, function="own_one:score", code=REWARD)))
    lines = error.splitlines()
    assert lines[:2] == [f"{folder}/own_one.py:2: ZeroDivisionError: division by zero", "    return 1 / 0"]
    assert "own_one:score was called with the response '2' for the first prompt of its data (p1)" in lines[2]
    assert lines[3:] == ["    rewards.mine was tried before the run"]


def test_data_that_a_built_in_reward_cannot_read_is_reported_with_its_file_first(folder: Path) -> None:
    [error] = errors(check_inputs(config(folder, "rewards={ifeval: {}, math_rule: null}")))
    assert ".jsonl: row p1: the ground truth" in error.splitlines()[0] and "ifeval.py" not in error, error


def test_a_reward_that_cannot_be_imported_stops_a_run_but_not_a_plan(folder: Path) -> None:
    report = check_inputs(config(folder, function="own_two:score"))
    assert errors(report) == [] and "there is no module own_two" in str(report.missing[0])


def test_a_tag_that_no_row_has_is_a_warning(folder: Path) -> None:
    rewards = "rewards={a: {tag_included: [maths]}, rest: {function: math_rule}}"
    warnings = [str(warning) for warning in check_inputs(config(folder, rewards)).warnings]
    assert "rewards.a.tag_included: no row read has the tag maths; there are math_rule" in warnings


def test_a_tag_without_a_reward_is_reported(folder: Path) -> None:
    [error] = errors(check_inputs(config(folder, "rewards={a: {tag_included: [code]}}")))
    assert error.startswith("rewards: no reward scores samples tagged 'math_rule'")


def test_broken_lines_are_all_named(folder: Path) -> None:
    kinds = ["[1]"] * 9 + [f'{{"id": {number}, "prompt": {number}, "ground_truth": "2"}}' for number in range(9)]
    data = jsonl(folder, row(1), "{", row(2), '{"prompt": "1+1="}', *kinds, row(3), name="broken.jsonl")
    found = errors(check_inputs(config(folder, f"actor_train.data_args.file_name={data}")))
    assert found[0].startswith(f"actor_train.data_args: {data}:2: not JSON")
    assert found[1].startswith(f"actor_train.data_args: {data}:4: no column 'ground_truth'")
    assert found[2].startswith(f"actor_train.data_args: {data}:5: holds a list")
    assert found[2].endswith("(8 more rows alike)")
    assert found[5] == f"actor_train.data_args: {data}: 7 more of its first 50,000 rows are broken"


def warnings(report: Report) -> list[str]:
    return [str(problem) for problem in report.warnings]


def test_ids_that_occur_in_two_files_are_counted_in_a_warning(folder: Path) -> None:
    data = [jsonl(folder, row(1), row(2), name="one.jsonl"), jsonl(folder, row(2), name="two.jsonl")]
    report = check_inputs(config(folder, f"actor_train.data_args.file_name={data}"))
    warning, *_ = warnings(report)
    assert errors(report) == []
    assert warning.startswith(
        "actor_train.data_args.id: 1 of 3 rows have the id of an earlier row, such as p2 "
        f"({folder}/one.jsonl:2 and {folder}/two.jsonl:1)"
    )


@pytest.mark.parametrize(("pipeline", "rows"), [("rlvr", 2), ("sft", 1)])
def test_a_batch_that_is_larger_than_the_data_is_a_warning(folder: Path, pipeline: str, rows: int) -> None:
    data = f"actor_train.data_args.file_name={jsonl(folder, row(1, solution='2'))}"
    found = warnings(check_inputs(config(folder) if pipeline == "rlvr" else sft(folder, data)))
    assert any(f"of the {rows} rows of the data: every batch repeats some" in text for text in found)


@pytest.mark.parametrize("names", [("one", "one"), ("one", "link"), ("one", "copy"), ("one", "other")])
def test_validation_on_training_prompts_is_a_warning(folder: Path, names: tuple[str, str]) -> None:
    files = {"one": jsonl(folder, row(1), row(2, prompt="2+2="), name="one.jsonl"), "link": str(folder / "link.jsonl")}
    Path(files["link"]).symlink_to(files["one"])
    files |= {"copy": jsonl(folder, row(9, prompt="2+2="), row(8, prompt="8+8="), name="copy.jsonl")}
    files |= {"other": jsonl(folder, row(1, prompt="7+7="), name="other.jsonl")}
    given = [f"actor_train.data_args.file_name={files[names[0]]}", f"validation.data_args.file_name={files[names[1]]}"]
    found = "\n".join(warnings(check_inputs(config(folder, *given, "eval_steps=3"))))
    if names[1] == "copy":
        assert "validation.data_args.file_name: 1 of 2 prompts are in the training data too" in found
    else:
        assert ("is trained on too, so its score is not of unseen prompts" in found) == (names[1] != "other")


@pytest.mark.parametrize(("split", "same"), [("null", False), ("train", True)])
def test_a_dataset_by_name_is_validated_on_another_split(folder: Path, split: str, same: bool) -> None:
    given = [f"{role}.data_args.file_name=owner/name" for role in ("actor_train", "validation")]
    given += ["actor_train.data_args.split=train", f"validation.data_args.split={split}", "eval_steps=3"]
    found = "\n".join(warnings(check_inputs(config(folder, *given))))
    assert ("owner/name is trained on too" in found) == same


def test_a_ground_truth_is_asked_for_only_by_functions_that_read_it(folder: Path) -> None:
    data = jsonl(folder, row(1, ground_truth={"target": ["a"]}), {"id": 2, "prompt": "1+1="}, name="mixed.jsonl")
    given = f"actor_train.data_args.file_name={data}"
    for name, code in {
        "free:score": "def score(response): return 1",
        "spare:score": "def score(response, ground_truth=None): return 1",
    }.items():
        assert errors(check_inputs(config(folder, given, function=name, code=code))) == []
    code = "def score(response, ground_truth): return len(ground_truth['target'])"
    [error] = errors(check_inputs(config(folder, given, function="needs:score", code=code)))
    assert "asks for ground_truth, and row 2 has none; name its column in data_args.ground_truth" in error


def test_a_class_without_a_rule_here_asks_for_no_ground_truth(folder: Path) -> None:
    given = f"actor_train.data_args.file_name={jsonl(folder, row(1, ground_truth=''), name='poems.jsonl')}"
    [error] = errors(check_inputs(config(folder, given)))
    assert "math_rule cannot compare a response with it" in error
    planned = "rewards={poem: {worker_cls: mine.PoemRewardWorker}, math_rule: null}"
    assert errors(check_inputs(config(folder, given, planned))) == []


def test_pairs_with_equal_responses_are_counted(folder: Path) -> None:
    pairs = [{"prompt": "1+1=", "chosen": "2", "rejected": other} for other in ("2", "3")]
    text = RLVR.replace("actor_infer:", "reference:") + "pipeline: dpo\n"
    text = "\n".join(line for line in text.splitlines() if "rollout_batch" not in line and "num_return" not in line)
    dpo = build_config(yaml.safe_load(text.replace("train.jsonl", jsonl(folder, *pairs))))
    assert any("1 of 2 pairs have two equal responses" in text for text in warnings(check_inputs(dpo)))


def test_columns_of_sft_are_checked(folder: Path) -> None:
    data = jsonl(folder, {"prompt": "1+1=", "answer": "2"})
    [error] = errors(check_inputs(sft(folder, f"actor_train.data_args.file_name={data}")))
    assert error.endswith(
        f"{data}:1: no column 'solution'; the columns are prompt, answer: name the right one in data_args.response"
    )


def test_a_folder_without_a_tokenizer_is_reported(folder: Path) -> None:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(Path(RLVR.split("pretrain: ")[1].split()[0], "config.json").read_text())
    data = f"actor_train.data_args.file_name={jsonl(folder, {'prompt': '1+1=', 'solution': '2'})}"
    tokenizer, weights = check_inputs(sft(folder, data, f"pretrain={model}")).missing
    assert str(tokenizer).startswith(f"pretrain: {model} has no tokenizer (none of tokenizer.json, ")
    assert str(weights).startswith(f"pretrain: {model}: has no weights; put model.safetensors")
    (model / "tokenizer.json").write_text("{")
    [error] = errors(check_inputs(sft(folder, data, f"pretrain={model}")))
    assert f"{model}/tokenizer.json cannot be read as a tokenizer" in error


def test_a_template_that_the_tokenizer_cannot_apply_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll.plan.check_inputs.try_tokens", lambda *given: Report())
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(Path(RLVR.split("pretrain: ")[1].split()[0], "config.json").read_text())
    Tokenizer(models.BPE()).save(str(model / "tokenizer.json"))
    data = f"actor_train.data_args.file_name={jsonl(folder, {'prompt': '1+1=', 'solution': '2'})}"

    def report(template: str) -> list[str]:
        return errors(
            check_inputs(sft(folder, data, f"pretrain={model}", f"actor_train.data_args.template={template}"))
        )

    [error] = report("native")
    assert error.startswith("actor_train.data_args.template: the tokenizer has no chat template; use none, chatml, ")
    [error] = report("qwen3")
    assert error.startswith("actor_train.data_args.template: 'qwen3' needs the special tokens <|im_end|>, <|im_start|>")
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        before = (model / name).read_bytes() if (model / name).exists() else None
        (model / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
        assert f"pretrain: {model / name}: is a git-lfs pointer, not the file itself; run git lfs pull" in report(
            "none"
        )
        (model / name).unlink() if before is None else (model / name).write_bytes(before)
    (model / "tokenizer_config.json").write_text("[]")
    assert f"pretrain: {model}/tokenizer_config.json: holds a list; write a JSON object" in report("none")
    (model / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert report("native") == report("none") == []


def test_environments_are_tried(folder: Path) -> None:
    names = {"Lake": "frozen_lake", "Room": "tests.envs.broken_envs:Raises"}
    entries = {tag: {"env_type": name} for tag, name in names.items()}
    [error] = errors(check_inputs(agentic(folder, f"custom_envs={yaml.safe_dump(entries, default_flow_style=True)}")))
    assert "broken_envs.py:" in error.splitlines()[0] and error.endswith("custom_envs.Room was tried before the run")


def test_tools_of_built_in_environments_are_tried(folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"title": "no text"}')
    tools = {
        "Lake": {"python": {}, "mcp": {"own": {"command": [sys.executable, "-c", "1/0"]}}},
        "Room": {"search": {"files": f"{folder}/rows.jsonl"}},
    }
    entries = {tag: {"env_config": {"tools": each}} for tag, each in tools.items()}
    given = agentic(folder, f"custom_envs={yaml.safe_dump(entries, default_flow_style=True, width=9999)}")
    server, rows = errors(check_inputs(given))
    assert "tools.mcp.own: did not start" in server and server.endswith("custom_envs.Lake was tried before the run")
    assert "rows.jsonl:1: has no text; name it text or contents" in rows and "custom_envs.Room was tried" in rows


def test_an_environment_that_hangs_does_not_hang_the_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agentic(folder)
    overrides = ["custom_envs.Room.env_type=tests.envs.broken_envs:Hangs", "env_step_timeout_s=0.5"]
    assert main(["plan", str(folder / "config.yaml"), *overrides]) == 2
    assert "a reset or step of tests.envs.broken_envs:Hangs took longer than 0.5 s" in capsys.readouterr().err


def test_a_plan_ends_with_the_users_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = config(folder, function="own_three:score", code=REWARD)
    overrides = [f"actor_train.data_args.file_name={given.actor_train.data_args.file_name}"]
    overrides.append('rewards={mine: {function: "own_three:score"}}')
    assert main(["plan", str(folder / "config.yaml"), *overrides]) == 2
    assert capsys.readouterr().err.startswith(f"{folder}/own_three.py:2: ZeroDivisionError: division by zero\n")


PAIRS = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ({"pad_token": "<pad>", "eos_token": "<end>"}, ""),
        ({"eos_token": "<end>"}, "its tokenizer has no pad_token: transformers will rate one sequence at a time"),
        ({"pad_token": "<end>", "eos_token": "<end>"}, "its tokenizer pads with the end token <end>"),
        ({"pad_token": "<gap>", "eos_token": "<end>"}, "no file of its tokenizer gives the id of its pad_token <gap>"),
    ],
)
def test_a_reward_model_that_is_exported_needs_a_padding_token_of_its_own(
    folder: Path, tokens: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roll.plan.check_inputs.try_tokens", lambda *given: Report())
    Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1})).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens | {"chat_template": "x"}))
    given = {
        "pipeline": "reward_model",
        "pretrain": str(folder),
        "response_length": 8,
        "save_hf_model": True,
        "actor_train": {"device_mapping": [0], "data_args": {"file_name": jsonl(folder, *PAIRS)}},
    }
    config = build_config(given | {"save_hf_model": False})
    assert check_inputs(config).warnings == []
    warnings = [str(warning) for warning in check_inputs(build_config(given)).warnings]
    assert len(warnings) == bool(message) and all(message in warning for warning in warnings)


def test_the_tokenizer_of_a_reward_model_is_tried_with_its_own_template(folder: Path) -> None:
    scores = folder / "scores"
    scores.mkdir()
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"vocab_size": 99, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    kind = {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "a"}, "model_type": "qwen2"}
    (scores / "config.json").write_text(json.dumps(shape | kind))
    given = [
        "rewards={math_rule: null, reward_model: {template: chatml}}",
        f"reward={{device_mapping: [0], model_args: {{model_name_or_path: {scores}}}}}",
    ]
    report = check_inputs(config(folder, *given))
    assert "reward.model_args.model_name_or_path" in str(report.missing[0]) and "has no tokenizer" in str(
        report.missing[0]
    )
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(scores / "tokenizer.json"))
    [error] = errors(check_inputs(config(folder, *given)))
    assert error.startswith("rewards.reward_model.template: 'chatml' needs the special tokens")


def test_a_policy_without_prompts_is_warned_of_and_a_tag_without_a_policy_is_an_error(folder: Path) -> None:
    keys = ["actor_train.model_args.lora_target=all-linear", "actor_train.training_args.gradient_accumulation_steps=64"]
    absent = "policies={sums: {tags: [math_rule]}, code: {tags: [code]}}"
    warnings = [str(warning) for warning in check_inputs(config(folder, absent, *keys)).warnings]
    assert "policies.code.tags: no row read has one; there are math_rule" in warnings
    [error] = errors(check_inputs(config(folder, "policies={code: {tags: [code]}}", *keys)))
    assert error.startswith("policies: ") and "math_rule" in error
