"""Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685), with rank-stabilised scaling and weight decomposition."""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from litce.args import UsageError
from litce.lm_head import LMHead
from litce.loss.function import no_autocast
from litce.model import GPT
from litce.peft.method import FinetuneMethod, become, require_within

# The names of the modules that each target stands for.
TARGETS = {
    "query": r"\.attn\.q",
    "key": r"\.attn\.k",
    "value": r"\.attn\.v",
    "projection": r"\.attn\.proj",
    "mlp": r"\.mlp\..*",
    "head": r"lm_head",
}


@dataclass
class LoRA(FinetuneMethod):
    """Low-rank additions to frozen linear layers.

    Raises:
        UsageError: if an option is out of range, or two contradict each other.
    """

    name: ClassVar[str] = "lora"

    r: int = 8
    """Rank of the additions"""
    alpha: float = 16
    """Scale of the additions, which are multiplied by alpha / r"""
    dropout: float = 0.05
    """Share of the additions' input features that training sets to 0"""
    rslora: bool = False
    """Multiply by alpha / sqrt(r) instead, so that large ranks learn as fast (rsLoRA)"""
    dora: bool = False
    """Also learn the length of each row of the weight (DoRA)"""
    query: bool = True
    """Adapt the queries"""
    key: bool = False
    """Adapt the keys"""
    value: bool = True
    """Adapt the values"""
    projection: bool = False
    """Adapt the output projection of the attention"""
    mlp: bool = False
    """Adapt all layers of the MLP"""
    head: bool = False
    """Adapt the language-model head; one that is tied to the embedding then differs from it"""

    def __post_init__(self) -> None:
        require_within("lora.r", self.r, 1, math.inf, "must be at least 1")
        if not 0 < self.alpha < math.inf:
            raise UsageError(f"--lora.alpha {self.alpha}: must be greater than 0")
        require_within("lora.dropout", self.dropout, 0, 1, "must be 0 or more and below 1")
        if not any(getattr(self, target) for target in TARGETS):
            raise UsageError(f"--lora: nothing is adapted; set one of {', '.join(TARGETS)} to true")
        if self.head and self.dropout:
            raise UsageError(
                f"--lora.dropout {self.dropout} does not go with --lora.head true: the loss reads the head as one "
                "weight, which cannot drop features of one of its parts; set --lora.dropout 0 or --lora.head false"
            )

    @property
    def scaling(self) -> float:
        """Factor of the low-rank product (Kalajdzievski 2023, arXiv:2312.03732, for the root)."""
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)

    @property
    def trains_head(self) -> bool:
        return self.head

    def extend(self, model: GPT) -> None:
        targets = "|".join(pattern for target, pattern in TARGETS.items() if getattr(self, target))
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and re.fullmatch(f".*(?:{targets})", name):
                become(module, LoRAHead if isinstance(module, LMHead) else LoRALinear)
                assert isinstance(module, LoRALinear)
                module.add_parts(self)

    def owns(self, name: str) -> bool:
        return name.rpartition(".")[-1].startswith("lora_")

    def after_save(self, directory: Path) -> str:
        return f"these are the additions alone; litce merge_lora {directory} puts them into the model's weights"


class LoRALinear(nn.Linear):
    """`x @ (W + scaling * B @ A).T + bias` with W (V, D) and bias (V,) frozen, A (r, D) and B (V, r) trained.

    With DoRA (Liu et al. 2024, arXiv:2402.09353) each row of the sum is brought to the length `lora_magnitude` (V,);
    its own length counts as a constant to the gradient, as in section 4.3 there. Dropout acts on the input of what is
    added to W's output. (..., D) -> (..., V).
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_magnitude: nn.Parameter | None
    dropout: float
    scaling: float

    def add_parts(self, lora: LoRA) -> None:
        """Add A, drawn like the weight of a new `nn.Linear`, and B, zeros, so that nothing changes yet."""
        self.dropout, self.scaling = lora.dropout, lora.scaling
        self.lora_A = nn.Parameter(self.weight.new_empty(lora.r, self.in_features))
        self.lora_B = nn.Parameter(self.weight.new_zeros(self.out_features, lora.r))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.lora_magnitude = nn.Parameter(_row_lengths(self._sum()).to(self.weight.dtype)) if lora.dora else None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        drops = self.training and self.dropout > 0
        dropped = F.dropout(x, self.dropout) if drops else x
        added = F.linear(F.linear(dropped, self.lora_A), self.lora_B) * self.scaling
        if self.lora_magnitude is None:
            return y + added
        with torch.no_grad():
            total = self._sum()
        stretch = self._stretch(total)
        plain = F.linear(dropped, self.weight) if drops else y
        if not drops and self.bias is not None:
            plain = plain - self.bias
        return (y + (stretch - 1) * plain + stretch * added).to(y.dtype)

    def projection(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight (V, D) and bias (V,) that give the same as all parts without dropout.

        Differentiable in A, B and the magnitude. The weight is made anew, summed in fp32 (fp64 for fp64) and rounded
        to the dtype of W once: V x D numbers in the forward pass, and as many for their gradient.
        """
        weight = self._sum()
        if self.lora_magnitude is not None:
            weight = weight * self._stretch(weight)[:, None]
        return weight.to(self.weight.dtype), self.bias

    def _sum(self) -> Tensor:
        """`W + scaling * B @ A`, at least in fp32."""
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        with no_autocast(self.weight.device.type):  # it would round the sum to 16 bits
            a, b = self.lora_A.to(dtype), self.lora_B.to(dtype)
            return torch.addmm(self.weight.to(dtype), b, a, alpha=self.scaling)

    def _stretch(self, weight: Tensor) -> Tensor:
        """Factors (V,) that bring the rows of `weight` (V, D) to `lora_magnitude`."""
        assert self.lora_magnitude is not None
        return self.lora_magnitude / _row_lengths(weight).to(self.lora_magnitude.dtype)


class LoRAHead(LMHead, LoRALinear):
    """A head with low-rank additions; loss and logits read the weight that they add up to."""

    projection = LoRALinear.projection


@torch.no_grad()
def merge_lora(model: GPT) -> GPT:
    """A model without low-rank additions that computes the same as `model` does in evaluation.

    The weights that had additions are new, the others are shared with `model`. A tied head that had additions gets a
    weight of its own, and the configuration says so.
    """
    parts = {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}
    state = {name: value for name, value in model.state_dict().items() if not LoRA().owns(name)}
    state |= {f"{name}.weight": module.projection()[0] for name, module in parts.items()}
    config = replace(model.config, tie_embeddings=model.config.tie_embeddings and "lm_head" not in parts)
    with torch.device("meta"):
        merged = GPT(config)
    merged.load_state_dict(state, assign=True)
    merged.max_seq_length, merged.lm_head.plan = model.max_seq_length, model.lm_head.plan
    return merged.train(model.training)


def _row_lengths(weight: Tensor) -> Tensor:
    """Euclidean lengths (V,) of the rows of `weight` (V, D), a constant to the gradient."""
    return torch.linalg.vector_norm(weight.detach(), dim=1)
