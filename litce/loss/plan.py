"""Which strategy a loss runs with, and how large its blocks are, for a memory budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from litce.loss.chunked import lent_tile_columns
from litce.loss.host_sync import is_host_readable
from litce.loss.projection import CAST_TILE_BYTES, TILE_COLUMNS

DEFAULT_BUDGET_BYTES = 32 * 2**20

StrategyName = Literal["dense", "chunked", "cut"]
STRATEGIES = ("dense", "chunked", "cut")

# A peak may exceed the budget by 16 MB. Half of it is for what comes with a block (hidden states, row statistics, a
# widened tile of a 16-bit weight) or, up to a share of the budget, for some more rows of a block: with 64 instead of 48
# a pass takes a tenth less time. The other half is for what no plan knows, such as the buffers of BLAS.
SLACK_BYTES = 8 * 2**20
MORE_ROWS_SHARE = 0.25

# Measured on CPUs (docs/loss.md), relative to chunked with many rows. Every block of r rows streams the weight three
# times, which costs as much as the GEMMs of some more rows; cut has one more GEMM, with a frozen weight as many.
ROWS_OVERHEAD = 12
CUT_TIME = 1.33
CUT_TIME_FROZEN = 1.02

MAX_CHUNKED_ROWS = 512
CUT_ROWS = 2048
MIN_CUT_TILE = 256
MAX_CUT_TILE = 4096  # a larger tile leaves the caches and wins nothing
ROW_MULTIPLE = 16  # vectorised reductions over rows want whole vectors


@dataclass(frozen=True)
class CrossEntropyPlan:
    """How a head computes its loss: everything resolved, nothing "auto"."""

    strategy: StrategyName
    rows: int  # rows (tokens) of logits alive at once
    vocab_tile: int  # columns of logits alive at once
    peak_bytes: int  # predicted peak above inputs and their gradients
    lent_rows: int = 0  # first rows whose logits lie in the memory of the weight's gradient instead
    filter_tolerance: float = 0.0  # share of the probability whose gradient may be dropped

    def __str__(self) -> str:
        lent = f" after {self.lent_rows} in the weight's gradient" if self.lent_rows else ""
        filtered = f", dropping at most {self.filter_tolerance:g} of it" if self.filter_tolerance else ""
        return (
            f"cross-entropy: {self.strategy}, {self.rows} rows x {self.vocab_tile} of the vocabulary at a time"
            f"{lent}{filtered}, "
            f"predicted peak {self.peak_bytes / 2**20:.1f} MiB above inputs and gradients"
        )


def auto_cross_entropy_chunk_size(
    vocab_size: int, itemsize: int, memory_budget_bytes: int = DEFAULT_BUDGET_BYTES, copies: int = 3
) -> int:
    """Return the most rows of logits whose `copies` fit the budget, at least 1.

    `max(1, memory_budget_bytes // (vocab_size * itemsize * copies))`. Autograd's log-softmax over existing logits holds
    three copies of a chunk: its fp32 logits, log-probabilities and their gradient.

    Raises:
        ValueError: for an argument below 1.
    """
    for name, value in (
        ("vocab_size", vocab_size),
        ("itemsize", itemsize),
        ("memory_budget_bytes", memory_budget_bytes),
        ("copies", copies),
    ):
        _check_count(name, value)
    return max(1, memory_budget_bytes // (vocab_size * itemsize * copies))


def _check_count(name: str, value: int, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}; give a whole number of at least {least}")


def check_chunk_size(name: str, chunk_size: int | str) -> None:
    """Raise ValueError unless `chunk_size` is "auto", 0 (dense) or a number of rows."""
    if chunk_size == "auto":
        return
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 0:
        raise ValueError(f'{name}={chunk_size!r}; give a number of rows, 0 for all at once, or "auto"')


def plan_cross_entropy(
    num_rows: int,
    vocab_size: int,
    n_embd: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    weight_requires_grad: bool = True,
    chunk_size: int | Literal["auto"] = "auto",
    strategy: Literal["auto", "dense", "chunked", "cut"] = "auto",
    memory_budget_bytes: int = DEFAULT_BUDGET_BYTES,
    filter_tolerance: float = 0.0,
) -> CrossEntropyPlan:
    """Return the plan of a loss over (num_rows, n_embd) hidden states and a (vocab_size, n_embd) weight of `dtype`.

    `chunk_size` k > 0 means k rows, 0 means dense. "auto" with strategy "auto" is the fastest strategy whose block of
    logits fits `memory_budget_bytes`; with a named strategy its block is sized for the budget. A budget below the
    smallest useful tile gets that tile, whose size `peak_bytes` states.

    Raises:
        ValueError: for an unknown strategy, an unusable size or budget, or a chunk size that contradicts the strategy.
    """
    if strategy not in ("auto", *STRATEGIES):
        raise ValueError(f"strategy={strategy!r}; choose auto, dense, chunked or cut")
    check_chunk_size("chunk_size", chunk_size)
    for name, value, least in (
        ("num_rows", num_rows, 0),
        ("vocab_size", vocab_size, 1),
        ("n_embd", n_embd, 1),
        ("memory_budget_bytes", memory_budget_bytes, 1),
    ):
        _check_count(name, value, least)
    if not 0.0 <= filter_tolerance < 1.0:
        raise ValueError(f"filter_tolerance={filter_tolerance}; give a number in [0, 1)")
    if filter_tolerance and (strategy == "dense" or chunk_size == 0):
        raise ValueError(f"filter_tolerance={filter_tolerance} needs strategy chunked, cut or auto; dense is exact")
    if chunk_size == 0:
        if strategy in ("chunked", "cut"):
            raise ValueError(
                f"chunk_size=0 means all logits at once, strategy={strategy!r} does not; "
                'give a number of rows or "auto"'
            )
        strategy = "dense"
    # Their product with the weight, what it is multiplied with, and where ignored rows are blanked a copy of them.
    hidden_copies = 2 if is_host_readable(torch.device(device)) else 3
    shape = _Shape(max(1, num_rows), vocab_size, n_embd, dtype, weight_requires_grad, filter_tolerance, hidden_copies)
    if strategy == "dense":
        return shape.dense()
    if strategy == "auto" and chunk_size == "auto":
        chunked, cut = shape.chunked(memory_budget_bytes), shape.cut(memory_budget_bytes)
        fits = chunked.peak_bytes <= memory_budget_bytes + SLACK_BYTES
        return chunked if fits and shape.chunked_time(chunked) <= shape.cut_time() else cut
    rows = None if chunk_size == "auto" else min(chunk_size, shape.rows)
    return shape.cut(memory_budget_bytes, rows) if strategy == "cut" else shape.chunked(memory_budget_bytes, rows)


@dataclass(frozen=True)
class _Shape:
    rows: int
    vocab_size: int
    n_embd: int
    dtype: torch.dtype
    weight_requires_grad: bool
    filter_tolerance: float
    hidden_copies: int  # of the hidden states of a block

    @property
    def item(self) -> int:
        return max(4, self.dtype.itemsize)

    def fixed_bytes(self, columns: int) -> int:
        """Row statistics, and the widened tile of a 16-bit weight, at most `columns` of the vocabulary."""
        widened_tile = min(CAST_TILE_BYTES, min(columns, self.vocab_size) * self.n_embd * self.item)
        return 8 * self.rows * self.item + (widened_tile if self.dtype.itemsize < 4 else 0)

    def filtered_bytes(self, rows: int) -> int:
        """Copies of kept columns of logits, weight and its gradient, where there is a filter."""
        return TILE_COLUMNS * (rows + 2 * self.n_embd) * self.item if self.filter_tolerance else 0

    def dense(self) -> CrossEntropyPlan:
        # Logits, log-probabilities and their gradient; a 16-bit GEMM adds its own copy of the first and the last.
        copies = 3 * self.item + (2 * self.dtype.itemsize if self.dtype.itemsize < 4 else 0)
        return CrossEntropyPlan("dense", self.rows, self.vocab_size, self.rows * self.vocab_size * copies)

    def chunked(self, budget: int, rows: int | None = None) -> CrossEntropyPlan:
        per_row = self.vocab_size * self.item + self.hidden_copies * self.n_embd * self.item
        # A 16-bit weight's gradient is summed in a (V, D) fp32 buffer, which is alive with the blocks in the forward
        # pass, before the gradient exists, and with the gradient in the backward pass.
        summed = self.vocab_size * self.n_embd * self.item if self._widens_weight_grad else 0
        fixed = self.fixed_bytes(TILE_COLUMNS) + summed - (summed // self.item * self.dtype.itemsize)
        lent_rows = 0
        if rows is None:
            largest = int(budget * (1 + MORE_ROWS_SHARE)) // (self.vocab_size * self.item)
            fitting = min(largest, (budget + SLACK_BYTES - fixed) // per_row)
            rows = min(_round_down(min(MAX_CHUNKED_ROWS, fitting)), self.rows)
            if self.weight_requires_grad and not self.filter_tolerance:
                lent_rows = _round_down(
                    min(self.n_embd, self.rows, budget // (self.hidden_copies * self.n_embd * self.item))
                )
        lent = lent_rows * self.hidden_copies * self.n_embd * self.item
        if lent_rows:
            lent += lent_tile_columns(lent_rows) * lent_rows * self.item
        blocks = max(lent, rows * per_row if lent_rows < self.rows else 0)
        peak = max(summed, blocks + fixed) + self.filtered_bytes(rows)
        return CrossEntropyPlan("chunked", rows, self.vocab_size, peak, lent_rows, self.filter_tolerance)

    def chunked_time(self, plan: CrossEntropyPlan) -> float:
        """Return the time of the plan per row, in passes of three GEMMs (two with a frozen weight)."""
        lent = plan.lent_rows / self.rows
        return lent + (1 - lent) * (1 + ROWS_OVERHEAD / plan.rows)

    def cut_time(self) -> float:
        """Return the time of cut per row, in the unit of `chunked_time`."""
        return CUT_TIME if self.weight_requires_grad else CUT_TIME_FROZEN

    def cut(self, budget: int, rows: int | None = None) -> CrossEntropyPlan:
        rows = rows or min(CUT_ROWS, self.rows)
        while True:
            fixed = self.fixed_bytes(MAX_CUT_TILE) + self.hidden_copies * rows * self.n_embd * self.item
            per_column = rows * self.item + (self.n_embd * self.item if self._widens_weight_grad else 0)
            tile = min(budget // (rows * self.item), (budget + SLACK_BYTES - fixed) // per_column)
            if tile >= MIN_CUT_TILE or rows <= 64:
                break
            rows //= 2
        tile = min(self.vocab_size, max(MIN_CUT_TILE, min(MAX_CUT_TILE, tile // 256 * 256)))
        peak = tile * per_column + fixed + self.filtered_bytes(rows)
        return CrossEntropyPlan("cut", rows, tile, peak, filter_tolerance=self.filter_tolerance)

    @property
    def _widens_weight_grad(self) -> bool:
        return self.weight_requires_grad and self.dtype.itemsize < 4


def _round_down(rows: int) -> int:
    return max(1, rows // ROW_MULTIPLE * ROW_MULTIPLE if rows >= ROW_MULTIPLE else rows)
