import torch
import torch.nn.functional as F

from roll.models.operators import rms_norm


def test_value_and_gradient_are_those_of_torch():
    torch.manual_seed(0)
    x = (3 * torch.randn(5, 2, 16)).requires_grad_()
    weight = torch.randn(16, requires_grad=True)
    upstream = torch.randn(5, 2, 16)
    expected = F.rms_norm(x, (16,), weight, 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected)
    ours = torch.autograd.grad(rms_norm(x, weight, 1e-5), (x, weight), upstream)
    theirs = torch.autograd.grad(expected, (x, weight), upstream)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_heads_that_do_not_lie_together_are_normed_alike():
    x = torch.randn(3, 4, 12)[..., 2:10]
    torch.testing.assert_close(rms_norm(x, torch.ones(8), 1e-6), F.rms_norm(x, (8,), torch.ones(8), 1e-6))
