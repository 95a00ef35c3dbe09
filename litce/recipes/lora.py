"""Finetune low-rank additions to a model's linear layers (LoRA, DoRA); the model itself stays as it is."""

from typing import Any

from litce.peft import LoRA
from litce.training.finetune import finetune
from litce.training.metrics import Summary


def setup(lora: LoRA = LoRA(), **options: Any) -> Summary:  # noqa: B008  (never written to)
    """Finetune low-rank additions to a model's linear layers (LoRA, DoRA); the model itself stays as it is.

    Args:
        lora: Rank, scale and dropout of the additions, and the layers that get them.
        options: As for `finetune`.
    """
    return finetune(lora, **options)
