"""Counters of allocated memory against sums that are known, and against each other."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from litce.tools.allocations import Allocations, allocator_peak_bytes, peak_new_bytes

KIB = 1024


def test_counts_new_storages_until_they_are_freed() -> None:
    old = torch.zeros(KIB)

    def run() -> None:
        a = torch.ones(KIB)  # 4 KiB
        b = a * 2  # 8 KiB
        b.view(2, -1).add_(1)  # a view, and a result in place
        torch.add(old, 1, out=old)  # a result in memory from before
        del a
        c = torch.cat((b, b))  # 12 KiB
        del b, c
        torch.ones(KIB)

    assert peak_new_bytes(run) == allocator_peak_bytes(run) == 12 * KIB
    with FakeTensorMode():
        old = torch.zeros(KIB)
        assert peak_new_bytes(run) == 12 * KIB


def test_saved_tensors_live_until_backward_frees_them() -> None:
    x = torch.ones(KIB, requires_grad=True)
    with Allocations() as counter:
        y = x.exp().sin().sum()  # saves the results of exp; sin's goes at once
        assert counter.live_bytes == 4 * KIB + 4
        y.backward()
        assert counter.live_bytes == 4 * KIB + 4  # x.grad and y
    # exp's result, its cosine and their product; y and the upstream gradient.
    assert counter.peak.num_bytes == 12 * KIB + 8


def test_peaks_know_phase_operator_and_part() -> None:
    with Allocations() as counter:
        counter.enter_phase("first", "inputs")
        a = torch.ones(KIB)
        counter.enter_phase("second", "outputs")
        b = a.half()
        counter.assign("results", [b])
    assert list(counter.peaks) == ["first", "second"]
    assert counter.peaks["first"].by_part() == {"inputs": 4 * KIB}
    assert counter.peak.by_part() == {"inputs": 4 * KIB, "results": 2 * KIB}
    buffer = counter.peak.buffers[1]
    assert (buffer.operator, buffer.shape, buffer.dtype) == ("aten._to_copy.default", (KIB,), torch.float16)


class _Fresh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx, upstream):
        return tuple(torch.zeros_like(t) for t in ctx.saved_tensors)


@pytest.mark.parametrize("head", ["linear", "fresh"])
@pytest.mark.parametrize("has_grad", [False, True])
@pytest.mark.parametrize("fake", [False, True])
def test_sums_of_gradients_count_as_without_the_counter(head: str, has_grad: bool, fake: bool) -> None:
    """Autograd adds the second gradient of a tied weight in place, unless the first is a view, as F.linear's is."""

    def run() -> None:
        weight = nn.Parameter(torch.zeros(500, 32))
        if has_grad:
            weight.grad = torch.zeros(500, 32)
        x = F.embedding(torch.zeros(4, dtype=torch.int64), weight)
        (F.linear(x, weight).sum() if head == "linear" else _Fresh.apply(x, weight)).backward()

    want = allocator_peak_bytes(run)
    if fake:
        with FakeTensorMode():
            assert peak_new_bytes(run) == pytest.approx(want, rel=0.01)
    else:
        assert peak_new_bytes(run) == pytest.approx(want, rel=0.01)
    copies = 1 + has_grad + (3 if head == "linear" else 2)
    assert want == pytest.approx(copies * 500 * 32 * 4, rel=0.05)
