import torch
import torch.nn.functional as F

from roll.models.operators import swiglu


def test_value_and_gradient_are_those_of_its_parts():
    torch.manual_seed(0)
    x = torch.randn(3, 2, 10, requires_grad=True)
    gate, up = x.chunk(2, dim=-1)
    expected = F.silu(gate) * up
    upstream = torch.randn_like(expected)
    torch.testing.assert_close(swiglu(x), expected)
    ours, theirs = (torch.autograd.grad(each, x, upstream)[0] for each in (swiglu(x), expected))
    torch.testing.assert_close(ours, theirs)
