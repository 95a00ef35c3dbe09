"""Finetune learned prefixes in a model's attention (LLaMA-Adapter); the model itself stays as it is."""

from typing import Any

from litce.peft import Adapter
from litce.training.finetune import finetune
from litce.training.metrics import Summary


def setup(adapter: Adapter = Adapter(), **options: Any) -> Summary:  # noqa: B008  (never written to)
    """Finetune learned prefixes in a model's attention (LLaMA-Adapter); the model itself stays as it is.

    Args:
        adapter: Length of the prefixes, and the first layer that gets one.
        options: As for `finetune`.
    """
    return finetune(adapter, **options)
