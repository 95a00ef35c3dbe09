"""Whether the host may look at the values of a tensor."""

from __future__ import annotations

import torch

# Elsewhere a value that the host reads stalls it until everything queued before has run.
_READABLE_DEVICES = ("cpu",)


def is_host_readable(device: torch.device) -> bool:
    """Return whether values on `device` can be read without waiting for it.

    Where they cannot, the loss calls nothing whose result's shape or control flow depends on values: no `item`, no
    `nonzero`, no indexing by a mask.
    """
    return device.type in _READABLE_DEVICES
