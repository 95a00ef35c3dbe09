"""`litce bench accuracy`: gradient errors against fp64, by the number of blocks and by what a filter drops."""

from __future__ import annotations

import json as json_format
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from litce.args import UsageError, parse_bytes
from litce.loss import linear_cross_entropy
from litce.tools.operands import Operands, load_operands

CHUNK_COUNTS = (1, 4, 16, 64, 256, 1024)
TOLERANCES = (0.0, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
BF16_ROUNDING = 2.0**-8


def accuracy(
    operands: Path | None = None,
    rounds: int = 3,
    memory_budget_bytes: int | str = "32MiB",
    json: Path | None = None,
    png: Path | None = None,
) -> None:
    """Measure gradient errors against fp64: of bf16 by the number of blocks of rows, and of the filter by its time.

    Args:
        operands: file of litce bench operands; without it random operands of 1024 x 64 x 5003, whose softmax is flat.
        rounds: how often every filter is timed, in turn with dense; ratios are medians.
        memory_budget_bytes: of the filter's blocks.
        json: write the numbers to this file too.
        png: draw them to this file.

    Raises:
        UsageError: if a file cannot be read or written.
    """
    if rounds < 1:
        raise UsageError(f"--rounds {rounds}: give at least 1")
    for flag, path in (("json", json), ("png", png)):
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"--{flag} {path}: the folder {path.parent} does not exist")
    hidden, weight, target = load_operands(operands) if operands is not None else _random_operands()
    results = {
        "shape": [*hidden.shape, len(weight)],
        "blocks": errors_by_blocks((hidden, weight, target)),
        "filter": filter_frontier(
            (hidden, weight, target), rounds, parse_bytes(memory_budget_bytes, "--memory_budget_bytes")
        ),
    }
    _print(results)
    if json is not None:
        temporary = json.with_name(f".{json.name}.{os.getpid()}")
        temporary.write_text(json_format.dumps(results, indent=2) + "\n", encoding="utf-8")
        temporary.replace(json)
    if png is not None:
        _draw(results, png)


def errors_by_blocks(operands: Operands) -> list[dict[str, Any]]:
    """Relative errors of the bf16 weight's gradient, with the rows in more and more blocks.

    `summed in bf16` adds the gradient of each block to one in bf16, as autograd does over a loop of blocks.
    """
    hidden, weight, target = (t.bfloat16() if t.is_floating_point() else t for t in operands)
    reference = _gradients((hidden.double(), weight.double(), target), strategy="dense")[1]
    rows = []
    for count in CHUNK_COUNTS:
        if count > len(target):
            break
        chunk_size = -(-len(target) // count)
        row: dict[str, Any] = {"blocks": count}
        for strategy in ("chunked", "cut"):
            gradient = _gradients((hidden, weight, target), strategy=strategy, chunk_size=chunk_size)[1]
            row[strategy] = _relative_error(gradient, reference)
        row["summed in bf16"] = _relative_error(_summed_in_bf16((hidden, weight, target), chunk_size), reference)
        rows.append(row)
    return rows


def filter_frontier(operands: Operands, rounds: int, budget: int) -> list[dict[str, Any]]:
    """Time over dense's, and relative errors of both gradients in fp32, for each tolerance of the filter."""
    operands = tuple(t.float() if t.is_floating_point() else t for t in operands)  # type: ignore[assignment]
    reference = _gradients(tuple(t.double() if t.is_floating_point() else t for t in operands), strategy="dense")  # type: ignore[arg-type]
    rows: list[dict[str, Any]] = []
    ratios: dict[float, list[float]] = {tolerance: [] for tolerance in TOLERANCES}
    for turn in range(rounds + 1):
        dense_seconds = _seconds(operands, strategy="dense")[0]
        for tolerance in TOLERANCES:
            seconds, gradients = _seconds(operands, filter_tolerance=tolerance, memory_budget_bytes=budget)
            if turn > 0:  # the first turn warms up
                ratios[tolerance].append(seconds / dense_seconds)
            else:
                errors = [_relative_error(got, want) for got, want in zip(gradients, reference, strict=True)]
                rows.append({"tolerance": tolerance, "input_error": errors[0], "weight_error": errors[1]})
    for row in rows:
        row["ratio_to_dense"] = statistics.median(ratios[row["tolerance"]])
    return rows


def _gradients(operands: Operands, **options: Any) -> tuple[Tensor, Tensor]:
    hidden, weight, target = operands
    leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    loss = linear_cross_entropy(*leaves, target, **options)
    gradients = torch.autograd.grad(loss, leaves)
    return gradients[0], gradients[1]


def _seconds(operands: Operands, **options: Any) -> tuple[float, tuple[Tensor, Tensor]]:
    begin = time.perf_counter()
    gradients = _gradients(operands, **options)
    return time.perf_counter() - begin, gradients


def _summed_in_bf16(operands: Operands, chunk_size: int) -> Tensor:
    hidden, weight, target = operands
    total = torch.zeros_like(weight)
    for x, t in zip(hidden.split(chunk_size), target.split(chunk_size), strict=True):
        probability = (x.float() @ weight.float().T).softmax(-1)
        probability[torch.arange(len(t)), t] -= 1
        total += (probability.T @ x.float() / len(target)).bfloat16()
    return total


def _relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def _random_operands() -> Operands:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=generator) for n in (1024, 5003))
    return hidden, weight / 8, torch.randint(5003, (1024,), generator=generator)


def _print(results: dict[str, Any]) -> None:
    console = Console()
    shape = " x ".join(map(str, results["shape"]))
    for title, rows in (
        (f"relative error of the bf16 weight's gradient, N x D x V = {shape}", results["blocks"]),
        (f"filter_tolerance in fp32, N x D x V = {shape}", results["filter"]),
    ):
        table = Table(title=title, title_justify="left")
        for name in rows[0]:
            table.add_column(name, justify="right")
        for row in rows:
            table.add_row(*(f"{value:.3g}" for value in row.values()))
        console.print(table)


def _draw(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    counts = [row["blocks"] for row in results["blocks"]]
    for name, style in (("summed in bf16", "s--"), ("chunked", "o-"), ("cut", "x-")):
        left.loglog(counts, [row[name] for row in results["blocks"]], style, label=name)
    left.set(xlabel="blocks of rows", ylabel="relative error of the weight's gradient", title="bf16 against fp64")
    left.legend()
    rows = results["filter"][1:]
    for name in ("input", "weight"):
        right.loglog([r["ratio_to_dense"] for r in rows], [r[f"{name}_error"] for r in rows], "o-", label=name)
    for row in rows:
        right.annotate(f"{row['tolerance']:g}", (row["ratio_to_dense"], row["input_error"]), fontsize=8)
    right.axhline(BF16_ROUNDING, color="gray", linestyle=":", label="one bf16 rounding")
    right.axvline(results["filter"][0]["ratio_to_dense"], color="gray", linestyle="--", label="exact")
    right.set(xlabel="time / dense", ylabel="relative error of the gradient", title="filter_tolerance")
    right.legend()
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
