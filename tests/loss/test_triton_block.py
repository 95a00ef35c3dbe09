"""The Triton kernels against the torch operators and fp64, on a GPU or else in the interpreter of Triton."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from litce.loss import triton_block
from litce.loss.options import LossOptions
from litce.loss.rows import add_exp_sum_, block_max, exp_sum_, logits_grad_, read_target_, subtract_target_
from litce.loss.triton_block import available, softmax_grad_, softmax_grad_block_
from tests.loss.oracle import assert_no_worse_than_dense, make_case, oracle, run

pytest.importorskip("triton", reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
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


def tile_by_tile(block: Tensor, target: Tensor, width: int, fused: bool) -> tuple[Tensor, ...]:
    """Return maxima, sums, exponentials and gradient as cut.py makes them, by the kernels or by operators."""
    row_max = torch.full_like(block[0], torch.finfo(torch.float32).min)
    total, exponentials, grad = torch.zeros_like(row_max), block.clone(), block.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_block, "available", lambda device, dtype: fused)
        for tile in exponentials.split(width):
            row_max, total = add_exp_sum_(tile, row_max, total)
        for i, tile in enumerate(grad.split(width)):
            logits_grad_(tile, target, i * width, row_max, total, row_max, LossOptions(), len(block))
    return row_max, total, exponentials, grad


@pytest.mark.parametrize("num_rows", [1, 7, 64])
@pytest.mark.parametrize(("num_columns", "width"), [(101, 101), (101, 1), (1024, 256), (5000, 2048)])
def test_tiles_equal_operators(num_columns: int, width: int, num_rows: int) -> None:
    block, target = make_block(num_columns, num_rows, scale=5.0), make_target(num_columns, num_rows)
    got, want = (tile_by_tile(block, target, width, fused) for fused in (True, False))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1], (block - block.amax(0)).exp().sum(0), rtol=1e-5, atol=0)


def test_tiles_with_infinite_and_broken_rows_equal_operators() -> None:
    block, target = make_block(600, 7), make_target(600, 7)
    block[:256, 1] = block[300:, 2] = -torch.inf
    block[17, 3], block[400, 4], block[20, 5], block[500, 6] = torch.nan, torch.nan, torch.inf, torch.inf
    got, want = (tile_by_tile(block, target, 128, fused) for fused in (True, False))
    finite = [0, 1, 2]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a[..., finite], b[..., finite], rtol=1e-5, atol=1e-5)
    assert torch.equal(got[1].isfinite(), want[1].isfinite()) and not got[1][3:].isfinite().any()


def test_gradient_of_no_rows() -> None:
    block = make_block(101, 0)
    softmax_grad_(block, make_target(101, 0), block[0], block[0])
    assert add_exp_sum_(block, block[0], block[0])[0].shape == (0,)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Send every fp32 block through the kernels, and note which methods launch them."""
    calls: list[str] = []

    def noted(name: str):
        original = getattr(triton_block._Launch, name)

        def method(*args: object) -> object:
            calls.append(name)
            return original(*args)

        return method

    monkeypatch.setattr(triton_block, "available", lambda device, dtype: dtype == torch.float32)
    for name in ("write_statistics", "write_grad"):
        monkeypatch.setattr(triton_block._Launch, name, noted(name))
    return calls


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [LossOptions(logit_scale=0.7), LossOptions(logit_softcap=5.0)], ids=str)
@pytest.mark.parametrize("strategy", ["chunked", "cut"])
def test_whole_loss_through_the_kernels(
    strategy: str, options: LossOptions, dtype: torch.dtype, reduction: str, launches: list[str]
) -> None:
    case = make_case(45, 1501, dtype=dtype, ignored="some", bias=True)
    case.options = options
    arguments = {"strategy": strategy, "reduction": reduction, "chunk_size": 16, "memory_budget_bytes": 40_000}
    got = run(case, **arguments)
    # Chunked serves "none" by cut; with a softcap the kernels have nothing to do.
    fused = options.plain_softmax
    assert ("write_statistics" in launches) == ("write_grad" in launches) == fused
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_block, "available", lambda device, dtype: False)
        by_torch, dense = run(case, **arguments), run(case, reduction=reduction, strategy="dense")
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for name, value in got.items():
        torch.testing.assert_close(value, by_torch[name], rtol=tolerance, atol=tolerance)
    assert_no_worse_than_dense(got, dense, oracle(case, reduction=reduction))


@pytest.mark.parametrize("strategy", ["chunked", "cut"])
@pytest.mark.parametrize("frozen", [("weight",), ("input",)], ids=str)
def test_frozen_operands_through_the_kernels(strategy: str, frozen: tuple[str, ...], launches: list[str]) -> None:
    case = make_case(45, 501, ignored="some")
    got = run(case, strategy=strategy, frozen=frozen, chunk_size=16, memory_budget_bytes=40_000)
    assert launches
    assert_no_worse_than_dense(got, run(case, strategy="dense", frozen=frozen), oracle(case))


@pytest.mark.parametrize("strategy", ["chunked", "cut"])
def test_filter_through_the_kernels(strategy: str, launches: list[str]) -> None:
    case = make_case(45, 501, ignored="some")
    arguments = {"strategy": strategy, "chunk_size": 16, "memory_budget_bytes": 40_000, "filter_tolerance": 0.1}
    got = run(case, **arguments)
    assert launches
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_block, "available", lambda device, dtype: False)
        want = run(case, **arguments)
    for name, value in got.items():
        torch.testing.assert_close(value, want[name], rtol=1e-5, atol=1e-5)
