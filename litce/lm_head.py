"""The output projection of a language model and its loss."""

from __future__ import annotations

from torch import Tensor, nn

from litce.loss.linear_cross_entropy import run_plan
from litce.loss.plan import CrossEntropyPlan, plan_cross_entropy


class LMHead(nn.Linear):
    """Maps hidden states (..., D) to logits (..., V), or with targets straight to their summed loss.

    The only reader of its weight, and only inside `forward`, where wrappers that shard parameters have gathered it.
    """

    plan: CrossEntropyPlan | None = None
    """How the loss runs; set once before training. None: planned for each call with the default budget."""

    def projection(self) -> tuple[Tensor, Tensor | None]:
        """Return the effective weight (V, D) and bias (V,), differentiable in the head's own parameters."""
        return self.weight, self.bias

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits (..., V) of `x` (..., D), or the fp32 sum of the losses of `targets` (...), -100 ignored."""
        if targets is None:
            return super().forward(x)
        weight, bias = self.projection()
        plan = self.plan or plan_cross_entropy(
            targets.numel(),
            *weight.shape,
            dtype=weight.dtype,
            device=weight.device,
            weight_requires_grad=weight.requires_grad,
        )
        return run_plan(plan, x, weight, targets, bias=bias, reduction="sum")
