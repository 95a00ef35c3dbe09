"""What the stand-in for the loss allocates, against the loss itself."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from litce.lm_head import LMHead
from litce.loss import plan_cross_entropy
from litce.tools.allocations import Allocations, allocator_peak_bytes
from litce.tools.planned_loss import LOSS_PART, planned_loss

ROWS, N_EMBD, VOCAB_SIZE = 512, 64, 20011


@pytest.mark.parametrize("strategy", ["dense", "chunked", "cut"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_allocates_as_much_as_the_loss(strategy: str, dtype: torch.dtype, trained: bool, bias: bool) -> None:
    plan = plan_cross_entropy(
        ROWS,
        VOCAB_SIZE,
        N_EMBD,
        dtype=dtype,
        strategy=strategy,
        weight_requires_grad=trained,  # type: ignore[arg-type]
    )

    def run(fake: bool, counter: Allocations | None = None) -> None:
        head = LMHead(N_EMBD, VOCAB_SIZE, bias=bias, dtype=dtype).requires_grad_(trained)
        head.plan = plan
        x = torch.zeros(1, ROWS, N_EMBD, dtype=dtype, requires_grad=True)
        target = torch.zeros(1, ROWS, dtype=torch.int64)
        (planned_loss(head, x, target, plan, counter) if fake else head(x, target)).backward()

    measured = allocator_peak_bytes(lambda: run(fake=False))
    with FakeTensorMode(), Allocations() as counter:
        run(fake=True, counter=counter)
    assert counter.peak.num_bytes == pytest.approx(measured, rel=0.1)
    assert counter.peak.by_part()[LOSS_PART] > 0
