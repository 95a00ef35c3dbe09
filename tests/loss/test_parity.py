"""Value and gradients of every strategy against fp64, with twice the dense path's error as the tolerance."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from litce.loss import linear_cross_entropy
from tests.loss.oracle import assert_no_worse_than_dense, make_case, oracle, run

STRATEGIES = ("chunked", "cut")
DTYPES = (torch.float32, torch.bfloat16)
GRID = list(itertools.product((0, 1, 37, 2048), (2, 101, 50257, 151936)))
SMALL = list(itertools.product((0, 1, 37), (2, 101)))
LARGE = [(37, 50257), (2048, 101), (2048, 50257), (37, 151936), (2048, 151936)]
TINY_BUDGET = 40_000  # several tiles even for the small shapes


def chunk_sizes(num_rows: int) -> list[int | str]:
    return [c for c in dict.fromkeys([1, 7, 128, num_rows - 1, num_rows, 10_000, "auto"]) if c == "auto" or c > 0]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "vocab_size"), SMALL)
def test_small_shapes(num_rows, vocab_size, dtype, ignored, reduction):
    case = make_case(num_rows, vocab_size, dtype=dtype, ignored=ignored, bias=True)
    upstream = torch.linspace(-1, 2, num_rows) if reduction == "none" else 0.37
    want = oracle(case, reduction=reduction, upstream=upstream)
    dense = run(case, reduction=reduction, upstream=upstream, strategy="dense")
    for strategy, chunk_size in itertools.product(STRATEGIES, chunk_sizes(num_rows)):
        got = run(
            case,
            reduction=reduction,
            upstream=upstream,
            strategy=strategy,
            chunk_size=chunk_size,
            memory_budget_bytes=TINY_BUDGET,
        )
        assert_no_worse_than_dense(got, dense, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "vocab_size"), LARGE)
def test_large_shapes(num_rows, vocab_size, dtype):
    case = make_case(num_rows, vocab_size, dtype=dtype, ignored="some")
    want, dense = oracle(case), run(case, strategy="dense")
    one_row_chunks = num_rows * vocab_size < 10**8
    for strategy, chunk_size in itertools.product(STRATEGIES, chunk_sizes(num_rows)):
        if chunk_size not in (1, 7) or one_row_chunks:
            assert_no_worse_than_dense(run(case, strategy=strategy, chunk_size=chunk_size), dense, want)


@pytest.mark.slow
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "vocab_size"), GRID)
def test_full_grid(num_rows, vocab_size, dtype, ignored):
    case = make_case(num_rows, vocab_size, dtype=dtype, ignored=ignored)
    want = oracle(case)
    for frozen in ((), ("weight",), ("input",)):
        dense = run(case, strategy="dense", frozen=frozen)
        for strategy, chunk_size in itertools.product(STRATEGIES, chunk_sizes(num_rows)):
            got = run(case, strategy=strategy, chunk_size=chunk_size, frozen=frozen)
            assert_no_worse_than_dense(got, dense, want)


@pytest.mark.parametrize(
    "frozen", [f for n in range(4) for f in itertools.combinations(("input", "weight", "bias"), n)]
)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_frozen_operands(strategy, frozen, dtype):
    case = make_case(50, 3001, dtype=dtype, ignored="some", bias=True)
    want, dense = oracle(case), run(case, strategy="dense", frozen=frozen)
    got = run(case, strategy=strategy, chunk_size=16, memory_budget_bytes=TINY_BUDGET, frozen=frozen)
    assert_no_worse_than_dense(got, dense, want)
    assert got.keys() == {"loss", "input", "weight", "bias"} - set(frozen)


@pytest.mark.parametrize("strategy", ("dense", *STRATEGIES))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["sliced", "transposed", "expanded"])
def test_strided_operands_equal_contiguous_ones(strategy, dtype, layout):
    case = make_case(24, 301, dtype=dtype, ignored="some")
    target = case.target.view(4, 6)
    if layout == "sliced":
        hidden = torch.full((4, 7, 16), torch.nan, dtype=dtype)
        hidden[:, :-1] = case.input.view(4, 6, 16)
        weight = torch.stack([case.weight, case.weight], 1)[:, 0]
        strided = hidden[:, :-1], weight
    elif layout == "transposed":
        strided = (
            case.input.view(4, 6, 16).permute(2, 0, 1).contiguous().permute(1, 2, 0),
            case.weight.t().contiguous().t(),
        )
    else:
        case.input[:] = case.input[0]
        target[:] = target[2, 3]
        strided = case.input[0].expand(4, 6, 16), case.weight
        target = target[0, 0].expand(4, 6)
    results = []
    for x, w in (strided, (case.input.view(4, 6, 16).clone(), case.weight.clone())):
        before = x.clone(), w.clone()
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        loss = linear_cross_entropy(x, w, target, strategy=strategy, chunk_size="auto", memory_budget_bytes=TINY_BUDGET)
        results.append((loss, *torch.autograd.grad(loss, (x, w))))
        assert torch.equal(x, before[0]) and torch.equal(w, before[1])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_agrees_with_torch_own_op():
    if not hasattr(F, "linear_cross_entropy"):
        pytest.skip("this torch has no F.linear_cross_entropy")
    case = make_case(50, 301)
    a, b = case.leaves(), case.leaves()
    F.linear_cross_entropy(a["input"], a["weight"], case.target).backward()
    linear_cross_entropy(b["input"], b["weight"], case.target).backward()
    torch.testing.assert_close(b["input"].grad, a["input"].grad)
    torch.testing.assert_close(b["weight"].grad, a["weight"].grad)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_error_of_the_weight_gradient_does_not_grow_with_the_chunks(strategy):
    case = make_case(1024, 500, n_embd=32, dtype=torch.bfloat16)
    want, dense = oracle(case), run(case, strategy="dense")
    for chunk_size in (1, 4, 32, 256, 1024):
        assert_no_worse_than_dense(run(case, strategy=strategy, chunk_size=chunk_size), dense, want)
