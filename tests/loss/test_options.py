"""Every option in every strategy, alone and together, against fp64."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from litce.loss import linear_cross_entropy
from litce.loss.options import LossOptions
from tests.loss.oracle import assert_no_worse_than_dense, make_case, oracle, run

STRATEGIES = ("chunked", "cut")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPTIONS = {
    "softcap": {"logit_softcap": 5.0},
    "scale": {"logit_scale": 0.3},
    "smoothing": {"label_smoothing": 0.1},
    "all smoothing": {"label_smoothing": 1.0},
    "z_loss": {"z_loss": 0.01},
    "softcap, smoothing": {"logit_softcap": 3.0, "label_smoothing": 0.2},
    "all": {"logit_softcap": 6.0, "logit_scale": 1.7, "label_smoothing": 0.1, "z_loss": 0.02},
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_value_and_gradients(options, dtype, reduction, weighted):
    case = make_case(45, 777, dtype=dtype, ignored="some", bias=True)
    case.options = LossOptions(**options)
    if weighted:
        case.token_weights = torch.linspace(-0.5, 2.0, 45)
    upstream = torch.linspace(-1, 2, 45) if reduction == "none" else 0.37
    want = oracle(case, reduction=reduction, upstream=upstream)
    dense = run(case, reduction=reduction, upstream=upstream, strategy="dense")
    for strategy, chunk_size in itertools.product(STRATEGIES, (7, 16, "auto")):
        got = run(
            case,
            reduction=reduction,
            upstream=upstream,
            strategy=strategy,
            chunk_size=chunk_size,
            memory_budget_bytes=60_000,
        )
        assert_no_worse_than_dense(got, dense, want)


@pytest.mark.parametrize("frozen", [("weight",), ("input",), ("bias",), ("weight", "bias"), ("input", "weight")])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_frozen_operands_under_all_options(strategy, frozen):
    case = make_case(45, 777, ignored="some", bias=True)
    case.options = LossOptions(**OPTIONS["all"])
    want, dense = oracle(case), run(case, strategy="dense", frozen=frozen)
    assert_no_worse_than_dense(run(case, strategy=strategy, chunk_size=16, frozen=frozen), dense, want)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_hidden_states_times_fifty_keep_bias_and_softcap(strategy):
    case = make_case(20, 300, ignored="some", bias=True)
    case.input = case.input * 50
    case.options = LossOptions(logit_softcap=30.0)
    want, dense = oracle(case), run(case, strategy="dense")
    assert_no_worse_than_dense(run(case, strategy=strategy, memory_budget_bytes=60_000), dense, want)


@pytest.mark.parametrize("strategy", ["dense", *STRATEGIES])
def test_ignore_index_inside_the_vocabulary(strategy):
    case = make_case(30, 11)
    want = run(make_case(30, 11), strategy=strategy, reduction="none")["loss"]
    losses = linear_cross_entropy(
        case.input, case.weight, case.target, ignore_index=3, reduction="none", strategy=strategy
    )
    assert (case.target == 3).any()
    torch.testing.assert_close(losses, torch.where(case.target == 3, 0.0, want))


@pytest.mark.parametrize("strategy", ["dense", *STRATEGIES])
def test_ignored_rows_with_a_nan_weight_do_not_matter(strategy):
    case = make_case(30, 11, ignored="some")
    case.token_weights = torch.ones(30)
    want = run(case, strategy=strategy)
    case.token_weights[case.target == -100] = torch.nan
    got = run(case, strategy=strategy)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("strategy", ["dense", *STRATEGIES])
def test_gradient_of_token_weights(strategy, reduction):
    case = make_case(30, 101, ignored="some")
    token_weights, twin = (torch.linspace(0.5, 2, 30, requires_grad=True) for _ in range(2))
    linear_cross_entropy(
        case.input, case.weight, case.target, token_weights=token_weights, reduction=reduction, strategy=strategy
    ).backward()
    losses = F.cross_entropy(case.input @ case.weight.T, case.target, reduction="none")
    supervised = twin[case.target != -100].sum()
    ((losses * twin).sum() / (supervised if reduction == "mean" else 1)).backward()
    torch.testing.assert_close(token_weights.grad, twin.grad)


@pytest.mark.parametrize("strategy", ["dense", *STRATEGIES])
def test_gradcheck_in_fp64(strategy):
    case = make_case(5, 9, n_embd=3, ignored="some", bias=True, dtype=torch.float64)

    def loss(x, weight, bias):
        return linear_cross_entropy(
            x, weight, case.target, linear_bias=bias, strategy=strategy, chunk_size=1 + (strategy != "dense"),
            memory_budget_bytes=100, reduction="none", **OPTIONS["all"],
        )  # fmt: skip

    leaves = [t.clone().requires_grad_() for t in (case.input, case.weight, case.bias)]
    assert torch.autograd.gradcheck(loss, leaves, check_batched_grad=False)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("label_smoothing", -0.1),
        ("label_smoothing", 1.1),
        ("z_loss", -1.0),
        ("z_loss", float("nan")),
        ("logit_softcap", 0.0),
        ("logit_softcap", -3.0),
        ("logit_scale", float("inf")),
        ("token_weights", torch.ones(3)),
    ],
)
def test_wrong_options_raise_and_name_themselves(option, value):
    case = make_case(8, 11)
    with pytest.raises(ValueError, match=option):
        linear_cross_entropy(case.input, case.weight, case.target, **{option: value})
