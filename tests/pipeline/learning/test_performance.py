from types import SimpleNamespace

import pytest
import torch
import transformers
from tensordict import TensorDict
from torch.utils.flop_counter import FlopCounterMode

from roll.models.families.shape import read_model_shape
from roll.models.tiny import write_tiny_model
from roll.pipeline.learning.performance import Performance
from roll.platforms import get_platform


@pytest.mark.parametrize(
    ("family", "changes"), [("llama", {"tie_word_embeddings": True}), ("qwen3", {"num_hidden_layers": 3})]
)
def test_operations_of_training_are_those_that_torch_counts(family, changes, tmp_path):
    """Torch computes all pairs of queries and keys, of which the mask needs half."""
    folder = write_tiny_model(tmp_path, family, **changes)
    shape = read_model_shape(folder)
    assert shape is not None
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    samples, length = 3, 40
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(0, 101, (samples, length))).logits.sum().backward()
    tokens, squares = samples * length, samples * length**2
    masked = shape.training_operations(tokens, squares, tokens) - shape.training_operations(tokens, 0, tokens)
    counted = shape.training_operations(tokens, squares, tokens) + masked
    assert counter.get_total_flops() == pytest.approx(counted, rel=1e-3)  # the rotary angles are a product too


TIMES = {"time/step": 10.0, "time/generate": 4.0, "time/old_log_probs": 1.0, "time/train": 2.0, "time/val": 1.0}
BATCH = TensorDict(
    {
        "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]),
        "response_mask": torch.tensor([[0, 0, 1, 0], [0, 1, 1, 1]]),
    },
    batch_size=[2],
)


def of_two_devices(folder, value_head=False):
    """Three devices, of which two train."""
    role = SimpleNamespace(
        device_mapping=[0, 1], value_head=value_head, model_args=SimpleNamespace(model_name_or_path=str(folder))
    )
    engine = SimpleNamespace(**vars(role) | {"device_mapping": [2]})
    return Performance({"actor_train": role, "actor_infer": engine}, read_model_shape(folder, value_head))


def test_tflops_are_those_of_the_scored_batch_and_the_training_time(tmp_path):
    folder = write_tiny_model(tmp_path, "llama")
    shape = read_model_shape(folder)
    assert shape is not None
    tflops = shape.training_operations(3 + 4, 9 + 16, 4) / 2.0 / 2 / 1e12
    found = of_two_devices(folder).metrics(BATCH, TIMES, 100.0)
    assert found == {
        "throughput/tokens_per_second": pytest.approx(7 / 10 / 3),
        "throughput/trainer_idle": pytest.approx(0.7),
        "perf/tflops_per_device": pytest.approx(tflops),
        "perf/mfu": pytest.approx(tflops / 100),
    }
    values = of_two_devices(folder, value_head=True).metrics(BATCH, TIMES, None)
    assert values["perf/tflops_per_device"] < found["perf/tflops_per_device"] and "perf/mfu" not in values


@pytest.mark.parametrize("missing", ["time/train", "model"])
def test_without_training_or_a_known_model_there_are_no_tflops(missing, tmp_path):
    folder = tmp_path if missing == "model" else write_tiny_model(tmp_path, "llama")
    times = {name: seconds for name, seconds in TIMES.items() if name != missing}
    assert set(of_two_devices(folder).metrics(BATCH, times, 100.0)) == {
        "throughput/tokens_per_second",
        "throughput/trainer_idle",
    }


def test_the_peak_is_that_of_a_known_gpu_in_half_precision(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert get_platform("cuda").peak_tflops("bf16") == 989.0
    assert get_platform("cuda").peak_tflops("fp32") is None and get_platform("cpu").peak_tflops("bf16") is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    assert get_platform("cuda").peak_tflops("bf16") is None
