"""No strategy reads a value of a tensor on the host where that would wait for a GPU.

On the CPU the GPU's code path is forced, and every operator that would wait raises.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from litce.loss import (
    chunked_cross_entropy,
    cut_cross_entropy_logprobs,
    host_sync,
    linear_cross_entropy,
    linear_token_stats,
    sample_tokens_chunked,
)
from litce.loss.options import LossOptions
from tests.loss.oracle import Case, assert_no_worse_than_dense, make_case, oracle, run

STRATEGIES = ("dense", "chunked", "cut")
TILES = {"chunk_size": 16, "memory_budget_bytes": 40_000}
READS = ("item", "tolist", "nonzero", "masked_select", "__bool__", "__int__", "__float__", "__index__")
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "unique", "_unique2", "equal", "is_nonzero")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class HostRead(AssertionError):
    pass


class NoHostReads(TorchDispatchMode):
    """Raises for operators that wait for a GPU: those that return values, or shapes that depend on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        masks = args[1] if name in ("index", "index_put", "index_put_") else ()
        if name in WAITING or any(m is not None and m.dtype in (torch.bool, torch.uint8) for m in masks):
            raise HostRead(name)
        return func(*args, **(kwargs or {}))


def refuse(name: str) -> Callable:
    def method(*args: object, **kwargs: object) -> None:
        raise HostRead(name)

    return method


@contextlib.contextmanager
def no_host_reads() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, NoHostReads():
        for name in READS:
            patch.setattr(torch.Tensor, name, refuse(name))
        yield


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_sync, "_READABLE_DEVICES", ())


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.sum().item(),
        lambda t: bool(t.any()),
        lambda t: int(t[0]),
        lambda t: float(t[0]),
        lambda t: [0, 1][t[0].long()],
        lambda t: t[t > 0],
        lambda t: t.nonzero(),
        lambda t: t.masked_select(t > 0),
        lambda t: torch.bincount(t.long()),
        lambda t: t.index_put_((t > 0,), t[0]),
    ],
)
def test_reads_are_noticed(read: Callable[[Tensor], object]) -> None:
    with no_host_reads(), pytest.raises(HostRead):
        read(torch.ones(3))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_cpu_does_read(strategy: str) -> None:
    """Otherwise the tests below would test nothing."""
    case = make_case(8, 11)
    with no_host_reads(), pytest.raises(HostRead):
        linear_cross_entropy(case.input, case.weight, case.target, strategy=strategy)


def step(case: Case, frozen: tuple[str, ...] = (), **options: Any) -> dict[str, Tensor]:
    """As `run`, without a read."""
    leaves = case.leaves(frozen)
    with no_host_reads():
        return run_leaves(case, leaves, **options)


def run_leaves(case: Case, leaves: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    loss = linear_cross_entropy(
        leaves["input"],
        leaves["weight"],
        case.target,
        linear_bias=leaves.get("bias"),
        token_weights=case.token_weights,
        label_smoothing=case.options.label_smoothing,
        z_loss=case.options.z_loss,
        logit_softcap=case.options.logit_softcap,
        logit_scale=case.options.logit_scale,
        **options,
    )
    loss.backward(torch.ones_like(loss))
    return {"loss": loss.detach(), **{k: v.grad for k, v in leaves.items() if v.is_leaf and v.grad is not None}}


def num_supervised(case: Case, hint: str) -> int | None:
    count = int((case.target != -100).sum())
    return {"unknown": None, "exact": count, "bound": count + 3, "all": len(case.target)}[hint]


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("hint", ["unknown", "exact", "bound", "all"])
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_same_numbers_without_a_read(strategy: str, reduction: str, ignored: str, hint: str) -> None:
    case = make_case(50, 301, ignored=ignored, bias=True)
    case.bias[0] = -torch.inf  # whatever ignored targets are replaced by, its logit may be infinite
    case.target = torch.where(case.target == 0, 1, case.target)
    count = num_supervised(case, hint)
    got = step(case, reduction=reduction, strategy=strategy, num_supervised=count, **TILES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_sync, "_READABLE_DEVICES", ("cpu",))
        want = run(case, reduction=reduction, strategy=strategy, **TILES)
    assert got.keys() == want.keys()
    for name, value in got.items():
        torch.testing.assert_close(value, want[name], rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    if hint in ("exact", "unknown"):
        ignored_rows = case.target == -100
        assert not got["input"][ignored_rows].any()


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("frozen", [(), ("weight",), ("input",)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        LossOptions(label_smoothing=0.1),
        LossOptions(z_loss=1e-3),
        LossOptions(logit_softcap=5.0),
        LossOptions(label_smoothing=0.1, z_loss=1e-3, logit_softcap=5.0, logit_scale=0.5),
    ],
    ids=["smoothing", "z-loss", "softcap", "all"],
)
@pytest.mark.parametrize("strategy", ["chunked", "cut"])
def test_options_against_fp64(strategy: str, options: LossOptions, frozen: tuple[str, ...], dtype: torch.dtype) -> None:
    case = make_case(50, 301, dtype=dtype, ignored="some", bias=True)
    case.options = options
    case.token_weights = torch.rand(50, generator=torch.Generator().manual_seed(1)) + 0.5
    want, dense = oracle(case), step(case, frozen, strategy="dense")
    for hint in ("unknown", "exact"):
        got = step(case, frozen, strategy=strategy, num_supervised=num_supervised(case, hint), **TILES)
        assert_no_worse_than_dense(got, dense, want)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("hint", ["unknown", "exact", "bound"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ignored_rows_that_are_not_finite_do_no_harm(strategy: str, bad: float, hint: str) -> None:
    case = make_case(50, 301, ignored="some", bias=True)
    want = step(case, strategy=strategy, **TILES)
    case.input[case.target == -100] = bad
    got = step(case, strategy=strategy, num_supervised=num_supervised(case, hint), **TILES)
    for name, value in got.items():
        torch.testing.assert_close(value, want[name], rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("hint", ["unknown", "exact"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strided_input(strategy: str, hint: str) -> None:
    case = make_case(24, 301, ignored="some")
    hidden = torch.zeros(4, 7, 16)
    hidden[:, :-1] = case.input.view(4, 6, 16)
    count = num_supervised(case, hint)
    want = step(case, strategy=strategy, **TILES)
    case.input, case.target = hidden[:, :-1], case.target.view(4, 6)
    hidden = hidden.requires_grad_()
    leaves = {"input": hidden, "weight": case.weight.clone().requires_grad_()}
    with no_host_reads():
        sliced = {**leaves, "input": hidden[:, :-1]}
        loss = run_leaves(case, sliced, strategy=strategy, num_supervised=count, **TILES)["loss"]
    torch.testing.assert_close(loss, want["loss"])
    torch.testing.assert_close(hidden.grad[:, :-1].reshape(24, 16), want["input"])
    torch.testing.assert_close(leaves["weight"].grad, want["weight"])


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_retained_graph_keeps_the_hint(strategy: str) -> None:
    case = make_case(50, 301, ignored="some")
    leaves = case.leaves()
    count = num_supervised(case, "exact")
    with no_host_reads():
        loss = linear_cross_entropy(*leaves.values(), case.target, strategy=strategy, num_supervised=count, **TILES)
        first, second = (torch.autograd.grad(loss, list(leaves.values()), retain_graph=True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("count", [0, 20])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_bound_that_is_too_small_gives_nan(strategy: str, count: int, reduction: str) -> None:
    case = make_case(50, 301, ignored="some")
    assert count < num_supervised(case, "exact")
    loss = step(case, strategy=strategy, reduction=reduction, num_supervised=count)["loss"]
    assert loss.isnan().all()


@pytest.mark.parametrize("count", [0, 26, -1, 3.0, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_cpu_refuses_a_wrong_number(strategy: str, count: object) -> None:
    case = make_case(40, 11)
    case.target[:10] = -100
    with pytest.raises(ValueError, match=f"num_supervised={count}"):
        run(case, strategy=strategy, num_supervised=count)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_fewer_rows_are_multiplied_with_the_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(64, 301, ignored="some")
    rows = {}
    original = torch.mm

    def count(a: Tensor, b: Tensor, **kwargs: object) -> Tensor:
        rows[hint] = rows.get(hint, 0) + (b.shape[1] if a.shape[1] == 16 else 0)
        return original(a, b, **kwargs)

    monkeypatch.setattr(torch, "mm", count)
    for hint in ("unknown", "exact"):
        run(case, strategy="chunked", num_supervised=num_supervised(case, hint), chunk_size=16)
    assert rows["exact"] < 0.75 * rows["unknown"]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_other_functions_of_the_package() -> None:
    case = make_case(50, 301, ignored="some", bias=True)
    logits = torch.randn(50, 301, requires_grad=True)
    with no_host_reads():
        chunked_cross_entropy(logits, case.target, 16).backward()
        stats = linear_token_stats(case.input, case.weight, case.target, memory_budget_bytes=40_000)
        logprobs = cut_cross_entropy_logprobs(case.input, case.weight, case.target, bias=case.bias)
        tokens = sample_tokens_chunked(case.input, case.weight, chunk_size=64)
    assert tokens.shape == case.target.shape
    ignored = case.target == -100
    assert not logprobs[ignored].any() and not stats.loss[ignored].any() and (stats.argmax[ignored] == -1).all()
    want = linear_token_stats(case.input[~ignored], case.weight, case.target[~ignored])
    torch.testing.assert_close(stats.loss[~ignored], want.loss)
    assert torch.equal(stats.argmax[~ignored], want.argmax)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("hint", ["unknown", "exact"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_cuda_agrees(strategy: str, dtype: torch.dtype, reduction: str, hint: str) -> None:
    case = make_case(500, 3001, n_embd=64, dtype=dtype, ignored="some", bias=True)
    want, count = oracle(case, reduction=reduction), num_supervised(case, hint)
    leaves = {k: v.detach().cuda().requires_grad_() for k, v in case.leaves().items()}
    case.target = case.target.cuda()
    dense = run_leaves(case, leaves, strategy="dense", reduction=reduction)
    options = {"strategy": strategy, "reduction": reduction, "num_supervised": count, "memory_budget_bytes": 2**20}
    clear(leaves)
    run_leaves(case, leaves, **options)  # loads and compiles, which may wait
    clear(leaves)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = run_leaves(case, leaves, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    got, dense = ({k: v.cpu() for k, v in result.items()} for result in (got, dense))
    assert_no_worse_than_dense(got, dense, want)


def clear(leaves: dict[str, Tensor]) -> None:
    for leaf in leaves.values():
        leaf.grad = None
