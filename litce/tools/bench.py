"""`litce bench loss`: time and peak memory of the loss against dense, its usual remedies and the bare GEMMs."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from litce.args import UsageError, parse_bytes
from litce.tools.bench_worker import CONTENDERS
from litce.tools.operands import load_operands

DEFAULT_SHAPES = ("2048x512x65536", "4096x768x50257", "2048x896x151936")


def loss(
    shapes: list[str] | None = None,
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32",
    contenders: list[str] | None = None,
    rounds: int = 3,
    repeats: int = 1,
    memory_budget_bytes: int | str = "32MiB",
    filter_tolerance: float = 0.0,
    operands: Path | None = None,
    json: Path | None = None,
    png: Path | None = None,
) -> None:
    """Measure a forward and backward pass of the loss and print a table per shape.

    Each contender runs in a process of its own, the contenders in turn within a round. A ratio is the median over the
    rounds of seconds / dense's seconds of the same round. The peak is resident memory above the inputs during the first
    pass; "above gradients" leaves out the gradients themselves.

    Args:
        shapes: hidden states (N, D) and weight (V, D) as NxDxV; default: the three of the README.
        dtype: of hidden states and weight.
        contenders: subset of dense, logits_chunked, rows_checkpoint, vocab_checkpoint, torch, gemms, litce.
        rounds: how often the contenders take turns.
        repeats: passes per process, the best of which counts.
        memory_budget_bytes: litce's budget, e.g. 33554432, 32MiB or 192MiB.
        filter_tolerance: litce's filter; 0 is exact.
        operands: file of litce bench operands to measure with instead of random operands.
        json: write the rows to this file too.
        png: draw time against memory to this file.
    """
    parsed: list[tuple[int, ...]] = [parse_shape(s) for s in shapes or DEFAULT_SHAPES]
    if operands is not None:
        if shapes is not None:
            raise UsageError("--shapes does not go with --operands, whose shape it is; leave one out")
        hidden, weight, _ = load_operands(operands)
        parsed = [(*hidden.shape, len(weight))]
        del hidden, weight
    if not 0 <= filter_tolerance < 1:
        raise UsageError(f"--filter_tolerance {filter_tolerance}: must be at least 0 and below 1")
    names = _check_contenders(contenders)
    budget = parse_bytes(memory_budget_bytes, "--memory_budget_bytes")
    for name, value in (("rounds", rounds), ("repeats", repeats)):
        if value < 1:
            raise UsageError(f"--{name} {value}: give at least 1")
    for flag, path in (("json", json), ("png", png)):
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"--{flag} {path}: the folder {path.parent} does not exist")
    settings = {
        "dtype": dtype,
        "budget": budget,
        "repeats": repeats,
        "operands": None if operands is None else str(operands),
        "filter_tolerance": filter_tolerance,
    }
    rows = []
    for shape in parsed:
        runs = _run_rounds(shape, names, rounds, settings)
        rows += [_summarise(shape, dtype, name, runs) for name in names]
        _print_table(rows[-len(names) :], budget, rounds)
        if json is not None:
            _write_json(json, rows)
    if png is not None:
        draw(rows, budget, png)


def _run_rounds(
    shape: tuple[int, ...], names: list[str], rounds: int, settings: dict[str, Any]
) -> dict[str, list[dict[str, float]]]:
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=rounds * len(names))
        for _ in range(rounds):
            for name in names:
                progress.update(task, description=f"{'x'.join(map(str, shape))} {name}")
                runs[name].append(_run_worker(name, shape, settings))
                progress.advance(task)
    return runs


def _run_worker(name: str, shape: tuple[int, ...], settings: dict[str, Any]) -> dict[str, float]:
    arguments = {"contender": name, "shape": shape, **settings}
    command = [sys.executable, "-m", "litce.tools.bench_worker", json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}: out of memory?"])[-1]
        raise RuntimeError(f"contender {name} failed at {'x'.join(map(str, shape))}: {reason}")
    return json.loads(done.stdout)


def _summarise(
    shape: tuple[int, ...], dtype: str, name: str, runs: dict[str, list[dict[str, float]]]
) -> dict[str, object]:
    own = runs[name]
    ratio = None
    if "dense" in runs:
        ratio = statistics.median(r["seconds"] / d["seconds"] for r, d in zip(own, runs["dense"], strict=True))
    return {
        "shape": list(shape),
        "dtype": dtype,
        "contender": name,
        "seconds": statistics.median(r["seconds"] for r in own),
        "ratio_to_dense": ratio,
        "peak_bytes": max(int(r["peak_bytes"]) for r in own),
        "grad_bytes": int(own[0]["grad_bytes"]),
    }


def _print_table(rows: list[dict], budget: int, rounds: int) -> None:
    shape = " x ".join(map(str, rows[0]["shape"]))
    title = f"N x D x V = {shape}, {rows[0]['dtype']}, budget {budget / 2**20:.0f} MiB, {rounds} rounds"
    table = Table(title=title, title_justify="left")
    for column in ("contender", "seconds", "time / dense", "peak MB above inputs", "peak MB above gradients"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for row in rows:
        ratio = "" if row["ratio_to_dense"] is None else f"{row['ratio_to_dense']:.2f}"
        above = (row["peak_bytes"] - row["grad_bytes"]) / 1e6
        table.add_row(
            row["contender"], f"{row['seconds']:.2f}", ratio, f"{row['peak_bytes'] / 1e6:.0f}", f"{above:.0f}"
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def draw(rows: list[dict[str, Any]], budget: int, path: Path) -> None:
    """Draw the rows of the benchmark, a panel per shape: time over dense's against peak memory above gradients."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = list(dict.fromkeys(tuple(row["shape"]) for row in rows))
    figure, axes = pyplot.subplots(1, len(shapes), figsize=(4.5 * len(shapes), 4), layout="constrained", squeeze=False)
    for axis, shape in zip(axes[0], shapes, strict=True):
        for row in rows:
            if tuple(row["shape"]) != shape:
                continue
            own = row["contender"] == "litce"
            point = (max(1.0, (row["peak_bytes"] - row["grad_bytes"]) / 1e6), row["ratio_to_dense"] or row["seconds"])
            axis.scatter(*point, color="tab:red" if own else "tab:gray", zorder=3)
            axis.annotate(row["contender"], point, xytext=(5, 4), textcoords="offset points", fontsize=8)
        axis.axvline(budget / 1e6, color="gray", linestyle=":", linewidth=1)
        axis.set(xscale="log", yscale="log", title="N x D x V = " + " x ".join(map(str, shape)))
        axis.set(xlabel="peak MB above inputs and gradients", ylabel="time / dense")
        axis.margins(x=0.25, y=0.15)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.grid(alpha=0.3, which="both")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _write_json(path: Path, rows: list[dict]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(rows, indent=2) + "\n")
    temporary.replace(path)


def parse_shape(text: str, flag: str = "--shapes", form: str = "NxDxV") -> tuple[int, ...]:
    """The sizes in a text such as 2048x512x65536, as many as `form` has.

    Raises:
        UsageError: if they are not positive numbers.
    """
    parts = text.split("x")
    if len(parts) != form.count("x") + 1 or not all(p.isdigit() and int(p) > 0 for p in parts):
        example = "x".join(DEFAULT_SHAPES[0].split("x")[: form.count("x") + 1])
        raise UsageError(f"{flag} {text}: give {form} in positive numbers, such as {example}")
    return tuple(map(int, parts))


def _check_contenders(names: list[str] | None) -> list[str]:
    known = [n for n in CONTENDERS if n != "torch" or hasattr(F, "linear_cross_entropy")]
    if names is None:
        return known
    for name in names:
        if name not in known:
            raise UsageError(f"--contenders {name}: not one of {', '.join(known)}")
    return list(dict.fromkeys(names))
