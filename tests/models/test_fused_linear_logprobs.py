import pytest
import torch

from roll.models.fused_linear_logprobs import HeadSpec, fused_linear_logprobs


def reference(hidden, weight, targets, tokens, temperature):
    log_softmax = torch.log_softmax(hidden @ weight[:tokens].t() / temperature, dim=-1)
    picked = log_softmax.gather(1, targets[:, None]).squeeze(1)
    return picked, -(log_softmax.exp() * log_softmax).sum(-1)


def inputs(rows=7, width=8, padded=16, tokens=11):
    torch.manual_seed(0)
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = torch.randn(padded, width, requires_grad=True)
    return hidden, weight, torch.randint(0, tokens, (rows,)), tokens


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("memory", ["kept", "recomputed in chunks"])
def test_log_probs_entropies_and_gradients_match_a_full_softmax(temperature, memory, monkeypatch):
    if memory != "kept":
        monkeypatch.setattr("roll.models.fused_linear_logprobs.HEAD_KEPT_BYTES", 0)
        monkeypatch.setattr("roll.models.fused_linear_logprobs.HEAD_CHUNK_BYTES", 4 * 16 * 3)
    hidden, weight, targets, tokens = inputs()
    spec = HeadSpec(0, tokens, temperature)
    log_probs, entropy = fused_linear_logprobs(hidden, weight, targets, spec, entropy_gradient=True)
    expected, expected_entropy = reference(hidden, weight, targets, tokens, temperature)
    torch.testing.assert_close(log_probs, expected)
    torch.testing.assert_close(entropy, expected_entropy)
    weights = torch.linspace(-1, 2, len(targets))
    ours = torch.autograd.grad((weights * log_probs + weights.flip(0) * entropy).sum(), (hidden, weight))
    theirs = torch.autograd.grad((weights * expected + weights.flip(0) * expected_entropy).sum(), (hidden, weight))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_entropy_has_no_gradient_by_default():
    hidden, weight, targets, tokens = inputs()
    log_probs, entropy = fused_linear_logprobs(hidden, weight, targets, HeadSpec(0, tokens))
    assert log_probs.requires_grad and not entropy.requires_grad


def test_an_empty_selection_still_has_a_gradient():
    hidden, weight, _, tokens = inputs()
    log_probs, _ = fused_linear_logprobs(hidden[:0], weight, torch.empty(0, dtype=torch.long), HeadSpec(0, tokens))
    log_probs.sum().backward()
    assert weight.grad.abs().sum() == 0
