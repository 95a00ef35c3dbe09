"""The pictures of `litce profile_memory`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from litce.tools.profile_tables import Result, own_bytes

STYLES = {"chunked": "o-", "cut": "s-", "logits in chunks": "^--", "auto": "D-", "dense": "x--"}
BUDGET_LOSSES = ("dense", "logits in chunks", "auto")


def draw(data: dict[str, Any], out_dir: Path) -> list[str]:
    """Write the pictures for the runs that are in `data`; returns their names."""
    pictures: dict[str, tuple[str, Callable[[list[Result], Any], None]]] = {
        "peak-against-chunk-size.png": ("loss", _chunk_sizes),
        "timeline.png": ("loss", _timelines),
        "budget-against-vocabulary.png": ("budget", _budget),
    }
    written = []
    for name, (run, paint) in pictures.items():
        results = [result for result in data["results"] if result["run"] == run]
        if results:
            _save(paint, results, f"{data['command']}\n{data['versions']}", out_dir / name)
            written.append(name)
    return written


def _chunk_sizes(results: list[Result], axis: Any) -> None:
    results = _first_shape(results)
    for loss in ("logits in chunks", "chunked", "cut"):
        own = [result for result in results if result["case"]["loss"] == loss and result["case"]["rows"] is not None]
        axis.plot([r["case"]["rows"] for r in own], [own_bytes(r) / 1e6 for r in own], STYLES[loss], label=loss)
    for loss, color in (("dense", "black"), ("auto", "tab:green")):
        size = next(own_bytes(result) / 1e6 for result in results if result["case"]["loss"] == loss)
        axis.axhline(size, color=color, linestyle=":", label=f"{loss}: {size:,.0f} MB")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set(xlabel="rows of logits alive at once", ylabel="peak above inputs and gradients, MB")


def _timelines(results: list[Result], axis: Any) -> None:
    results = _first_shape(results)
    rows = sorted({r["case"]["rows"] for r in results if r["case"]["rows"] is not None})
    middle = rows[len(rows) // 2] if rows else None
    wanted = [("dense", None), ("logits in chunks", middle), ("chunked", middle), ("cut", middle), ("auto", None)]
    for loss, size in wanted:
        found = [r for r in results if (r["case"]["loss"], r["case"]["rows"]) == (loss, size)]
        for result in found:
            label = loss if size is None else f"{loss}, {size} rows"
            times, sizes = zip(*result["timeline"], strict=True)
            axis.step(times, [size / 1e6 for size in sizes], where="post", label=label, linewidth=1.2)
    axis.set(xlabel="forward and backward pass, share of its own time", ylabel="allocated above the inputs, MB")


def _budget(results: list[Result], axis: Any) -> None:
    for loss in BUDGET_LOSSES:
        own = [result for result in results if result["case"]["loss"] == loss]
        vocabularies = [result["case"]["shape"][2] for result in own]
        axis.plot(vocabularies, [own_bytes(result) / 1e6 for result in own], STYLES[loss], label=loss)
    budget = results[0]["case"]["budget"]
    axis.axhline(budget / 1e6, color="gray", linestyle=":", label=f"budget: {budget / 2**20:g} MiB")
    axis.set_yscale("log")
    axis.set_ylim(bottom=min(budget / 1e6, axis.get_ylim()[0]) / 3)
    axis.set(xlabel="vocabulary", ylabel="peak above inputs and gradients, MB")


def _first_shape(results: list[Result]) -> list[Result]:
    return [result for result in results if result["case"]["shape"] == results[0]["case"]["shape"]]


def _save(paint: Callable[[list[Result], Any], None], results: list[Result], footer: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7.5, 4.8), layout="constrained")
    paint(results, axis)
    shape = results[0]["case"]["shape"]
    sizes = f"N x D = {shape[0]} x {shape[1]}"
    if len({result["case"]["shape"][2] for result in results}) == 1:
        sizes = f"N x D x V = {shape[0]} x {shape[1]} x {shape[2]}"
    axis.set_title(f"{sizes}, {results[0]['case']['dtype']}", fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.supxlabel(footer, fontsize=6, color="gray", wrap=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(temporary, format="png", dpi=110)
    temporary.replace(path)
    pyplot.close(figure)
