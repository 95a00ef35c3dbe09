"""The Triton kernels behind `litce.loss.triton_block`; importing this module needs triton.

Both tile a block of logits as (columns of the vocabulary, rows). The vocabulary is split over programs as well as the
rows are: a block that fits a small budget has too few rows to fill a GPU.
"""

# mypy: disable-error-code="no-untyped-def, no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

LEAST_FINITE = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def split_statistics_kernel(
    block,  # (num_columns, num_rows) fp32
    target,  # (num_rows,) integer
    split_max,  # (splits, num_rows) fp32, written
    split_sum,  # (splits, num_rows) fp32, written
    target_logit,  # (num_rows,) fp32, written by the first split: NaN where the target is no column
    num_columns,
    num_rows,
    column_stride,
    row_stride,
    columns_per_split,  # a multiple of COLUMNS
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write each row's maximum and sum of exp(z - maximum) over one split of the vocabulary.

    One pass (Milakov and Gimelshein 2018, arXiv:1805.02867), with a running maximum and sum in every lane: lanes are
    combined once at the end. The maximum starts at the least finite number, so that a row of -inf sums to 0, not NaN.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    row_offset = row.to(tl.int64) * row_stride
    row_mask = row < num_rows
    lane_max = tl.full((COLUMNS, ROWS), LEAST_FINITE, tl.float32)
    lane_sum = tl.zeros((COLUMNS, ROWS), tl.float32)
    for start in range(0, columns_per_split, COLUMNS):
        column = split * columns_per_split + start + tl.arange(0, COLUMNS)
        mask = (column < num_columns)[:, None] & row_mask[None, :]
        offset = column.to(tl.int64)[:, None] * column_stride + row_offset[None, :]
        z = tl.load(block + offset, mask=mask, other=float("-inf"))
        # Of exp(old maximum - new) and exp(z - new) one is always exp(0).
        difference = z - lane_max
        smaller = tl.exp(-tl.abs(difference))
        lane_sum = tl.where(difference > 0, lane_sum * smaller + 1.0, lane_sum + smaller)
        lane_max = tl.maximum(lane_max, z)
    row_max = tl.max(lane_max, 0)
    # inf - inf makes the sum of a row with +inf NaN here, as exp(inf - inf) does in an unfused softmax.
    row_sum = tl.sum(lane_sum * tl.exp(lane_max - row_max[None, :]), 0)
    tl.store(split_max + split * num_rows + row, row_max, mask=row_mask)
    tl.store(split_sum + split * num_rows + row, row_sum, mask=row_mask)

    if split == 0:
        label = tl.load(target + row, mask=row_mask, other=-1).to(tl.int64)
        inside = (label >= 0) & (label < num_columns)
        logit = tl.load(block + label * column_stride + row_offset, mask=inside, other=float("nan"))
        tl.store(target_logit + row, logit, mask=row_mask)


@triton.jit
def softmax_grad_kernel(
    block,  # (num_columns, num_rows) fp32, overwritten
    target,  # (num_rows,) integer
    split_max,  # (splits, num_rows) fp32
    split_sum,  # (splits, num_rows) fp32
    row_max,  # (num_rows,) fp32, written by the first split
    exp_sum,  # (num_rows,) fp32, written by the first split
    num_columns,
    num_rows,
    column_stride,
    row_stride,
    columns_per_split,
    num_splits,
    SPLITS: tl.constexpr,  # the power of two that holds num_splits
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Overwrite one split by `exp(z - row_max) - exp_sum * [column == target]`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    row_offset = row.to(tl.int64) * row_stride
    row_mask = row < num_rows

    part = tl.arange(0, SPLITS)
    part_mask = (part < num_splits)[:, None] & row_mask[None, :]
    part_offset = part[:, None] * num_rows + row[None, :]
    maxima = tl.load(split_max + part_offset, mask=part_mask, other=LEAST_FINITE)
    sums = tl.load(split_sum + part_offset, mask=part_mask, other=0.0)
    maximum = tl.max(maxima, 0)
    total = tl.sum(sums * tl.exp(maxima - maximum[None, :]), 0)
    # A GPU's max drops NaN; the sum keeps it.
    maximum = tl.where((total != total) & (maximum < float("inf")), float("nan"), maximum)
    if split == 0:
        tl.store(row_max + row, maximum, mask=row_mask)
        tl.store(exp_sum + row, total, mask=row_mask)

    label = tl.load(target + row, mask=row_mask, other=-1).to(tl.int64)
    for start in range(0, columns_per_split, COLUMNS):
        column = split * columns_per_split + start + tl.arange(0, COLUMNS)
        mask = (column < num_columns)[:, None] & row_mask[None, :]
        pointer = block + column.to(tl.int64)[:, None] * column_stride + row_offset[None, :]
        exponential = tl.exp(tl.load(pointer, mask=mask, other=float("-inf")) - maximum[None, :])
        hit = column[:, None] == label[None, :]
        tl.store(pointer, tl.where(hit, exponential - total[None, :], exponential), mask=mask)
