"""GEMMs with 16-bit operands, as a GPU multiplies them: on the CPU with a stand-in for `torch.mm(..., out_dtype=)`."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from litce.loss import projection as projection_module
from litce.loss.options import LossOptions
from litce.loss.projection import Projection, multiplies_into_fp32, operand_dtype
from litce.tools.allocations import peak_new_bytes
from tests.loss.oracle import assert_no_worse_than_dense, make_case, oracle, relative_error, run

DTYPES = (torch.bfloat16, torch.float16)
# `litce.loss.linear_cross_entropy` is the function.
loss_module = importlib.import_module("litce.loss.linear_cross_entropy")
mm, addmm = torch.mm, torch.addmm


@pytest.fixture(params=[True, False], ids=["out_dtype", "fallback"])
def widens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether products of 16-bit operands can be fp32, as from torch 2.8. GEMMs run in the weight's dtype."""

    def wide_mm(a: Tensor, b: Tensor, *, out: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        if out_dtype is None:
            return mm(a, b, out=out)
        assert out.dtype == out_dtype == torch.float32 and a.dtype == b.dtype in DTYPES
        return mm(a.float(), b.float(), out=out)

    def wide_addmm(input: Tensor, a: Tensor, b: Tensor, *, out: Tensor, out_dtype: torch.dtype) -> Tensor:
        assert out is input and out.dtype == out_dtype == torch.float32 and a.dtype == b.dtype in DTYPES
        return addmm(input, a.float(), b.float(), out=out)

    monkeypatch.setattr(torch, "mm", wide_mm)
    monkeypatch.setattr(torch, "addmm", wide_addmm)
    monkeypatch.setattr(projection_module, "multiplies_into_fp32", lambda device, dtype: request.param)
    monkeypatch.setattr(loss_module, "operand_dtype", lambda weight: weight.dtype)
    return request.param


def make_projection(dtype: torch.dtype, weight_dtype: torch.dtype | None = None) -> tuple[Projection, Tensor]:
    case = make_case(40, 700, n_embd=24)
    weight = case.weight.to(dtype).to(weight_dtype or dtype)
    return Projection(weight, None, LossOptions(), dtype, dtype, 700), case.input.to(dtype)


def rounding(dtype: torch.dtype, widens: bool) -> float:
    """Return the relative error of a product that is fp32, or rounded to `dtype` once."""
    return 4 * torch.finfo(torch.float32).eps if widens else torch.finfo(dtype).eps


@pytest.mark.parametrize("weight_dtype", [None, torch.float32], ids=["16-bit", "autocast"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_are_rounded_only_where_torch_cannot_widen(
    dtype: torch.dtype, weight_dtype: torch.dtype | None, widens: bool
) -> None:
    projection, x = make_projection(dtype, weight_dtype)
    logits = projection.logits_(torch.empty(700, 40), x, 0)
    error = relative_error(logits, projection.weight.double() @ x.double().t())
    assert error < rounding(dtype, widens)
    assert widens or error > rounding(dtype, True)


@pytest.mark.parametrize("num_rows", [3, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_accumulate_in_fp32(dtype: torch.dtype, num_rows: int, widens: bool) -> None:
    projection, x = make_projection(dtype)
    x = x[:num_rows]
    block = torch.randn(700, num_rows).to(dtype).float()
    input_grad, weight_grad = torch.ones(num_rows, 24), torch.ones(700, 24)
    projection.input_grad_(input_grad, block, 0, accumulate=True)
    projection.weight_grad_(weight_grad, block, x, accumulate=True)
    bound = rounding(dtype, widens)
    assert relative_error(input_grad, 1 + block.double().t() @ projection.weight.double()) < bound
    assert relative_error(weight_grad, 1 + block.double() @ x.double()) < bound
    projection.input_grad_(input_grad, block, 0, accumulate=False)
    assert relative_error(input_grad, block.double().t() @ projection.weight.double()) < bound


@pytest.mark.parametrize("softcap", [None, 40.0])
@pytest.mark.parametrize("confident", [False, True], ids=["unsure", "confident"])
@pytest.mark.parametrize("strategy", ["chunked", "cut"])
@pytest.mark.usefixtures("widens")
def test_no_worse_than_dense_in_bf16(strategy: str, confident: bool, softcap: float | None) -> None:
    """The gradient of a confident model is what is left of probabilities that are 1 but for a 16-bit rounding."""
    case = make_case(60, 1500, n_embd=32, dtype=torch.bfloat16, ignored="some")
    case.options = LossOptions(logit_softcap=softcap)
    if confident:
        target_weight = case.weight[case.target.clamp(min=0)]
        case.input = (0.05 * case.input.float() + target_weight.float()).bfloat16()
    want, dense = oracle(case), run(case, strategy="dense")
    assert (want["loss"] < 0.1) == confident, want["loss"]
    for budget in (60_000, 2**25):
        got = run(case, strategy=strategy, chunk_size=16, memory_budget_bytes=budget)
        assert_no_worse_than_dense(got, dense, want)


@pytest.mark.usefixtures("widens")
def test_copies_of_large_blocks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projection_module, "CAST_TILE_BYTES", 2**16)
    for name in ("mm", "addmm"):  # the stand-ins' own copies do not count
        monkeypatch.setattr(torch, name, lambda *operands, out, **options: out)
    case = make_case(64, 8192, n_embd=64, dtype=torch.bfloat16)
    projection = Projection(case.weight, None, LossOptions(), torch.bfloat16, torch.bfloat16, 8192)
    block, grad, input_grad = torch.zeros(8192, 64), torch.zeros(8192, 64), torch.zeros(64, 64)
    x = case.input

    def all_products() -> None:
        projection.logits_(block, x, 0)
        projection.input_grad_(input_grad, block, 0, accumulate=True)
        projection.weight_grad_(grad, block, x, accumulate=True)

    # A cast operand and a narrow product.
    assert peak_new_bytes(all_products) <= 2 * 2**16


@pytest.mark.parametrize(
    ("weight_dtype", "autocast_dtype", "operands"),
    [
        (torch.float32, None, torch.float32),
        (torch.bfloat16, None, torch.bfloat16),
        (torch.float16, None, torch.float32),
        (torch.float64, None, torch.float64),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16, torch.float32),
    ],
)
def test_operands_on_a_gpu(
    weight_dtype: torch.dtype,
    autocast_dtype: torch.dtype | None,
    operands: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: autocast_dtype is not None)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device_type: autocast_dtype)
    weight = SimpleNamespace(dtype=weight_dtype, device=torch.device("cuda"))
    assert operand_dtype(weight) == operands


def test_cpus_do_not_widen() -> None:
    assert not multiplies_into_fp32(torch.device("cpu"), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_products_are_fp32(dtype: torch.dtype, transposed: bool, accumulate: bool) -> None:
    a, b = torch.randn(48, 512, device="cuda", dtype=dtype), torch.randn(512, 64, device="cuda", dtype=dtype)
    out = torch.ones(64, 48, device="cuda").t() if transposed else torch.ones(48, 64, device="cuda")
    projection_module._matmul_(out, a, b, accumulate=accumulate)
    error = relative_error(out, a.double() @ b.double() + accumulate)
    assert error < rounding(dtype, multiplies_into_fp32(out.device, dtype))
