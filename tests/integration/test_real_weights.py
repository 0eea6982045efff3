"""SmolLM2-135M on real text: transformers, Megatron at three layouts, SGLang and the fused decoder agree."""

from __future__ import annotations

import shutil

import pytest
import ray
import torch
from sglang_host import EngineHost, RemoteEngine, largest_difference, start_host

from examples.smollm2_135m.weights import gguf_weights
from roll.configs.devices.parallel_layout import ParallelLayout
from roll.configs.pipeline import BaseConfig
from roll.distributed.ray_session import start_ray, stop_ray
from roll.hub.names import HubError, converted_folder
from roll.models.gguf_files import convert_gguf
from roll.platforms.cpu.decoder import DecoderSizes, DecoderTensors
from roll.rollout.types import GenerateRequest, SamplingParams
from tests.integration.real_weights_scenario import sequences, token_batch
from tests.integration.test_megatron_strategy import tensors_of
from tests.platforms import test_cpu_decoder as decoder

pytestmark = [pytest.mark.integration, pytest.mark.slow]

LAYOUTS = {"tp1": ParallelLayout(), "tp3": ParallelLayout(tensor=3), "pp2": ParallelLayout(pipeline=2)}
FP32 = 1e-4
"""Largest difference of a log-prob in fp32; measured: 5.2e-5."""

BF16 = {0.5: 0.03, 0.99: 0.4, 1.0: 0.8}
"""Bound of each quantile of the differences in bf16: 1.5 to 2 times the largest of all pairs measured."""

SIZES, HEAD_DIM = DecoderSizes(hidden=576, heads=9, key_heads=3, intermediate=1536, layers=30), 64
TENSOR = "model.layers.15.self_attn.v_proj.weight"
ADAM_STEP = 1e-5
TEMPERATURE, SAMPLED = 0.8, 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model as a Hugging Face folder, whose large files are links to the cache."""
    try:
        file = gguf_weights()
    except HubError as error:
        pytest.skip(str(error))
    convert_gguf(file, weights=True)
    folder = tmp_path_factory.mktemp("smollm2")
    for path in converted_folder(file).iterdir():
        (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="module")
def rows(folder):
    return sequences(folder)


@pytest.fixture(scope="module")
def scored(rows):
    """Tokens that have a log-prob [B, T]."""
    mask = token_batch(rows)["attention_mask"].bool()
    mask[:, 0] = False
    return mask


@pytest.fixture(scope="module")
def model(folder):
    """The model of transformers by dtype."""
    from transformers import AutoModelForCausalLM

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    return {name: AutoModelForCausalLM.from_pretrained(folder, dtype=dtype) for name, dtype in dtypes.items()}


@pytest.fixture(scope="module")
def score(model, rows):
    """Log-probs [N] of transformers as it is now."""
    batch = token_batch(rows)

    @torch.no_grad()
    def score(dtype: str, temperature: float = 1.0) -> torch.Tensor:
        found = torch.log_softmax(model[dtype](**batch).logits[:, :-1].float() / temperature, -1)
        return found.gather(2, batch["input_ids"][:, 1:, None])[..., 0][batch["attention_mask"][:, 1:].bool()]

    return score


@pytest.fixture(scope="module")
def right(score):
    """Log-probs [N] of transformers by dtype."""
    return {dtype: score(dtype) for dtype in ("fp32", "bf16")}


@pytest.fixture(scope="module")
def megatron(folder, rows, scored, rank_pool, tmp_path_factory):
    """By layout: log-probs [N] by dtype, and the exported tensors."""
    root = tmp_path_factory.mktemp("exported")
    scenario = "tests.integration.real_weights_scenario:score_and_export"
    runs = {
        name: rank_pool.start(scenario, layout, root / name, model=folder, rows=rows)
        for name, layout in LAYOUTS.items()
    }
    found = {}
    for name, run in runs.items():
        last = run.result()[-1]
        found[name] = {dtype: last[dtype][scored] for dtype in ("fp32", "bf16")}
        found[name]["exported"] = tensors_of(root / name / "exported")
    rank_pool.free_memory()
    shutil.rmtree(root)
    return found


@pytest.fixture(scope="module")
def engines(megatron, folder, rows, tmp_path_factory):
    """By dtype: log-probs [N] of the texts; by "sampled" and dtype: requests and their answers."""
    start_ray(BaseConfig(output_dir=str(tmp_path_factory.mktemp("run"))), "cpu", num_devices=2)
    found, host = {}, start_host(EngineHost)
    sampling = SamplingParams(SAMPLED, TEMPERATURE)
    asked = [GenerateRequest(f"r{i}", row[: 40 + 8 * i], sampling, seed=i) for i, row in enumerate(rows)]
    for dtype in ("fp32", "bf16"):
        engine = RemoteEngine(folder, actor=host, dtype=dtype)
        engine.initialize()
        found[dtype] = torch.tensor([value for row in engine.score(rows) for value in row])
        found[f"sampled {dtype}"] = asked, engine.generate(asked)
        engine.close()
    ray.kill(host)
    yield found
    stop_ray()


def exceeded(differences: torch.Tensor) -> list[float]:
    """The quantiles that exceed their bound in bf16."""
    return [share for share, bound in BF16.items() if differences.abs().quantile(share) > bound]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_megatron_agrees_with_transformers_in_fp32(megatron, right, layout):
    assert (megatron[layout]["fp32"] - right["fp32"]).abs().max() < FP32


def test_an_engine_agrees_with_transformers_in_fp32_on_text_and_on_what_it_samples(engines, model, right):
    assert (engines["fp32"] - right["fp32"]).abs().max() < FP32
    assert largest_difference(model["fp32"], *engines["sampled fp32"]) < FP32


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_pairs_agree_in_bf16(megatron, engines, right, layout):
    ours, engine = megatron[layout]["bf16"], engines["bf16"]
    assert [exceeded(each) for each in (ours - right["bf16"], engine - right["bf16"], ours - engine)] == [[], [], []]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_exported_tensors_are_those_of_the_folder_bit_for_bit(megatron, folder, layout):
    original, exported = tensors_of(folder), megatron[layout]["exported"]
    assert len(original) == 272 and original.keys() == exported.keys()
    assert all(torch.equal(original[name], exported[name]) for name in original)


@pytest.fixture
def wrong(model, score):
    """Log-probs [N] of a wrong model in transformers, by its fault and dtype."""

    def faulty(dtype: str, fault: str) -> torch.Tensor:
        whole = model[dtype]
        rotary, tensor = whole.model.rotary_emb.inv_freq, whole.get_parameter(TENSOR).data
        kept = rotary.clone(), tensor.clone()
        if fault == "rope base":
            rotary.copy_(50_000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))  # it is 100,000
        if fault == "tensor of the layer before":
            tensor.copy_(whole.get_parameter(TENSOR.replace("15", "14")))
        if fault == "tensor off by 30 %":
            tensor.add_(0.3 * tensor.std() * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)))
        if fault == "tensor stale by one step":
            tensor.add_(ADAM_STEP * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)).sign())
        found = score(dtype, temperature=1.05 if fault == "temperature" else 1.0)
        rotary.copy_(kept[0])
        tensor.copy_(kept[1])
        return found

    return faulty


@pytest.mark.parametrize("fault", ["temperature", "rope base", "tensor of the layer before", "tensor off by 30 %"])
def test_wrong_models_exceed_the_bounds_of_bf16(wrong, megatron, engines, fault):
    others = [*(each["bf16"] for each in megatron.values()), engines["bf16"]]
    found = wrong("bf16", fault)
    assert all(exceeded(found - each) for each in others)


def test_one_tensor_that_missed_one_step_exceeds_the_bound_of_fp32(wrong, megatron, engines):
    found = wrong("fp32", "tensor stale by one step")
    assert all((found - each).abs().max() > FP32 for each in (megatron["tp1"]["fp32"], engines["fp32"]))


def test_thirty_layers_in_one_call_agree_with_operators(folder, rows, right):
    weights = tensors_of(folder)
    tensors = decoder_tensors(weights)
    engine, found = decoder.Engine(SIZES, HEAD_DIM, tensors), []
    ids = [torch.tensor(row) for row in rows]
    places = list(range(len(ids)))
    prefilled = engine.forward([each[:-1] for each in ids], places, [0] * len(ids))
    decoded = engine.forward([each[-1:] for each in ids], places, [len(each) - 1 for each in ids])
    for row, *parts in zip(ids, prefilled, decoded, strict=True):
        hidden, operators = torch.cat(parts), decoder.reference(tensors, SIZES, HEAD_DIM, row)
        torch.testing.assert_close(hidden, operators, atol=1e-3, rtol=1e-4)
        log_probs = torch.log_softmax(hidden[:-1] @ tensors.embedding.T, -1)
        found.append(log_probs.gather(1, row[1:, None])[:, 0])
    assert (torch.cat(found) - right["fp32"]).abs().max() < FP32


def decoder_tensors(weights: dict[str, torch.Tensor]) -> DecoderTensors:
    def layer(number: int) -> list[torch.Tensor | None]:
        def part(*names: str) -> torch.Tensor:
            return torch.cat([weights[f"model.layers.{number}.{name}.weight"] for name in names])

        qkv, gate_up = part(*(f"self_attn.{name}_proj" for name in "qkv")), part("mlp.gate_proj", "mlp.up_proj")
        norms = part("input_layernorm"), part("post_attention_layernorm")
        out, down = part("self_attn.o_proj"), part("mlp.down_proj")
        return [norms[0], qkv, None, None, None, out, None, norms[1], gate_up, down]

    angles = torch.arange(decoder.POSITIONS)[:, None] * 100_000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    caches = [[torch.zeros(decoder.SLOTS, SIZES.key_heads, HEAD_DIM) for _ in range(SIZES.layers)] for _ in range(2)]
    return DecoderTensors(
        weights["model.embed_tokens.weight"],
        torch.cat([angles.cos(), angles.sin()], dim=1),
        weights["model.norm.weight"],
        [layer(number) for number in range(SIZES.layers)],
        *caches,
    )
