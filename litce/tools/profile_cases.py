"""The losses that `litce profile_memory` compares: functions of a head's operands that return a scalar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from litce.loss import CrossEntropyPlan, chunked_cross_entropy, linear_cross_entropy, plan_cross_entropy

LITGPT_CHUNK_ROWS = 128
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Autograd's log-softmax holds log-probabilities, their gradient and that of the logits.
COPIES_OF_EXISTING = 3


@dataclass(frozen=True)
class Case:
    """One setting to measure."""

    loss: str
    """A key of LOSSES."""
    shape: tuple[int, ...]
    """Rows, width and vocabulary: N, D, V."""
    dtype: str = "fp32"
    rows: int | None = None
    """Rows of a block; None lets the loss choose."""
    budget: int = 32 * 2**20
    compiled: bool = False
    device: str = "cpu"

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Case:
        """The case that `to_dict` gave."""
        return cls(**{**values, "shape": tuple(values["shape"])})

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)

    @property
    def plan(self) -> CrossEntropyPlan | None:
        """The plan of litce's own losses and of dense; None for the others."""
        if self.loss not in ("dense", "chunked", "cut", "auto"):
            return None
        num_rows, n_embd, vocab_size = self.shape
        return plan_cross_entropy(
            num_rows,
            vocab_size,
            n_embd,
            dtype=DTYPES[self.dtype],
            device=self.device,
            strategy=self.loss,  # type: ignore[arg-type]
            chunk_size="auto" if self.rows is None or self.loss == "dense" else self.rows,
            memory_budget_bytes=self.budget,
        )

    @property
    def on_existing_logits(self) -> bool:
        """Whether the loss starts from logits, which then are an input."""
        return self.loss.startswith("existing logits")

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of the logits that are alive at once, as far as the loss bounds them."""
        plan = self.plan
        if plan is not None:
            return plan.rows, plan.vocab_tile
        return (self.rows or self.shape[0]) if self.on_existing_logits else self.shape[0], self.shape[2]

    @property
    def block_bytes(self) -> int:
        """One fp32 copy of the block's logits."""
        return self.block[0] * self.block[1] * 4

    @property
    def predicted_bytes(self) -> int | None:
        """Predicted peak above inputs and gradients; None where nothing predicts it."""
        if self.loss == "existing logits":
            return COPIES_OF_EXISTING * self.block_bytes
        return None if self.plan is None else self.plan.peak_bytes


Loss = Callable[[Case, Tensor, Tensor, Tensor], Tensor]


def _litce(case: Case, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return linear_cross_entropy(
        x,
        weight,
        target,
        strategy=case.loss,  # type: ignore[arg-type]
        chunk_size="auto" if case.rows is None else case.rows,
        memory_budget_bytes=case.budget,
    )


def _dense(case: Case, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), target)


def _logits_chunked(case: Case, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    rows = case.rows or LITGPT_CHUNK_ROWS
    parts = zip(F.linear(x, weight).split(rows), target.split(rows), strict=True)
    return torch.cat([F.cross_entropy(z.float(), t, reduction="none") for z, t in parts]).mean()


def _existing(case: Case, logits: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target)


def _existing_litce(case: Case, logits: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return chunked_cross_entropy(logits, target, chunk_size=case.rows or 0)


LOSSES: dict[str, Loss] = {
    "dense": _dense,  # all logits at once, autograd's log-softmax
    "logits in chunks": _logits_chunked,  # all logits at once, their loss by rows: litgpt's way
    "chunked": _litce,
    "cut": _litce,
    "auto": _litce,
    "existing logits": _existing,  # autograd's log-softmax of one block that exists already
    "existing logits, litce": _existing_litce,
}


def operands(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Random operands: x (N, D), or the block's logits for losses of existing ones; weight (V, D); targets (N,)."""
    num_rows, n_embd, vocab_size = case.shape
    dtype, device = DTYPES[case.dtype], case.device
    generator = torch.Generator(device).manual_seed(0)
    if case.on_existing_logits:
        num_rows, n_embd = case.block
        weight = torch.zeros((), device=device)
    else:
        weight = torch.randn(vocab_size, n_embd, generator=generator, device=device).mul_(n_embd**-0.5).to(dtype)
        weight.requires_grad_()
    x = torch.randn(num_rows, n_embd, generator=generator, device=device).to(dtype).requires_grad_()
    return x, weight, torch.randint(vocab_size, (num_rows,), generator=generator, device=device)
