"""The divergence to a teacher over its most likely tokens, and as a term of the policy loss."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from roll.algorithms.aggregation import LossScale
from roll.algorithms.distillation import POLICY_TOP_LOG_PROBS, TEACHER_TOP_IDS, TEACHER_TOP_LOG_PROBS, top_k_divergence
from roll.algorithms.losses import LOSSES
from roll.algorithms.options.policy_options import PolicySettings
from tests.algorithms.batches import SPLITS, check_split, pad, random_batch

VOCABULARY, K = 7, 3
DIVERGENCES = ("reverse", "forward", "jsd")
BETAS = (0.1, 0.5, 0.9)


def distributions(*shape, seed=0):
    """Log-probs of a policy and of a teacher over the whole vocabulary, [*shape, VOCABULARY] float64."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(2, *shape, VOCABULARY, generator=generator, dtype=torch.float64)
    return logits.log_softmax(-1).unbind(0)


def merged(log_probs, ids):
    """Log-probs of the tokens `ids` and of all others together, written down with a softmax."""
    return torch.cat([log_probs.gather(-1, ids), (1 - log_probs.exp().gather(-1, ids).sum(-1, keepdim=True)).log()], -1)


def of_torch(ours, theirs, divergence, beta=0.5):
    """The divergence [...] of two log-distributions [..., n]: GKD's formulas with the KL divergence of torch."""

    def kl(one, other):
        return F.kl_div(other, one, log_target=True, reduction="none").sum(-1)

    if divergence == "jsd":
        mixture = (beta * theirs.exp() + (1 - beta) * ours.exp()).log()
        return beta * kl(theirs, mixture) + (1 - beta) * kl(ours, mixture)
    return kl(ours, theirs) if divergence == "reverse" else kl(theirs, ours)


def everywhere(ids):
    return torch.ones_like(ids, dtype=torch.bool)


@pytest.mark.parametrize(
    ("divergence", "beta"), [("reverse", 0.5), ("forward", 0.5), *(("jsd", beta) for beta in (*BETAS, 0.25))]
)
@pytest.mark.parametrize("count", [1, K, VOCABULARY])
def test_it_is_the_divergence_of_torch_with_its_gradient(divergence, beta, count):
    policy, teacher = distributions(5)
    ids, logits = teacher.topk(count).indices, policy.clone().requires_grad_()
    ours, theirs = logits.log_softmax(-1), logits.log_softmax(-1)
    found = top_k_divergence(ours.gather(-1, ids), teacher.gather(-1, ids), everywhere(ids), divergence, beta)
    one, other = (theirs, teacher) if count == VOCABULARY else (merged(theirs, ids), merged(teacher, ids))
    expected = of_torch(one, other, divergence, beta)
    torch.testing.assert_close(found, expected)
    weights = torch.linspace(1, 2, 5, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((found * weights).sum(), logits)
    torch.testing.assert_close(gradient, torch.autograd.grad((expected * weights).sum(), logits)[0])


def with_gradient(divergence, beta=0.5, scale=1.0):
    """`scale` times the divergence of all positions, and its gradient in the logits of the policy."""
    policy, teacher = distributions(20)
    ids, logits = teacher.topk(K).indices, policy.clone().requires_grad_()
    of_ids = logits.log_softmax(-1).gather(-1, ids)
    found = scale * top_k_divergence(of_ids, teacher.gather(-1, ids), everywhere(ids), divergence, beta)
    return found.detach(), torch.autograd.grad(found.sum(), logits)[0]


@pytest.mark.parametrize(("beta", "limit"), [(1e-8, "forward"), (1 - 1e-8, "reverse")])
def test_at_either_end_of_beta_jsd_over_the_smaller_weight_is_a_kl_divergence(beta, limit):
    scaled, expected = with_gradient("jsd", beta, 1 / min(beta, 1 - beta)), with_gradient(limit)
    torch.testing.assert_close(scaled, expected, rtol=1e-3, atol=1e-4)
    other = with_gradient("reverse" if limit == "forward" else "forward")
    assert not torch.allclose(scaled[0], other[0], rtol=0.1) and not torch.allclose(scaled[1], other[1], rtol=0.1)


@pytest.mark.parametrize("beta", BETAS)
def test_jsd_exchanges_policy_and_teacher_with_the_weights_and_is_bounded(beta):
    policy, teacher = distributions(50)
    ids = torch.arange(VOCABULARY).expand(50, VOCABULARY)
    one = top_k_divergence(policy, teacher, everywhere(ids), "jsd", beta)
    torch.testing.assert_close(one, top_k_divergence(teacher, policy, everywhere(ids), "jsd", 1 - beta))
    apart = torch.tensor([[0.0, -80.0], [-80.0, 0.0]], dtype=torch.float64)
    largest = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
    assert (one >= 0).all() and (one <= largest).all()
    found = top_k_divergence(apart, apart.flip(0), everywhere(apart), "jsd", beta)
    assert found.tolist() == pytest.approx([largest] * 2, abs=1e-4)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_it_grows_with_k_up_to_the_divergence_over_all_tokens_and_is_0_for_equal_ones(divergence):
    policy, teacher = distributions(50)
    order = teacher.argsort(descending=True)
    found = [
        top_k_divergence(policy.gather(-1, ids), teacher.gather(-1, ids), everywhere(ids), divergence)
        for ids in (order[:, :count] for count in range(1, VOCABULARY + 1))
    ]
    assert all((more >= fewer - 1e-5).all() for fewer, more in zip(found[:-1], found[1:], strict=True))
    equal = top_k_divergence(teacher.gather(-1, order), teacher.gather(-1, order), everywhere(order), divergence)
    assert equal.abs().max() <= (1e-12 if divergence == "jsd" else 0)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_places_without_a_token_do_not_count_whatever_they_hold(divergence):
    policy, teacher = distributions(4)
    ids = teacher.topk(K).indices
    expected = top_k_divergence(policy.gather(-1, ids), teacher.gather(-1, ids), everywhere(ids), divergence)
    more = [F.pad(log_probs.gather(-1, ids), (0, 2), value=-3e38) for log_probs in (policy, teacher)]
    more[0].requires_grad_()
    found = top_k_divergence(*more, F.pad(everywhere(ids), (0, 2)), divergence)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert more[0].grad.isfinite().all() and (more[0].grad[:, K:] == 0).all()


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_in_fp32_certain_distributions_have_a_finite_divergence_and_gradient(divergence):
    logits = torch.tensor([[80.0, 0, 0, 0], [0, 80.0, 0, 0], [80.0, 0, 0, 0]], requires_grad=True)
    teacher = torch.tensor([[0.0, 80, 0, 0], [0, 80.0, 0, 0], [0, 0, 0, 0]]).log_softmax(-1)
    ids = teacher.topk(2).indices
    found = top_k_divergence(
        logits.log_softmax(-1).gather(-1, ids), teacher.gather(-1, ids), everywhere(ids), divergence
    )
    found.sum().backward()
    assert found.isfinite().all() and logits.grad.isfinite().all() and found[1].abs() < 1e-6


CONFIG = PolicySettings(pg_variant="ppo", opd_top_k=K, opd_kl_coef=0.5)
CONFIGS = {
    "reverse": CONFIG,
    "forward": replace(CONFIG, opd_divergence="forward"),
    "jsd": replace(CONFIG, opd_divergence="jsd", opd_jsd_beta=0.2),
    "token mean": replace(CONFIG, loss_agg_mode="token-mean"),
}


def with_teacher(batch):
    samples, tokens = batch["response_mask"].shape
    policy, teacher = distributions(samples, tokens)
    top = teacher.topk(K)
    tensors = {TEACHER_TOP_IDS: top.indices.int(), TEACHER_TOP_LOG_PROBS: top.values}
    return batch | tensors | {POLICY_TOP_LOG_PROBS: policy.gather(-1, top.indices)}


def policy_loss(batch, config, scale):
    leaves = {name: batch[name].clone().requires_grad_() for name in ("log_probs", POLICY_TOP_LOG_PROBS)}
    loss, metrics = LOSSES["policy"](leaves["log_probs"], None, batch | leaves, scale, config)
    loss.backward()
    return loss.item(), *(leaf.grad for leaf in leaves.values()), {name: each.item() for name, each in metrics.items()}


def widened(batch, columns):
    """As `pad`, with the tokens of the teacher padded too."""
    wide = {name: tensor for name, tensor in batch.items() if tensor.dim() == 3}
    narrow = pad({name: tensor for name, tensor in batch.items() if tensor.dim() < 3}, columns)
    return narrow | {name: F.pad(tensor, (0, 0, 0, columns)) for name, tensor in wide.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_policy_loss_adds_the_divergence_of_the_response_tokens(name):
    batch, config = with_teacher(random_batch()), CONFIGS[name]
    mask, scale = batch["response_mask"], LossScale.of(batch["response_mask"], 16)
    plain, *plain_gradients, _ = policy_loss(batch, replace(config, opd_top_k=None), scale)
    loss, *gradients, metrics = policy_loss(batch, config, scale)
    ids = batch[TEACHER_TOP_IDS]
    each = top_k_divergence(
        batch[POLICY_TOP_LOG_PROBS],
        batch[TEACHER_TOP_LOG_PROBS],
        everywhere(ids),
        config.opd_divergence,
        config.opd_jsd_beta,
    )
    if name == "jsd":
        standard = replace(config, opd_jsd_beta=0.5)
        assert metrics["opd_loss"] < 0.9 * policy_loss(batch, standard, scale)[-1]["opd_loss"]
    total = (each * mask).sum(-1)
    expected = total.sum() / mask.sum() if name == "token mean" else (total / mask.sum(-1)).mean()
    assert metrics["opd_loss"] == pytest.approx(expected.item())
    assert loss == pytest.approx(plain + 0.5 * expected.item())
    assert torch.equal(gradients[0], plain_gradients[0]) and plain_gradients[1] is None
    assert (gradients[1][~mask] == 0).all() and gradients[1][mask].abs().min() > 0
    mass = batch[TEACHER_TOP_LOG_PROBS].exp().sum(-1)[mask].mean().item()
    assert metrics["teacher_top_k_mass"] == pytest.approx(mass)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("padding", [0, 5])
def test_the_gradient_does_not_depend_on_how_the_batch_is_split_or_padded(name, split, padding):
    batch, config = with_teacher(random_batch()), CONFIGS[name]
    scale = LossScale.of(batch["response_mask"], 16)
    check_split(lambda part: policy_loss(part, config, scale), batch, split, padding, widened)


def test_without_advantages_the_loss_is_the_divergence_alone():
    batch = with_teacher(random_batch())
    batch["advantages"] = torch.zeros_like(batch["advantages"])
    scale = LossScale.of(batch["response_mask"], 16)
    loss, *gradients, metrics = policy_loss(batch, CONFIG, scale)
    assert loss == pytest.approx(0.5 * metrics["opd_loss"]) and (gradients[0] == 0).all()
