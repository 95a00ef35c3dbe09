"""Sampling from the softmax of a head, block by block of the vocabulary."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from litce.loss.function import no_autocast
from litce.loss.options import LossOptions
from litce.loss.plan import DEFAULT_BUDGET_BYTES
from litce.loss.projection import Projection, operand_dtype, tiles


@torch.no_grad()
def sample_tokens_chunked(
    hidden_states: Tensor,  # (..., D)
    weight: Tensor,  # (V, D)
    temperature: float = 0.9,
    chunk_size: int = 8192,
    generator: torch.Generator | None = None,
    *,
    bias: Tensor | None = None,  # (V,)
    options: LossOptions = LossOptions(),  # noqa: B008  (frozen)
) -> Tensor:
    """Return one token id (...) per row from `softmax((hidden_states @ weight.T + bias) / temperature)`, int64.

    The Gumbel-max trick (Gumbel 1954): the largest of `logit / temperature + Gumbel noise` has exactly the
    distribution of the softmax, and a running maximum needs one block of logits at a time. At temperature 0, or with
    noise that ties, the first of the largest logits.

    Args:
        hidden_states: (..., D); cast to the weight's dtype.
        weight: (V, D) weight of the head.
        temperature: at least 0.
        chunk_size: columns of the vocabulary whose logits are alive at once.
        generator: source of the noise, on the device of the hidden states; torch's default one if None.
        bias: (V,) bias of the head.
        options: scale and softcap of the logits, which come before the temperature.

    Raises:
        ValueError: for a negative or infinite temperature, a chunk size below 1 or shapes that do not fit.
    """
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature={temperature}; give a number of at least 0")
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size!r}; give at least 1 column of the vocabulary")
    if weight.ndim != 2 or hidden_states.shape[-1] != weight.shape[1]:
        raise ValueError(f"hidden_states {tuple(hidden_states.shape)} do not fit weight {tuple(weight.shape)}")
    projection = Projection(weight, bias, options, operand_dtype(weight), weight.dtype, len(weight))
    flat = hidden_states.reshape(-1, weight.shape[1])
    tokens = torch.zeros(len(flat), dtype=torch.long, device=flat.device)
    columns = min(chunk_size, len(weight))
    rows = max(1, DEFAULT_BUDGET_BYTES // (2 * columns * projection.accumulate_dtype.itemsize))  # logits and noise
    with no_autocast(flat.device.type):
        for part in tiles(len(flat), rows):
            x = projection.operand(flat[part])
            best = torch.full((len(x),), -torch.inf, dtype=projection.accumulate_dtype, device=x.device)
            for tile in tiles(len(weight), columns):
                scores = x.new_empty((tile.stop - tile.start, len(x)), dtype=best.dtype)
                projection.logits_(scores, x, tile.start)
                if temperature > 0:
                    # Subtracting log E of an exponential E adds Gumbel noise; scaling it instead of the logits keeps
                    # tiny temperatures finite.
                    noise = torch.empty_like(scores).exponential_(generator=generator).log_()
                    scores.sub_(noise, alpha=temperature)
                value, index = scores.max(0)
                better = value > best
                tokens[part] = torch.where(better, index + tile.start, tokens[part])
                best = torch.where(better, value, best)
    return tokens.view(hidden_states.shape[:-1])
