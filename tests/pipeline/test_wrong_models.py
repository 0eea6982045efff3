"""The default bounds in fp32 pass a model that is computed in another way, and find one that is a little wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.base.errors import RunError
from roll.configs.pipeline import RLVRConfig
from roll.models.tiny import write_tiny_model
from roll.pipeline.learning.logprob_checks import TokenLogProbs, check_engines
from tests.configs.samples import rlvr

pytestmark = pytest.mark.slow

PROMPTS, TOKENS = 8, 16
VOCABULARY = 101


@dataclass
class Compared:
    """A model in fp32, and the log-probs of tokens that it has sampled."""

    model: Any
    config: RLVRConfig
    ids: torch.Tensor
    right: TokenLogProbs

    def check(self, engine: torch.Tensor) -> None:
        check_engines({"engine 0": replace(self.right, engine=engine)}, self.config)


@torch.no_grad()
def scores(model: Any, ids: torch.Tensor, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of the last TOKENS of `ids`, which are as long as their rows number."""
    found = []
    for row, sequence in enumerate(ids):
        used = sequence[: 8 * (row + 1) + TOKENS]
        logits = model(used[None]).logits[0, -TOKENS - 1 : -1] / temperature
        log_probs = logits.double().log_softmax(-1)
        found.append((log_probs.gather(-1, used[-TOKENS:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)))
    log_probs, entropy = (torch.stack(each).flatten() for each in zip(*found, strict=True))
    return log_probs, entropy


@pytest.fixture(scope="module", params=[2, 30])
def compared(request, tmp_path_factory) -> Compared:
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(
        folder, "llama", num_hidden_layers=request.param, rope_parameters={"rope_theta": 1e5, "rope_type": "default"}
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        ids = torch.randint(0, VOCABULARY, (PROMPTS, 8 * PROMPTS + TOKENS))
        for row in range(PROMPTS):  # what is sampled continues a prompt
            prompt = ids[row, : 8 * (row + 1)][None]
            new = model.generate(prompt, do_sample=True, top_k=0, min_new_tokens=TOKENS, max_new_tokens=TOKENS)
            ids[row, : new.shape[1]] = new[0]
    config = rlvr(
        Path(folder), f"pretrain={folder}", "platform=cpu", "prompt_length=64", "response_length=16",
        "actor_train.model_args.dtype=fp32", "actor_infer.model_args.dtype=fp32",
    )  # fmt: skip
    log_probs, entropy = scores(model, ids)
    positions = torch.cat([torch.arange(TOKENS) + 8 * (row + 1) for row in range(PROMPTS)])
    return Compared(model, config, ids, TokenLogProbs(log_probs, log_probs, entropy, positions))


def test_a_right_model_passes_with_three_times_the_room(compared):
    from transformers import AutoModelForCausalLM

    exact = AutoModelForCausalLM.from_pretrained(compared.model.name_or_path, dtype=torch.float64)
    apart = scores(exact, compared.ids)[0] - compared.right.trainer
    compared.check(compared.right.trainer + 3 * apart)


@pytest.mark.parametrize("factor", [0.95, 1.05])
def test_another_temperature_is_named(compared, factor):
    with pytest.raises(RunError, match=f"as at {factor:g}\\d* times the trainer's temperature"):
        compared.check(scores(compared.model, compared.ids, factor)[0])


def test_another_rope_base_is_found_and_named(compared):
    from transformers import AutoConfig, AutoModelForCausalLM

    path = compared.model.name_or_path
    config = AutoConfig.from_pretrained(path)
    config.rope_parameters["rope_theta"] = 1e4
    other = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32)
    with pytest.raises(RunError, match="weights, config.json and dtype|rope_theta"):
        compared.check(scores(other, compared.ids)[0])


def middle(model: Any) -> Any:
    return model.model.layers[len(model.model.layers) // 2]


def noisy(name: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        weight = middle(model).get_parameter(name)
        weight.mul_(1 + 0.03 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(4)))

    return change


def swap_query_and_key(model: Any) -> None:
    attention = middle(model).self_attn
    query, key = attention.q_proj.weight, attention.k_proj.weight
    query[:2], key[:2] = key[:2].clone(), query[:2].clone()


def other_epsilons(model: Any) -> None:
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = layer.post_attention_layernorm.variance_epsilon = 1e-5


FAULTS = {
    "query": noisy("self_attn.q_proj.weight"),
    "key": noisy("self_attn.k_proj.weight"),
    "output": noisy("self_attn.o_proj.weight"),
    "down": noisy("mlp.down_proj.weight"),
    "norm": noisy("input_layernorm.weight"),
    "rows": swap_query_and_key,
    "epsilons": other_epsilons,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_wrong_tensor_or_setting_is_found(compared, fault):
    wrong = copy.deepcopy(compared.model)
    with torch.no_grad():
        FAULTS[fault](wrong)
    with pytest.raises(RunError, match="engine 0 and trainer disagree .* more than mean_logprob_mismatch"):
        compared.check(scores(wrong, compared.ids)[0])
