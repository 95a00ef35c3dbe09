"""The GEMMs of a head over a tile of the vocabulary, in the dtypes the device multiplies fast."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from litce.loss.options import LossOptions

# Columns of a GEMM over few rows: its tiles of logits and weight stay in the caches, which is 10 to 30 % faster.
TILE_COLUMNS = 2048
# A 16-bit weight is widened tile by tile; 4 MiB stays in the caches while the GEMM reads it.
CAST_TILE_BYTES = 4 * 2**20
# With fewer rows than this, BLAS sums a product over the vocabulary in one running fp32 sum, whose error at V = 152k is
# 13 times that of its kernels for more rows. Partial sums over tiles of so many columns bring it down to theirs.
FEW_ROWS = 16
FEW_ROWS_TILE = 512


def operand_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype in which a GEMM with `weight` multiplies.

    CPUs multiply in fp32 at least: it is exact for 16-bit operands, and the 16-bit GEMM of a CPU without bf16 units is
    emulated. GPUs multiply in autocast's dtype where autocast is on and in the weight's own dtype elsewhere.
    """
    if weight.device.type == "cpu":
        return torch.promote_types(weight.dtype, torch.float32)
    if torch.is_autocast_enabled(weight.device.type):
        return torch.get_autocast_dtype(weight.device.type)
    return weight.dtype


@dataclass(frozen=True)
class Projection:
    """`logits = x @ weight.T + bias`, scaled and capped by the options, read tile by tile.

    Blocks of logits are stored `(columns of the vocabulary, rows)`: with the few rows that a memory budget allows, the
    GEMM `weight @ x.T` runs 1.2 to 1.5 times faster than `x @ weight.T` (docs/loss.md).
    """

    weight: Tensor  # (V, D), or more rows
    bias: Tensor | None  # (V,), or longer
    options: LossOptions
    dtype: torch.dtype  # of the operands of every GEMM
    input_dtype: torch.dtype  # that hidden states are rounded to before
    vocab_size: int  # V

    @property
    def accumulate_dtype(self) -> torch.dtype:
        """Logits, sums and gradient accumulators are fp32 (fp64 for fp64 weights)."""
        return torch.promote_types(self.dtype, torch.float32)

    def operand(self, x: Tensor) -> Tensor:
        """Return hidden states in the operands' dtype, rounded to the head's on the way as a dense head's are."""
        return x.to(self.input_dtype).to(self.dtype)

    def logits_(self, block: Tensor, x: Tensor, start: int) -> Tensor:
        """Write the logits of columns `start` to `start + v` to `block` (v, rows); `x` is (rows, D) in `self.dtype`."""
        for a, b in self._tiles(start, *block.shape):
            _matmul_(block[a - start : b - start], self._weight_tile(a, b), x.t(), accumulate=False)
        if self.bias is not None:
            block.add_(self.bias[start : start + block.shape[0], None])
        return self.options.transform_(block)

    def input_grad_(self, grad: Tensor, block: Tensor, start: int, *, accumulate: bool) -> None:
        """Write or add `block.T @ weight[start:start + v]` to `grad` (rows, D); `block` is (v, rows)."""
        for a, b in self._tiles(start, *block.shape):
            columns = block[a - start : b - start].to(self.dtype)
            if block.shape[1] < FEW_ROWS and (accumulate or a > start):
                grad.add_(columns.t() @ self._weight_tile(a, b))
            else:
                _matmul_(grad, columns.t(), self._weight_tile(a, b), accumulate=accumulate or a > start)

    def weight_grad_(self, grad: Tensor, block: Tensor, x: Tensor, *, accumulate: bool) -> None:
        """Write or add `block @ x` to `grad` (v, D); `block` is (v, rows), `x` (rows, D) in `self.dtype`."""
        _matmul_(grad, block.to(self.dtype), x, accumulate=accumulate)

    def weight_sum(self) -> Tensor:
        """Return the sum of the weight's rows (D,) in the accumulators' dtype."""
        total = torch.zeros(self.weight.shape[1], dtype=self.accumulate_dtype, device=self.weight.device)
        for tile in tiles(self.vocab_size, TILE_COLUMNS):
            total += self.weight[tile].sum(0, dtype=self.accumulate_dtype)
        return total

    def _weight_tile(self, start: int, stop: int) -> Tensor:
        return self.weight[start:stop].to(self.dtype)

    def _tiles(self, start: int, num_columns: int, num_rows: int) -> Iterator[tuple[int, int]]:
        step = num_columns
        if num_rows < FEW_ROWS:
            step = FEW_ROWS_TILE
        elif self.weight.dtype != self.dtype:
            step = max(1, CAST_TILE_BYTES // (self.weight.shape[1] * self.dtype.itemsize))
        for a in range(start, start + num_columns, step):
            yield a, min(a + step, start + num_columns)


def tiles(size: int, step: int) -> Iterator[slice]:
    """Yield slices of at most `step` that cover `range(size)`."""
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def new_input_product(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised (rows, D) accumulator for `Projection.input_grad_`.

    With fewer rows than D it is stored transposed: BLAS is up to a third faster when the longer side comes first.
    """
    num_rows, n_embd = x.shape
    if num_rows < n_embd:
        return torch.empty((n_embd, num_rows), dtype=dtype, device=x.device).t()
    return torch.empty((num_rows, n_embd), dtype=dtype, device=x.device)


def _matmul_(out: Tensor, a: Tensor, b: Tensor, *, accumulate: bool) -> None:
    """`out = a @ b` or `out += a @ b`, where `out` may be wider than the operands."""
    if out.dtype != a.dtype:
        product = a @ b
        out.add_(product) if accumulate else out.copy_(product)
    elif accumulate:
        out.addmm_(a, b)
    else:
        torch.mm(a, b, out=out)
