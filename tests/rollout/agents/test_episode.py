"""Requests of an episode, how it handles responses, and how it ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from examples.tiny_frozen_lake.play import LAKE, write_play
from roll.configs.arguments import DataArguments
from roll.configs.pipeline import role_seed
from roll.datasets.sft import encode_sft_data, load_sft_data
from roll.rollout.agents.episode import Episode, EpisodeFailed
from roll.usercode.env_pool import EnvFailure
from tests.rollout.agents.agent_setup import (
    SAMPLING,
    VERSION,
    Engines,
    Setup,
    chat,
    episode,
    in_turn,
    one_of,
    run,
    run_episode,
    task,
    tokenizer,
)

WALK = task(max_steps=3)


def trajectory_of(engines: Engines, what=WALK, **options):
    return run(run_episode(episode(what, **options), Setup(engines))).trajectory


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def prompt_tokens(trajectory) -> int:
    """Tokens before the last answer of a trajectory that has one."""
    return trajectory.turns[-1].start


def test_every_request_has_the_exact_ids_so_far():
    engines = Engines(in_turn("left", "right", "gold"))
    trajectory = trajectory_of(engines)
    assert len(engines.requests) == 3
    for request, turn in zip(engines.requests, trajectory.turns, strict=True):
        assert request.prompt_ids == trajectory.ids[: turn.start]
        assert request.version == VERSION
    assert [turn.text for turn in trajectory.turns] == ["left", "right", "gold"]
    whole = tokenizer().decode(trajectory.ids)
    assert whole.startswith("Walk.\n1: start ")
    assert "<|answer|>left<|end|>2: saw left<|answer|>right<|end|>3: saw right<|answer|>gold<|end|>" in whole


def test_braces_of_a_system_message_are_sent_as_they_are():
    what = replace(WALK, system='\\boxed{} {"a": 1} {{A}} {env_instruction}')
    whole = tokenizer().decode(trajectory_of(Engines(in_turn("left", "gold")), what).ids)
    assert whole.startswith('\\boxed{} {"a": 1} {{A}} Walk.')


def test_the_instruction_is_placed_by_the_templates_after_the_system_message():
    what = replace(WALK, system="Rules: {env_instruction}", template="{observation}, {actions_left} left of {{3}}")
    engines = Engines(in_turn("left", "gold"))
    trajectory_of(engines, what)
    first, second = (tokenizer().decode(request.prompt_ids) for request in engines.requests)
    assert first.startswith("Rules: Walk.start ") and first.count("Walk.") == 1
    assert second.endswith("saw left, 2 left of {3}<|answer|>")


@pytest.mark.parametrize(
    "of_task, of_sampling, sequence_length, most", [(20, 64, 1000, 20), (20, 6, 1000, 6), (20, 64, None, 5)]
)
def test_a_response_is_limited_by_task_sampling_and_room(of_task, of_sampling, sequence_length, most):
    first = len(chat().start([{"role": "user", "content": "Walk.\n1: start 944"}]))
    what = task(max_tokens=of_task)
    engines = Engines(one_of("x" * 100))
    sampling = replace(SAMPLING, max_new_tokens=of_sampling, temperature=0.5)
    trajectory_of(engines, what, sampling=sampling, sequence_length=sequence_length or first + 5)
    assert len(engines.requests[0].prompt_ids) == first
    assert engines.requests[0].sampling == replace(sampling, max_new_tokens=most)


def test_the_template_shows_the_effective_limit():
    engines = Engines(one_of("gold"))
    what = replace(WALK, template="{observation} in {max_response_length}")
    trajectory_of(engines, what, sampling=replace(SAMPLING, max_new_tokens=6))
    assert tokenizer().decode(engines.requests[0].prompt_ids).endswith(" in 6<|answer|>")


def test_a_response_cut_at_the_tokens_of_a_turn_reaches_the_environment():
    trajectory = trajectory_of(Engines(in_turn("left" * 20, "gold")), task(max_tokens=8))
    first, second = trajectory.turns
    assert (first.text, first.reward) == ("leftleft", 0.125)
    assert (second.text, second.reward, trajectory.stop) == ("gold", 1.0, "terminated")
    assert trajectory.ids[first.end] == tokenizer().eos_token_id, "the template closes what was cut"
    assert trajectory.versions[first.end] == -1


def test_a_full_sequence_cuts_off_the_first_response():
    first = prompt_tokens(trajectory_of(Engines(in_turn("gold"))))
    trajectory = trajectory_of(Engines(in_turn("gold")), sequence_length=first + 3)
    [turn] = trajectory.turns
    assert (len(trajectory.ids), trajectory.stop, trajectory.score) == (first + 3, "sequence_length", 0.0)
    assert (turn.text, turn.metrics, trajectory.metrics, trajectory.outcome) == ("gol", {}, {"gold": 0.0}, "")


def test_a_full_sequence_cuts_off_a_later_response_and_keeps_earlier_rewards():
    whole = trajectory_of(Engines(in_turn("left", "gold")))
    trajectory = trajectory_of(Engines(in_turn("left", "gold")), sequence_length=prompt_tokens(whole) + 2)
    assert trajectory.ids == whole.ids[: prompt_tokens(whole) + 2]
    assert [turn.reward for turn in trajectory.turns] == [0.125, 0.0]
    assert (trajectory.stop, trajectory.metrics) == ("sequence_length", {"letters": 4.0, "gold": 0.0})


def test_a_response_that_ends_exactly_with_the_sequence_counts():
    whole = trajectory_of(Engines(in_turn("left", "gold")))
    trajectory = trajectory_of(Engines(in_turn("left", "gold")), sequence_length=len(whole.ids))
    assert trajectory == whole and trajectory.stop == "terminated"


def test_an_observation_that_leaves_no_room_is_the_outcome():
    whole = trajectory_of(Engines(in_turn("left", "gold")))
    for length in (prompt_tokens(whole), prompt_tokens(whole) - 1, whole.turns[0].end):
        trajectory = trajectory_of(Engines(in_turn("left", "gold")), sequence_length=length)
        assert trajectory.ids == whole.ids[: whole.turns[0].end]
        assert (trajectory.stop, trajectory.outcome, trajectory.score) == ("sequence_length", "saw left", 0.125)
    assert (
        trajectory_of(Engines(in_turn("left", "gold")), sequence_length=prompt_tokens(whole) + 1).turns[1].text == "g"
    )


def test_a_first_message_that_fills_the_sequence_fails():
    first = prompt_tokens(trajectory_of(Engines(in_turn("gold"))))
    with pytest.raises(EpisodeFailed, match=f"the first message has {first} tokens") as caught:
        trajectory_of(Engines(in_turn("gold")), sequence_length=first)
    assert caught.value.reason == "prompt_too_long"


def test_an_abort_fails_with_the_error_of_the_engine():
    with pytest.raises(EpisodeFailed, match="train-0-0-1: out of memory") as caught:
        trajectory_of(Engines(in_turn("left", None)))
    assert caught.value.reason == "generation_failed"


def test_an_empty_response_is_a_failure():
    engines = Engines(in_turn("left", "right"))
    answer = engines.answer

    async def empty(request):
        return replace(await answer(request), response_ids=[], log_probs=[], versions=[])

    engines.answer = empty
    with pytest.raises(EpisodeFailed, match="train-0-0-0: the response is empty") as caught:
        trajectory_of(engines)
    assert caught.value.reason == "generation_failed"


def test_an_exception_of_the_environment_fails_with_its_message():
    with pytest.raises(EnvFailure, match="turn 2: .*: ArithmeticError: the ground gave way") as caught:
        trajectory_of(Engines(in_turn("left", "boom")))
    assert caught.value.reason == "env_raised"


def test_rewards_metrics_and_outcome_of_an_episode_that_ends_itself():
    trajectory = trajectory_of(Engines(in_turn("left", "gold")))
    assert [turn.observation for turn in trajectory.turns] == ["start 944", "saw left"]
    assert [turn.metrics for turn in trajectory.turns] == [{"letters": 4.0, "gold": 0.0}, {"letters": 4.0, "gold": 1.0}]
    assert trajectory.metrics == {"letters": 8.0, "gold": 1.0}
    assert (trajectory.score, trajectory.stop, trajectory.outcome) == (1.125, "terminated", "saw gold")


def test_the_last_action_truncates_and_no_request_follows():
    engines = Engines(one_of("left"))
    trajectory = trajectory_of(engines)
    assert (trajectory.stop, trajectory.outcome, len(engines.requests)) == ("truncated", "saw left", 3)
    assert trajectory.score == 0.375


def test_frozen_lake_acts_on_the_text_of_the_model():
    moves = in_turn("<answer>Right</answer>", "<answer>Down</answer>")
    what = task("frozen_lake", max_steps=6, size=3, p=1.0, is_slippery=False)
    trajectory = trajectory_of(Engines(moves), what)
    assert (trajectory.score, trajectory.stop, trajectory.metrics["success"]) == (1.0, "terminated", 1.0)
    assert [turn.observation for turn in trajectory.turns] == ["P__\n_G_\n___", "_P_\n_G_\n___"]


def test_warm_start_data_has_the_ids_of_the_episode(tmp_path):
    """The warm-start data of the tiny FrozenLake recipe has the same token ids as an episode in its run."""
    data = write_play(tmp_path, seed=5, train=1, val=0, chance=0.5) / "train.jsonl"
    [sample] = load_sft_data(str(data), DataArguments())
    examples, _ = encode_sft_data([sample], tokenizer(), "native", 100, 1000, mask_history=False)
    answers = [message["content"] for message in sample.question.messages if message["role"] == "assistant"]
    what = replace(task("frozen_lake", **LAKE), template="{observation}\n")
    seed = role_seed(5, "play", "train", 0)
    one = Episode("train-0-0", what, seed, 1, SAMPLING, 1000, 0, chat())
    trajectory = run(run_episode(one, Setup(Engines(in_turn(*answers, sample.response))))).trajectory
    assert trajectory.stop == "terminated" and len(trajectory.turns) == len(answers) + 1 > 2
    assert trajectory.ids == [*examples[0].prompt_ids, *examples[0].response_ids]


def test_fields_of_single_turns_are_filled():
    template = "step {current_step} after {step_count} [{history}] of {history_length}: {current_observation}{suffix}"
    engines = Engines(in_turn("left", "gold"))
    whole = tokenizer().decode(trajectory_of(engines, replace(WALK, template=template)).ids)
    assert "step 1 after 0 [] of 0: start" in whole
    assert "step 2 after 1 [the messages above] of 1: saw left" in whole
