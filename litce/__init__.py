"""litce: pretrain and finetune language models with large vocabularies on the memory you have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from litce.llm import LLM

__version__ = "0.1.0"


def load(directory: Path | str, device: str | None = None) -> LLM:
    """The model and tokenizer in a checkpoint folder, with `generate` and `chat`.

    Args:
        directory: as training or `litce convert_from_hf` writes it.
        device: such as "cpu" or "cuda:1"; the GPU, if there is one, when not given.

    Raises:
        UsageError: if the folder does not hold a model and its tokenizer.
    """
    from litce.llm import LLM  # only here, so that importing litce does without torch

    return LLM.load(directory, device)
