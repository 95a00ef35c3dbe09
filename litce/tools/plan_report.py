"""What `litce plan` prints and draws."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console
from rich.table import Table

from litce.args import TrainArgs
from litce.tools.planned_loss import LOSS_PART
from litce.tools.step_memory import ACTIVATIONS, BATCH, GRADIENTS, OPTIMIZER, PARTS, PHASES, WEIGHTS, StepMemory

COLORS = ("#4c72b0", "#55a868", "#8c8c8c", "#dd8452", "#c44e52", "#8172b3", "#937860", "#ccb974", "#da8bc3")


def format_bytes(num_bytes: int) -> str:
    """A size in GB, or MB below one, in powers of 1000."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 10**9 else f"{num_bytes / 1e6:.1f} MB"


def print_table(console: Console, title: str, memory: StepMemory) -> None:
    """A row per part, a column per phase of the step; MB."""
    console.print(title, style="bold", highlight=False)
    table = Table()
    table.add_column("MB of tensors at the peak of")
    for phase in PHASES:
        table.add_column(phase, justify="right", style="bold" if phase == memory.phase else None)
    for part in PARTS:
        if any(memory.phases[phase].get(part) for phase in PHASES):
            table.add_row(part, *(f"{memory.phases[phase].get(part, 0) / 1e6:,.1f}" for phase in PHASES))
    table.add_section()
    table.add_row("all", *(f"{sum(memory.phases[phase].values()) / 1e6:,.1f}" for phase in PHASES))
    console.print(table)
    console.print(f"predicted peak: {format_bytes(memory.peak_bytes)}, at the {memory.phase}")


def fits_line(memory: StepMemory, limit: int, usable: int) -> str:
    """Whether the run fits."""
    verdict = "fits" if memory.peak_bytes <= usable else "does not fit"
    return (
        f"it {verdict}: {format_bytes(limit)} less {format_bytes(limit - usable)} for what is no tensor is "
        f"{format_bytes(usable)}"
    )


def generation_line(generation: dict[str, int], length: int) -> str:
    """What generating takes with the trained model."""
    parts = ", ".join(f"{part} {format_bytes(size)}" for part, size in generation.items() if part != BATCH)
    return f"generating a sequence of {length} tokens: {format_bytes(sum(generation.values()))} ({parts})"


def advice(parts: dict[str, int], train: TrainArgs, max_seq_length: int) -> str:
    """The part to reduce, the largest that an option can, and the options."""
    options = {
        LOSS_PART: "--train.cross_entropy auto --train.cross_entropy_chunk_size auto"
        if train.cross_entropy == "dense" or train.cross_entropy_chunk_size != "auto"
        else "--train.memory_budget_bytes, which is now " + format_bytes(int(train.memory_budget_bytes)),
        ACTIVATIONS: f"--train.micro_batch_size {train.num_sequences // 2}"
        if train.num_sequences % 2 == 0
        else f"--train.max_seq_length {max(1, max_seq_length // 2)}",
        OPTIMIZER: "--optimizer SGD, or --precision bf16-true",
        GRADIENTS: "--precision bf16-true",
        WEIGHTS: "--precision bf16-true, or a smaller model",
    }
    largest = max(options, key=lambda part: parts.get(part, 0))
    return f"the largest part is {largest}, {format_bytes(parts.get(largest, 0))}; change {options[largest]}"


def draw(memory: StepMemory, title: str, path: Path, limit: int | None) -> None:
    """Write a picture of the parts, stacked, a bar per phase."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    bottoms = [0.0] * len(PHASES)
    for part, color in zip(PARTS, COLORS, strict=True):
        heights = [memory.phases[phase].get(part, 0) / 1e9 for phase in PHASES]
        if part != BATCH and any(heights):
            axis.bar(PHASES, heights, bottom=bottoms, label=part, color=color, width=0.6)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for x, total in enumerate(bottoms):
        axis.annotate(f"{total:.2f}", (x, total), ha="center", va="bottom")
    if limit is not None:
        axis.axhline(limit / 1e9, color="black", linestyle="--", label="--memory")
    axis.set(ylabel="GB of tensors at the peak")
    axis.set_title(title, fontsize=9)
    axis.margins(y=0.1)
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(temporary, format="png", dpi=110)
    temporary.replace(path)
    pyplot.close(figure)
