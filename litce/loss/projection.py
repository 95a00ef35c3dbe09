"""The GEMMs of a head over a tile of the vocabulary, in the dtypes the device multiplies fast."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from litce.loss.options import LossOptions

# Columns of a GEMM over few rows: its tiles of logits and weight stay in the caches, which is 10 to 30 % faster.
TILE_COLUMNS = 2048
# What is cast to the dtype of a GEMM, or from that of its product, is cast tile by tile. 4 MiB stays in the caches.
CAST_TILE_BYTES = 4 * 2**20
# With fewer rows than this, BLAS sums a product over the vocabulary in one running fp32 sum, whose error at V = 152k is
# 13 times that of its kernels for more rows. Partial sums over tiles of so many columns bring it down to theirs.
FEW_ROWS = 16
FEW_ROWS_TILE = 512


def operand_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype in which a GEMM with `weight` multiplies.

    CPUs multiply in fp32 at least: it is exact for 16-bit operands, and the 16-bit GEMM of a CPU without bf16 units is
    emulated. GPUs multiply in autocast's dtype where autocast is on and in the weight's own dtype elsewhere, but for
    fp16: a sum of exponentials over a vocabulary exceeds its range, and its reciprocal falls below it.
    """
    if weight.device.type == "cpu":
        return torch.promote_types(weight.dtype, torch.float32)
    dtype = weight.dtype
    if torch.is_autocast_enabled(weight.device.type):
        dtype = torch.get_autocast_dtype(weight.device.type)
    return torch.float32 if dtype == torch.float16 else dtype


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
    def tile_columns(self) -> int:
        """Columns of a GEMM over few rows: few stay in a CPU's caches, a GPU wants few launches."""
        return TILE_COLUMNS if self.weight.device.type == "cpu" else self.vocab_size

    @property
    def accumulate_dtype(self) -> torch.dtype:
        """Logits, sums and gradient accumulators are fp32 (fp64 for fp64 weights)."""
        return torch.promote_types(self.dtype, torch.float32)

    def operand(self, x: Tensor) -> Tensor:
        """Return hidden states in the operands' dtype, rounded to the head's on the way as a dense head's are."""
        return x.to(self.input_dtype).to(self.dtype)

    def logits_(self, block: Tensor, x: Tensor, start: int) -> Tensor:
        """Write the logits of columns `start` to `start + v` to `block` (v, rows); `x` is (rows, D) in `self.dtype`."""
        for a, b in self._tiles(start, len(block), self._copied_weight, 0 if self._widens_products else len(x)):
            _matmul_(block[a - start : b - start], self._weight_tile(a, b), x.t(), accumulate=False)
        if self.bias is not None:
            block.add_(self.bias[start : start + block.shape[0], None])
        return self.options.transform_(block)

    def input_grad_(self, grad: Tensor, block: Tensor, start: int, *, accumulate: bool) -> None:
        """Write or add `block.T @ weight[start:start + v]` to `grad` (rows, D); `block` is (v, rows)."""
        few_rows = len(grad) < FEW_ROWS
        limit = FEW_ROWS_TILE if few_rows else len(block)
        for a, b in self._tiles(start, len(block), self._copied_weight, self._copied_block(grad), limit=limit):
            columns, weight = block[a - start : b - start].to(self.dtype), self._weight_tile(a, b)
            if few_rows and (accumulate or a > start):
                product = torch.empty_like(grad)
                _matmul_(product, columns.t(), weight, accumulate=False)
                grad.add_(product)
            else:
                _matmul_(grad, columns.t(), weight, accumulate=accumulate or a > start)

    def weight_grad_(self, grad: Tensor, block: Tensor, x: Tensor, *, accumulate: bool) -> None:
        """Write or add `block @ x` to `grad` (v, D); `block` is (v, rows), `x` (rows, D) in `self.dtype`."""
        copied_product = 0 if self._widens_products else x.shape[1]
        for a, b in self._tiles(0, len(block), self._copied_block(x), copied_product):
            _matmul_(grad[a:b], block[a:b].to(self.dtype), x, accumulate=accumulate)

    def weight_sum(self) -> Tensor:
        """Return the sum of the weight's rows (D,) in the accumulators' dtype."""
        total = torch.zeros(self.weight.shape[1], dtype=self.accumulate_dtype, device=self.weight.device)
        for tile in tiles(self.vocab_size, TILE_COLUMNS):
            total += self.weight[tile].sum(0, dtype=self.accumulate_dtype)
        return total

    def _weight_tile(self, start: int, stop: int) -> Tensor:
        return self.weight[start:stop].to(self.dtype)

    @property
    def _widens_products(self) -> bool:
        """Whether products arrive in the accumulators' dtype, without a copy in that of the operands."""
        return self.dtype == self.accumulate_dtype or multiplies_into_fp32(self.weight.device, self.dtype)

    @property
    def _copied_weight(self) -> int:
        """Values that are cast per column of the vocabulary before a GEMM with the weight."""
        return 0 if self.weight.dtype == self.dtype else self.weight.shape[1]

    def _copied_block(self, rows: Tensor) -> int:
        """Values that are cast per column of the vocabulary before a GEMM with a block of `rows`."""
        return 0 if self.dtype == self.accumulate_dtype else len(rows)

    def _tiles(self, start: int, num_columns: int, *copied: int, limit: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield the bounds of tiles, at most `limit` wide, of which no cast of `copied` values per column is large."""
        step = num_columns if limit is None else limit
        for values in copied:
            if values > 0:
                step = min(step, max(1, CAST_TILE_BYTES // (values * self.dtype.itemsize)))
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


@functools.cache
def multiplies_into_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `torch.mm` and `addmm` take `out_dtype`: from torch 2.8, for 16-bit operands, on CUDA.

    The product then leaves the multiplier's fp32 accumulators unrounded.
    """
    if device.type == "cpu":
        return False
    operand, out = torch.zeros((16, 16), dtype=dtype, device=device), torch.zeros((16, 16), device=device)
    try:
        torch.addmm(out, operand, operand, out_dtype=torch.float32, out=out)
    except (TypeError, RuntimeError):
        return False
    return True


def _matmul_(out: Tensor, a: Tensor, b: Tensor, *, accumulate: bool) -> None:
    """`out = a @ b` or `out += a @ b`, where `out` may be wider than the operands."""
    if out.dtype == a.dtype:
        out.addmm_(a, b) if accumulate else torch.mm(a, b, out=out)
    elif multiplies_into_fp32(a.device, a.dtype):
        if accumulate:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        else:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        product = a @ b
        out.add_(product) if accumulate else out.copy_(product)
