"""Products by the kernel: the same values as torch's, and never where a gradient is recorded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from roll.platforms.cpu import matmul as cpu_matmul
from roll.platforms.cpu.kernels import CpuKernels
from roll.platforms.cpu.library import BuildError

pytestmark = pytest.mark.slow

ROWS, DEPTH, COLUMNS = 256, 96, 128
AMD = "vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2 avx512f avx512bw\n"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Installs the kernel for one test; the shapes of the inputs that it got."""
    found: list[tuple[int, ...]] = []
    kernels = CpuKernels(cpu_matmul.ANY_HEAD)

    def counted(x, weight, bias, out=None):
        found.append(tuple(x.shape))
        return kernels.linear(x, weight, bias, out)

    for owner, name in ((torch, "matmul"), (torch.Tensor, "matmul"), (torch.nn.functional, "linear")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back at the end
    monkeypatch.setattr(cpu_matmul, "INSTALLED", {})
    assert cpu_matmul.use_fast_matmul(counted) and cpu_matmul.use_fast_matmul(counted)
    yield found


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


PRODUCTS = {
    "into a transposed tensor": lambda x, w, g: (
        torch.matmul(x, w.t(), out=torch.empty(COLUMNS, ROWS).t()),
        x.double() @ w.double().t(),
    ),
    "into a part of a tensor": lambda x, w, g: (
        torch.matmul(x, w.t(), out=torch.empty(2 * ROWS, COLUMNS)[ROWS:]),
        x.double() @ w.double().t(),
    ),
    "forward": lambda x, w, g: (torch.matmul(x, w.t()), x.double() @ w.double().t()),
    "gradient of the input": lambda x, w, g: (g.matmul(w), g.double() @ w.double()),
    "gradient of the weight": lambda x, w, g: (g.t().matmul(x), g.double().t() @ x.double()),
    "linear": lambda x, w, g: (
        torch.nn.functional.linear(x, w, w[:, 0]),
        x.double() @ w.double().t() + w[:, 0].double(),
    ),
    "three dimensions": lambda x, w, g: (
        torch.matmul(x[:, None], w.t()),
        (x.double() @ w.double().t())[:, None],
    ),
}


@pytest.mark.parametrize("kind", PRODUCTS)
def test_products_are_those_of_float64_up_to_rounding(calls, kind: str):
    product, exact = PRODUCTS[kind](drawn(ROWS, DEPTH), drawn(COLUMNS, DEPTH), drawn(ROWS, COLUMNS))
    assert len(calls) == 1 and product.dtype == torch.float32 and product.shape == exact.shape
    assert (product - exact).abs().max() < 1e-5 * exact.abs().max()


MEMORY = {
    "part of the columns": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "every second row": lambda x: x.repeat_interleave(2, 0)[::2],
    "every second column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "transposed": lambda x: x.t().contiguous().t(),
    "one row for all": lambda x: x[:1].expand_as(x),
    "one column for all": lambda x: x[:, :1].expand_as(x),
}


@pytest.mark.parametrize("kind", MEMORY)
def test_tensors_may_lie_in_memory_in_any_way(calls, kind: str):
    x, weight = MEMORY[kind](drawn(ROWS, DEPTH)), MEMORY[kind](drawn(COLUMNS, DEPTH))
    for bias in (None, weight[:, 1], weight[:1, 0].expand(COLUMNS)):
        exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        for one, other in ((x, weight), (x.contiguous(), weight), (x, weight.contiguous())):
            assert torch.allclose(torch.nn.functional.linear(one, other, bias).double(), exact, atol=1e-4)
    assert len(calls) == 9


OTHERS = {
    "empty": lambda: torch.cat([torch.matmul(drawn(0, 32), drawn(32, 16)), torch.matmul(drawn(2, 0), drawn(0, 16))]),
    "bfloat16": lambda: torch.nn.functional.linear(drawn(ROWS, DEPTH).bfloat16(), drawn(COLUMNS, DEPTH).bfloat16()),
    "a negative view": lambda: torch.matmul(torch.complex(drawn(4, 3), drawn(4, 3)).conj().imag, drawn(3, 4)),
    "sparse": lambda: torch.matmul(drawn(4, 3).to_sparse(), drawn(3, 4)),
    "batched": lambda: torch.matmul(drawn(8, ROWS, DEPTH), drawn(8, DEPTH, COLUMNS)),
    "a vector": lambda: torch.matmul(drawn(1 << 20), drawn(1 << 20, 2)),
    "a bias of one number": lambda: torch.nn.functional.linear(drawn(ROWS, DEPTH), drawn(COLUMNS, DEPTH), drawn(1)),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_everything_else_is_left_to_torch(calls, kind: str):
    assert OTHERS[kind]().isfinite().all() and not calls


@pytest.mark.parametrize(
    "product",
    [
        lambda: torch.matmul(drawn(ROWS, DEPTH), drawn(COLUMNS, COLUMNS)),
        lambda: drawn(ROWS, DEPTH).matmul(drawn(COLUMNS, COLUMNS)),
        lambda: torch.nn.functional.linear(drawn(ROWS, DEPTH), drawn(DEPTH, COLUMNS)),
    ],
)
def test_shapes_that_do_not_fit_have_the_error_of_torch(calls, product):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        product()
    assert not calls


def test_an_output_of_another_precision_or_shape_is_left_to_torch(calls):
    x, other = drawn(ROWS, DEPTH), drawn(DEPTH, COLUMNS)
    with pytest.raises(RuntimeError, match="dtype"):
        torch.matmul(x, other, out=torch.empty(ROWS, COLUMNS, dtype=torch.float64))
    torch.matmul(x, other, out=torch.empty(0))
    assert not calls


def test_autocast_chooses_the_precision(calls):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.matmul(drawn(ROWS, DEPTH), drawn(DEPTH, COLUMNS)).dtype == torch.bfloat16
    assert not calls


def test_a_gradient_is_recorded_by_torch(calls):
    weight = drawn(COLUMNS, DEPTH).requires_grad_()
    for product in (
        torch.matmul(drawn(ROWS, DEPTH), weight.t()),
        torch.nn.functional.linear(drawn(ROWS, DEPTH), weight),
    ):
        (gradient,) = torch.autograd.grad(product.sum(), weight)
        assert torch.allclose(gradient, drawn(ROWS, DEPTH).sum(0).expand_as(gradient), atol=1e-4)
    assert not calls
    with torch.no_grad():
        torch.nn.functional.linear(drawn(ROWS, DEPTH), weight)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("cpuinfo", "slow"),
    [
        (AMD, True),
        (AMD.replace("AuthenticAMD", "GenuineIntel"), False),
        (AMD.replace("avx512f ", ""), False),
        ("CPU part\t: 0xd0c\n", False),
        ("", False),
    ],
)
def test_mkl_is_slow_with_avx512_on_other_processors_than_intels(tmp_path, monkeypatch, cpuinfo: str, slow: bool):
    file = tmp_path / "cpuinfo"
    file.write_text(cpuinfo)
    monkeypatch.setattr(cpu_matmul, "CPUINFO", file)
    assert cpu_matmul.mkl_is_slow() is slow


def test_without_a_file_about_the_processor_torch_multiplies(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_matmul, "CPUINFO", tmp_path / "none")
    assert not cpu_matmul.mkl_is_slow()


def test_the_variable_decides_and_a_wrong_value_is_an_error(monkeypatch):
    matmul = torch.matmul
    monkeypatch.setenv(cpu_matmul.VARIABLE, "mkl")
    assert not cpu_matmul.use_fast_matmul() and torch.matmul is matmul
    monkeypatch.setenv(cpu_matmul.VARIABLE, "openblas")
    with pytest.raises(ValueError, match="ROLL_CPU_MATMUL='openblas': use one of auto, kernel, mkl"):
        cpu_matmul.use_fast_matmul()


@pytest.mark.parametrize(
    ("choice", "slow", "kernel"), [("auto", True, True), ("auto", False, False), ("kernel", False, True)]
)
def test_a_process_without_a_product_uses_the_kernel_where_mkl_is_slow(calls, monkeypatch, choice, slow, kernel):
    """`calls` puts torch's functions back at the end."""
    monkeypatch.setattr(cpu_matmul, "INSTALLED", {})
    monkeypatch.setattr(cpu_matmul, "mkl_is_slow", lambda: slow)
    monkeypatch.setenv(cpu_matmul.VARIABLE, choice)
    before = torch.matmul
    assert cpu_matmul.use_fast_matmul() is kernel
    assert (torch.matmul is not before) is kernel
    x, weight = drawn(ROWS, DEPTH), drawn(COLUMNS, DEPTH)
    torch.testing.assert_close(torch.matmul(x, weight.t()), (x.double() @ weight.double().t()).float())


def test_without_a_compiler_torch_multiplies_and_a_line_says_so(monkeypatch, caplog):
    def fail(head_dim):
        raise BuildError("no C++ compiler (c++ or g++) was found")

    monkeypatch.setattr(cpu_matmul, "INSTALLED", {})
    monkeypatch.setattr(cpu_matmul, "CpuKernels", fail)
    monkeypatch.setenv(cpu_matmul.VARIABLE, "kernel")
    assert not cpu_matmul.use_fast_matmul()
    assert "half as fast on this processor: no C++ compiler" in caplog.text
