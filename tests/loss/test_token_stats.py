import pytest
import torch
import torch.nn.functional as F

from litce.loss import cut_cross_entropy, cut_cross_entropy_logprobs, linear_cross_entropy, linear_token_stats
from litce.tools.allocations import peak_new_bytes
from tests.loss.oracle import make_case, relative_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("budget", [20_000, 2**25])
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
def test_statistics_against_fp64_logits(dtype, budget, ignored):
    case = make_case(60, 1500, dtype=dtype, ignored=ignored, bias=True)
    target = case.target.view(4, 15)
    stats = linear_token_stats(
        case.input.view(4, 15, 16),
        case.weight,
        target,
        linear_bias=case.bias,
        logit_softcap=20.0,
        logit_scale=0.5,
        memory_budget_bytes=budget,
    )
    logits = 0.5 * F.linear(case.input.double(), case.weight.double(), case.bias.double())
    logits = (20 * torch.tanh(logits / 20)).view(4, 15, -1)
    keep = target != -100
    log_probs = logits.log_softmax(-1)
    want_entropy = -(log_probs.exp() * log_probs).sum(-1) * keep
    want_loss = F.cross_entropy(logits.flatten(0, 1), case.target, reduction="none").view(4, 15)
    assert relative_error(stats.loss, want_loss) < 1e-6
    assert relative_error(stats.entropy, want_entropy) < 1e-5
    assert torch.equal(stats.argmax, torch.where(keep, logits.argmax(-1), -1))
    assert torch.equal(stats.correct, keep & (logits.argmax(-1) == target))


def test_entropy_with_classes_at_minus_infinity():
    logits = torch.full((1, 900), -torch.inf)
    logits[0, [300, 700]] = torch.tensor([1.0, 2.0])
    stats = linear_token_stats(torch.ones(1, 1), logits.t().contiguous(), torch.tensor([700]), memory_budget_bytes=2000)
    p = torch.tensor([1.0, 2.0]).softmax(0)
    torch.testing.assert_close(stats.entropy[0], -(p * p.log()).sum())
    torch.testing.assert_close(stats.loss[0], -p[1].log())


def test_statistics_hold_no_logits():
    case = make_case(512, 20000)
    run = lambda: linear_token_stats(case.input, case.weight, case.target, memory_budget_bytes=2**20)  # noqa: E731
    assert peak_new_bytes(run) < 512 * 20000 * 4 / 5


def test_log_probabilities_differentiate_through_a_preference_loss():
    """DPO's loss (Rafailov et al. 2023) of two sequences, against dense logits."""
    case = make_case(40, 301, ignored="some")
    target = case.target.view(2, 20)
    grads = []
    for fused in (True, False):
        x, weight = case.input.view(2, 20, 16).clone().requires_grad_(), case.weight.clone().requires_grad_()
        if fused:
            log_probs = cut_cross_entropy_logprobs(x, weight, target, memory_budget_bytes=20_000)
        else:
            keep = target != -100
            log_probs = (x @ weight.T).log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0] * keep
        chosen, rejected = log_probs.sum(-1)
        loss = -F.logsigmoid(0.1 * (chosen - rejected))
        grads.append((loss, *torch.autograd.grad(loss, (x, weight))))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_cut_cross_entropy_is_linear_cross_entropy_cut():
    case = make_case(40, 301, ignored="some")
    a = cut_cross_entropy(case.input, case.weight, case.target, z_loss=0.1, reduction="sum")
    b = linear_cross_entropy(case.input, case.weight, case.target, z_loss=0.1, reduction="sum", strategy="cut")
    assert torch.equal(a, b)
