"""One measurement of `litce profile_memory` in a process of its own: `python -m litce.tools.profile_worker JSON`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from litce.tools.allocations import Allocations, AllocatorEvent, allocator_events
from litce.tools.bench_worker import peak_memory, reset_peak_memory
from litce.tools.profile_cases import LOSSES, Case, operands
from litce.tools.profile_step import StepCase, real_step

GRADIENTS = "gradients"
TIMELINE_POINTS = 300
MOST_OPERATORS = 8
MOST_BUFFERS = 6


def measure(case: Case) -> dict[str, Any]:
    """Peak memory of a forward and backward pass above the inputs, by several instruments.

    Returns:
        `allocated`: the most bytes that the device's allocator has given out at once; `gradients`: those of them that
        are the gradients of the inputs; `resident`: the growth of the process's resident memory, on the CPU;
        `operators`: name, calls and bytes allocated less freed, the largest first; `timeline`: share of the time and
        bytes allocated; `buffers`: operator, shape, dtype, bytes and what for, of all that is held at the peak.
    """
    loss_function: Callable[..., Any] = LOSSES[case.loss]
    if case.compiled:
        loss_function = torch.compile(loss_function, dynamic=False)

    def run(x: Any, weight: Any, target: Any) -> None:
        loss_function(case, x, weight, target).backward()

    tensors = operands(case)
    # Loads code, starts threads and compiles, none of which is the loss's memory.
    run(*(tensors if case.compiled else operands(Case(case.loss, (16, case.shape[1], 512), case.dtype, rows=8))))
    _forget_gradients(tensors)
    base = reset_peak_memory()
    run(*tensors)
    resident = peak_memory() - base
    _forget_gradients(tensors)

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if case.device == "cuda" else [])
    with profile(activities=activities, profile_memory=True, record_shapes=True) as profiler:
        if case.compiled:  # a dispatch mode would run the graph operator by operator
            run(*tensors)
            counter = None
        else:
            with Allocations() as counter:
                counter.part = "loss"
                run(*tensors)
                if not case.on_existing_logits:  # whose gradient is one of the copies that are looked for
                    counter.assign(GRADIENTS, [t.grad for t in tensors if t.grad is not None])
    events = allocator_events(profiler, case.device)
    grads = sum(t.grad.nbytes for t in tensors if t.grad is not None)
    buffers = sorted(counter.peak.buffers, key=lambda b: -b.num_bytes) if counter is not None else []
    held = sum(buffer.num_bytes for buffer in buffers if buffer.part == GRADIENTS) if counter is not None else grads
    return {
        "allocated": max((event.total for event in events), default=0),
        "gradients": held,
        "resident": resident if case.device == "cpu" else None,
        "operators": _operators(profiler, case.device),
        "timeline": thin_out(events),
        "buffers": [
            [b.operator.removeprefix("aten."), list(b.shape), str(b.dtype).removeprefix("torch."), b.num_bytes, b.part]
            for b in buffers[:MOST_BUFFERS]
        ],
    }


def measure_step(case: StepCase) -> dict[str, Any]:
    """Peak memory of training steps from before the model is built, by the allocator and as resident memory."""
    base = reset_peak_memory()
    real_step(case)
    resident = peak_memory() - base
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        real_step(case)
    events = allocator_events(profiler)
    return {"allocated": max(e.total for e in events), "resident": resident, "timeline": thin_out(events)}


def thin_out(events: list[AllocatorEvent]) -> list[list[float]]:
    """At most `2 * TIMELINE_POINTS` points (share of the time, bytes) with the largest and last of each stretch."""
    if not events:
        return []
    duration = max(1, events[-1].nanoseconds)
    stretches: dict[int, list[int]] = {}
    for event in events:
        stretches.setdefault(min(TIMELINE_POINTS - 1, TIMELINE_POINTS * event.nanoseconds // duration), []).append(
            event.total
        )
    points = []
    for index, totals in stretches.items():
        points += [[index / TIMELINE_POINTS, max(totals)], [(index + 0.5) / TIMELINE_POINTS, totals[-1]]]
    return points


def _operators(profiler: Any, device: str) -> list[list[Any]]:
    field = "self_cpu_memory_usage" if device == "cpu" else "self_device_memory_usage"
    rows = [[event.key, event.count, getattr(event, field)] for event in profiler.key_averages()]
    rows = [row for row in rows if row[2] > 0 and row[0] != "[memory]"]
    return sorted(rows, key=lambda row: -row[2])[:MOST_OPERATORS]


def _forget_gradients(tensors: tuple[Any, ...]) -> None:
    for tensor in tensors:
        tensor.grad = None


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    if "model_name" in request:
        print(json.dumps(measure_step(StepCase(**request))))
    else:
        print(json.dumps(measure(Case.from_dict(request))))
