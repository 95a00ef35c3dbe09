"""Counts the bytes of storages that operators create: the CPU's stand-in for `max_memory_allocated`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class NewStorages(TorchDispatchMode):
    """Tracks the live bytes of storages born inside the mode; views and in-place results are not new."""

    def __init__(self, *existing: torch.Tensor) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._old = {t.untyped_storage().data_ptr() for t in existing}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._live = {k: v for k, v in self._live.items() if not v[0].expired()}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._old:
                    self._live[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return out


def peak_new_bytes(run: Callable[[], object], *existing: torch.Tensor) -> int:
    """Return the most bytes that storages created by `run` hold at once; `existing` are the inputs."""
    with NewStorages(*existing) as mode:
        run()
    return mode.peak
