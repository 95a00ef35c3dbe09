"""The bound that `filter_tolerance` states, on peaked and on flat models."""

import pytest
import torch

from litce.loss import linear_cross_entropy, plan_cross_entropy
from litce.loss.column_filter import ColumnFilter
from tests.loss.oracle import make_case, oracle, run

TOLERANCES = (1e-4, 1e-2, 0.2)


def peaked_case(scale=3.0):
    case = make_case(96, 3000, n_embd=8, ignored="some", bias=True)
    case.weight *= scale
    return case


@pytest.mark.parametrize("strategy", ["chunked", "cut"])
@pytest.mark.parametrize("tolerance", TOLERANCES)
@pytest.mark.parametrize("scale", [3.0, 1.0, 0.01])
def test_gradients_keep_the_stated_bound(strategy, tolerance, scale):
    case = peaked_case(scale)
    got = run(
        case, strategy=strategy, chunk_size=32, reduction="sum", filter_tolerance=tolerance, memory_budget_bytes=60_000
    )
    want = oracle(case, reduction="sum")
    num_rows = int((case.target != -100).sum())
    rounding = 1e-5 * num_rows
    input_error = (got["input"].double() - want["input"]).norm(dim=1).sum()
    assert input_error <= tolerance * num_rows * case.weight.norm(dim=1).max() + rounding
    weight_error = (got["weight"].double() - want["weight"]).norm(dim=1).sum()
    assert weight_error <= tolerance * num_rows * case.input.norm(dim=1).max() + rounding
    torch.testing.assert_close(got["loss"].double(), want["loss"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("tolerance", TOLERANCES)
def test_dropped_probability_is_bounded_tile_by_tile(tolerance):
    g = torch.Generator().manual_seed(0)
    for spread in (0.0, 1.0, 8.0):
        probability = (spread * torch.randn(3000, 40, generator=g)).softmax(0)
        target = torch.randint(3000, (40,), generator=g)
        column_filter = ColumnFilter(tolerance, 3000)
        kept = torch.zeros(3000, dtype=torch.bool)
        for start in range(0, 3000, 700):
            tile = probability[start : start + 700]
            kept[start + column_filter.kept(tile, torch.ones(40), target, start)] = True
        assert probability[~kept].sum(0).mean() <= tolerance
        assert kept[target].all()
        if spread == 0.0:
            assert (~kept).sum() <= tolerance * 3000
        if spread == 8.0 and tolerance == 0.2:
            assert kept.sum() < 1500


@pytest.mark.parametrize("strategy", ["chunked", "cut"])
def test_a_peaked_model_loses_columns_and_little_else(strategy):
    case = peaked_case(scale=4.0)
    options = {"strategy": strategy, "chunk_size": 32, "memory_budget_bytes": 10**6}
    exact, filtered = run(case, **options), run(case, filter_tolerance=1e-3, **options)
    dropped = ((exact["weight"] != 0).any(1) & (filtered["weight"] == 0).all(1)).float().mean()
    assert dropped > 0.2
    for name in ("input", "weight"):
        error = (exact[name] - filtered[name]).norm() / exact[name].norm()
        assert 0 < error < 2**-8


@pytest.mark.parametrize("strategy", ["chunked", "cut"])
def test_a_row_that_is_not_finite_is_reported_not_filtered(strategy):
    case = peaked_case()
    case.input[50, 0] = torch.nan
    case.target[50] = 3
    got = run(case, strategy=strategy, filter_tolerance=0.01)
    assert got["loss"].isnan() and got["weight"].isnan().any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"filter_tolerance": -0.1}, "filter_tolerance=-0.1"),
        ({"filter_tolerance": 1.0}, "filter_tolerance=1.0"),
        ({"filter_tolerance": 0.1, "strategy": "dense"}, "dense is exact"),
        ({"filter_tolerance": 0.1, "label_smoothing": 0.1}, "label_smoothing"),
        ({"filter_tolerance": 0.1, "z_loss": 0.1}, "z_loss"),
    ],
)
def test_what_it_does_not_go_with_is_named(options, message):
    case = make_case(8, 11)
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(case.input, case.weight, case.target, **options)


def test_the_plan_says_what_it_drops():
    assert "0.01" in str(plan_cross_entropy(4096, 50257, 768, filter_tolerance=0.01))
