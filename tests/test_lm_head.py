"""The head: plain, tied, biased, padded, declared fp32; logits, loss and samples from one projection."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from litce.config import Config
from litce.lm_head import LMHead
from litce.loss.options import LossOptions
from litce.loss.plan import plan_cross_entropy
from litce.model import GPT
from tests.loss.oracle import relative_error

STRATEGIES = ("dense", "chunked", "cut")
SMALL_TILES = {"memory_budget_bytes": 40_000}


def make_head(strategy: str, rows: int = 300, **arguments) -> LMHead:
    torch.manual_seed(0)
    head = LMHead(16, rows, **arguments)
    head.plan = plan_cross_entropy(20, rows, 16, strategy=strategy, **SMALL_TILES)
    return head


def inputs(vocab_size: int = 300, dtype=torch.float32):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(2, 10, 16, generator=g).to(dtype).requires_grad_()
    targets = torch.randint(vocab_size, (2, 10), generator=g)
    targets[:, :3] = -100
    return x, targets


def reference(head: LMHead, x, targets, vocab_size=None):
    """Return the loss and the gradients of x and of the head's parameters, in fp64."""
    hidden = x.detach().double().requires_grad_()
    parameters = [parameter.detach().double().requires_grad_() for parameter in head.parameters()]
    logits = head.options.transform(F.linear(hidden, *parameters))[..., :vocab_size]
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    return [loss.detach(), hidden.grad, *(parameter.grad for parameter in parameters)]


def results(head: LMHead, x, targets, autocast: bool = False):
    x.grad = None
    head.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = head(x, targets)
    loss.backward()
    return [loss.detach(), x.grad, *(parameter.grad for parameter in head.parameters())]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "options", [LossOptions(), LossOptions(logit_softcap=3.0, logit_scale=0.7)], ids=["plain", "capped"]
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_loss_and_gradients_equal_those_of_its_own_logits(strategy, options, bias):
    head = make_head(strategy, bias=bias, options=options)
    x, targets = inputs()
    for got, want in zip(results(head, x, targets), reference(head, x, targets), strict=True):
        assert relative_error(got, want) < 1e-6
    logits = head(x)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    assert relative_error(loss, reference(head, x, targets)[0]) < 1e-6


@pytest.mark.parametrize("rows", [300, 4200])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_padded_rows_are_outside_the_softmax(strategy, bias, rows):
    """A padded id with the largest logit has no part in the loss, and its row no gradient."""
    head = make_head(strategy, rows=rows, bias=bias, vocab_size=rows - 41)
    with torch.no_grad():
        head.weight[-41:] *= 100
    x, targets = inputs(rows - 41)
    got, want = results(head, x, targets), reference(head, x, targets, vocab_size=rows - 41)
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) < 1e-6
    assert not any(grad[-41:].any() for grad in got[2:])
    with pytest.raises(ValueError, match=rf"outside \[0, {rows - 41}\)"):
        head(x, targets.clamp(min=rows - 41))
    assert int(head(x, sample=0.0).max()) < rows - 41


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_fp32_head_projects_in_fp32_under_autocast(weight_dtype, strategy):
    """bf16 hidden states; a tied weight may be bf16 too. Rounding to bf16 would show as an error of 1e-3."""
    head = make_head(strategy, fp32=True, bias=True).to(weight_dtype)
    x, targets = inputs(dtype=torch.bfloat16)
    want = reference(head, x, targets)
    got = results(head, x, targets, autocast=True)
    with torch.autocast("cpu", torch.bfloat16):
        logits = head(x)
    assert logits.dtype == torch.float32
    assert relative_error(logits, F.linear(x.double(), *(p.double() for p in head.parameters()))) < 1e-6
    assert relative_error(got[0], want[0]) < 1e-6
    for value, expected in zip(got[1:], want[1:], strict=True):
        rounded = expected.to(value.dtype)
        allowed = 1e-6 if value.dtype == torch.float32 else 1.1 * relative_error(rounded, expected)
        assert relative_error(value, expected) < allowed


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_tied_head_adds_its_gradient_to_the_embeddings(strategy):
    config = Config(block_size=12, vocab_size=90, padded_vocab_size=96, n_layer=1, n_head=2, n_embd=16)
    torch.manual_seed(0)
    model = GPT(config)
    model.init_weights()
    model.lm_head.plan = plan_cross_entropy(24, 96, 16, strategy=strategy, **SMALL_TILES)
    idx = torch.randint(90, (2, 12))
    model(idx, idx).backward()
    got = model.transformer.wte.weight.grad.clone()
    model.zero_grad()
    logits = model(idx)[..., :90]
    F.cross_entropy(logits.flatten(0, 1), idx.flatten(), reduction="sum").backward()
    assert relative_error(got, model.transformer.wte.weight.grad) < 1e-6


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bf16_never_gives_a_negative_loss(strategy):
    """In bf16 3.28125**2 rounds to 10.75; a target logit and a log-sum-exp of other roundings would differ by 0.016."""
    weight = torch.tensor([[3.28125], [0.0]], dtype=torch.bfloat16)
    head = LMHead(1, 2)
    head.weight = nn.Parameter(weight)
    head.plan = plan_cross_entropy(1, 2, 1, strategy=strategy)
    loss = head(weight[:1], torch.tensor([0]))
    assert 0 <= float(loss) < 1e-4


@pytest.mark.parametrize("size", [80.0, 640.0])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_large_bf16_logits(strategy, size):
    x, targets = inputs(dtype=torch.bfloat16)
    head = make_head(strategy).to(torch.bfloat16)
    with torch.no_grad():
        head.weight *= size / float((x @ head.weight.t()).abs().max())
    want = reference(head, x, targets)
    got = results(head, x, targets)
    dense = results(make_dense(head), x, targets)
    for value, same_dtype, expected in zip(got, dense, want, strict=True):
        assert relative_error(value, expected) <= 2 * relative_error(same_dtype, expected) + 1e-6


def make_dense(head: LMHead) -> LMHead:
    dense = LMHead(16, 300, dtype=head.weight.dtype)
    dense.load_state_dict(head.state_dict())
    dense.plan = plan_cross_entropy(20, 300, 16, strategy="dense")
    return dense


def test_samples_follow_the_heads_own_logits():
    head = make_head("cut", bias=True)
    x, _ = inputs()
    assert torch.equal(head(x, sample=0.0), head(x).argmax(-1))


def test_samples_follow_scaled_and_capped_logits():
    options = LossOptions(logit_softcap=0.5, logit_scale=3.0)
    head = LMHead(4, 6, options=options)
    x = torch.randn(4, generator=torch.Generator().manual_seed(0)).expand(20000, 4)
    torch.manual_seed(1)
    with torch.no_grad():
        head.weight.normal_(std=2.0)
        expected = head(x[0]).softmax(-1)
        shares = head(x, sample=1.0).bincount(minlength=6) / len(x)
    # Five standard deviations of a share; the plain logits' shares are far off.
    assert ((shares - expected).abs() <= 5 * (expected * (1 - expected) / len(x)).sqrt()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"bias": True},
        {"vocab_size": 250},
        {"bias": True, "vocab_size": 250, "options": LossOptions(logit_softcap=3.0, logit_scale=0.5)},
        {"fp32": True},
    ],
)
def test_token_stats_are_those_of_the_logits(dtype, arguments):
    head = make_head("cut", **arguments).to(dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            # Far from the rows before, so that padding in the softmax would show.
            parameter[250:] *= 20
    x, targets = inputs(250)
    x = x.detach() if arguments.get("fp32") else x.detach().to(dtype)
    logits = F.linear(x.double(), *(parameter.detach().double() for parameter in head.parameters()))
    logits = head.options.transform(logits)[..., : head.vocab_size]
    keep = targets != -100
    stats = head.token_stats(x, targets)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    assert relative_error(stats.loss, expected) < 1e-6
    assert torch.equal(stats.correct, keep & (logits.argmax(-1) == targets))
    with torch.no_grad():
        assert relative_error(stats.loss.sum(), head(x, targets)) < 1e-5
