import weakref

import pytest
import torch
import torch._dynamo

import roll.models.fused_linear_logprobs as fused_linear_logprobs_module
from roll.models.fused_linear_logprobs import HeadSpec, fused_linear_logprobs, top_log_probs


def reference(hidden, weight, targets, tokens, temperature):
    log_softmax = torch.log_softmax(hidden @ weight[:tokens].t() / temperature, dim=-1)
    picked = log_softmax.gather(1, targets[:, None]).squeeze(1)
    return picked, -(log_softmax.exp() * log_softmax).sum(-1)


def inputs(rows=7, width=8, padded=16, tokens=11):
    torch.manual_seed(0)
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = torch.randn(padded, width, requires_grad=True)
    return hidden, weight, torch.randint(0, tokens, (rows,)), tokens


def in_chunks(monkeypatch):
    monkeypatch.setattr("roll.models.fused_linear_logprobs.HEAD_KEPT_BYTES", 0)
    monkeypatch.setattr("roll.models.fused_linear_logprobs.HEAD_CHUNK_BYTES", {"cpu": 4 * 16 * 3})


def truncated_log_softmax(hidden, weight, mask, targets, tokens):
    """Log-probs [N, tokens] over the ids of `mask` and the target where it has any, else over all."""
    left_out = torch.zeros(len(targets), tokens, dtype=torch.bool)
    for row, kept in enumerate([] if mask is None else mask.tolist()):
        ids = [token for token in kept if token >= 0]
        left_out[row, list(set(range(tokens)) - {*ids, int(targets[row])}) if ids else []] = True
    return (hidden @ weight[:tokens].t() / 0.7).masked_fill(left_out, -1e30).log_softmax(-1)


MASKS = {"all tokens": None, "truncated": torch.tensor([[0, 3, 5], [-1, -1, -1], [1, -1, -1]] * 2 + [[9, 10, 2]])}


@pytest.mark.parametrize("memory", ["kept", "recomputed in chunks"])
@pytest.mark.parametrize("sampled_from", MASKS)
def test_log_probs_entropies_squares_and_gradients_match_a_full_softmax(memory, sampled_from, monkeypatch):
    """Rows without a mask are over all tokens; the target counts even where the mask lacks it."""
    if memory != "kept":
        in_chunks(monkeypatch)
    hidden, weight, targets, tokens = inputs()
    mask = MASKS[sampled_from]
    if mask is not None:
        mask = torch.cat([mask[:-1], torch.tensor([[int(targets[-1]), -1, -1]])])
    spec = HeadSpec(0, tokens, 0.7)
    log_probs, entropy, squares = fused_linear_logprobs(
        hidden, weight, targets, spec, entropy_gradient=True, sum_pi_squared=True, kept=mask
    )
    log_softmax = truncated_log_softmax(hidden, weight, mask, targets, tokens)
    expected = log_softmax.gather(1, targets[:, None]).squeeze(1)
    expected_entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    torch.testing.assert_close(log_probs, expected)
    torch.testing.assert_close(entropy, expected_entropy)
    torch.testing.assert_close(squares, log_softmax.exp().square().sum(-1).detach())
    assert mask is None or log_probs[-1].item() == entropy[-1].item() == 0, "the target alone is sampled from"
    weights = torch.linspace(-1, 2, len(targets))
    ours = torch.autograd.grad((weights * log_probs + weights.flip(0) * entropy).sum(), (hidden, weight))
    theirs = torch.autograd.grad((weights * expected + weights.flip(0) * expected_entropy).sum(), (hidden, weight))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    plain = fused_linear_logprobs(hidden, weight, targets, spec, kept=mask)
    assert torch.equal(log_probs, plain[0]) and torch.equal(entropy, plain[1])


def half_precision_kernel(one, other, out_dtype, out=None):
    """torch.mm of a GPU: products of half-precision numbers summed in fp32."""
    assert one.dtype == other.dtype == torch.bfloat16 and out_dtype == torch.float32
    return torch.matmul(one.float(), other.float(), out=out)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_in_half_precision_many_chunks_lose_no_digits(device, monkeypatch):
    """The error of the weights' gradient over 64 chunks is that of rounding it once; in bf16 sums it is 1 %."""
    module = "roll.models.fused_linear_logprobs"
    monkeypatch.setattr(f"{module}.HEAD_CHUNK_BYTES", {"cpu": 4 * 512 * 8})
    if device == "gpu":
        monkeypatch.setattr(f"{module}._multiplied", lambda matrix: matrix)
        monkeypatch.setattr(f"{module}.PRODUCT_ROWS", 100)
        monkeypatch.setattr(torch, "mm", half_precision_kernel)
    hidden, weight, targets, tokens = inputs(rows=512, width=64, padded=512, tokens=500)
    hidden, weight = (each.detach().bfloat16().requires_grad_() for each in (hidden, weight))
    exact = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    log_probs, _ = fused_linear_logprobs(hidden, weight, targets, HeadSpec(0, tokens))
    expected, _ = reference(*exact, targets, tokens, 1.0)
    torch.testing.assert_close(log_probs.double(), expected, atol=1e-4, rtol=1e-5)
    ours = torch.autograd.grad(log_probs.sum(), (hidden, weight))
    theirs = torch.autograd.grad(expected.sum(), exact)
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.double() - other).norm() < 3e-3 * other.norm()


def test_a_cpu_with_amx_rounds_nothing_but_gradients_of_logits(monkeypatch):
    """What oneDNN multiplies in bf16 was bf16 before; its setting is as it was afterwards."""
    monkeypatch.setattr(fused_linear_logprobs_module, "_has_amx", lambda: True)
    hidden, weight, targets, tokens = inputs(rows=64, width=64, padded=640, tokens=600)
    hidden, weight = (each.detach().bfloat16().requires_grad_() for each in (hidden, weight))
    exact = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    log_probs, entropy = fused_linear_logprobs(hidden, weight, targets, HeadSpec(0, tokens))
    expected, expected_entropy = reference(*exact, targets, tokens, 1.0)
    torch.testing.assert_close(log_probs.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy.detach(), atol=1e-5, rtol=1e-5)
    ours, theirs = torch.autograd.grad(log_probs.sum(), (hidden, weight)), torch.autograd.grad(expected.sum(), exact)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.double() - other).norm() < 4e-3 * other.norm()
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"


@pytest.mark.parametrize("entropy_gradient", [True, False])
def test_what_a_gpu_compiles_is_one_graph_with_equal_results(entropy_gradient):
    """Traced without a compiler: where the graph broke, the logits would be read once for each part."""
    torch.manual_seed(0)
    logits, (highest, entropy, of_all, of_entropy) = 20 * torch.randn(5, 33), torch.randn(4, 5)
    last = of_entropy if entropy_gradient else None
    for function, arguments in (
        (fused_linear_logprobs_module._softmax_sums, (highest, entropy_gradient)),
        (fused_linear_logprobs_module._softmax_gradient, (highest + 60, entropy, of_all, last, torch.bfloat16)),
    ):
        traced = torch._dynamo.optimize("eager", nopython=True, dynamic=True)(function)
        assert torch.equal(traced(logits, *arguments), function(logits, *arguments))


def test_what_torch_cannot_compile_runs_as_it_is(monkeypatch, caplog):
    calls = []

    def fails(*arguments):
        calls.append(arguments)
        raise torch._dynamo.exc.BackendCompilerFailed(fails, RuntimeError("no C compiler"), None)

    module = fused_linear_logprobs_module
    monkeypatch.setattr(module, "_compiled", lambda function: fails)
    monkeypatch.setattr(module, "_NOT_COMPILED", set())
    logits = torch.zeros(2, 3, device="meta")
    for _ in range(2):
        assert module._fused(torch.exp, logits).shape == (2, 3)
    assert len(calls) == 1 and "no C compiler" in caplog.text


@pytest.mark.parametrize("memory", ["kept", "recomputed in chunks"])
@pytest.mark.parametrize("sampled_from", MASKS)
def test_log_probs_of_chosen_tokens_and_their_gradients_match_a_full_softmax(memory, sampled_from, monkeypatch):
    if memory != "kept":
        in_chunks(monkeypatch)
    hidden, weight, targets, tokens = inputs()
    mask = MASKS[sampled_from]
    expected = truncated_log_softmax(hidden, weight, mask, targets, tokens)
    chosen = expected.topk(3).indices.int()
    chosen[1, 2] = -1
    spec = HeadSpec(0, tokens, 0.7)
    log_probs, entropy, found = fused_linear_logprobs(
        hidden, weight, targets, spec, entropy_gradient=True, kept=mask, chosen=chosen
    )
    there = (chosen >= 0) & (expected.gather(1, chosen.clamp(min=0).long()) > -1e20)
    of_chosen = expected.gather(1, chosen.clamp(min=0).long())
    torch.testing.assert_close(found[there], of_chosen[there])
    picked, h = expected.gather(1, targets[:, None])[:, 0], -(expected.exp() * expected).sum(-1)
    by_token = torch.linspace(-1, 2, chosen.numel()).view(chosen.shape)
    weights = torch.linspace(1, 2, len(targets))

    def total(log_probs, entropy, of_chosen):
        probabilities = torch.where(there, of_chosen, 0.0).exp() * there * by_token
        return (weights * log_probs + 0.5 * weights * entropy).sum() + probabilities.sum()

    ours = torch.autograd.grad(total(log_probs, entropy, found), (hidden, weight))
    theirs = torch.autograd.grad(total(picked, h, of_chosen), (hidden, weight))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_chosen_tokens_change_nothing_else():
    hidden, weight, targets, tokens = inputs()
    gradients, values = [], []
    for chosen in (None, torch.tensor([[1, 4, -1]] * len(targets))):
        found = fused_linear_logprobs(hidden, weight, targets, HeadSpec(0, tokens), chosen=chosen)
        values.append(found[:2])
        gradients.append(torch.autograd.grad(found[0].sum(), (hidden, weight)))
    for one, other in zip((*values[0], *gradients[0]), (*values[1], *gradients[1]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("memory", ["whole", "in chunks"])
@pytest.mark.parametrize("sampled_from", MASKS)
@pytest.mark.parametrize("count", [1, 4, 11])
def test_the_most_likely_tokens_are_those_of_a_full_softmax(memory, sampled_from, count, monkeypatch):
    if memory != "whole":
        in_chunks(monkeypatch)
    hidden, weight, targets, tokens = inputs()
    mask = MASKS[sampled_from]
    expected = truncated_log_softmax(hidden, weight, mask, targets, tokens).detach().topk(count)
    log_probs, entropy, ids, found = top_log_probs(hidden, weight, targets, HeadSpec(0, tokens, 0.7), count, mask)
    there = expected.values > -1e20
    assert torch.equal(ids, torch.where(there, expected.indices, -1).int()) and not found.requires_grad
    torch.testing.assert_close(found, torch.where(there, expected.values, 0.0))
    plain = fused_linear_logprobs(hidden, weight, targets, HeadSpec(0, tokens, 0.7), kept=mask)
    assert torch.equal(log_probs, plain[0]) and torch.equal(entropy, plain[1])


def test_entropy_has_no_gradient_by_default():
    hidden, weight, targets, tokens = inputs()
    log_probs, entropy = fused_linear_logprobs(hidden, weight, targets, HeadSpec(0, tokens))
    assert log_probs.requires_grad and not entropy.requires_grad


def test_an_empty_selection_still_has_a_gradient():
    hidden, weight, _, tokens = inputs()
    log_probs, _ = fused_linear_logprobs(hidden[:0], weight, torch.empty(0, dtype=torch.long), HeadSpec(0, tokens))
    log_probs.sum().backward()
    assert weight.grad.abs().sum() == 0


@pytest.mark.parametrize("gradient", [True, False])
def test_probabilities_that_are_not_kept_are_freed_before_the_next_chunk(gradient, monkeypatch):
    module = "roll.models.fused_linear_logprobs"
    monkeypatch.setattr(f"{module}.HEAD_KEPT_BYTES", 0)
    monkeypatch.setattr(f"{module}.HEAD_CHUNK_BYTES", {"cpu": 4 * 16 * 2})
    earlier = []

    def forward_chunk(*arguments, **keywords):
        part = whole(*arguments, **keywords)
        earlier.append(weakref.ref(part.logits))
        return part

    def of_chunk(*arguments, **keywords):
        assert all(large() is None for large in earlier)
        logits = product(*arguments, **keywords)
        earlier.append(weakref.ref(logits))
        return logits

    whole, product = fused_linear_logprobs_module._forward_chunk, fused_linear_logprobs_module._logits
    monkeypatch.setattr(f"{module}._forward_chunk", forward_chunk)
    monkeypatch.setattr(f"{module}._logits", of_chunk)
    hidden, weight, targets, tokens = inputs()
    with torch.set_grad_enabled(gradient):
        log_probs, _ = fused_linear_logprobs(hidden, weight, targets, HeadSpec(0, tokens))
    if gradient:
        log_probs.sum().backward()
    assert len(earlier) == (12 if gradient else 8)
