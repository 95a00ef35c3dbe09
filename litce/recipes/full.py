"""Finetune all parameters of a model."""

from typing import Any

from litce.peft import Full
from litce.training.finetune import finetune
from litce.training.metrics import Summary


def setup(**options: Any) -> Summary:
    """Finetune all parameters of a model.

    Args:
        options: As for `finetune`.
    """
    return finetune(Full(), **options)
