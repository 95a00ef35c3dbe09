"""A run and the memory of its devices: a micro-batch that fits, and what to change when memory has run out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric import Fabric

from litce.args import TrainArgs, UsageError

if TYPE_CHECKING:
    from litce.tools.planner import Planner
    from litce.training.run import Task
    from litce.training.strategy import Precision

# What torch's CPU allocator says when the system refuses it memory.
CPU_OUT_OF_MEMORY = "DefaultCPUAllocator"
# Where Linux says how much memory the processes of a container may have, for both versions of its control groups.
CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def resolve_micro_batch(
    train: TrainArgs, task: Task, precision: Precision | None, optimizer: str | dict[str, Any], fabric: Fabric
) -> TrainArgs:
    """`train` with a number for a `micro_batch_size` of "auto", and with a memory limit that it is predicted to keep.

    Raises:
        UsageError: if nothing fits, naming the part of the memory to reduce.
    """
    if train.micro_batch_size != "auto" and train.memory_limit is None:
        return train
    from litce.tools.plan_report import advice, format_bytes
    from litce.tools.planner import usable_bytes

    limit = device_memory(fabric) if train.memory_limit is None else int(train.memory_limit)
    usable = usable_bytes(limit)
    first = replace(train, micro_batch_size=1) if train.micro_batch_size == "auto" else train
    planner = _planner(first, task, precision, optimizer, fabric)
    if train.micro_batch_size == "auto":
        largest = planner.largest_micro_batch(first, usable)
        first = replace(train, micro_batch_size=largest or 1)
    memory = planner.memory(first)
    if memory.peak_bytes > usable:
        raise UsageError(
            f"--train.memory_limit {format_bytes(limit)}: a micro-batch of {first.num_sequences} is predicted to take "
            f"{format_bytes(memory.peak_bytes)}, and {format_bytes(usable)} can be used; "
            f"{advice(memory.parts, first, planner.max_seq_length)}"
        )
    peak = format_bytes(memory.peak_bytes)
    fabric.print(f"micro-batch of {first.num_sequences}: predicted peak {peak} of {format_bytes(limit)}")
    return first


@contextmanager
def explained_out_of_memory(
    train: TrainArgs, task: Task, precision: Precision | None, optimizer: str | dict[str, Any], fabric: Fabric
) -> Iterator[None]:
    """Turn an out-of-memory error into a line that says what holds the memory and which option changes that."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        from litce.tools.plan_report import advice, format_bytes

        try:
            planner = _planner(train, task, precision, optimizer, fabric)
            memory = planner.memory(train)
        except UsageError:  # an optimizer that cannot be planned for; it was no mistake to run it
            raise error from None
        parts = sorted(memory.parts.items(), key=lambda item: -item[1])
        held = ", ".join(f"{part} {format_bytes(size)}" for part, size in parts if size > memory.peak_bytes / 100)
        raise UsageError(
            f"out of memory: a step with --train.micro_batch_size {train.micro_batch_size} takes "
            f"{format_bytes(memory.peak_bytes)} ({held}); {advice(memory.parts, train, planner.max_seq_length)}, or "
            "see what fits with litce plan"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU's or the CPU's allocator, or Python, found no memory."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or CPU_OUT_OF_MEMORY in str(error)


def device_memory(fabric: Fabric) -> int:
    """Bytes of memory of a GPU, or of this machine for each of the processes on it.

    Raises:
        UsageError: if the system does not say.
    """
    if fabric.device.type == "cuda":
        return torch.cuda.get_device_properties(fabric.device).total_memory
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError) as error:
        raise UsageError(
            "--train.micro_batch_size auto: this system does not tell its memory; give --train.memory_limit"
        ) from error
    for path in map(Path, CONTAINER_LIMITS):
        text = path.read_text().strip() if path.is_file() else ""
        if text.isdigit():
            memory = min(memory, int(text))
    return memory // getattr(fabric.strategy, "num_processes", 1)


def _planner(
    train: TrainArgs, task: Task, precision: Precision | None, optimizer: str | dict[str, Any], fabric: Fabric
) -> Planner:
    from litce.tools.planner import Planner

    return Planner(task, precision, train, optimizer, fabric.world_size, fabric)
