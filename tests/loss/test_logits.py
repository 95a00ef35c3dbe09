"""`chunked_cross_entropy` over logits that exist, and the equivalence of everything at scale."""

import pytest
import torch
import torch.nn.functional as F

from litce.loss import auto_cross_entropy_chunk_size, chunked_cross_entropy, linear_cross_entropy
from litce.tools.allocations import peak_new_bytes

SCALE = [8192, 32768, 50257, 151936]


def reference(logits, targets):
    """Return loss and gradient of the logits in fp64; 0 where nothing is supervised."""
    z = logits.detach().double().requires_grad_()
    total = F.cross_entropy(z.reshape(-1, z.shape[-1]), targets.reshape(-1), reduction="sum")
    loss = total / max(1, int((targets != -100).sum()))
    loss.backward()
    return loss.detach(), z.grad


def make(batch=2, length=9, vocab_size=101, dtype=torch.float32, ignored=True):
    g = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(batch, length, vocab_size, generator=g)).to(dtype)
    targets = torch.randint(vocab_size, (batch, length), generator=g)
    if ignored:
        targets[:, ::4] = -100
    return logits, targets


@pytest.mark.parametrize("chunk_size", [0, 1, 5, 128, 10_000, "auto"])
@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_value_and_gradient_against_fp64(dtype, as_list, chunk_size):
    logits, targets = make(dtype=dtype)
    want, want_grad = reference(logits, targets)
    parts = list(logits.split(4, dim=1)) if as_list else [logits]
    parts = [p.clone().requires_grad_() for p in parts]
    loss = chunked_cross_entropy(parts if as_list else parts[0], targets, chunk_size)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=0)
    loss.backward()
    grad = torch.cat([p.grad for p in parts], dim=1)
    rounding = 2**-8 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(grad.double(), want_grad, rtol=rounding, atol=rounding * 1e-3)


@pytest.mark.parametrize("chunk_size", [0, 4, "auto"])
def test_ignored_rows_have_no_gradient_and_nan_in_them_does_not_matter(chunk_size):
    logits, targets = make()
    logits[targets == -100] = torch.nan
    z = logits.requires_grad_()
    loss = chunked_cross_entropy(z, targets, chunk_size)
    loss.backward()
    assert loss.isfinite() and not z.grad[targets == -100].any() and z.grad[targets != -100].all()


def test_chunked_cross_entropy_auto_matches_manual_chunk_size():
    logits, targets = make(batch=3, length=50, vocab_size=1000)
    budget = 100_000
    rows = auto_cross_entropy_chunk_size(1000, 4, budget)
    assert rows == 8
    results = []
    for chunk_size in ("auto", rows):
        z = logits.clone().requires_grad_()
        loss = chunked_cross_entropy(z, targets, chunk_size, memory_budget_bytes=budget)
        loss.backward()
        results.append((loss.detach(), z.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("vocab_size", SCALE)
def test_chunked_cross_entropy_equivalence_at_scale(vocab_size):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 48, 32, generator=g)
    weight = torch.randn(vocab_size, 32, generator=g) * 0.3
    targets = torch.randint(vocab_size, (2, 48), generator=g)
    targets[:, 40:] = -100
    want, want_grad = reference(x @ weight.T, targets)
    for chunk_size in (0, 7, 128, "auto"):
        z = (x @ weight.T).requires_grad_()
        loss = chunked_cross_entropy(z, targets, chunk_size)
        loss.backward()
        torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=0)
        torch.testing.assert_close(z.grad.double(), want_grad, rtol=1e-4, atol=1e-8)
        w = weight.clone().requires_grad_()
        fused = linear_cross_entropy(x, w, targets, chunk_size=chunk_size)
        fused.backward()
        torch.testing.assert_close(fused.double(), want, rtol=1e-6, atol=0)
        want_weight = want_grad.reshape(-1, vocab_size).T @ x.double().reshape(-1, 32)
        torch.testing.assert_close(w.grad.double(), want_weight, rtol=1e-4, atol=1e-7)


def test_logits_are_not_written_to_and_serve_a_second_loss():
    logits, targets = make()
    z = logits.clone().requires_grad_()
    (chunked_cross_entropy(z, targets, 4) + 0.1 * z.square().mean()).backward(retain_graph=True)
    assert torch.equal(z, logits)
    _, want = reference(logits, targets)
    torch.testing.assert_close(z.grad.double(), want + 0.2 * logits.double() / logits.numel())


@pytest.mark.parametrize("targets", [torch.full((2, 9), -100), torch.zeros(2, 0, dtype=torch.long)])
def test_nothing_supervised_gives_zero_with_a_graph(targets):
    z = torch.randn(*targets.shape, 11, requires_grad=True)
    loss = chunked_cross_entropy(z, targets)
    loss.backward()
    assert loss == 0 and not z.grad.any()


def test_only_the_gradient_has_the_size_of_the_logits():
    logits, targets = make(batch=1, length=512, vocab_size=4096)
    z = logits.requires_grad_()
    peak = peak_new_bytes(lambda: chunked_cross_entropy(z, targets, 16).backward())
    assert peak <= z.grad.nbytes + 4 * 16 * 4096 * 4 + 2**16


@pytest.mark.parametrize(
    ("logits", "targets", "chunk_size", "message"),
    [
        (torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.long), 128, "do not fit"),
        ([torch.zeros(2, 3, 5)] * 2, torch.zeros(2, 5, dtype=torch.long), 128, "do not fit"),
        ([torch.zeros(2, 3, 5), torch.zeros(2, 3, 6)], torch.zeros(2, 6, dtype=torch.long), 128, "differ"),
        ([], torch.zeros(2, 6, dtype=torch.long), 128, "empty list"),
        (torch.zeros(2, 5), torch.tensor([0, 5]), 128, r"target 5 at position \[1\]"),
        (torch.zeros(2, 5), torch.tensor([0, 1]), -1, "chunk_size=-1"),
        (torch.zeros(2, 5), torch.tensor([0, 1]), "large", "chunk_size='large'"),
    ],
)
def test_wrong_arguments_raise(logits, targets, chunk_size, message):
    with pytest.raises(ValueError, match=message):
        chunked_cross_entropy(logits, targets, chunk_size)
