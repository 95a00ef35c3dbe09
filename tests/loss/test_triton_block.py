"""The Triton kernels against the torch operators and fp64, on a GPU or else in the interpreter of Triton."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from litce.loss.rows import block_max, exp_sum_, read_target_, subtract_target_
from litce.loss.triton_block import available, softmax_grad_block_

pytest.importorskip("triton", reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = torch.finfo(torch.float32).eps


def make_block(num_columns: int, num_rows: int, layout: str = "vocabulary-major", scale: float = 3.0) -> Tensor:
    values = torch.randn(num_columns, num_rows, generator=torch.Generator().manual_seed(0)) * scale
    if layout == "row-major":
        values = values.t().contiguous().t()
    return values.to(DEVICE)


def make_target(num_columns: int, num_rows: int) -> Tensor:
    return torch.randint(num_columns, (num_rows,), generator=torch.Generator().manual_seed(1)).to(DEVICE)


def by_operators(block: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return losses, maxima, sums and the gradient as chunked.py makes them of torch operators."""
    block = block.clone()
    row_max = block_max(block)
    target_logit = torch.full_like(row_max, torch.nan)
    read_target_(target_logit, block, target, 0)
    total = exp_sum_(block, row_max)
    subtract_target_(block, target, 0, total)
    return total.log() - (target_logit - row_max), row_max, total, block


def fused(block: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what `by_operators` does, from the kernels."""
    block = block.clone(memory_format=torch.preserve_format)
    return *softmax_grad_block_(block, target), block


def assert_equal_to_operators(block: Tensor, target: Tensor) -> None:
    for got, want in zip(fused(block, target), by_operators(block, target), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("layout", ["vocabulary-major", "row-major"])
@pytest.mark.parametrize("num_rows", [1, 7, 64])
@pytest.mark.parametrize("num_columns", [1, 2, 101, 1024, 5000])
def test_equals_operators_and_fp64(num_columns: int, num_rows: int, layout: str) -> None:
    block, target = make_block(num_columns, num_rows, layout), make_target(num_columns, num_rows)
    assert_equal_to_operators(block, target)
    losses, row_max, total, grad = fused(block, target)
    z = block.t().double().requires_grad_()
    want = F.cross_entropy(z, target, reduction="none")
    want.sum().backward()
    assert z.grad is not None
    assert torch.equal(row_max, block.amax(0))
    torch.testing.assert_close(losses.double(), want.detach(), rtol=8 * ROUNDING, atol=8 * ROUNDING)
    torch.testing.assert_close((grad / total).t().double(), z.grad, rtol=16 * ROUNDING, atol=16 * ROUNDING)


@pytest.mark.parametrize("num_columns", [101, 5000])
def test_strided_block_leaves_its_neighbours(num_columns: int) -> None:
    storage = make_block(num_columns, 14)
    before = storage.clone()
    target = make_target(num_columns, 7)
    want = by_operators(storage[:, ::2], target)
    got = softmax_grad_block_(storage[:, ::2], target)
    for a, b in zip((*got, storage[:, ::2]), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert torch.equal(storage[:, 1::2], before[:, 1::2])


@pytest.mark.parametrize("scale", [80.0, 640.0, 1e6])
def test_large_logits(scale: float) -> None:
    block, target = make_block(5000, 7, scale=scale), make_target(5000, 7)
    assert_equal_to_operators(block, target)
    losses, _, total, grad = fused(block, target)
    want = F.cross_entropy(block.t().double(), target, reduction="none")
    torch.testing.assert_close(losses.double(), want, rtol=4 * ROUNDING, atol=4 * ROUNDING * scale)
    assert torch.isfinite(grad).all() and (total >= 1).all()


def test_logits_near_a_large_constant_keep_their_differences() -> None:
    block, target = make_block(1024, 7, scale=1.0) + 1e6, make_target(1024, 7)
    losses, *_ = fused(block, target)
    want = F.cross_entropy(block.t().double(), target, reduction="none")
    torch.testing.assert_close(losses.double(), want, rtol=1e-6, atol=1e-6)


def test_columns_at_minus_infinity_have_no_probability() -> None:
    block, target = make_block(5000, 7), make_target(5000, 7)
    block[4000:] = -torch.inf  # whole splits of the vocabulary
    block[:8, 3] = -torch.inf
    target.clamp_(8, 3999)
    assert_equal_to_operators(block, target)
    losses, *_, grad = fused(block, target)
    assert torch.isfinite(losses).all() and (grad[4000:] == 0).all()


def test_target_at_minus_infinity_has_infinite_loss() -> None:
    block, target = make_block(101, 7), make_target(101, 7)
    block[target[2], 2] = -torch.inf
    assert fused(block, target)[0][2] == torch.inf
    assert_equal_to_operators(block, target)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("column", [0, 2600, 4999])
def test_one_broken_row_breaks_no_other(value: float, column: int) -> None:
    block, target = make_block(5000, 7), make_target(5000, 7)
    block[column, 4] = value
    assert_equal_to_operators(block, target)
    losses = fused(block, target)[0]
    assert losses.isnan().nonzero().flatten().tolist() == [4]


def test_row_of_minus_infinity_has_nan_loss() -> None:
    block, target = make_block(101, 7), make_target(101, 7)
    block[:, 5] = -torch.inf
    assert_equal_to_operators(block, target)
    assert fused(block, target)[0].isnan().nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_targets_outside_the_vocabulary_have_nan_loss(dtype: torch.dtype) -> None:
    block = make_block(101, 6)
    target = torch.tensor([0, 101, 100, -1, -100, 2**31 - 1], dtype=dtype, device=DEVICE)
    assert_equal_to_operators(block, target)
    assert fused(block, target)[0].isnan().tolist() == [False, True, False, True, True, True]


def test_no_rows() -> None:
    for got in softmax_grad_block_(make_block(101, 0), make_target(101, 0)):
        assert got.shape == (0,)


def test_available_only_for_fp32_on_cuda() -> None:
    cuda = torch.device("cuda")
    assert available(cuda, torch.float32)
    assert not available(cuda, torch.float64)
    assert not available(torch.device("cpu"), torch.float32)
