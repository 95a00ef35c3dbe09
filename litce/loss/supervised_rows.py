"""The rows of the hidden states that have a target, served block by block."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


class SupervisedRows:
    """Views the rows of `input` (..., D) whose `target` (...) is not `ignore_index`, without copying all of them.

    Ignored rows reach no GEMM, and strided inputs are gathered one block at a time, so that the copy of a sliced or
    partly ignored input never exceeds a block.
    """

    def __init__(self, input: Tensor, target: Tensor, ignore_index: int) -> None:
        self.input = input
        self.num_rows = target.numel()
        flat_target = target.reshape(-1)
        keep = flat_target != ignore_index
        self.index: Tensor | None = None  # flat positions of the kept rows; None: all rows
        if not bool(keep.all()):
            self.index = keep.nonzero()[:, 0]
            flat_target = flat_target[self.index]
        self.target = flat_target.long()
        try:
            self._flat: Tensor | None = input.view(-1, input.shape[-1])
        except RuntimeError:
            self._flat = None
            if self.index is None:
                self.index = torch.arange(self.num_rows, device=target.device)

    def __len__(self) -> int:
        return self.target.numel()

    def blocks(self, rows: int, first: int = 0) -> Iterator[slice]:
        """Yield slices of at most `rows` of the kept rows, the first of at most `first` where that is not 0."""
        first = min(first, len(self))
        if first > 0:
            yield slice(0, first)
        for start in range(first, len(self), rows):
            yield slice(start, min(start + rows, len(self)))

    def hidden(self, block: slice) -> Tensor:
        """Return the hidden states (rows, D) of a block; a view where nothing has to be gathered."""
        if self.index is None:
            assert self._flat is not None
            return self._flat[block]
        index = self.index[block]
        if self._flat is not None:
            return self._flat.index_select(0, index)
        return self.input[torch.unravel_index(index, self.input.shape[:-1])]

    def select(self, values: Tensor) -> Tensor:
        """Return the kept entries of `values` (...) of all rows, flat; 0-dim values are those of every row."""
        if values.ndim == 0:
            return values.expand(len(self.target))
        flat = values.reshape(-1)
        return flat if self.index is None else flat[self.index]

    def scatter(self, values: Tensor) -> Tensor:
        """Return `values` (kept rows,) at their places among all rows, 0 at ignored ones."""
        if self.index is None:
            return values
        out = torch.zeros(self.num_rows, dtype=values.dtype, device=values.device)
        return out.index_copy_(0, self.index, values)

    def new_grad(self, dtype: torch.dtype) -> Tensor:
        """Return a gradient buffer (all rows, D): zeros where rows are dropped, uninitialised elsewhere."""
        make = torch.empty if self.index is None else torch.zeros
        return make((self.num_rows, self.input.shape[-1]), dtype=dtype, device=self.input.device)

    def write(self, out: Tensor, block: slice, values: Tensor) -> None:
        """Write `values` (rows, ...) of a block to their places in `out` (all rows, ...)."""
        if self.index is None:
            out[block] = values
        else:
            out.index_copy_(0, self.index[block], values.to(out.dtype))
