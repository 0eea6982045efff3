"""Router replay from engine to gradient: what an engine records, and training with recorded experts at every layout."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import ray
import torch
from runs import inputs_in, lines, recipe
from sglang_host import EngineHost, RemoteEngine, largest_difference, requests, start_host

from roll.configs.devices.parallel_layout import ParallelLayout
from roll.models.tiny import write_tiny_model
from roll.rollout.types import GenerateRequest, missing_routing
from tests.integration.megatron_scenario import LENGTHS, token_batch
from tests.processes import PATIENCE_S

pytestmark = pytest.mark.integration

SHAPE = {"max_position_embeddings": 2056, "eos_token_id": None, "vocab_size": 101, "num_hidden_layers": 4}
LAYERS, EXPERTS, CHOSEN = 4, 4, 2
LAYOUTS = {
    "tp1": ParallelLayout(),
    "tp2 x ep2": ParallelLayout(tensor=2, expert=2, expert_tensor=1),
    "pp2 x ep2": ParallelLayout(pipeline=2, data=2, expert=2),
}
FULL = {"megatron": {"recompute_granularity": "full"}}
VARIANTS = {
    "tp1": {
        "live": ("live", {}),
        "own": ("own", {}),
        "other": ("other", {}),
        "shifted": ("shifted", {}),
        "packed": ("other", {"packed": True}),
        "recomputed": ("other", {"packed": True, **FULL}),
        "records": ("recorded", {}),
    },
    "tp2 x ep2": {
        "padded": ("other", {}),
        "packed, recomputed": ("other", {"packed": True, **FULL}),
        "records": ("recorded", {"packed": True}),
    },
    "pp2 x ep2": {"packed, recomputed": ("other", {"packed": True, **FULL}), "records": ("recorded", {})},
}
SAME = [(layout, name) for layout, names in VARIANTS.items() for name, (kind, _) in names.items() if kind == "other"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("mixture"), "qwen3_moe", **SHAPE)


@pytest.fixture(scope="module")
def model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")


@torch.no_grad()
def own_experts(model, ids):
    """Of transformers, [tokens, layers, k], the most likely first."""
    logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    return torch.stack([each.view(len(ids), -1).topk(CHOSEN, -1).indices for each in logits], 1).numpy()


TEXTS = [row[:length] for row, length in zip(token_batch()["input_ids"].tolist(), LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def own(model):
    return [own_experts(model, text)[:-1].astype(np.uint8) for text in TEXTS]


@pytest.fixture(scope="module")
def run(folder, own, rank_pool, tmp_path_factory):

    def other(text):  # the same after the same tokens, so that prefixes are shared
        seeds = [hash(tuple(text[: end + 1])) % 2**32 for end in range(len(text) - 1)]
        draws = [
            [np.random.default_rng([seed, layer]).permutation(EXPERTS)[:CHOSEN] for layer in range(LAYERS)]
            for seed in seeds
        ]
        return np.array(draws, np.uint8).reshape(-1, LAYERS, CHOSEN)

    routings = {"own": own, "other": [other(text) for text in TEXTS], "shifted": [np.roll(each, 1, 0) for each in own]}
    running = {
        layout: rank_pool.start(
            "tests.integration.gradient_scenario:replayed",
            sizes,
            tmp_path_factory.mktemp("replayed"),
            model=str(folder),
            routings=routings,
            variants=VARIANTS[layout],
        )
        for layout, sizes in LAYOUTS.items()
    }
    return lambda layout: running[layout].result()


def test_recorded_experts_that_are_its_own_change_no_bit(run):
    ((own, live),) = [(rank["own"], rank["live"]) for rank in run("tp1")]
    assert own["agreement"] == 1.0 and live["agreement"] is None
    assert torch.equal(own["log_probs"], live["log_probs"])
    assert all(torch.equal(own["gradients"][name], value) for name, value in live["gradients"].items())


@pytest.mark.parametrize("kind", ["other", "shifted"])
def test_other_experts_give_other_log_probs_and_are_counted(run, kind):
    (rank,) = run("tp1")
    assert (rank[kind]["log_probs"] - rank["live"]["log_probs"]).abs().max() > 1e-2
    assert 0.0 < rank[kind]["agreement"] < 0.9


@pytest.mark.parametrize("layout, name", SAME)
def test_every_layout_trains_with_the_recorded_experts(run, layout, name):
    (reference,) = run("tp1")
    expected, ranks = reference["other"], run(layout)
    for rank in ranks:
        found = rank[name]
        if found["log_probs"] is not None:
            torch.testing.assert_close(found["log_probs"], expected["log_probs"][found["rows"]], atol=1e-4, rtol=0)
        if LAYOUTS[layout].data == 1:  # else a rank has the sums of its own shard alone
            for key, value in found["gradients"].items():
                torch.testing.assert_close(value, expected["gradients"][key], atol=1e-5, rtol=1e-3)
        if "packed" not in VARIANTS[layout][name][1]:  # else tokens that are shared count once
            assert found["agreement"] == pytest.approx(expected["agreement"], abs=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pass_records_the_experts_that_it_chooses(run, own, layout):
    found = [(rank["records"]["rows"], rank["records"]["recorded"]) for rank in run(layout)]
    assert {row for rows, recorded in found if recorded for row in rows} == {*range(len(TEXTS))}
    for rows, recorded in found:
        for row, experts in zip(rows, recorded, strict=bool(recorded)):
            assert experts.dtype == np.uint8
            assert (np.sort(experts) == np.sort(own[row])).all()


@pytest.fixture(scope="module")
def engine(on_ray, folder):
    engine = RemoteEngine(folder, actor=start_host(EngineHost), routing=True)
    engine.initialize()
    yield engine
    engine.close()
    ray.kill(engine.actor)


def routed(count: int, tokens: int, first_seed: int = 0) -> list[GenerateRequest]:
    asked = requests(count, tokens, first_seed=first_seed)
    return [replace(each, sampling=replace(each.sampling, routing=True)) for each in asked]


def assert_recorded(model, asked, answers):
    for request, answer in zip(asked, answers, strict=True):
        assert missing_routing(request, answer) is None
        expected = own_experts(model, [*request.prompt_ids, *answer.response_ids])[request.routed : -1]
        assert (np.sort(answer.routing) == np.sort(expected)).all()


def test_an_engine_returns_the_experts_of_every_token_but_the_last(engine, model):
    asked = routed(8, 24)
    answers = engine.generate(asked)
    assert largest_difference(model, asked, answers) < 1e-4
    assert_recorded(model, asked, answers)
    assert all(answer.routing.dtype == np.uint8 for answer in answers)
    assert engine.generate(requests(1, 4))[0].routing is None


@pytest.mark.parametrize("mode", ["abort_resume", "retract", "in_place"])
def test_a_paused_response_has_the_experts_of_all_its_parts(engine, model, mode):
    asked = routed(4, 400, first_seed=50)
    pending = engine.start_generate(asked)
    engine.pause(mode)
    engine.resume()
    assert_recorded(model, asked, ray.get(pending, timeout=PATIENCE_S))


def test_the_next_turn_adds_the_rows_that_are_missing(engine, model):
    [first] = routed(1, 12, first_seed=90)
    [answer] = engine.generate([first])
    ids = [*first.prompt_ids, *answer.response_ids, 7, 8, 9]
    second = replace(first, request_id="second", prompt_ids=ids, routed=len(answer.routing))
    [continued] = engine.generate([second])
    assert len(answer.routing) + len(continued.routing) == len(ids) + len(continued.response_ids) - 1
    assert_recorded(model, [second], [continued])


@pytest.fixture(scope="module")
def tiny_mixture(tmp_path_factory, tiny_model_dir):
    """A mixture with the tokenizer of the tiny model."""
    settings = json.loads((tiny_model_dir / "config.json").read_text())
    numbers = {key: settings[key] for key in ("vocab_size", "eos_token_id", "max_position_embeddings")}
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny_mixture"), "qwen3_moe", initializer_range=0.05, **numbers)
    for file in tiny_model_dir.iterdir():
        if not (folder / file.name).exists():
            shutil.copy(file, folder)
    return folder


def test_a_run_ahead_of_the_trainer_replays_every_token(shared_runs, tiny_mixture, tmp_path):
    """Two data ranks share the experts; an engine that runs two requests at a time is never idle."""
    config = recipe(
        inputs_in(tmp_path / "data", tiny_mixture),
        tmp_path,
        async_generation_ratio=2,
        deterministic=False,
        max_steps=8,
        response_length=80,
        actor_infer__max_running_requests=2,
        old_log_probs_source="recompute",
        actor_train__pg_variant="decoupled_ppo",
        eval_steps=0,
        actor_train__router_replay={"mode": "R3"},
        actor_train__use_sequence_packing=True,
        actor_train__training_args__per_device_train_batch_size=4,
        actor_train__strategy_args={"strategy_config": {"expert_model_parallel_size": 2}},
    )
    shared_runs.succeed(config)
    steps = lines(tmp_path)
    trained = [line for line in steps if line.get("step")]
    assert len(trained) == 8 and max(line["rollout/versions_max"] for line in trained) > 1
    assert trained[0]["moe/routing_agreement"] == pytest.approx(1.0, abs=1e-3)
    assert all(0.5 < line["moe/routing_agreement"] <= 1.0 for line in trained)
    assert trained[0]["correction/log_prob_diff_max"] < 1e-4
    assert all(line["rollout/routing_megabytes"] > 0 for line in trained)
    assert not any("routing_incomplete" in name for line in trained for name in line)


def test_a_run_replays_the_experts_of_its_old_log_probs(shared_runs, tiny_mixture, tmp_path):
    """Two optimizer steps of a batch; the engine records nothing."""
    config = recipe(
        inputs_in(tmp_path / "data", tiny_mixture),
        tmp_path,
        max_steps=2,
        eval_steps=0,
        old_log_probs_source="recompute",
        actor_train__router_replay={"mode": "R2"},
        actor_train__training_args__per_device_train_batch_size=4,
        actor_train__training_args__gradient_accumulation_steps=1,
        actor_train__strategy_args={"strategy_config": {"expert_model_parallel_size": 2}},
    )
    shared_runs.succeed(config)
    trained = [line for line in lines(tmp_path) if line.get("step")]
    assert [0.9 < line["moe/routing_agreement"] <= 1.0 for line in trained] == [True] * 2
    assert not any("rollout/routing_megabytes" in line for line in trained)
