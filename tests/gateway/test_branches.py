"""The rows of a session with branches: what is trained on, with which score and weight."""

from __future__ import annotations

import json

import pytest
import torch

from roll.algorithms.advantages import AdvantageSettings, compute_advantages
from roll.algorithms.aggregation import SAMPLE_WEIGHTS, LossScale, aggregate
from roll.algorithms.turns import check_turns, read_turns
from roll.datasets.micro_batches import plan_optimizer_steps
from roll.gateway.history import readable
from roll.gateway.protocol import read_request, wire
from roll.gateway.session import AgentSession
from roll.pipeline.learning.shards import training_shards
from roll.rollout.metrics import rollout_metrics
from roll.rollout.rollout_batch import batch_of_groups
from roll.rollout.types import Group, Trajectory
from tests.gateway.conversations import ScriptedPolicy, byte_tokenizer, dialogue, spec

TOKENIZER = byte_tokenizer()
DIALOGUE = dialogue(TOKENIZER)


def session(*talks: list[str], reward: float = 0.0) -> Trajectory:
    """Conversations of user messages, each from the start; equal beginnings are sent once."""
    one, policy, said = AgentSession(spec(TOKENIZER), DIALOGUE), ScriptedPolicy(TOKENIZER), {}
    for talk in talks:
        messages: list[dict] = []
        for number, text in enumerate(talk):
            messages.append({"role": "user", "content": text})
            key = json.dumps(talk[: number + 1])
            if key not in said:
                turn = one.ask(read_request({"messages": messages}))
                result = policy.result(turn.requests[0], f"ab {len(said)}")
                said[key] = wire(one.answer(turn, [result]).choices[0].message)
            messages.append(said[key])
    trajectory = one.end().trajectory
    trajectory.turns[-1].reward, trajectory.stop = reward, "terminated"
    return trajectory


def groups() -> list[Group]:
    """Two groups of two: one session of the first has three branches."""
    many = session(["a", "b", "c"], ["a", "b", "d"], ["e"], reward=1.0)
    other = Group(5, "Solver", 4, "Solver-5", [session(["a"], reward=0.5), session(["b"], reward=1.5)])
    return [Group(4, "Solver", 3, "Solver-4", [many, session(["a", "c"], reward=-1.0)]), other]


def test_a_session_is_a_row_for_each_branch_with_its_id_and_score():
    batch = batch_of_groups(groups(), episodes=True)
    assert batch.batch["trajectory_ids"].tolist()[:4] == [0, 0, 0, 1]
    assert batch.batch["scores"].tolist()[:4] == [1.0, 1.0, 1.0, -1.0]
    assert batch.non_tensor_batch["id"][:4].tolist() == [
        *("Solver-4-0.1", "Solver-4-0.2", "Solver-4-0.3", "Solver-4-1")
    ]
    assert [each["branch"] for each in batch.non_tensor_batch["episode"][:3]] == [1, 2, 3]
    check_turns(read_turns(batch.batch), batch.batch["scores"], batch.batch["group_ids"], batch.batch["response_mask"])
    sampled = sum(turn.end - turn.start for group in groups() for one in group.trajectories for turn in one.all_turns)
    assert int(batch.batch["response_mask"].sum()) == sampled == sum(group.generated_tokens for group in groups())


@pytest.mark.parametrize("name", ["grpo", "reinforce"])
def test_baselines_count_a_session_once(name):
    """The advantages are those of the batch in which each session is its last branch alone."""
    whole, last = groups(), groups()
    for group in last:
        for trajectory in group.trajectories:
            trajectory.branches = []

    def advantages(given: list[Group]) -> dict[int, set[float]]:
        batch = batch_of_groups(given).batch
        settings = AdvantageSettings(adv_estimator=name)
        arguments = batch["scores"], batch["group_ids"], batch["response_mask"], settings
        found = compute_advantages(*arguments, turns=read_turns(batch)).advantages
        rows: dict[int, set[float]] = {}
        for row, trajectory in enumerate(batch["trajectory_ids"].tolist()):
            values = found[row][batch["response_mask"][row]]
            rows.setdefault(trajectory, set()).update(round(value, 5) for value in values.tolist())
        return rows

    assert advantages(whole) == advantages(last)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_means_over_samples_weigh_a_session_once_and_means_over_tokens_each_token(mode):
    batch = batch_of_groups(groups(), multiple=8)
    plans = plan_optimizer_steps([1] * len(batch), 2, samples_per_step=8, micro_batch_size=2)
    shards = training_shards(batch, plans[0], {})
    loss = 0.0
    for shard in shards:
        [step] = shard.meta_info["optimizer_steps"]
        values, mask = shard.batch["input_ids"].double(), shard.batch["response_mask"]
        scale = LossScale(step["tokens"], step["sequences"], 10)
        loss += float(aggregate(values, mask, mode, scale, shard.batch[SAMPLE_WEIGHTS]))
    ids, mask = batch.batch["input_ids"].double(), batch.batch["response_mask"]
    if mode == "token-mean":
        assert loss == pytest.approx(float(ids[mask].mean()))
        return
    rows = [(row[kept].sum(), row[kept].mean()) for row, kept in zip(ids, mask, strict=True)]
    of_session: dict[int, list[torch.Tensor]] = {}
    for row, trajectory in enumerate(batch.batch["trajectory_ids"].tolist()):
        if bool(mask[row].any()):
            of_session.setdefault(trajectory, []).append(rows[row][mode == "seq-mean-token-mean"])
    assert loss == pytest.approx(float(torch.stack([torch.stack(each).mean() for each in of_session.values()]).mean()))


def test_without_branches_a_batch_has_no_weights():
    plain = [Group(0, "Solver", 0, "Solver-0", [session(["a"]), session(["b", "c"])])]
    assert SAMPLE_WEIGHTS not in batch_of_groups(plain).batch.keys()
    assert SAMPLE_WEIGHTS not in batch_of_groups(groups(), "step").batch.keys()


def test_checkpoints_and_metrics_have_the_branches():
    group = groups()[0]
    again = Group.from_state(json.loads(json.dumps(group.state_dict())))
    assert again.trajectories == group.trajectories
    metrics = rollout_metrics([group], version=4, stale_after=0)
    assert metrics["rollout/turns_mean"] == (5 + 2) / 2 and metrics["staleness/token_max"] == 1
    assert metrics["rollout/response_length_max"] == sum(
        turn.end - turn.start for turn in group.trajectories[0].all_turns
    )


def test_messages_are_shown_with_their_roles_and_the_names_of_tools():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "Add."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
        {"role": "user", "content": "And now?"},
    ]
    assert readable(messages, 0) == "system: Add.\nassistant: [calls add]\ntool add: 42\nuser: And now?"
    assert readable(messages, 2) == "tool add: 42\nuser: And now?"
