"""Finetune prefixes, norms, and a scale and a bias on every linear layer (LLaMA-Adapter V2)."""

from typing import Any

from litce.peft import AdapterV2
from litce.training.finetune import finetune
from litce.training.metrics import Summary


def setup(adapter_v2: AdapterV2 = AdapterV2(), **options: Any) -> Summary:  # noqa: B008  (never written to)
    """Finetune prefixes, norms, and a scale and a bias on every linear layer (LLaMA-Adapter V2).

    Args:
        adapter_v2: Length of the prefixes, and the first layer that gets one.
        options: As for `finetune`.
    """
    return finetune(adapter_v2, **options)
