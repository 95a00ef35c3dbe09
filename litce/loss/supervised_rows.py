"""The rows of the hidden states that have a target, served block by block."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from litce.loss.host_sync import is_host_readable


class SupervisedRows:
    """Views the rows of `input` (..., D) whose `target` (...) is not `ignore_index`, without copying all of them.

    Ignored rows reach no GEMM, and strided inputs are gathered one block at a time, so that the copy of a sliced or
    partly ignored input never exceeds a block.

    A GPU would have to be waited for to tell which rows those are. There the first `num_supervised` rows are kept, in
    an order that puts the supervised ones first, and all of them if it is None. Ignored rows among those kept have
    hidden states, weights, losses and gradients of 0 and target 0.
    """

    def __init__(self, input: Tensor, target: Tensor, ignore_index: int, num_supervised: int | None = None) -> None:
        self.input = input
        self.num_rows = target.numel()
        flat_target = target.reshape(-1)
        keep = flat_target != ignore_index
        self.index: Tensor | None = None  # flat positions of the kept rows; None: all rows
        self._ignored: Tensor | None = None  # (kept rows,) those without a target; None: none of them
        if is_host_readable(target.device):
            if not bool(keep.all()):
                self.index = keep.nonzero()[:, 0]
        else:
            self._ignored = ~keep
            if num_supervised is not None and num_supervised < self.num_rows:
                self.index = self._ignored.byte().argsort(stable=True)[:num_supervised]
                self._ignored = self._ignored[self.index]
        kept_target = flat_target if self.index is None else flat_target[self.index]
        self.target = self._zero_ignored(kept_target.long(), slice(None))
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
            x = self._flat[block]
        elif self._flat is not None:
            x = self._flat.index_select(0, self.index[block])
        else:
            x = self.input[_unravel(self.index[block], self.input.shape[:-1])]
        # Of an ignored row NaN would survive a weight of 0.
        return self._zero_ignored(x, block)

    def losses(self, losses: Tensor, block: slice) -> Tensor:
        """Return the losses (rows,) of a block, 0 at ignored rows."""
        return self._zero_ignored(losses, block)

    def select(self, values: Tensor) -> Tensor:
        """Return the kept entries of `values` (...) of all rows, flat; 0-dim values are those of every row."""
        if values.ndim == 0:
            kept = values.expand(len(self.target))
        else:
            flat = values.reshape(-1)
            kept = flat if self.index is None else flat[self.index]
        return self._zero_ignored(kept, slice(None))

    def scatter(self, values: Tensor) -> Tensor:
        """Return `values` (kept rows,) at their places among all rows, 0 at ignored ones."""
        values = self._zero_ignored(values, slice(None))
        if self.index is None:
            return values
        out = torch.zeros(self.num_rows, dtype=values.dtype, device=values.device)
        return out.index_copy_(0, self.index, values)

    def new_grad(self, dtype: torch.dtype) -> Tensor:
        """Return a gradient buffer (all rows, D): zeros where rows are dropped, uninitialised elsewhere."""
        make = torch.empty if self.index is None else torch.zeros
        return make((self.num_rows, self.input.shape[-1]), dtype=dtype, device=self.input.device)

    def write(self, out: Tensor, block: slice, values: Tensor) -> None:
        """Write `values` (rows, D) of a block, which it may change, to their places in `out` (all rows, D)."""
        if self._ignored is not None:
            values.masked_fill_(self._ignored[block, None], 0)
        if self.index is None:
            out[block] = values
        else:
            out.index_copy_(0, self.index[block], values.to(out.dtype))

    def _zero_ignored(self, values: Tensor, block: slice) -> Tensor:
        if self._ignored is None:
            return values
        ignored = self._ignored[block]
        return values.masked_fill(ignored if values.ndim == 1 else ignored[:, None], 0)


def _unravel(index: Tensor, shape: torch.Size) -> tuple[Tensor, ...]:
    """As `torch.unravel_index`, which copies the shape to the index's device and waits for that."""
    positions = []
    for size in reversed(shape):
        positions.append(index % size)
        index = index // size
    return tuple(reversed(positions))
