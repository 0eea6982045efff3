"""Entries of `custom_envs` that are agents: defaults, what is refused, and what has no effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.configs.agentic import AgenticConfig
from roll.configs.check import check
from roll.plan.batch_lines import batch_lines
from tests.configs.samples import MODEL, agentic, refusal

AGENTS = f"""
pipeline: agentic
pretrain: {MODEL}
rollout_batch_size: 16
sequence_length: 512
custom_envs:
  Solver: {{agent: "keys_agent:Solver"}}
train_env_manager: {{group_size: 4}}
actor_train:
  training_args: {{per_device_train_batch_size: 4, gradient_accumulation_steps: 4}}
  device_mapping: [0]
actor_infer: {{device_mapping: [1]}}
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module beside the YAML file, with a class of an agent."""
    text = "from roll.agents import Agent, Result\nclass Solver(Agent):\n    def run(self, task, seed): ...\n"
    (tmp_path / "keys_agent.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))


def solver(folder: Path, *overrides: str) -> AgenticConfig:
    return agentic(folder, *overrides, text=AGENTS)


def findings(config: AgenticConfig) -> list[str]:
    report = check(config)
    found = [*report.errors, *report.warnings, *report.missing]
    return [str(each) for each in found if each.path.startswith("custom_envs")]


def test_an_agent_needs_no_other_key_and_may_answer_up_to_the_sequence_length(tmp_path: Path) -> None:
    config = solver(tmp_path)
    entry = config.custom_envs["Solver"]
    assert entry.is_agent and entry.max_requests == entry.max_steps == config.turns == 30
    assert entry.max_tokens_per_step == config.actor_infer.generating_args.max_new_tokens == 511
    assert findings(config) == []
    assert not [each for each in check(config).warnings if "turns" in each.message]


def test_its_answers_are_as_long_as_the_run_samples_them(tmp_path: Path) -> None:
    config = solver(tmp_path, "actor_infer.generating_args.max_new_tokens=64", "custom_envs.Solver.max_requests=7")
    assert (config.custom_envs["Solver"].max_tokens_per_step, config.turns) == (64, 7)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("agent=keys_agent:Solvr", "custom_envs.Solver.agent: keys_agent has no class Solvr; did you mean Solver?"),
        ("agent=keys_agent.Solver", "'keys_agent.Solver' is not module:Class; write keys_agent:Solver"),
        ("agent=keys_agent.py:Solver", "'keys_agent.py:Solver' is not module:Class; write keys_agent:Class"),
        ("command=[python, solve.py]", "custom_envs.Solver.command: agent keys_agent:Solver is given too; keep one"),
        ("env_type=sokoban", "custom_envs.Solver.env_type: has no effect: agent or command is in its place; keep one"),
        ("max_requests=0", "custom_envs.Solver.max_requests: 0"),
        ("max_request=3", "custom_envs.Solver.max_request: unknown key; did you mean custom_envs.Solver.max_requests?"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(tmp_path: Path, override: str, message: str) -> None:
    assert message in refusal(tmp_path, f"custom_envs.Solver.{override}", text=AGENTS)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["max_steps=3"], "custom_envs.Solver.max_steps: has no effect: an agent writes its own messages"),
        (["agent_template='{observation}'"], "agent_template: has no effect: an agent writes its own messages"),
        (["tasks.file_name=none.jsonl"], "custom_envs.Solver.tasks.file_name: none.jsonl is not here"),
        (["agent=null", "command=[no-such-program]"], "command: no-such-program is not on this machine"),
        (["agent=null", "command='python3 solve.py {taskfile}'"], "did you mean {task_file}?"),
        (["agent=null", "max_requests=3"], "custom_envs.Solver.max_requests: has no effect: only agents have it"),
        (["agent=null", "tasks.file_name=[a.jsonl]"], "tasks.file_name: has no effect: only agents have it"),
    ],
)  # fmt: skip
def test_what_has_no_effect_or_is_not_here_is_named(tmp_path: Path, overrides: list[str], message: str) -> None:
    extra = ["max_tokens_per_step=64"] if overrides[0] == "agent=null" and "command" not in overrides[1] else []
    config = solver(tmp_path, *(f"custom_envs.Solver.{each}" for each in overrides), *extra)
    assert any(message in found for found in findings(config)), findings(config)


UNSEEN = ["custom_envs.Unseen.agent=keys_agent:Solver", "custom_envs.Unseen.tasks.file_name=val.jsonl"]


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["eval_steps=1"], ["Solver: a.jsonl"]),
        ([], []),
        (["eval_steps=1", *UNSEEN], ["Solver: a.jsonl", "Unseen: val.jsonl"]),
        (["eval_steps=1", *UNSEEN, "val_env_manager.tags=Unseen"], ["Unseen: val.jsonl"]),
        (["eval_steps=1", *UNSEEN, "val_env_manager.tags=Unseen", "train_env_manager.tags=Solver"], []),
    ],
)
def test_tasks_of_validation_that_are_trained_on_are_named(
    tmp_path: Path, overrides: list[str], named: list[str]
) -> None:
    config = solver(tmp_path, "custom_envs.Solver.tasks.file_name=a.jsonl", *overrides)
    warned = [each for each in check(config).warnings if "is trained on too" in each.message]
    parts = [(each.path.split(".")[1], each.message.split()[0]) for each in warned]
    assert [f"{tag}: {name}" for tag, name in parts] == named


def test_a_command_line_in_one_text_is_read_as_words(tmp_path: Path) -> None:
    config = solver(tmp_path, "custom_envs.Solver.agent=null", "custom_envs.Solver.command='python3 -m solve \"a b\"'")
    assert config.custom_envs["Solver"].command == ["python3", "-m", "solve", "a b"]


def test_branches_are_counted_as_samples_of_a_session(tmp_path: Path) -> None:
    linear = "actor_train.training_args.lr_scheduler_type=linear"
    one, three = solver(tmp_path, linear), solver(tmp_path, linear, "custom_envs.Solver.branches=3")
    assert (one.samples_per_batch, three.samples_per_batch) == (16, 48)
    assert (one.optimizer_steps_per_batch, three.optimizer_steps_per_batch) == (1, 3)
    assert three.schedule_steps(three.actor_train) == 3 * one.schedule_steps(one.actor_train)
    line = next(each for each in batch_lines(three) if each.name.startswith("samples per step"))
    assert (line.name, line.value) == ("samples per step, about", 48)
    assert line.formula == "16 trajectories x branches of Solver (3); a session may have more or fewer"
    warned = [each.message for each in check(three).warnings if each.path.endswith("lr_scheduler_type")]
    assert warned == [
        "linear is computed for 3 branches of each session; with fewer it stays unfinished, with more it ends early"
    ]
    assert not [each for each in check(one).warnings if each.path.endswith("lr_scheduler_type")]
