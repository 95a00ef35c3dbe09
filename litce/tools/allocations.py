"""Counters of allocated memory: by operator and buffer, of real and of fake tensors, and as the allocator sees it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class Buffer:
    """Memory that an operator allocated."""

    operator: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int
    part: str
    """What it is for; `Allocations.part` when it was allocated, unless `Allocations.assign` says otherwise later."""


@dataclass
class Peak:
    """The moment of a phase with the most bytes allocated."""

    num_bytes: int = 0
    buffers: list[Buffer] = field(default_factory=list)

    def by_part(self) -> dict[str, int]:
        """Bytes of each part, the parts in the order in which their first buffers were allocated."""
        totals: dict[str, int] = {}
        for buffer in self.buffers:
            totals[buffer.part] = totals.get(buffer.part, 0) + buffer.num_bytes
        return totals


class Allocations(TorchDispatchMode):
    """Follows the storages that operators create within the context, until they are freed.

    Views and results in place are no new storages. What an operator allocates and frees while it runs is not seen;
    `allocator_bytes` sees it. Under FakeTensorMode nothing is computed or allocated, and the count is the same.
    """

    phase: str = ""
    """Name of what runs now; there is a peak of each."""
    part: str = ""
    """What new buffers are for."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peaks: dict[str, Peak] = {}
        self._live: dict[int, Buffer] = {}
        # A weak reference without a referrer would be collected, and its callback with it.
        self._references: dict[int, Any] = {}
        self._sum: tuple[int, dict[int, Buffer]] | None = None

    @property
    def peak(self) -> Peak:
        """The largest of the phases' peaks."""
        return max(self.peaks.values(), key=lambda peak: peak.num_bytes, default=Peak())

    def assign(self, part: str, tensors: Iterable[Tensor]) -> None:
        """Say what the storages of `tensors` are for, in peaks seen before as well."""
        for tensor in tensors:
            buffer = self._live.get(tensor.untyped_storage()._cdata)
            if buffer is not None:
                buffer.part = part

    def enter_phase(self, phase: str, part: str) -> None:
        """Count under another name from here on."""
        self._settle()
        self.phase, self.part = phase, part
        self._note_peak()

    def __exit__(self, *exception: Any) -> None:
        self._settle()
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "prim":  # questions about a tensor
            return func(*args, **(kwargs or {}))
        self._settle()
        out = func(*args, **(kwargs or {}))
        if self._add(func, out, args, kwargs):
            if func is torch.ops.aten.add.Tensor and not torch.is_grad_enabled() and not args[0]._is_view():
                self._sum = args[0].untyped_storage()._cdata, dict(self._live)
            else:
                self._note_peak()
        return out

    def _add(self, func: Any, out: Any, args: tuple, kwargs: dict | None) -> bool:
        old: set[int] | None = None
        added = False
        for tensor in tree_leaves(out):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._live:
                continue
            if old is None:
                inputs = (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
                old = {x.untyped_storage()._cdata for x in inputs}
            if key in old or storage.nbytes() == 0:
                continue
            shape = tuple(tensor.shape)
            self._live[key] = Buffer(str(func), shape, tensor.dtype, storage.nbytes(), self.part)
            self._references[key] = weakref.ref(storage, lambda _, key=key: self._free(key))  # type: ignore[misc]
            self.live_bytes += storage.nbytes()
            added = True
        return added

    def _free(self, key: int) -> None:
        self.live_bytes -= self._live.pop(key).num_bytes
        del self._references[key]

    def _settle(self) -> None:
        """Look for a peak at the last sum of two gradients.

        Autograd adds in place to a gradient that it alone refers to and that is no view, but never under a dispatch
        mode. Here such a gradient is freed right after the sum: the sum then counts in its place.
        """
        if self._sum is None:
            return
        (key, live), self._sum = self._sum, None
        if key not in self._live:
            live.pop(key, None)
        self._note_peak(live)

    def _note_peak(self, live: dict[int, Buffer] | None = None) -> None:
        num_bytes = self.live_bytes if live is None else sum(buffer.num_bytes for buffer in live.values())
        peak = self.peaks.setdefault(self.phase, Peak())
        if num_bytes > peak.num_bytes:
            peak.num_bytes, peak.buffers = num_bytes, list((live or self._live).values())


def peak_new_bytes(run: Callable[[], object]) -> int:
    """Return the most bytes that storages created by `run` hold at once."""
    with Allocations() as allocations:
        run()
    return allocations.peak.num_bytes


@dataclass(frozen=True)
class AllocatorEvent:
    """Memory that an allocator of torch gave or took back."""

    nanoseconds: int
    """Since the first event."""
    change: int
    """Bytes, negative where memory was freed."""
    total: int
    """Bytes allocated since the counting began and not freed yet."""


def allocator_events(profiler: Any, device_type: str = "cpu") -> list[AllocatorEvent]:
    """What a `torch.profiler.profile` with `profile_memory` saw of a device's allocator, in order.

    Memory that was allocated before and is freed meanwhile does not count.
    """
    recorded = [
        event
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]" and event.device_type().name.lower() == device_type
    ]
    events, total = [], 0
    for event in sorted(recorded, key=lambda event: event.start_ns()):
        total += event.nbytes()
        events.append(AllocatorEvent(event.start_ns() - recorded[0].start_ns(), event.nbytes(), total))
    return events


def allocator_peak_bytes(run: Callable[[], object]) -> int:
    """Return the most bytes that torch's CPU allocator has given out at once while `run` runs.

    Unlike `peak_new_bytes` with the buffers that operators use inside, and without changing how autograd sums.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    return max((event.total for event in allocator_events(profiler)), default=0)
