"""`litce profile_memory`: where the loss's memory goes, measured setting by setting."""

from __future__ import annotations

import functools
import inspect
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import Progress

from litce import __version__
from litce.args import UsageError, parse_bytes
from litce.loss import auto_cross_entropy_chunk_size
from litce.recipes.pretrain import resolve_config
from litce.tools.bench import parse_shape
from litce.tools.profile_cases import Case
from litce.tools.profile_plots import draw
from litce.tools.profile_step import StepCase
from litce.tools.profile_tables import tables

RUNS = ("loss", "compile", "step", "budget")
# B x T = 2 x 2048 tokens.
REFERENCE_SHAPE = "4096x2048x32000"
CHUNK_SIZES = (64, 256, 1024, 4096)
VOCAB_SIZES = (8192, 16384, 32768, 50257, 131072, 151936)
ROW_LOSSES = ("chunked", "cut", "logits in chunks")


def setup(
    runs: list[Literal["loss", "compile", "step", "budget"]] | None = None,
    shapes: list[str] | None = None,
    chunk_sizes: list[int] | None = None,
    vocab_sizes: list[int] | None = None,
    budget_shape: str = "2048x512",
    dtype: Literal["fp32", "bf16"] = "fp32",
    memory_budget_bytes: int | str = "32MiB",
    model_name: str = "gpt2",
    model_config: dict[str, Any] | None = None,
    micro_batch_size: int = 2,
    max_seq_length: int = 1024,
    device: Literal["cpu", "cuda"] = "cpu",
    out_dir: Path = Path("out/profiling"),
) -> None:
    """Measure what the loss holds, and write tables.md, pictures and results.json.

    Each setting runs in a process of its own: one forward and backward pass alone, whose resident memory is read, and
    one under torch.profiler, which sees every allocation.

    Args:
        runs: What to measure: loss (strategies and chunk sizes), compile (eager against torch.compile), step (a whole
            training step), budget (vocabularies at one memory budget). Default is all of them.
        shapes: Hidden states (N, D) and weight (V, D) as NxDxV; default 4096x2048x32000, 2 sequences of 2048 tokens.
        chunk_sizes: Rows of logits alive at once.
        vocab_sizes: V of the budget run.
        budget_shape: N and D of the budget run, as NxD.
        dtype: Of hidden states and weight.
        memory_budget_bytes: What auto may use.
        model_name: Named model of the step run.
        model_config: Fields of that model.
        micro_batch_size: Sequences of the step run.
        max_seq_length: Tokens per sequence of the step run.
        device: Where to run the loss; the step runs on the CPU.
        out_dir: Folder to write to.

    Raises:
        UsageError: if a value cannot be used.
    """
    command = _command(locals())
    budget = parse_bytes(memory_budget_bytes, "--memory_budget_bytes")
    for name, values in (("chunk_sizes", chunk_sizes), ("vocab_sizes", vocab_sizes)):
        if values is not None and (not values or min(values) < 1):
            raise UsageError(f"--{name} {values}: give numbers from 1 on")
    if micro_batch_size < 1:
        raise UsageError(f"--micro_batch_size {micro_batch_size}: must be greater than 0")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: this machine has no GPU that torch can use; give cpu")
    common: dict[str, Any] = {"dtype": dtype, "budget": budget, "device": device}
    selected = tuple(runs) if runs else RUNS
    requests: list[tuple[str, Case | StepCase]] = []
    parsed = [parse_shape(shape) for shape in shapes or [REFERENCE_SHAPE]]
    if "loss" in selected:
        for shape in parsed:
            requests += [("loss", case) for case in loss_cases(shape, chunk_sizes or CHUNK_SIZES, common)]
    if "compile" in selected:
        for name in ("dense", "logits in chunks", "auto"):
            requests += [("compile", Case(name, parsed[0], compiled=compiled, **common)) for compiled in (False, True)]
    if "step" in selected:
        config = resolve_config(model_name, model_config, None)
        if not 0 < max_seq_length <= config.block_size:
            raise UsageError(f"--max_seq_length {max_seq_length}: must be from 1 to the model's {config.block_size}")
        step = functools.partial(
            StepCase, model_name, micro_batch_size, max_seq_length, model_config=model_config or {}
        )
        requests += [("step", step(cross_entropy=loss, budget=budget)) for loss in ("dense", "auto")]
    if "budget" in selected:
        rows_and_width = parse_shape(budget_shape, "--budget_shape", "NxD")
        for vocab_size in vocab_sizes or VOCAB_SIZES:
            requests += [("budget", case) for case in budget_cases((*rows_and_width, vocab_size), common)]
    out_dir.mkdir(parents=True, exist_ok=True)
    results = measure_all(requests)
    versions = f"litce {__version__}, torch {torch.__version__}, Python {platform.python_version()}, {device}"
    _write(out_dir / "results.json", json.dumps({"command": command, "versions": versions, "results": results}))
    report(out_dir)


def report(out_dir: Path) -> None:
    """Write the tables and pictures of the results.json in `out_dir`."""
    data = json.loads((out_dir / "results.json").read_text(encoding="utf-8"))
    _write(out_dir / "tables.md", tables(data))
    written = ["tables.md", *draw(data, out_dir)]
    Console().print("wrote " + ", ".join(str(out_dir / name) for name in written), highlight=False, soft_wrap=True)


def loss_cases(shape: tuple[int, ...], chunk_sizes: Any, common: dict[str, Any]) -> list[Case]:
    """Dense, what the budget gives, and the strategies with blocks of so many rows."""
    sizes = [rows for rows in chunk_sizes if rows <= shape[0]]
    by_rows = [Case(loss, shape, rows=rows, **common) for loss in ROW_LOSSES for rows in sizes]
    return [Case("dense", shape, **common), Case("auto", shape, **common), *by_rows]


def budget_cases(shape: tuple[int, ...], common: dict[str, Any]) -> list[Case]:
    """Every strategy as the budget sizes it, and dense."""
    rows = auto_cross_entropy_chunk_size(shape[2], 4, common["budget"])
    return [
        *(Case(loss, shape, **common) for loss in ("dense", "logits in chunks", "chunked", "cut", "auto")),
        *(Case(loss, shape, rows=rows, **common) for loss in ("existing logits", "existing logits, litce")),
    ]


def measure_all(requests: list[tuple[str, Case | StepCase]]) -> list[dict[str, Any]]:
    """What the worker measured of each request, one process at a time."""
    results = []
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=len(requests))
        for run, case in requests:
            progress.update(task, description=f"{run}: {case}"[:80])
            command = [sys.executable, "-m", "litce.tools.profile_worker", json.dumps(case.to_dict())]
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
            if done.returncode != 0:
                reason = (done.stderr.strip().splitlines() or ["out of memory?"])[-1]
                raise RuntimeError(f"{run}: {case} failed with exit status {done.returncode}: {reason}")
            predicted = case.predicted().parts if isinstance(case, StepCase) else None
            measured = json.loads(done.stdout.splitlines()[-1])
            results.append({"run": run, "case": case.to_dict(), "predicted": predicted, **measured})
            progress.advance(task)
    return results


def _command(arguments: dict[str, Any]) -> str:
    words = ["litce profile_memory"]
    for name, parameter in inspect.signature(setup).parameters.items():
        value = arguments[name]
        if isinstance(value, dict):
            words += [f"--{name}.{key} {item}" for key, item in value.items()]
        elif value != parameter.default:
            words.append(f"--{name} " + (f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)))
    return " ".join(words)


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
