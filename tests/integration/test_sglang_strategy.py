"""A real SGLang engine in a Ray actor: parity, seeds, determinism, deadlines, weight updates, and its end."""

from __future__ import annotations

import copy
import json
import socket
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import ray
import torch
from sglang_host import (
    EngineHost,
    RemoteEngine,
    Sender,
    largest_difference,
    reference,
    requests,
    start_host,
)
from tokenizers import Regex, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from roll.base.events import EVENTS_FILE
from roll.distributed.infer.sglang_checksums import EngineChecksums
from roll.distributed.infer.sglang_engine import WATCH_INTERVAL_S, free_port, preferred_port
from roll.distributed.process_groups import BroadcastGroup, join_as_source
from roll.distributed.weights.plan import Bucket, WeightSpec
from roll.distributed.weights.shm_buckets import flattened
from roll.models.tiny import write_tiny_model
from roll.rollout.types import GenerateRequest, SamplingParams
from tests.processes import PATIENCE_S, name_of

pytestmark = pytest.mark.integration

TOLERANCE = 1e-4

RUNNING_TOKENS = 500
"""Requests of so many tokens are far from done when they are seen to run."""

SHAPE = {"max_position_embeddings": 2056, "eos_token_id": None, "vocab_size": 101}


def load(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


PIECES = [f"{'abc'[at % 3] * (1 + at // 3 % 4)}{'xyz<>/'[at % 6]}" for at in range(SHAPE["vocab_size"])]
"""Text of each token; the same text has several spellings."""


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory):
    folder = write_tiny_model(tmp_path_factory.mktemp("llama"), "llama", **SHAPE)
    words = {f"{at} {piece}": at for at, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0 ax"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace(Regex(r"^\d+ "), ""), decoders.Fuse()])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=list(words)[3]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(on_ray, llama_folder):
    engine = RemoteEngine(llama_folder)
    engine.initialize()
    names = [psutil.Process(process).name() for process in engine.process_ids()]
    assert not any("detoken" in name for name in names), "an unneeded process was started"
    yield engine
    engine.close()
    assert len(engine.process_ids()) == 1, "only the actor is left"
    ray.kill(engine.actor)


@pytest.fixture(scope="module")
def model(llama_folder):
    """What the engine holds; tests that update weights change it in place."""
    return load(llama_folder)


def change(model, factor):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)


@pytest.fixture(scope="module")
def offer(on_ray):
    """Shares tensors by name from another process and returns their handle."""
    sender = ray.remote(num_cpus=0)(Sender).remote()
    yield lambda tensors: ray.get(sender.share.remote(tensors), timeout=PATIENCE_S)
    ray.kill(sender)


@pytest.fixture(scope="module")
def update(offer):
    """Updates an engine to a whole model in one bucket of shared memory."""

    def update(engine, model, version, ranks=1):
        engine.begin_update(version)
        engine.receive_shared([[offer(model.state_dict())] * ranks])
        engine.end_update(version)
        engine.commit_update()

    return update


def expected_checksums(model, folder, ranks):
    checksums = EngineChecksums.of_model(folder, ranks)
    for name, tensor in model.state_dict().items():
        checksums.add(name, tensor)
    return checksums.result()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_transformers(engine, model, temperature):
    asked = requests(10, 24, temperature)
    answers = engine.generate(asked)
    assert [len(answer.response_ids) for answer in answers] == [24] * 10
    assert {answer.finish_reason for answer in answers} == {"length"}
    assert largest_difference(model, asked, answers) < TOLERANCE


def test_the_tokens_of_a_response_come_in_one_message(engine):
    assert engine.outputs_of(requests(1, 210)) == ([210], 1)
    assert engine.outputs_of(requests(3, 210)) == ([210] * 3, 1), "requests of one batch that end together"


def test_the_process_groups_of_an_engine_share_one_network_thread(engine):
    for scheduler in engine.scheduler_ids():
        names = [(task / "comm").read_text().strip() for task in Path(f"/proc/{scheduler}/task").iterdir()]
        assert names.count("gloo_tcp_loop") == 1


def test_truncated_samples_come_with_the_tokens_that_were_kept(engine, model):
    """Their log-probs are over these tokens; other requests of the batch stay as they are."""
    sampling = {"temperature": 0.7, "top_p": 0.8, "top_k": 6, "sampling_mask": True}
    asked = [
        replace(each, sampling=replace(each.sampling, **sampling)) if number % 2 else each
        for number, each in enumerate(requests(10, 24, 1.0))
    ]
    answers = engine.generate(asked)
    assert largest_difference(model, asked[::2], answers[::2]) < TOLERANCE
    assert not any(answer.sampling_mask for answer in answers[::2])
    sizes = set()
    for request, answer in zip(asked[1::2], answers[1::2], strict=True):
        ids = torch.tensor([request.prompt_ids + answer.response_ids])
        with torch.no_grad():
            logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1] / 0.7
        probabilities, order = logits.softmax(-1).sort(dim=-1, descending=True)
        before = probabilities.cumsum(-1) - probabilities
        for row, (token, kept) in enumerate(zip(answer.response_ids, answer.sampling_mask, strict=True)):
            expected = order[row, : min(6, int((before[row] <= 0.8).sum()))].tolist()
            assert kept == expected and token in kept
            log_prob = float(torch.log_softmax(logits[row, kept], -1)[kept.index(token)])
            assert abs(answer.log_probs[row] - log_prob) < TOLERANCE
            sizes.add(len(kept))
    assert len(sizes) > 1


def test_the_same_requests_give_the_same_bits_whatever_came_before(engine):
    asked = requests(24, 40)
    first = engine.generate(asked)
    engine.generate(requests(5, 17, first_seed=100))
    assert engine.generate(asked) == first


def test_a_sample_depends_on_its_seed_and_not_on_its_batch(engine):
    asked = requests(8, 30)
    together = engine.generate(asked)
    [alone] = engine.generate(asked[3:4])
    assert alone.response_ids == together[3].response_ids
    assert max(abs(a - b) for a, b in zip(alone.log_probs, together[3].log_probs, strict=True)) < TOLERANCE
    others = engine.generate(requests(8, 30, first_seed=50))
    assert all(a.response_ids != b.response_ids for a, b in zip(together, others, strict=True))


def test_a_stop_token_ends_the_response_and_belongs_to_it(engine):
    [answer] = engine.generate(requests(1, 30))
    stop = answer.response_ids[11]
    until = answer.response_ids.index(stop) + 1
    [asked] = requests(1, 30)
    [stopped] = engine.generate([replace(asked, sampling=replace(asked.sampling, stop_token_ids=(stop,)))])
    assert (stopped.finish_reason, stopped.response_ids) == ("stop", answer.response_ids[:until])


def text_of(ids):
    return "".join(PIECES[each] for each in ids)


def with_stops(request, *stops):
    return replace(request, sampling=replace(request.sampling, stop_strings=stops))


def until_a_stop(ids, stops):
    """The ids up to the first one with which a stop string is in the text."""
    ends = (end for end in range(len(ids) + 1) if any(stop in text_of(ids[:end]) for stop in stops))
    return ids[: next(ends, len(ids))]


def test_a_stop_string_of_several_tokens_ends_the_response_and_belongs_to_it(engine, model):
    asked = requests(8, 60)
    whole = [answer.response_ids for answer in engine.generate(asked)]
    stops = [(text_of(ids[30:34])[1:-1], "never") for ids in whole]
    asked = [with_stops(request, *each) for request, each in zip(asked, stops, strict=True)]
    mixed = [*asked[:4], *requests(2, 20, first_seed=70), *asked[4:]]
    answers = engine.generate(mixed)
    assert [answer.finish_reason for answer in answers] == ["stop"] * 4 + ["length"] * 2 + ["stop"] * 4
    assert [len(answer.response_ids) for answer in answers[4:6]] == [20, 20]
    stopped = [*answers[:4], *answers[6:]]
    assert [answer.response_ids for answer in stopped] == [
        until_a_stop(ids, each) for ids, each in zip(whole, stops, strict=True)
    ]
    assert any(len(answer.response_ids) == 34 for answer in stopped), "the last token goes on after the stop string"
    assert largest_difference(model, asked, stopped) < TOLERANCE


def test_no_token_is_computed_after_a_stop_string(engine):
    [asked] = requests(1, 300)
    stop = text_of(engine.generate([asked])[0].response_ids[10:14])
    tokens, messages = engine.outputs_of([with_stops(asked, stop)])
    assert tokens[0] <= 14 and messages == 1
    generated = engine.sampled_tokens([with_stops(asked, stop)])
    assert generated == tokens


def test_a_stop_string_is_found_in_spite_of_pauses(engine):
    asked = requests(4, RUNNING_TOKENS)
    whole = [answer.response_ids for answer in engine.generate(asked)]
    stops = [(text_of(ids[-30:-22])[1:-1],) for ids in whole]
    pending = engine.start_generate([with_stops(each, *stop) for each, stop in zip(asked, stops, strict=True)], 3)
    for number, mode in enumerate(("abort_resume", "retract", "abort_resume")):
        if number:
            engine.until_next_mark()
        engine.pause(mode)
        engine.flush_cache()
        engine.resume()
    answers = ray.get(pending, timeout=PATIENCE_S)
    assert [answer.response_ids for answer in answers] == [
        until_a_stop(*each) for each in zip(whole, stops, strict=True)
    ]
    assert {answer.finish_reason for answer in answers} == {"stop"}


def test_an_expired_request_is_aborted_with_what_it_has(engine):
    seconds = round(2 * seconds_of_a_quarter(engine), 1) + 0.1
    answers = engine.generate_within(requests(3, 1900), seconds)
    assert {answer.finish_reason for answer in answers} == {"abort"}
    assert all(f"aborted after {seconds:g} s" in answer.error for answer in answers)
    assert all(0 < len(answer.response_ids) == len(answer.log_probs) < 1900 for answer in answers)


def test_a_request_the_engine_refuses_comes_back_with_its_reason(engine):
    [good, bad] = requests(2, 5)
    bad.prompt_ids.extend([5] * 3000)
    answers = engine.generate([bad, good])
    assert answers[0].finish_reason == "abort"
    assert "longer than" in answers[0].error
    assert len(answers[1].response_ids) == 5


def test_a_sequence_may_end_at_the_last_position_of_the_model(engine):
    """The harness limits sequences to this length; requests that continue after a pause are a little shorter."""
    longest = SHAPE["max_position_embeddings"]
    asked = [
        GenerateRequest(f"r{room}", [7] * (longest - room), SamplingParams(max_new_tokens=room), seed=room)
        for room in (1, 2, 5, 9)
    ]
    answers = engine.generate(asked)
    assert [(len(answer.response_ids), answer.finish_reason, answer.error) for answer in answers] == [
        (room, "length", None) for room in (1, 2, 5, 9)
    ]


def seconds_of_a_quarter(engine):
    """What a quarter of `RUNNING_TOKENS` takes on this machine just now: by then requests run and are far from done."""
    start = time.monotonic()
    engine.generate(requests(4, RUNNING_TOKENS // 4))
    return time.monotonic() - start


@pytest.mark.parametrize(("mode", "version"), [("in_place", 3), ("retract", 4), ("drain", 5), ("abort_resume", 6)])
def test_no_running_request_is_lost_and_each_token_knows_its_version(engine, model, update, mode, version):
    before = copy.deepcopy(model)
    old = engine.generate(requests(1, 1))[0].versions[0]
    asked = requests(4, RUNNING_TOKENS)
    pending = engine.start_generate(asked)
    change(model, 1.01)
    engine.pause(mode)
    update(engine, model, version)
    if mode != "in_place":
        engine.flush_cache()
    engine.resume()
    answers = ray.get(pending, timeout=PATIENCE_S)
    for request, answer in zip(asked, answers, strict=True):
        assert (answer.finish_reason, len(answer.response_ids)) == ("length", RUNNING_TOKENS)
        expected = {old} if mode == "drain" else {old, version}
        assert answer.versions == sorted(answer.versions) and set(answer.versions) == expected
        switch = RUNNING_TOKENS if mode == "drain" else answer.versions.index(version)
        got = torch.tensor(answer.log_probs)
        early = reference(before, request, answer.response_ids)[:switch]
        torch.testing.assert_close(got[:switch], early, atol=TOLERANCE, rtol=0)
        if mode != "in_place":  # there the new weights attend to keys that the old ones made
            after = reference(model, request, answer.response_ids)[switch:]
            torch.testing.assert_close(got[switch:], after, atol=TOLERANCE, rtol=0)
    engine.flush_cache()


def test_prefixes_are_shared_within_one_version_only(engine, model, update):
    """In place the cache cannot be emptied, so it is kept apart by version."""
    prompt = [GenerateRequest("long", list(range(4, 40)), SamplingParams(2), seed=1)]
    first, again = (engine.generate_within(prompt, 30.0)[0].cached_prompt_tokens for _ in range(2))
    assert (first, again > 0) == (0, True)
    pending = engine.start_generate(requests(2, RUNNING_TOKENS))
    engine.pause("in_place")
    update(engine, model, 7)
    engine.resume()
    assert [engine.generate_within(prompt, 30.0)[0].cached_prompt_tokens > 0 for _ in range(2)] == [False, True]
    ray.get(pending, timeout=PATIENCE_S)


def test_an_update_is_verified_by_names_and_checksums(engine, model, update, llama_folder):
    change(model, 0.99)
    engine.pause("retract")
    update(engine, model, 8)
    engine.flush_cache()
    engine.resume()
    expected = expected_checksums(model, llama_folder, 1)
    assert engine.checksums() == expected
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1e-6
    wrong = {name for name, value in expected_checksums(model, llama_folder, 1).items() if value != expected[name]}
    assert wrong == {"model.layers.1.mlp.gate_up_proj.weight@0"}


def broadcast(engine, joined, sent, specs):
    """Sends the tensors from this process, in one bucket, while the engine receives one of `specs`."""
    plan, group = joined
    send = partial(torch.distributed.broadcast, flattened(sent), src=0, group=group)
    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    try:
        engine.receive_broadcast([plan], [[Bucket(tuple(specs))]])
    finally:
        sender.join()


@pytest.fixture(scope="module")
def group(engine):
    port, joined = free_port(18000), []
    plan = BroadcastGroup("test", "127.0.0.1", port, 2, "gloo")
    joiner = threading.Thread(target=lambda: joined.append(join_as_source(plan, PATIENCE_S)), daemon=True)
    joiner.start()
    engine.join_broadcast_groups([plan], 0)
    joiner.join()
    yield plan, joined[0]
    engine.leave_broadcast_groups([plan])
    torch.distributed.destroy_process_group(joined[0])


def test_tensors_arrive_by_broadcast(engine, group, model, llama_folder):
    change(model, 1.02)
    state = model.state_dict()
    specs = [WeightSpec(name, tuple(t.shape), "float32") for name, t in state.items()]
    engine.begin_update(9)
    broadcast(engine, group, [*state.values()], specs)
    engine.end_update(9)
    engine.commit_update()
    engine.flush_cache()
    assert engine.checksums() == expected_checksums(model, llama_folder, 1)
    asked = requests(3, 20)
    answers = engine.generate(asked)
    assert largest_difference(model, asked, answers) < TOLERANCE
    assert set(answers[0].versions) == {9}


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("model.layers.9.mlp.up_proj.weight", (96, 64), "has no parameter for model.layers.9.mlp.up_proj.weight"),
        ("model.norm.weight", (65,), r"receive 1 tensors \(model.norm.weight\)"),
    ],
)
def test_a_tensor_that_does_not_fit_is_an_error(engine, group, name, shape, message):
    engine.begin_update(10)
    with pytest.raises(ray.exceptions.RayTaskError, match=message):
        broadcast(engine, group, [torch.zeros(shape)], [WeightSpec(name, shape, "float32")])


def test_a_session_left_open_by_an_error_is_closed_by_the_next(engine):
    engine.begin_update(11)
    engine.begin_update(11)
    engine.end_update(11)
    engine.commit_update()


def test_updates_outside_a_session_are_refused(engine, model, offer):
    handle = offer({"model.norm.weight": model.model.norm.weight.detach()})
    with pytest.raises(ray.exceptions.RayTaskError, match="must run between"):
        engine.receive_shared([[handle]])
    with pytest.raises(ray.exceptions.RayTaskError, match="no weight-update session is open"):
        engine.end_update(12)


def test_the_cache_is_not_emptied_under_running_requests(engine):
    pending = engine.start_generate(requests(2, RUNNING_TOKENS))
    engine.pause("in_place")
    with pytest.raises(ray.exceptions.RayTaskError, match="cannot be emptied while requests run"):
        engine.flush_cache()
    engine.resume()
    answers = ray.get(pending, timeout=PATIENCE_S)
    assert [answer.finish_reason for answer in answers] == ["length", "length"]


def test_a_paused_engine_leaves_its_core_to_others(engine):
    engine.pause("retract")
    used = engine.cpu_seconds(2.0)
    engine.resume()
    assert used < 0.3, "it would use two seconds if it asked for messages without a pause"


def test_cancelled_requests_leave_the_engine(engine):
    quarter_s = seconds_of_a_quarter(engine)
    engine.cancel_generate(requests(2, 1900))
    time.sleep(4 * quarter_s)  # of the fifteen that they would run
    engine.pause("in_place")  # from here on no request ends by itself
    engine.flush_cache()  # possible without running requests only
    engine.resume()


@pytest.fixture(scope="module")
def host(on_ray):
    """A process for engines that end with their test."""
    host = start_host(EngineHost)
    yield host
    ray.kill(host)


@pytest.mark.parametrize("killed", ["sglang::scheduler", "sglang::fork_server"])
def test_an_engine_is_started_once_more_where_its_processes_are_killed_while_it_starts(killed, host, tmp_path):
    engine = RemoteEngine(write_tiny_model(tmp_path, "llama", **SHAPE), actor=host)
    [worker] = engine.process_ids()
    starting = engine.actor.call.remote("initialize")

    def children():
        return {name_of(child)[: len(killed)]: child for child in psutil.Process(worker).children(recursive=True)}

    while "sglang::scheduler" not in children():
        time.sleep(0.01)
    children()[killed].kill()
    ray.get(starting, timeout=PATIENCE_S)
    assert [answer.error for answer in engine.generate(requests(2, 4))] == [None, None]
    [event] = [json.loads(line) for line in (tmp_path / EVENTS_FILE).read_text().splitlines()]
    assert event["event"] == "start failed" and "one of its processes was killed by SIGKILL" in event["message"]
    engine.close()


def test_a_model_that_cannot_be_loaded_is_an_error_at_once(host, tmp_path):
    engine = RemoteEngine(write_tiny_model(tmp_path, "llama", **SHAPE), actor=host)
    for weights in tmp_path.glob("*.safetensors"):
        weights.write_bytes(b"")
    with pytest.raises(ray.exceptions.RayTaskError, match=r"did not start: Rank 0 scheduler died .*code: [01]\)"):
        engine.initialize()
    assert not (tmp_path / EVENTS_FILE).exists()
    engine.close()


def test_the_death_of_an_engine_names_the_exception_that_ended_it(on_ray, tmp_path):
    engine = RemoteEngine(write_tiny_model(tmp_path, "llama", **SHAPE), attention_backend="triton")
    ray.get(engine.actor.print_to_log.remote())
    named = r"process \d+ of the engine died.*; its log is .*, whose last exception is RuntimeError: 0 active drivers"
    with pytest.raises(ray.exceptions.RayTaskError, match=named):
        engine.initialize()  # triton has no kernels for a CPU
    ray.kill(engine.actor)


def test_an_engine_over_two_devices_from_dummy_weights_to_its_end(update, tmp_path_factory):
    """The engine finds its port taken, refuses to serve dummy weights and gets real ones; then it is killed."""
    folder = write_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", **SHAPE)
    model = load(folder)
    engine = RemoteEngine(folder, tensor_parallel=2, load_format="dummy")
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", free_port(preferred_port(engine.process_ids()[0]))))
        holder.listen()
        engine.initialize()
    asked = requests(4, 16, 0.7)
    with pytest.raises(ray.exceptions.RayTaskError, match="is not serving: it started on dummy weights"):
        engine.generate(asked)
    assert engine.checksums() != expected_checksums(model, folder, 2)
    update(engine, model, 1, ranks=2)
    engine.flush_cache()
    assert engine.checksums() == expected_checksums(model, folder, 2)
    assert largest_difference(model, asked, engine.generate(asked)) < TOLERANCE

    processes = [psutil.Process(pid) for pid in engine.process_ids()]
    assert len(processes) == 3
    sockets = [each for process in processes for each in process.net_connections("inet")]
    listening = {each.laddr.ip.removeprefix("::ffff:") for each in sockets if each.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}, "ports that other machines reach"
    shared = engine.shared_files()
    assert shared and all(path.is_file() for path in shared)
    schedulers = engine.scheduler_ids()
    assert len(schedulers) == 2
    for helper in (process for process in processes[1:] if process.pid not in schedulers):
        helper.kill()  # such as torch's compiler, whose processes end when they are idle
    time.sleep(2 * WATCH_INTERVAL_S)
    assert largest_difference(model, asked, engine.generate(asked)) < TOLERANCE
    pending = engine.start_generate(requests(2, 1900))
    psutil.Process(schedulers[0]).kill()
    with pytest.raises(
        ray.exceptions.RayTaskError, match=r"of the engine died, killed by SIGKILL.*; its log is .*logs"
    ):
        ray.get(pending, timeout=PATIENCE_S)

    engine.close()
    assert not any(path.exists() for path in shared)
    ray.kill(engine.actor)
    _, alive = psutil.wait_procs(processes, timeout=120)
    assert alive == []
