"""What one rank does before the others, and errors of one that reach all: none waits for a rank that is gone."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
from lightning.fabric import Fabric

from litce.args import UsageError

T = TypeVar("T")

# The default group would give up on a rank that prepares data for hours.
LONG = timedelta(days=7)


def on_rank_zero(fabric: Fabric, function: Callable[[], T]) -> T:
    """What `function()` returns on rank 0, on every rank; the others do not call it.

    Raises:
        UsageError: on every rank, if it is raised on rank 0, so that none waits for a rank that is gone.
    """
    result: Any = None
    error: str | None = None
    if fabric.is_global_zero:
        try:
            result = function()
        except UsageError as usage_error:
            error = str(usage_error)
    if fabric.world_size > 1:
        group = torch.distributed.new_group(backend="gloo", timeout=LONG)
        values = [result, error]
        torch.distributed.broadcast_object_list(values, src=0, group=group)
        result, error = values
        torch.distributed.destroy_process_group(group)
    if error is not None:
        raise UsageError(error)
    return result


def on_every_rank(fabric: Fabric, function: Callable[[], object]) -> None:
    """Call `function` on all ranks at once.

    Raises:
        UsageError: on every rank, if it is raised on any, with the message of the first.
    """
    error: str | None = None
    try:
        function()
    except UsageError as usage_error:
        error = str(usage_error)
    errors = [error]
    if fabric.world_size > 1:
        errors = [None] * fabric.world_size
        group = torch.distributed.new_group(backend="gloo", timeout=LONG)
        torch.distributed.all_gather_object(errors, error, group=group)
        torch.distributed.destroy_process_group(group)
    for rank, message in enumerate(errors):
        if message is not None:
            raise UsageError(message if rank == 0 else f"{message} (on rank {rank})")


def rank_by_rank(fabric: Fabric, function: Callable[[], object]) -> None:
    """Call `function` on rank 0 and then on the others at once, which find the caches that it filled.

    Raises:
        UsageError: as `on_every_rank` does.
    """
    on_rank_zero(fabric, function)
    on_every_rank(fabric, lambda: None if fabric.is_global_zero else function())
