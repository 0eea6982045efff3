"""`roll.open` on the real engines: a loop of the caller does what `roll run` does, bit for bit, and what it cannot."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import assert_nothing_is_left, lines, recipe
from safetensors.torch import load_file
from torch import Tensor

import roll
from roll.api.open import OpenRun
from roll.base.errors import RunError
from roll.pipeline.learning.actor_learner import metric_name
from roll.serve.futures import Futures
from roll.serve.samplers import Sampler, Samplers
from tests.integration.shared_runs import SharedRuns

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]


def own_loop(config: Path, weights: Path) -> list[dict[str, float]]:
    """The loop of `roll run` at ratio 0, of a caller."""
    steps = []
    with roll.open(config) as run:
        for _ in range(run.config.max_steps):
            responses = run.sample(run.next_prompts(), n=4)
            scores = run.score(responses)
            passed = run.forward_backward(responses, run.advantages(responses, scores))
            steps.append(passed.metrics | run.optim_step() | {"reward_mean": sum(scores) / len(scores)})
            run.update_weights()
        run.save_hf(weights)
    return steps


def test_a_loop_of_the_caller_is_a_synchronous_run_bit_for_bit(
    shared_runs: SharedRuns, inputs: dict[str, Any], tmp_path: Path
) -> None:
    keys = {"max_steps": 3, "eval_steps": 0, "save_steps": 0}
    shared_runs.succeed(recipe(inputs, tmp_path / "whole", save_hf_model=True, **keys))
    shared_runs.free_memory()
    steps = own_loop(recipe(inputs, tmp_path / "own", **keys), tmp_path / "weights")
    whole = [line for line in lines(tmp_path / "whole") if line["step"]]
    assert len(whole) == len(steps) == 3
    for line, step in zip(whole, steps, strict=True):
        assert step.pop("reward_mean") == pytest.approx(line["rollout/reward_mean"])
        assert step["grad_norm"] > 0
        assert {metric_name(name): value for name, value in step.items()} == {
            name: line[name] for name in map(metric_name, step)
        }
    folders = tmp_path / "weights", tmp_path / "whole/run/hf_model"
    trained = [
        {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}
        for folder in folders
    ]
    assert trained[0] and trained[0].keys() == trained[1].keys()
    assert all(torch.equal(value, trained[1][name]) for name, value in trained[0].items())
    assert json.loads((tmp_path / "own/run/run.json").read_text())["summary"]["status"] == "finished"
    assert_nothing_is_left(tmp_path)


def test_engines_that_take_turns_with_the_trainer_serve_again_after_log_probs(
    inputs: dict[str, Any], tmp_path: Path
) -> None:
    keys = {"is_offload_states": True, "eval_steps": 0, "save_steps": 0, "deterministic": False}
    with roll.open(recipe(inputs, tmp_path, **keys, actor_infer__device_mapping=[0])) as run:
        assert run.config.takes_turns("cpu")
        version, first = run.version, run.sample(PROMPTS, seed=7, temperature=0.0)
        run.log_probs(first)
        assert [each.ids for each in run.sample(PROMPTS, seed=7, temperature=0.0)] == [each.ids for each in first]

        async def compute_log_probs() -> list[Any]:
            samplers = Samplers(run, futures := Futures())
            prompt = {"chunks": [{"type": "encoded_text", "tokens": first[0].prompt_ids + first[0].ids}]}
            asked = {"sampling_session_id": samplers.add(Sampler(version)), "prompt": prompt, "prompt_logprobs": True}
            each = [{**asked, "seq_id": number, "sampling_params": {"max_tokens": 1}} for number in range(3)]
            ids = [samplers.start(body, trained=False)["request_id"] for body in each]
            return [await futures.fetch(request_id, 60) for request_id in ids]

        answers = asyncio.run(compute_log_probs())
        assert run.version == version and not any(isinstance(each, dict) and "error" in each for each in answers)
        run.forward_backward(first, loss="sft")
        with pytest.raises(RunError, match="call update_weights first"):
            run.sample(PROMPTS)
        run.optim_step()
        with pytest.raises(RunError, match="call update_weights first"):
            run.sample(PROMPTS)
        assert run.update_weights() == version + 1 and len(run.sample(PROMPTS)) == 4
    assert_nothing_is_left(tmp_path)


@pytest.fixture(scope="module")
def opened(inputs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenRun]:
    """A run without data and validation, one batch ahead."""
    folder = tmp_path_factory.mktemp("opened")
    keys = {"async_generation_ratio": 1, "validation": {}, "eval_steps": 0, "deterministic": False}
    config = recipe(inputs, folder, **keys, actor_train__data_args={})
    with roll.open(config) as run:
        yield run
    assert_nothing_is_left(folder)


PROMPTS = ["1+1=", "2+2=", "13+4=", "70+7="]


def test_a_loop_samples_one_step_ahead_with_futures(opened: OpenRun) -> None:
    run, first = opened, opened.version
    coming = run.sample_async(PROMPTS, n=4)
    for step in range(3):
        responses = coming.result()
        coming = run.sample_async(PROMPTS, n=4)  # while this batch is learned from
        scores = [sum(each.ids) % 10 / 10 for each in responses]
        run.forward_backward(responses, run.advantages(responses, scores), scores=scores)
        assert run.optim_step()["grad_norm"] > 0
        versions = {version - first for each in responses for version in each.versions}
        assert versions <= ({0} if step == 0 else {step - 1, step}), "a sample is at most one step old"
        assert run.update_weights() - first == step + 1
    assert len(coming.result()) == 16


def test_the_same_seed_samples_the_same_and_trainer_and_engine_agree_about_it(opened: OpenRun) -> None:
    run = opened
    ids = [run.tokenizer.encode("13+4=", add_special_tokens=False)]
    one, other = (run.sample(ids, n=2, seed=7, max_new_tokens=5, temperature=0.9) for _ in range(2))
    assert [each.ids for each in one] == [each.ids for each in other]
    assert len({each.group for each in one + other}) == 2 and all(len(each.ids) <= 5 for each in one)
    for response, log_probs in zip(one, run.log_probs(one, temperature=0.9), strict=True):
        assert response.versions == [run.version] * len(response.ids)
        torch.testing.assert_close(log_probs, torch.tensor(response.log_probs), atol=1e-4, rtol=0)
    greedy = run.sample(PROMPTS[:1], n=2, temperature=0.0)
    assert greedy[0].ids == greedy[1].ids


def test_a_loss_of_the_caller_gives_the_gradient_of_the_same_loss_of_the_configuration(opened: OpenRun) -> None:
    """REINFORCE is the policy loss where the ratio is 1; a learning rate of 0 leaves the weights as they are."""
    run = opened
    responses = run.sample(PROMPTS, n=4)
    advantages = [1.0 if index % 2 else -0.5 for index in range(16)]

    def reinforce(log_probs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        terms = [value * each.mean() for value, each in zip(advantages, log_probs, strict=True)]
        return -torch.stack(terms).sum() / len(terms), {"responses": float(len(terms))}

    old = run.log_probs(responses)
    run.forward_backward(responses, advantages, old_log_probs=old)
    whole = run.optim_step(learning_rate=0.0)
    own = run.forward_backward(responses, loss=reinforce)
    assert own.metrics["responses"] == 16.0
    assert own.metrics["loss"] == pytest.approx(float(reinforce(own.log_probs)[0]), rel=1e-5)
    found = {"loss": run.optim_step(learning_rate=0.0)}
    pairs = zip(advantages, responses, strict=True)
    run.forward_backward(responses, gradients=[-value / len(each.ids) / 16 for value, each in pairs])
    found["gradients"] = run.optim_step(learning_rate=0.0)
    for part in (slice(0, 5), slice(5, 16)):
        run.forward_backward(responses[part], advantages[part], old_log_probs=old[part], batch=responses)
    found["parts"] = run.optim_step(learning_rate=0.0)
    for name, metrics in found.items():
        assert metrics == pytest.approx(whole, rel=1e-3), name


def test_a_call_of_the_trainer_that_is_cancelled_ends_what_it_has_begun(opened: OpenRun) -> None:
    begun, go = threading.Event(), threading.Event()

    def waits(log_probs: list[Tensor]) -> Tensor:
        begun.set()
        assert go.wait()
        return -torch.cat(log_probs).mean()

    pending = opened.forward_backward_async(opened.sample(PROMPTS[:1], n=2), loss=waits)
    assert begun.wait() and pending.cancel()
    go.set()
    assert opened.optim_step(learning_rate=0.0)["grad_norm"] > 0


def test_a_wrong_call_is_named_and_the_run_goes_on(opened: OpenRun) -> None:
    run = opened
    responses = run.sample(PROMPTS[:1], n=2)
    for name, value in (("learning_rate", float("nan")), ("learning_rate", -1.0), ("max_grad_norm", -1.0)):
        with pytest.raises(RunError, match=f"optim_step.{name}: {value}; give a finite number"):
            run.optim_step(**{name: value})

    def fails(log_probs: list[Tensor]) -> Tensor:
        raise ZeroDivisionError("of the caller")

    with pytest.raises(ZeroDivisionError, match="of the caller"):
        run.forward_backward(responses, loss=fails)
    for wrong, message in {
        lambda: run.forward_backward(responses, loss=lambda log_probs: 1.0): "^loss: returned no 0-d tensor",
        lambda: run.forward_backward(responses, loss=lambda log_probs: run.sample(PROMPTS)): "^loss: calls",
        lambda: run.forward_backward(responses): "^forward_backward: none of advantages, gradients and loss; give one",
        lambda: run.optim_step(): "^optim_step: there are no gradients",
        lambda: run.sample(["1" * 99]): r"^prompts\[0\]: 100 tokens and max_new_tokens 6 are not within 30",
        lambda: run.sample(PROMPTS, heat=1.0): "^sample: heat is no sampling parameter; use",
        lambda: run.next_prompts(): "^next_prompts: actor_train.data_args.file_name is not set",
        lambda: run.score(responses): "^score: actor_train.data_args.file_name is not set",
        lambda: roll.open(ROOT / "examples/tiny_math/rlvr_config.yaml"): "^roll.open: .* is open in this process",
    }.items():
        with pytest.raises(RunError, match=message):
            wrong()  # type: ignore[no-untyped-call]
    assert run.forward_backward(responses, loss="sft").metrics["loss"] > 0
    assert run.optim_step()["grad_norm"] > 0


def test_a_restored_state_repeats_a_step_and_has_a_version_of_its_own(opened: OpenRun) -> None:
    run = opened
    responses = run.sample(PROMPTS, n=2)
    saved, step = run.save_state(), run.step
    repeated = []
    for _ in range(2):
        passed = run.forward_backward(responses, loss="sft")
        repeated.append(passed.metrics | run.optim_step())
        version = run.update_weights()
        run.load_state(saved)
        assert (run.step, run.version) == (step, version)
    assert repeated[0] == repeated[1]
    assert run.update_weights() == version + 1


def test_an_event_loop_awaits_what_it_started(opened: OpenRun) -> None:
    async def both() -> list[Any]:
        return list(await asyncio.gather(opened.sample_async(PROMPTS), opened.sample_async(PROMPTS, temperature=0.5)))

    assert [len(each) for each in asyncio.run(both())] == [4, 4]
