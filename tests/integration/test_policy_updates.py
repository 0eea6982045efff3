"""Policy updates through Megatron: each `pg_variant` gives its own gradient, which is that of its formula in torch."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.configs.devices.parallel_layout import ParallelLayout
from roll.configs.pipeline import RLVRConfig
from roll.configs.roles import ActorTrainConfig
from roll.datasets.collate import sampling_masks
from roll.models.tiny import write_tiny_model
from tests.integration.megatron_scenario import PROMPT, SAMPLES, WIDTH, token_batch
from tests.integration.policy_scenario import RATE
from tests.integration.rank_pool import RankPool

pytestmark = pytest.mark.integration

TEMPERATURE = 0.7
LAYOUTS = {
    "tp2 with sequence parallel": ParallelLayout(tensor=2),
    "pp2 x dp2": ParallelLayout(pipeline=2, data=2),
}
TOLERANCE = 1e-4
"""Relative to the norm of the gradient, since fp32 sums differ by their order."""

Tensors = dict[str, torch.Tensor]


def variant_losses(log_probs: torch.Tensor, batch: Tensors) -> Tensors:
    """The loss of every token [b, T] by variant, written down from the papers with the default coefficients."""
    advantages, positive = batch["advantages"], batch["scores"][:, None] > 0
    log_ratio = log_probs - batch["behavior_log_probs"]
    ratio, weight = log_ratio.exp(), log_ratio.exp().detach()
    return {
        "vanilla": -advantages * log_probs,
        "ppo": -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages),
        "tis": -weight.clamp(max=1.0) * advantages * log_probs,
        "topr": -torch.where(positive, 1.0, weight.clamp(max=1.0)) * advantages * log_probs,
        "cispo": -weight.clamp(0.9, 1.1) * advantages * log_probs,
        "kimi15": -advantages * log_probs + 0.05 * log_ratio**2,
    }


VARIANTS = ("vanilla", "ppo", "tis", "topr", "cispo", "kimi15")

TEACHERS = {
    "ppo, teacher's 8 tokens": ("reverse", 8),
    "ppo, all tokens of a teacher": ("forward", 101),
    "ppo, mixture with a teacher": ("jsd", 8),
}
"""Steps of ppo with a divergence to a teacher, and how many of its tokens."""

STEPS = (*VARIANTS, *TEACHERS)
TEACHER_COEF, JSD_BETA = 2.0, 0.3
TOP_K = 8


def left_out(batch: Tensors, vocabulary: int) -> torch.Tensor:
    """Which tokens [b, T, vocabulary] the `sampling_mask` of each position leaves out."""
    kept = torch.zeros(*batch["input_ids"].shape, vocabulary, dtype=torch.bool)
    for row, sizes in enumerate(batch["sampling_mask_sizes"].tolist()):
        lists = batch["sampling_mask"][row, : sum(sizes)].long().split(sizes)
        for column, ids in enumerate(lists):
            kept[row, column, ids] = True
    return kept.any(-1)[..., None] & ~kept


def all_log_probs_of(model: Any, batch: Tensors) -> torch.Tensor:
    """Log-probs [b, T, vocabulary] of what could be in place of a token, 0 at the first; -1e30 for left-out ones."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    logits = model(**inputs).logits[:, :-1].float() / TEMPERATURE
    log_probs = torch.log_softmax(logits.masked_fill(left_out(batch, logits.shape[-1])[:, 1:], -1e30), -1)
    return torch.nn.functional.pad(log_probs, (0, 0, 1, 0))


def log_probs_of(model: Any, batch: Tensors) -> torch.Tensor:
    """Log-prob [b, T] of every token at its own position, 0 at the first."""
    return all_log_probs_of(model, batch).gather(2, batch["input_ids"][..., None]).squeeze(2)


def divergence_to(teacher: Tensors, log_probs: torch.Tensor, divergence: str) -> torch.Tensor:
    """The divergence [b, T] over the teacher's tokens and all others together, of torch."""
    ids, known = teacher["teacher_top_ids"].long(), teacher["teacher_top_ids"] >= 0
    policy = torch.where(known, log_probs.gather(2, ids.clamp(min=0)), -1e30)
    ours, theirs = (
        torch.cat([each, (1 - each.exp().sum(-1, keepdim=True)).clamp(min=1e-6).log()], -1)
        for each in (policy, torch.where(known, teacher["teacher_top_log_probs"], -1e30))
    )

    def kl(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.kl_div(other, one, log_target=True, reduction="none").sum(-1)

    if divergence == "jsd":
        mixture = (JSD_BETA * theirs.exp() + (1 - JSD_BETA) * ours.exp()).clamp(min=1e-30).log()
        return JSD_BETA * kl(theirs, mixture) + (1 - JSD_BETA) * kl(ours, mixture)
    return kl(ours, theirs) if divergence == "reverse" else kl(theirs, ours)


def truncated(ids: torch.Tensor, vocabulary: int) -> Tensors:
    """Sampling masks of up to a quarter of the vocabulary for every other sample, the tokens themselves among them."""
    drawn = random.Random(6)
    masks = [
        [[token, *drawn.sample(range(vocabulary), drawn.randrange(vocabulary // 4))] for token in row]
        for row in ids.tolist()
    ]
    return sampling_masks([row if number % 2 else [] for number, row in enumerate(masks)], ids.shape[1])


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def model(model_folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def batch(model: Any) -> Tensors:
    """One stale batch: its responses were sampled by weights that differ from the model's."""
    batch = token_batch()
    batch |= truncated(batch["input_ids"], model.config.vocab_size)
    batch["response_mask"] = batch["attention_mask"].bool() & (torch.arange(WIDTH) >= PROMPT)
    older = perturbed(model, 0.02, seed=5)
    with torch.no_grad():
        batch["behavior_log_probs"] = log_probs_of(older, batch)
        ratio = (log_probs_of(model, batch) - batch["behavior_log_probs"]).exp()[batch["response_mask"]]
    assert ((ratio < 0.8) | (ratio > 1.2)).float().mean() > 0.3, "the batch is hardly stale"
    batch["advantages"] = torch.linspace(-1.0, 1.5, SAMPLES)[:, None].expand(SAMPLES, WIDTH).clone()
    batch["scores"] = torch.linspace(-1.0, 1.5, SAMPLES)
    return batch


def perturbed(model: Any, size: float, seed: int) -> Any:
    """A copy of the model with other weights."""
    import copy

    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return other


def most_likely(model: Any, batch: Tensors, count: int) -> Tensors:
    """The most likely tokens at each position, and their log-probs."""
    with torch.no_grad():
        top = all_log_probs_of(model, batch).topk(count)
    there = top.values > -1e20
    return {"ids": torch.where(there, top.indices, -1).int(), "log_probs": torch.where(there, top.values, 0.0)}


@pytest.fixture(scope="module")
def teachers(model: Any, batch: Tensors) -> dict[str, Tensors]:
    """The tensors of a teacher by step."""
    teacher = perturbed(model, 0.05, seed=8)
    return {
        step: {f"teacher_top_{name}": each for name, each in most_likely(teacher, batch, count).items()}
        for step, (_, count) in TEACHERS.items()
    }


@pytest.fixture(scope="module")
def expected(model: Any, batch: Tensors, teachers: dict[str, Tensors]) -> dict[str, Tensors]:
    """Gradients by step and HF name, from autograd through transformers."""
    gradients = {}
    for variant in STEPS:
        model.zero_grad()
        mask, log_probs = batch["response_mask"], all_log_probs_of(model, batch)
        picked = log_probs.gather(2, batch["input_ids"][..., None]).squeeze(2)
        losses = variant_losses(picked, batch)["ppo" if variant in TEACHERS else variant]
        if variant in TEACHERS:
            losses = losses + TEACHER_COEF * divergence_to(teachers[variant], log_probs, TEACHERS[variant][0])
        per_sample = torch.where(mask, losses, 0.0).sum(1) / mask.sum(1)
        per_sample.mean().backward()
        gradients[variant] = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return gradients


@pytest.fixture(scope="module")
def steps(
    rank_pool: RankPool,
    model_folder: Path,
    batch: Tensors,
    teachers: dict[str, Tensors],
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    """Each rank's results by layout; the layouts run side by side."""
    scenario = "tests.integration.policy_scenario:one_step_of_each_variant"
    configs = {
        variant: RLVRConfig(async_generation_ratio=1, actor_train=ActorTrainConfig(pg_variant=variant)).policy
        for variant in VARIANTS
    }
    for step, (divergence, count) in TEACHERS.items():
        teaching = {
            "opd_top_k": count,
            "opd_kl_coef": TEACHER_COEF,
            "opd_divergence": divergence,
            "opd_jsd_beta": JSD_BETA,
        }
        configs[step] = replace(configs["ppo"], **teaching)
    arguments = {"model": model_folder, "batch": batch, "loss_configs": configs, "temperature": TEMPERATURE}
    arguments |= {"teachers": teachers, "top_k": TOP_K}
    running = {
        name: rank_pool.start(scenario, layout, tmp_path_factory.mktemp("ranks"), **arguments)
        for name, layout in LAYOUTS.items()
    }
    return {name: future.result() for name, future in running.items()}


def gradient_of_step(ranks: list[dict[str, Any]], variant: str, before: Tensors) -> Tensors:
    """The gradient that the weights after the step tell; see `one_step_of_each_variant`."""
    after = {name: tensor for rank in ranks for name, tensor in rank[variant]["weights"].items()}
    assert after.keys() == before.keys()
    moved = {name: before[name] - after[name] for name in before}
    return {name: move / (RATE - move.abs()) for name, move in moved.items()}


def distance(one: Tensors, other: Tensors) -> float:
    return sum(float((one[name] - other[name]).double().square().sum()) for name in one) ** 0.5


def norm(gradient: Tensors) -> float:
    return distance(gradient, {name: torch.zeros_like(value) for name, value in gradient.items()})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", STEPS)
def test_a_policy_step_follows_the_gradient_of_its_formula(steps, expected, model, layout, variant):
    before = {name: parameter.detach() for name, parameter in model.named_parameters()}
    gradient = gradient_of_step(steps[layout], variant, before)
    size = norm(expected[variant])
    assert distance(gradient, expected[variant]) < TOLERANCE * size
    for rank in steps[layout]:
        assert rank[variant]["grad_norm"] == pytest.approx(size, rel=TOLERANCE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_variant_moves_the_weights_elsewhere(steps, model, layout):
    before = {name: parameter.detach() for name, parameter in model.named_parameters()}
    gradients = {variant: gradient_of_step(steps[layout], variant, before) for variant in STEPS}
    size = norm(gradients["vanilla"])
    for one, other in itertools.combinations(STEPS, 2):
        assert distance(gradients[one], gradients[other]) > 100 * TOLERANCE * size, (one, other)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_most_likely_tokens_are_found_over_all_ranks(steps, model, batch, layout):
    expected = most_likely(model, batch, TOP_K)
    scored = batch["response_mask"]
    found = [rank["most_likely"] for rank in steps[layout] if rank["most_likely"]]
    assert len(found) == 2, "the ranks of the last stage"
    for rank in found:
        assert torch.equal(rank["top_ids"][scored], expected["ids"][scored]) and not rank["top_ids"][~scored].any()
        torch.testing.assert_close(rank["top_log_probs"][scored], expected["log_probs"][scored], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(rank["log_probs"][scored], log_probs_of(model, batch)[scored], atol=1e-4, rtol=1e-4)
