"""What every strategy promises beyond numbers: graphs, reuse, errors, untouched inputs."""

import pytest
import torch

from litce.loss import linear_cross_entropy, plan_cross_entropy
from tests.loss.oracle import assert_no_worse_than_dense, make_case, oracle, relative_error, run

STRATEGIES = ("dense", "chunked", "cut")
SMALL_TILES = {"memory_budget_bytes": 40_000}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("num_rows", [0, 5])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_supervised_rows_give_zero_attached_to_the_graph(strategy, num_rows, reduction):
    got = run(make_case(num_rows, 11, ignored="all", bias=True), strategy=strategy, reduction=reduction)
    assert set(got) == {"loss", "input", "weight", "bias"}
    assert all(not value.any() for value in got.values())


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_retained_graph_gives_the_same_gradients_again(strategy, reduction):
    case = make_case(30, 101, ignored="some", bias=True)
    leaves = case.leaves()
    loss = linear_cross_entropy(
        leaves["input"],
        leaves["weight"],
        case.target,
        linear_bias=leaves["bias"],
        reduction=reduction,
        strategy=strategy,
        **SMALL_TILES,
    )
    upstream = torch.randn_like(loss)
    first, second, double = (
        torch.autograd.grad(loss, list(leaves.values()), g, retain_graph=True)
        for g in (upstream, upstream, 2 * upstream)
    )
    for a, b, c in zip(first, second, double, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(2 * a, c)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_losses_over_one_head_add_up(strategy):
    a, b = make_case(20, 101, seed=1), make_case(12, 101, seed=2)
    weight = a.weight.clone().requires_grad_()
    total = sum(linear_cross_entropy(c.input, weight, c.target, strategy=strategy, **SMALL_TILES) for c in (a, b))
    total.backward()
    b.weight = a.weight
    want = oracle(a)["weight"] + oracle(b)["weight"]
    assert relative_error(weight.grad, want) < 1e-6


@pytest.mark.parametrize("strategy", ["chunked", "cut"])
def test_second_derivative_and_freed_graph_raise(strategy):
    case = make_case(8, 11)
    leaves = case.leaves()
    loss = linear_cross_entropy(leaves["input"], leaves["weight"], case.target, strategy=strategy)
    (grad,) = torch.autograd.grad(loss, leaves["input"], torch.ones((), requires_grad=True), create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()
    loss = linear_cross_entropy(leaves["input"], leaves["weight"], case.target, strategy=strategy)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_gradients_the_value_is_the_same(strategy, context):
    case = make_case(30, 101, ignored="some")
    want = run(case, strategy=strategy, **SMALL_TILES)["loss"]
    leaves = case.leaves()
    with context():
        got = linear_cross_entropy(leaves["input"], leaves["weight"], case.target, strategy=strategy, **SMALL_TILES)
    assert not got.requires_grad
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("wrong", [101, 106, -1, -101, 2**31])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_target_outside_the_vocabulary_raises(strategy, wrong):
    case = make_case(8, 101)
    case.target[3] = wrong
    with pytest.raises(ValueError, match=rf"target {wrong} at position \[3\] is outside \[0, 101\)"):
        run(case, strategy=strategy)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int64, torch.uint16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_integer_targets_of_any_width(strategy, dtype):
    case = make_case(8, 101, ignored="none" if dtype == torch.uint16 else "some")
    want = run(case, strategy=strategy)
    case.target = case.target.to(dtype)
    for name, value in run(case, strategy=strategy).items():
        assert torch.equal(value, want[name])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("offset", [0.0, 1e6, 1e8, -1e8])
def test_huge_logits(strategy, offset):
    """The maximum is subtracted before the difference is taken, so an offset of all logits changes little."""
    logits = torch.tensor([[0.0, 64.0, -64.0, 128.0]]) + offset
    x, weight = torch.ones(1, 1), logits.t().contiguous().requires_grad_()
    loss = linear_cross_entropy(x, weight, torch.tensor([1]), strategy=strategy)
    want = torch.nn.functional.cross_entropy(logits.double(), torch.tensor([1]))
    torch.testing.assert_close(loss.double(), want)
    loss.backward()
    torch.testing.assert_close(weight.grad.t().double(), logits.double().softmax(1) - torch.eye(4)[1].double())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_class_at_minus_infinity_has_no_probability(strategy):
    case = make_case(8, 700, bias=True)
    case.bias[:600] = -torch.inf
    case.target = case.target % 100 + 600
    got = run(case, strategy=strategy, **SMALL_TILES)
    want = oracle(case)
    for name in ("loss", "input", "bias"):
        assert relative_error(got[name], want[name]) < 1e-6
    assert not got["weight"][:600].any()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_classes_of_the_first_tile_at_minus_infinity(strategy):
    case = make_case(40, 9000, bias=True)
    case.bias[:4096] = -torch.inf
    case.target = case.target % 4000 + 5000
    got, want = run(case, strategy=strategy), oracle(case)
    for name in ("loss", "input", "bias"):
        assert relative_error(got[name], want[name]) < 1e-6
    assert not got["weight"][:4096].any()


@pytest.mark.parametrize("columns", [slice(0, 50), slice(8900, 9000)], ids=["first tile", "last tile"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_maximum_is_that_of_all_tiles(strategy, columns):
    """Logits of several hundred in one tile: exp of their difference from another tile's maximum overflows."""
    case = make_case(40, 9000)
    case.weight[columns] *= 60
    want, dense = oracle(case), run(case, strategy="dense")
    assert_no_worse_than_dense(run(case, strategy=strategy), dense, want)


@pytest.mark.parametrize("n_embd", [64, 256])
def test_logits_in_the_memory_of_the_weights_gradient(n_embd):
    """Several tiles of the vocabulary, more rows than are lent, and bias and weights that no tile may mix up."""
    plan = plan_cross_entropy(300, 9001, n_embd)
    assert plan.strategy == "chunked" and 0 < plan.lent_rows <= n_embd
    case = make_case(300, 9001, n_embd, bias=True, ignored="some")
    want, dense = oracle(case), run(case, strategy="dense")
    assert_no_worse_than_dense(run(case), dense, want)
    assert_no_worse_than_dense(run(case, memory_budget_bytes=2**22), dense, want)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_bias_of_another_dtype(strategy):
    case = make_case(8, 101, bias=True)
    want = run(case, strategy=strategy)
    case.bias = case.bias.bfloat16()
    got = run(case, strategy=strategy)
    assert got["bias"].dtype == torch.bfloat16
    assert relative_error(got["loss"], want["loss"]) < 1e-2


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_row_that_is_not_finite_stays_in_its_row(strategy, bad):
    case = make_case(8, 11)
    case.input[3, 0] = bad
    losses = run(case, strategy=strategy, reduction="none")["loss"]
    assert not losses[3].isfinite() and losses[:3].isfinite().all() and losses[4:].isfinite().all()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_mixed_dtypes_are_cast_to_the_heads(strategy):
    case = make_case(8, 101)
    x = case.input.bfloat16().requires_grad_()
    weight = case.weight.clone().requires_grad_()
    linear_cross_entropy(x, weight, case.target, strategy=strategy).backward()
    assert (x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)
    case.input = x.detach().float()
    assert relative_error(weight.grad, oracle(case)["weight"]) < 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": torch.zeros(8, 3)}, "does not fit linear_weight"),
        ({"linear_weight": torch.zeros(5)}, "linear_weight has shape"),
        ({"target": torch.zeros(7, dtype=torch.long)}, "does not fit input"),
        ({"target": torch.zeros(8)}, "target has dtype torch.float32"),
        ({"linear_bias": torch.zeros(4)}, "linear_bias"),
        ({"reduction": "average"}, "reduction='average'"),
        ({"strategy": "fast"}, "strategy='fast'"),
        ({"chunk_size": -1}, "chunk_size=-1"),
        ({"chunk_size": "big"}, "chunk_size='big'"),
        ({"chunk_size": 0, "strategy": "cut"}, "chunk_size=0"),
        ({"memory_budget_bytes": 0}, "memory_budget_bytes=0"),
        ({"memory_budget_bytes": "32MiB"}, "memory_budget_bytes='32MiB'"),
        ({"memory_budget_bytes": 1e6}, "memory_budget_bytes=1000000.0"),
        ({"ignore_index": 1.5}, "ignore_index=1.5"),
        ({"input": torch.zeros(8, 0), "linear_weight": torch.zeros(5, 0)}, "linear_weight"),
        ({"linear_weight": torch.zeros(0, 4)}, "linear_weight"),
    ],
)
def test_wrong_arguments_raise_and_name_the_argument(change, message):
    arguments = {
        "input": torch.zeros(8, 4),
        "linear_weight": torch.zeros(5, 4),
        "target": torch.zeros(8, dtype=torch.long),
    } | change
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**arguments)
