"""Ways of finetuning."""

from litce.peft.adapter import Adapter
from litce.peft.adapter_v2 import AdapterV2
from litce.peft.lora import LoRA
from litce.peft.method import FinetuneMethod, Full

METHODS: dict[str, type[FinetuneMethod]] = {cls.name: cls for cls in (Full, LoRA, Adapter, AdapterV2)}

__all__ = ["METHODS", "Adapter", "AdapterV2", "FinetuneMethod", "Full", "LoRA"]
