"""LLaMA-Adapter V2 (Gao et al. 2023, arXiv:2304.15010): a scale and a bias on every linear layer, and trained norms."""

import re
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from litce.lm_head import LMHead
from litce.model import GPT
from litce.peft.adapter import Adapter
from litce.peft.method import become

NORM = re.compile(r"(^|\.)(ln_f|\w*norm\w*)\.")


@dataclass
class AdapterV2(Adapter):
    """The prefix of `Adapter`, a learned scale and bias on the output of every linear layer, and unfrozen norms.

    Raises:
        UsageError: if an option is out of range.
    """

    name: ClassVar[str] = "adapter_v2"

    trains_head = True

    def extend(self, model: GPT) -> None:
        super().extend(model)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                become(module, ScaledHead if isinstance(module, LMHead) else ScaledLinear)
                assert isinstance(module, ScaledLinear)
                module.add_parts()

    def owns(self, name: str) -> bool:
        return super().owns(name) or NORM.search(name) is not None


class ScaledLinear(nn.Linear):
    """`scale * (x @ weight.T + bias + adapter_bias)` with weight (V, D) and bias (V,) frozen. (..., D) -> (..., V)."""

    adapter_scale: nn.Parameter
    adapter_bias: nn.Parameter

    def add_parts(self) -> None:
        """Add a scale (V,) of ones and a bias (V,) of zeros."""
        self.adapter_scale = nn.Parameter(self.weight.new_ones(self.out_features))
        self.adapter_bias = nn.Parameter(self.weight.new_zeros(self.out_features))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return (self.adapter_scale * (y + self.adapter_bias)).to(y.dtype)

    def projection(self) -> tuple[Tensor, Tensor]:
        """Return the weight (V, D) and bias (V,) that give the same, differentiable in the scale and the bias.

        The weight is made anew: V x D numbers in the forward pass, and as many for their gradient.
        """
        bias = self.adapter_bias if self.bias is None else self.bias + self.adapter_bias
        return self.adapter_scale[:, None] * self.weight, self.adapter_scale * bias


class ScaledHead(LMHead, ScaledLinear):
    """A head with scale and bias; loss and logits read the weight that they make."""

    projection = ScaledLinear.projection
