"""The fp64 reference of every loss test, and the comparison with the dense path's error in the same dtype."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from litce.loss import linear_cross_entropy
from litce.loss.options import LossOptions

ROUNDING = 4 * torch.finfo(torch.float32).eps
"""Errors below this share of the terms that a gradient is summed from are fp32 rounding: dense's may be 0 by luck."""
ORACLE_ROWS = 256


@dataclass
class Case:
    """Operands of one loss: `input` (N, D), `weight` (V, D), `bias` (V,) or None, `target` (N,)."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    token_weights: Tensor | None = None
    options: LossOptions = LossOptions()

    def leaves(self, frozen: tuple[str, ...] = ()) -> dict[str, Tensor]:
        """Return fresh leaves by name; those in `frozen` need no gradient."""
        tensors = {"input": self.input, "weight": self.weight, "bias": self.bias}
        return {k: v.detach().clone().requires_grad_(k not in frozen) for k, v in tensors.items() if v is not None}


def make_case(
    num_rows: int,
    vocab_size: int,
    n_embd: int = 16,
    *,
    dtype: torch.dtype = torch.float32,
    ignored: str = "none",
    bias: bool = False,
    seed: int = 0,
) -> Case:
    """Return random operands; `ignored` is none, some (every third row, and the first chunk) or all."""
    g = torch.Generator().manual_seed(seed)
    target = torch.randint(vocab_size, (num_rows,), generator=g)
    if ignored == "some":
        target[::3] = -100
        target[: min(9, max(0, num_rows - 1))] = -100
    elif ignored == "all":
        target[:] = -100
    return Case(
        torch.randn(num_rows, n_embd, generator=g).to(dtype),
        torch.randn(vocab_size, n_embd, generator=g).to(dtype),
        torch.randn(vocab_size, generator=g).to(dtype) if bias else None,
        target,
    )


def run(case: Case, *, upstream: Tensor | float = 1.0, frozen: tuple[str, ...] = (), **options: object) -> dict:
    """Return loss and gradients by name of one forward and backward pass of `linear_cross_entropy`."""
    leaves = case.leaves(frozen)
    loss = linear_cross_entropy(
        leaves["input"],
        leaves["weight"],
        case.target,
        linear_bias=leaves.get("bias"),
        token_weights=case.token_weights,
        **dataclasses.asdict(case.options),
        **options,  # type: ignore[arg-type]
    )
    if loss.requires_grad:
        loss.backward(torch.as_tensor(upstream, dtype=loss.dtype).expand(loss.shape))
    return {"loss": loss.detach(), **{k: v.grad for k, v in leaves.items() if v.grad is not None}}


def oracle(case: Case, *, reduction: str = "mean", upstream: Tensor | float = 1.0) -> dict[str, Tensor]:
    """Return loss and gradients in fp64, by autograd through torch's own operators, some rows at a time.

    Also, as "input terms" and so on, the norm of each gradient's terms `(softmax + one-hot) * |operand|`, before they
    cancel: rounding is relative to these.
    """
    options = case.options
    leaves = {k: v.detach().double().requires_grad_() for k, v in case.leaves().items()}
    keep = case.target != -100
    token_weights = keep.double() if case.token_weights is None else case.token_weights.double() * keep
    factor = 1 / (float(token_weights.sum()) or 1.0) if reduction == "mean" else 1.0
    losses, sizes = torch.zeros(2, len(case.target), dtype=torch.float64)
    terms: dict = {"input": 0.0, "weight": torch.zeros(()), "bias": torch.zeros(())}
    weights = torch.as_tensor(upstream, dtype=torch.float64).expand(losses.shape) * factor * token_weights
    for start in range(0, len(case.target), ORACLE_ROWS):
        part = slice(start, start + ORACLE_ROWS)
        logits = options.logit_scale * F.linear(leaves["input"][part], leaves["weight"], leaves.get("bias"))
        if options.logit_softcap is not None:
            logits = options.logit_softcap * torch.tanh(logits / options.logit_softcap)
        smoothing = options.label_smoothing
        loss = F.cross_entropy(logits, case.target[part], reduction="none", label_smoothing=smoothing)
        loss = loss + options.z_loss * logits.logsumexp(-1).square() * keep[part]
        (loss * weights[part]).sum().backward()
        losses[part] = loss.detach()
        with torch.no_grad():
            sizes[part] = (loss + logits.abs().amax(-1)) * keep[part]
            sizes[part] += options.z_loss * logits.logsumexp(-1).square() * keep[part]
            magnitude = logits.softmax(-1) * (1 + 2 * options.z_loss * logits.logsumexp(-1).abs())[:, None]
            magnitude += smoothing / logits.shape[-1]
            magnitude[keep[part], case.target[part][keep[part]]] += 1
            magnitude *= (weights[part].abs() * options.logit_scale)[:, None]
            terms["input"] += float((magnitude @ leaves["weight"].abs()).square().sum())
            terms["weight"] = terms["weight"] + magnitude.T @ leaves["input"][part].abs()
            terms["bias"] = terms["bias"] + magnitude.sum(0)
    grads = {k: torch.zeros_like(v) if v.grad is None else v.grad for k, v in leaves.items()}
    sizes *= token_weights.abs()
    losses *= token_weights
    norms = {"loss": float(sizes.norm() if reduction == "none" else sizes.sum() * abs(factor))}
    norms["input"] = terms["input"] ** 0.5
    norms |= {k: float(terms[k].norm()) for k in ("weight", "bias")}
    loss = losses if reduction == "none" else losses.sum() * factor
    return {"loss": loss, **grads, **{f"{k} terms": torch.tensor(v) for k, v in norms.items()}}


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return |got - want| / |want| in the 2-norm, with |got| where want is 0."""
    scale = float(want.detach().double().norm())
    return absolute_error(got, want) / (scale if scale > 0 else 1.0)


def absolute_error(got: Tensor, want: Tensor) -> float:
    """Return |got - want| in the 2-norm."""
    assert got.shape == want.shape
    return float((got.detach().double() - want.double()).norm())


def assert_no_worse_than_dense(got: dict, dense: dict, want: dict) -> None:
    """Assert that every result's error is at most twice the dense path's in the same dtype."""
    assert got.keys() == dense.keys()
    for name, value in got.items():
        allowed = 2 * absolute_error(dense[name], want[name]) + ROUNDING * float(want[f"{name} terms"])
        error = absolute_error(value, want[name])
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"
