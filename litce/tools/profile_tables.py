"""The tables of `litce profile_memory`, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from litce.tools.profile_cases import Case
from litce.tools.step_memory import PARTS

Result = dict[str, Any]


def tables(data: dict[str, Any]) -> str:
    """The whole of tables.md from the contents of results.json."""
    parts = [
        "# Memory of the loss, measured",
        "",
        f"`{data['command']}`",
        "",
        data["versions"] + ". MB are 10^6 bytes.",
    ]
    by_run: dict[str, list[Result]] = {}
    for result in data["results"]:
        by_run.setdefault(result["run"], []).append(result)
    for run, section in (("loss", _loss), ("compile", _compile), ("step", _step), ("budget", _budget)):
        if run in by_run:
            parts += ["", *section(by_run[run])]
    return "\n".join(parts) + "\n"


def own_bytes(result: Result) -> int:
    """What the loss holds at its peak beside its inputs and their gradients."""
    return result["allocated"] - result["gradients"]


def _loss(results: list[Result]) -> list[str]:
    lines = []
    for shape in dict.fromkeys(tuple(result["case"]["shape"]) for result in results):
        own = [result for result in results if tuple(result["case"]["shape"]) == shape]
        lines += [f"## Strategies and chunk sizes, N x D x V = {_shape(own[0])}", "", *_peaks(own), ""]
        for result in own[:2]:  # dense and auto
            lines += [f"### {result['case']['loss']}: what is held at the peak, and who allocates", ""]
            lines += _table(
                ("operator", "shape", "dtype", "MB", "what for"),
                ((name, _sizes(shape), dtype, _mb(size), part) for name, shape, dtype, size, part in result["buffers"]),
            )
            lines += ["", "Bytes that an operator allocated less those that it freed itself, over the whole pass:", ""]
            lines += _table(
                ("operator", "calls", "MB"), ((name, calls, _mb(size)) for name, calls, size in result["operators"])
            )
            lines.append("")
    return lines[:-1]


def _peaks(results: list[Result]) -> list[str]:
    rows = []
    for result in results:
        case = Case.from_dict(result["case"])
        predicted = case.predicted_bytes
        rows.append(
            (
                case.loss + (f" of {case.rows}" if case.loss == "logits in chunks" and case.rows else ""),
                _sizes(case.block),
                _mb(predicted),
                _mb(own_bytes(result)),
                "" if predicted is None else f"{own_bytes(result) / predicted:.2f}",
                f"{own_bytes(result) / case.block_bytes:.2f}",
                _mb(result["gradients"]),
                _mb(result["resident"]),
            )
        )
    header = ("loss", "logits alive", "predicted MB", "allocated MB", "measured / predicted", "copies")
    return _table((*header, "gradients at the peak MB", "resident MB"), rows)


def _compile(results: list[Result]) -> list[str]:
    rows = []
    for eager, compiled in zip(results[::2], results[1::2], strict=True):
        sizes = [_mb(result[key]) for key in ("allocated", "resident") for result in (eager, compiled)]
        rows.append((eager["case"]["loss"], *sizes))
    title = f"## Eager and torch.compile, N x D x V = {_shape(results[0])}"
    header = ("loss", "allocated, eager", "compiled", "resident, eager", "compiled")
    return [title, "", "MB above the inputs, gradients included.", "", *_table(header, rows)]


def _step(results: list[Result]) -> list[str]:
    case = results[0]["case"]
    tokens = f"{case['micro_batch_size']} x {case['max_seq_length']} tokens"
    title = f"## A whole training step: {case['model_name']}, {tokens}"
    rows: list[Sequence[Any]] = [
        (part, *(_mb(result["predicted"].get(part, 0)) for result in results))
        for part in PARTS
        if any(result["predicted"].get(part) for result in results)
    ]
    totals = [sum(result["predicted"].values()) for result in results]
    rows.append(("**predicted peak**", *map(_mb, totals)))
    rows.append(("**allocated**", *(_mb(result["allocated"]) for result in results)))
    measured = (f"{result['allocated'] / total:.3f}" for result, total in zip(results, totals, strict=True))
    rows.append(("measured / predicted", *measured))
    rows.append(("resident", *(_mb(result["resident"]) for result in results)))
    header = ("MB at the peak", *(result["case"]["cross_entropy"] for result in results))
    return [title, "", *_table(header, rows)]


def _budget(results: list[Result]) -> list[str]:
    case = results[0]["case"]
    num_rows, n_embd, _ = case["shape"]
    title = f"## One budget of {case['budget'] / 2**20:g} MiB, N x D = {num_rows} x {n_embd}, {case['dtype']}"
    lines = [title]
    for vocab_size in dict.fromkeys(result["case"]["shape"][2] for result in results):
        own = [result for result in results if result["case"]["shape"][2] == vocab_size]
        lines += ["", f"### V = {vocab_size}", "", *_peaks(own)]
    return lines


def _shape(result: Result) -> str:
    case = result["case"]
    return f"{_sizes(case['shape'])}, {case['dtype']}, budget {case['budget'] / 2**20:g} MiB"


def _sizes(sizes: Iterable[int]) -> str:
    return " x ".join(map(str, sizes)) or "scalar"


def _mb(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 1e6:,.1f}"


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (header, *rows)]
    return [lines[0], "|" + "---|" * len(header), *lines[1:]]
