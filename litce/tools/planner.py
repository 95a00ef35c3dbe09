"""Memory of variants of a training run, and the largest of them that fit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lightning.fabric import Fabric

from litce.args import TrainArgs
from litce.loss import CrossEntropyPlan
from litce.tools.step_memory import FakeRun, StepMemory
from litce.training.optim import resolve_optimizer
from litce.training.run import Task, resolve_max_seq_length, resolve_plan
from litce.training.strategy import Precision, build_fabric

SEQUENCE_STEP = 64
# Of a given memory this stays free for what is no tensor: a GPU's context, the allocator's fragments, Python.
RESERVED_SHARE = 0.1
MOST_RESERVED_BYTES = 10**9


class Planner:
    """Predicts the memory of variants of a run that differ in micro-batch and sequence length.

    Raises:
        UsageError: if the arguments cannot work.
    """

    def __init__(
        self,
        task: Task,
        precision: Precision | None,
        train: TrainArgs,
        optimizer: str | dict[str, Any],
        devices: int,
        fabric: Fabric | None = None,
    ) -> None:
        task.method.check(task.config)
        self.task, self.precision, self.devices = task, precision, devices
        train.accumulation_iters(devices)
        self.max_seq_length = resolve_max_seq_length(train, task)
        spec = resolve_optimizer(optimizer)
        self._fabric = fabric or build_fabric(precision=precision, devices=1, num_nodes=1)
        self.fabric_precision = self._fabric.strategy.precision.precision
        self.loss_plan(train)
        self._run = FakeRun(task.config, task.method.prepare, spec, self._fabric, devices)
        self._known: dict[tuple[int, int], StepMemory] = {}

    def loss_plan(self, train: TrainArgs) -> CrossEntropyPlan:
        """How the head computes the loss."""
        max_seq_length = resolve_max_seq_length(train, self.task)
        return resolve_plan(train, self.task, max_seq_length, self.precision, self._fabric.device)

    def memory(self, train: TrainArgs) -> StepMemory:
        """What the run with these arguments holds."""
        max_seq_length = resolve_max_seq_length(train, self.task)
        key = train.num_sequences, max_seq_length
        if key not in self._known:
            accumulation_iters = train.accumulation_iters(self.devices)
            self._known[key] = self._run.memory(self.loss_plan(train), *key, accumulation_iters)
        return self._known[key]

    def generation(self) -> dict[str, int]:
        """Bytes by part of generating one sequence as long as those of training."""
        return self._run.generation(self.max_seq_length)

    def fitting(self, train: TrainArgs, usable: int) -> list[str]:
        """Lines that say what is the largest micro-batch, and the longest sequence, that fits `usable` bytes."""
        micro_batch, sequence = self.largest_micro_batch(train, usable), self.longest_sequence(train, usable)
        share = train.global_batch_size // self.devices
        lines = []
        if micro_batch is None:
            lines.append(f"no micro-batch of {self.max_seq_length} tokens per sequence fits")
        else:
            limited = f", all of the global batch on {self.devices} device(s)" if micro_batch == share else ""
            lines.append(
                f"largest micro-batch that fits: {micro_batch}{limited}: --train.micro_batch_size {micro_batch}"
            )
        if sequence is None:
            lines.append(f"no sequence of {SEQUENCE_STEP} tokens or more fits at micro-batch {train.micro_batch_size}")
        else:
            limited = ", the model's longest" if sequence == self.task.config.block_size else ""
            lines.append(f"longest sequence that fits: {sequence} tokens{limited}: --train.max_seq_length {sequence}")
        return lines

    def largest_micro_batch(self, train: TrainArgs, usable: int) -> int | None:
        """The largest micro-batch within `usable` bytes, of those into which the global batch divides."""
        share = train.global_batch_size // self.devices
        divisors = [n for n in range(1, share + 1) if share % n == 0 and n * self.devices <= train.global_batch_size]

        def peak(n: int) -> int:
            return self.memory(replace(train, micro_batch_size=n)).peak_bytes

        # Apart from the others: one micro-batch per step never meets the gradients of another.
        if peak(divisors[-1]) <= usable:
            return divisors[-1]
        return largest_fitting(divisors[:-1], peak, usable)

    def longest_sequence(self, train: TrainArgs, usable: int) -> int | None:
        """The longest sequence within `usable` bytes, in steps of SEQUENCE_STEP up to the model's longest."""
        longest = self.task.config.block_size
        lengths = sorted({*range(SEQUENCE_STEP, longest + 1, SEQUENCE_STEP), longest})
        return largest_fitting(
            lengths, lambda length: self.memory(replace(train, max_seq_length=length)).peak_bytes, usable
        )


def usable_bytes(memory: int) -> int:
    """What of a device's memory tensors may hold."""
    return memory - min(MOST_RESERVED_BYTES, int(memory * RESERVED_SHARE))


def largest_fitting(candidates: Sequence[int], peak: Callable[[int], int], limit: int) -> int | None:
    """The last of the ascending `candidates` with a `peak` of at most `limit`; None if there is none.

    `peak` does not fall. It is nearly linear, so that interpolating needs fewer calls than halving.
    """
    low, high = 0, len(candidates)  # those before low fit, those from high on do not
    points: list[tuple[int, int]] = []
    while low < high:
        middle = (low + high) // 2
        if not points:
            middle = low
        elif len(points) == 1:
            middle = min(high - 1, 2 * low + 1)
        elif len(points) < 6:
            (x0, y0), (x1, y1) = points[-2:]
            slope = (y1 - y0) / (x1 - x0) or 1.0
            middle = min(max(bisect_right(candidates, x1 + (limit - y1) / slope) - 1, low), high - 1)
        points.append((candidates[middle], peak(candidates[middle])))
        if points[-1][1] <= limit:
            low = middle + 1
        else:
            high = middle
    return candidates[low - 1] if low > 0 else None
