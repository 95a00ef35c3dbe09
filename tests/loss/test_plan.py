import itertools

import pytest
import torch

from litce.loss import auto_cross_entropy_chunk_size, plan_cross_entropy

MIB = 2**20


def test_auto_cross_entropy_chunk_size():
    assert auto_cross_entropy_chunk_size(50257, 4) == 32 * MIB // (50257 * 4 * 3) == 55
    assert auto_cross_entropy_chunk_size(151936, 2, 64 * MIB, copies=1) == 220
    assert auto_cross_entropy_chunk_size(32000, 4, memory_budget_bytes=3 * 32000 * 4) == 1
    assert auto_cross_entropy_chunk_size(10**9, 4) == 1
    for name, arguments in {
        "vocab_size": (0, 4),
        "itemsize": (10, 0),
        "memory_budget_bytes": (10, 4, 0),
        "copies": (10, 4, 100, -1),
    }.items():
        with pytest.raises(ValueError, match=f"{name}="):
            auto_cross_entropy_chunk_size(*arguments)


def test_chunk_sizes_mean_what_they_say():
    assert plan_cross_entropy(4096, 50257, 768, chunk_size=0).strategy == "dense"
    plan = plan_cross_entropy(4096, 50257, 768, chunk_size=128)
    assert (plan.strategy, plan.rows, plan.vocab_tile) == ("chunked", 128, 50257)
    plan = plan_cross_entropy(4096, 50257, 768, chunk_size=128, strategy="cut")
    assert (plan.strategy, plan.rows) == ("cut", 128)
    assert plan_cross_entropy(100, 50257, 768, chunk_size=128).rows == 100
    assert plan_cross_entropy(4096, 50257, 768, strategy="dense").strategy == "dense"


def test_auto_takes_rows_where_enough_of_them_fit_and_cut_elsewhere():
    def strategy(budget_mib, **options):
        return plan_cross_entropy(2048, 151936, 896, memory_budget_bytes=budget_mib * MIB, **options).strategy

    assert strategy(8) == "cut"
    assert strategy(32) == strategy(192) == "chunked"
    assert strategy(192, weight_requires_grad=False) == "cut"
    assert strategy(192, dtype=torch.bfloat16) == "cut"  # rows would hold the weight's gradient in fp32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("budget", [8 * MIB, 32 * MIB, 192 * MIB, 512 * MIB])
def test_predicted_peak_fits_the_budget_from_8k_to_256k(budget, dtype):
    for rows, vocab_size, n_embd in itertools.product(
        (1, 100, 2048, 16384), (8192, 50257, 151936, 256000), (256, 896, 4096)
    ):
        plan = plan_cross_entropy(rows, vocab_size, n_embd, dtype=dtype, memory_budget_bytes=budget)
        assert plan.peak_bytes <= budget + 16 * 10**6, (rows, vocab_size, n_embd, plan)
        assert 1 <= plan.rows <= rows and 1 <= plan.vocab_tile <= vocab_size


def test_the_log_line_names_strategy_rows_tile_and_peak():
    plan = plan_cross_entropy(4096, 50257, 768, chunk_size=128)
    line = str(plan)
    assert "chunked" in line and "128 rows" in line and "50257" in line and f"{plan.peak_bytes / MIB:.1f} MiB" in line
