"""The guards around the autograd functions: autocast, second derivatives; and composition with what wraps a model."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from litce.lm_head import LMHead
from litce.loss import chunked_cross_entropy, linear_cross_entropy, linear_token_stats, sample_tokens_chunked
from litce.loss.options import LossOptions
from litce.loss.plan import plan_cross_entropy
from tests.loss.oracle import assert_no_worse_than_dense, make_case, oracle, run

STRATEGIES = ("dense", "chunked", "cut")
BLOCKED = ("chunked", "cut")
SMALL_TILES = {"memory_budget_bytes": 40_000}
ALL_OPTIONS = LossOptions(label_smoothing=0.1, z_loss=0.02, logit_softcap=6.0, logit_scale=1.7)


@pytest.mark.parametrize("num_rows", [5, 60])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("options", [LossOptions(), ALL_OPTIONS], ids=["plain", "all options"])
@pytest.mark.parametrize("strategy", BLOCKED)
def test_autocast_changes_nothing(strategy, options, reduction, num_rows):
    """Blocks choose their dtypes, in the forward and in the backward pass."""
    case = make_case(num_rows, 700, ignored="some", bias=True)
    case.token_weights = torch.linspace(0.5, 2, num_rows)
    case.options = options
    want = run(case, strategy=strategy, reduction=reduction, **SMALL_TILES)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(case, strategy=strategy, reduction=reduction, **SMALL_TILES)
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


def test_autocast_changes_nothing_without_gradients():
    case = make_case(20, 700, bias=True)
    want = linear_token_stats(case.input, case.weight, case.target)
    tokens = sample_tokens_chunked(case.input, case.weight, 0.0)
    logits = case.input @ case.weight.t()
    loss = chunked_cross_entropy(logits, case.target)
    with torch.autocast("cpu", torch.bfloat16):
        got = linear_token_stats(case.input, case.weight, case.target)
        assert torch.equal(sample_tokens_chunked(case.input, case.weight, 0.0), tokens)
        assert torch.equal(chunked_cross_entropy(logits, case.target), loss)
    assert torch.equal(got.loss, want.loss) and torch.equal(got.entropy, want.entropy)


@pytest.mark.parametrize("strategy", BLOCKED)
def test_a_loss_scaler_keeps_small_fp16_gradients(strategy):
    """Unscaled they are below fp16's least number: rounded before the scaler's factor they would be 0."""
    case = make_case(500, 101, dtype=torch.float16, ignored="some")
    case.weight = case.weight * 2e-6
    want = oracle(case, upstream=2.0**16)
    dense = run(case, strategy="dense", upstream=2.0**16)
    assert float(want["input"].abs().max()) < 2.0**16 * 2.0**-24
    assert dense["input"].any()
    assert_no_worse_than_dense(run(case, strategy=strategy, upstream=2.0**16, **SMALL_TILES), dense, want)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("penalised", ["input", "weight", "bias"])
@pytest.mark.parametrize("strategy", BLOCKED)
def test_a_gradient_penalty_raises(strategy, penalised, reduction):
    """Also where the upstream gradient has no graph, and another part of the loss could be differentiated."""
    case = make_case(8, 11, bias=True)
    leaves = case.leaves()
    loss = linear_cross_entropy(
        leaves["input"], leaves["weight"], case.target, linear_bias=leaves["bias"], strategy=strategy,
        reduction=reduction,
    ).sum()  # fmt: skip
    (grad,) = torch.autograd.grad(loss, leaves[penalised], create_graph=True)
    with pytest.raises(RuntimeError, match='differentiate twice .* strategy="dense"'):
        (loss + grad.norm()).backward()


def test_a_gradient_penalty_over_logits_raises():
    logits = torch.randn(4, 7, requires_grad=True)
    (grad,) = torch.autograd.grad(chunked_cross_entropy(logits, torch.arange(4)), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.norm().backward()


def test_dense_has_second_derivatives():
    case = make_case(6, 5, n_embd=3, dtype=torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (case.input, case.weight)]
    assert torch.autograd.gradgradcheck(
        lambda x, w: linear_cross_entropy(x, w, case.target, strategy="dense"), leaves, check_batched_grad=False
    )


class Tower(nn.Module):
    """A linear layer and a head, with the loss inside."""

    def __init__(self, strategy: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(16, 16)
        self.head = LMHead(16, 300)
        self.head.plan = plan_cross_entropy(64, 300, 16, strategy=strategy, **SMALL_TILES)

    def forward(self, x, targets):
        return self.head(torch.tanh(self.body(x)), targets)


def loss_and_grads(model, call, x, targets):
    model.zero_grad()
    loss = call(x, targets)
    loss.backward()
    return loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_compiled_model_gives_the_same_numbers_for_five_lengths(strategy):
    model = Tower(strategy)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    for length in (8, 16, 24, 40, 64):
        x, targets = torch.randn(2, length, 16), torch.randint(300, (2, length))
        targets[:, ::3] = -100
        want = loss_and_grads(model, model, x, targets)
        for got, expected in zip(loss_and_grads(model, compiled, x, targets), want, strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_activation_checkpointing_gives_the_same_numbers(strategy, reentrant):
    model = Tower(strategy)
    x, targets = torch.randn(2, 9, 16, requires_grad=True), torch.randint(300, (2, 9))
    want = loss_and_grads(model, model, x, targets)
    got = loss_and_grads(model, lambda *args: checkpoint(model, *args, use_reentrant=reentrant), x, targets)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_model_that_holds_a_head_can_be_copied(strategy):
    model = Tower(strategy)
    twin = copy.deepcopy(model)
    x, targets = torch.randn(5, 16), torch.randint(300, (5,))
    assert torch.equal(model(x, targets), twin(x, targets))


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_combination_equals_dense(data):
    """Shapes, strides, masks, options, dtypes, upstream gradients and frozen operands, drawn together."""
    num_rows, vocab_size = data.draw(st.integers(0, 40)), data.draw(st.integers(2, 700))
    n_embd = data.draw(st.integers(1, 24))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    case = make_case(num_rows, vocab_size, n_embd, dtype=dtype, bias=data.draw(st.booleans()), seed=num_rows)
    mask = data.draw(st.lists(st.booleans(), min_size=num_rows, max_size=num_rows))
    case.target = torch.where(torch.tensor(mask, dtype=torch.bool), -100, case.target)
    case.options = LossOptions(
        label_smoothing=data.draw(st.sampled_from([0.0, 0.3])),
        z_loss=data.draw(st.sampled_from([0.0, 0.01])),
        logit_softcap=data.draw(st.sampled_from([None, 4.0])),
        logit_scale=data.draw(st.sampled_from([1.0, 0.5, -2.0])),
    )
    if data.draw(st.booleans()):
        case.token_weights = torch.linspace(0.1, 2.0, num_rows)
    if data.draw(st.booleans()):
        case.weight = case.weight.t().contiguous().t()
    frozen = data.draw(st.sampled_from([(), ("weight",), ("input",), ("weight", "bias")]))
    reduction = data.draw(st.sampled_from(["mean", "sum", "none"]))
    upstream = torch.linspace(-1, 2, num_rows) if reduction == "none" else data.draw(st.sampled_from([1.0, -0.5]))
    want = oracle(case, reduction=reduction, upstream=upstream)
    shared = {"upstream": upstream, "frozen": frozen, "reduction": reduction}
    dense = run(case, strategy="dense", **shared)
    chunk_size = data.draw(st.sampled_from([1, 3, 16, "auto"]))
    for strategy in BLOCKED:
        budget = data.draw(st.sampled_from([1_000, 50_000, 2**25]))
        got = run(case, strategy=strategy, chunk_size=chunk_size, memory_budget_bytes=budget, **shared)
        assert_no_worse_than_dense(got, dense, want)
