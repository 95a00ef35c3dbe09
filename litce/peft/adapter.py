"""LLaMA-Adapter (Zhang et al. 2023, arXiv:2303.16199): learned keys and values that the upper layers attend to."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from litce.args import UsageError
from litce.config import Config
from litce.model import GPT, CausalSelfAttention
from litce.peft.method import FinetuneMethod, become, require_within


@dataclass
class Adapter(FinetuneMethod):
    """A learned prefix in the attention of each layer from `start_layer` on, behind a gate that starts closed.

    Raises:
        UsageError: if an option is out of range.
    """

    name: ClassVar[str] = "adapter"

    prompt_length: int = 10
    """Positions of the learned prefix"""
    start_layer: int = 2
    """First layer that has a prefix, counted from 0"""

    def __post_init__(self) -> None:
        require_within(f"{self.name}.prompt_length", self.prompt_length, 1, math.inf, "must be at least 1")
        require_within(f"{self.name}.start_layer", self.start_layer, 0, math.inf, "must be 0 or greater")

    trains_head = False

    def check(self, config: Config) -> None:
        if self.start_layer >= config.n_layer:
            raise UsageError(
                f"--{self.name}.start_layer {self.start_layer}: the model has layers 0 to {config.n_layer - 1}; "
                "give one of them"
            )

    def extend(self, model: GPT) -> None:
        for block in list(model.transformer.h)[self.start_layer :]:
            become(block.attn, AdapterAttention)  # type: ignore[arg-type]
            block.attn.add_prefix(self.prompt_length)  # type: ignore[union-attr, operator]

    def owns(self, name: str) -> bool:
        return name.rpartition(".")[-1].startswith("adapter_")


class AdapterAttention(CausalSelfAttention):
    """Attention that adds `tanh(gate)` times attention to a learned prefix (L, n_embd), with one gate per head.

    The prefix has a softmax of its own, as in the authors' code, so that a closed gate leaves the model as it was. Its
    keys and values come from the layer's own projections; its keys have no position.
    """

    adapter_prefix: nn.Parameter
    adapter_gate: nn.Parameter

    def add_prefix(self, length: int) -> None:
        """Add a prefix drawn from the standard normal distribution, the scale of normalised inputs, and a gate of 0."""
        self.adapter_prefix = nn.Parameter(self.k.weight.new_empty(length, self.k.in_features).normal_())
        self.adapter_gate = nn.Parameter(self.k.weight.new_zeros(self.q.out_features // self.head_size, 1, 1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        keys, values = (self._split_heads(layer(self.adapter_prefix[None])) for layer in (self.k, self.v))
        keys, values = (x.expand(len(q), -1, -1, -1) for x in (self.norm_k(keys), values))
        all_of_it = torch.ones(q.size(2), keys.size(2), dtype=torch.bool, device=q.device)
        prefix = super().attend(q, keys, values, all_of_it)
        return super().attend(q, k, v, mask) + (self.adapter_gate.tanh() * prefix).to(q.dtype)
