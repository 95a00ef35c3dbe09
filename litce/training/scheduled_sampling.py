"""Scheduled sampling: the model is trained on inputs that are partly its own."""

import torch
from torch import Tensor, nn

from litce.data.base import IGNORE_INDEX


@torch.no_grad()
def with_own_tokens(
    model: nn.Module, input_ids: Tensor, targets: Tensor, probability: float, temperature: float = 1.0
) -> Tensor:
    """Return `input_ids` (B, T), each token with `probability` replaced by the model's guess from those before it.

    The guesses are drawn from the model's distribution at every position in one parallel pass over the true tokens, as
    Mihaylova and Martins (2019, arXiv:1906.07651) do for transformers, and block by block of the vocabulary. First
    tokens stay: nothing comes before them; and so do tokens that are no target, such as a prompt's. Random numbers
    come from torch's default generators, whose states checkpoints hold.

    Args:
        model: maps (input_ids, sample=temperature) to a guess (B, T) of the token after each.
        input_ids: int64.
        targets: the token after each (B, T), -100 where it is not supervised.
        probability: in [0, 1].
        temperature: of the guesses.
    """
    guesses = model(input_ids, sample=temperature)
    own = torch.rand(input_ids[:, 1:].shape, device=input_ids.device) < probability
    own &= targets[:, :-1] != IGNORE_INDEX
    return torch.cat((input_ids[:, :1], torch.where(own, guesses[:, :-1], input_ids[:, 1:])), dim=1)
