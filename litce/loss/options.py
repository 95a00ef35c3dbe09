"""What a loss does to logits and log-probabilities besides softmax and target."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossOptions:
    """Per row, with `a = x @ weight.T + bias`, `u = logit_scale * a` and `z = softcap * tanh(u / softcap)` or `u`:

        loss = lse(z) - (1 - label_smoothing) * z[target] - label_smoothing * mean(z) + z_loss * lse(z)**2

    Label smoothing as in Szegedy et al. 2015 (arXiv:1512.00567), z-loss as in PaLM (arXiv:2204.02311), the softcap as
    in Gemma 2 (arXiv:2408.00118).

    Raises:
        ValueError: for a value outside its range.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    logit_softcap: float | None = None
    logit_scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ValueError(f"label_smoothing={self.label_smoothing}; give a number in [0, 1]")
        if not (self.z_loss >= 0.0 and math.isfinite(self.z_loss)):
            raise ValueError(f"z_loss={self.z_loss}; give a number of at least 0")
        if self.logit_softcap is not None and not (self.logit_softcap > 0 and math.isfinite(self.logit_softcap)):
            raise ValueError(f"logit_softcap={self.logit_softcap}; give a positive number, or None for no cap")
        if not math.isfinite(self.logit_scale):
            raise ValueError(f"logit_scale={self.logit_scale}; give a finite number")

    @property
    def plain_softmax(self) -> bool:
        """Whether the gradient of a logit is its probability, less one at the target, times a factor of its row."""
        return self.label_smoothing == 0.0 and self.z_loss == 0.0 and self.logit_softcap is None

    def transform(self, logits: Tensor) -> Tensor:
        """Return `logits` scaled and capped, differentiable."""
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_softcap is not None:
            logits = self.logit_softcap * torch.tanh(logits / self.logit_softcap)
        return logits

    def transform_(self, logits: Tensor) -> Tensor:
        """Scale and cap `logits` in place, whatever their shape."""
        if self.logit_scale != 1.0:
            logits.mul_(self.logit_scale)
        if self.logit_softcap is not None:
            logits.div_(self.logit_softcap).tanh_().mul_(self.logit_softcap)
        return logits

    def cap_slope(self, logits: Tensor) -> Tensor:
        """Return the derivative of the softcap (new tensor) where its result is `logits`: `1 - (z / softcap)**2`."""
        assert self.logit_softcap is not None
        return logits.div(self.logit_softcap).square_().neg_().add_(1.0)

    def row_losses(
        self, row_max: Tensor, exp_sum: Tensor, target_logit: Tensor, logit_sum: Tensor | None, vocab_size: int
    ) -> Tensor:
        """Return the losses (rows,) from each row's maximum, `sum exp(z - max)`, target logit and sum of logits.

        The maximum leaves each difference before the logarithm joins it: `lse - z` of huge logits would lose both.
        """
        log_sum = exp_sum.log()
        losses = log_sum - (target_logit - row_max)
        if logit_sum is not None:
            uniform = log_sum - (logit_sum / vocab_size - row_max)
            losses = torch.lerp(losses, uniform, self.label_smoothing)
        if self.z_loss != 0.0:
            losses = losses + self.z_loss * (log_sum + row_max).square()
        return losses

    def softmax_weight(self, row_max: Tensor, exp_sum: Tensor) -> Tensor:
        """Return `d loss / d lse` (rows,): the factor of the probabilities in the gradient of the logits."""
        return 1.0 + 2.0 * self.z_loss * (exp_sum.log() + row_max)
