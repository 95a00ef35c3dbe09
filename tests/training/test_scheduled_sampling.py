from pathlib import Path

import pytest
import torch
from torch import Tensor

from litce.args import UsageError
from litce.config import Config
from litce.model import GPT
from litce.training.scheduled_sampling import with_own_tokens
from tests.tiny import MODEL, assert_equal_weights, logged, pretrain, train_args


class Counter(torch.nn.Module):
    """Guesses the token after each to be its id plus 100."""

    def forward(self, input_ids: Tensor, sample: float) -> Tensor:
        assert sample == 1.0 and not torch.is_grad_enabled()
        return input_ids + 100


@pytest.mark.parametrize("probability", [0.0, 0.25, 1.0])
def test_share_and_place_of_the_models_tokens(probability: float) -> None:
    torch.manual_seed(0)
    ids = torch.arange(8000).reshape(8, 1000)
    targets = (ids + 1).index_fill(1, torch.arange(100), -100)
    mixed = with_own_tokens(Counter(), ids, targets, probability)
    assert torch.equal(mixed[:, :101], ids[:, :101])  # the prompt
    own = mixed[:, 1:] != ids[:, 1:]
    # A guess made from the true token before its place.
    assert torch.equal(mixed[:, 1:][own], (ids[:, :-1] + 100)[own])
    assert own[:, 100:].float().mean().item() == pytest.approx(probability, abs=4 * (0.25 / 7192) ** 0.5)


def test_guesses_are_drawn_from_the_models_distribution() -> None:
    torch.manual_seed(0)
    model = GPT(Config(**MODEL))
    model.init_weights()
    with torch.no_grad():
        model.lm_head.weight.mul_(10)
    ids = torch.randint(64, (1, 8))
    drawn = torch.stack([with_own_tokens(model, ids, ids, 1.0)[0, 4] for _ in range(1500)])
    expected = model(ids)[0, 3].softmax(-1) * 1500
    observed = drawn.bincount(minlength=64).float()
    common = expected > 5
    chi_square = ((observed - expected)[common].square() / expected[common]).sum().item()
    degrees = int(common.sum())
    assert degrees > 2 and chi_square < degrees + 5 * (2 * degrees) ** 0.5


def test_a_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    args = train_args(max_steps=6, save_interval=3, scheduled_sampling=0.5)
    pretrain(tmp_path / "whole", train=args)
    pretrain(tmp_path / "resumed", train=args, resume=tmp_path / "whole/step-00000003")
    assert_equal_weights(tmp_path / "whole/final", tmp_path / "resumed/final")
    pretrain(tmp_path / "without", train=train_args(max_steps=6))
    assert logged(tmp_path / "without")[6] != logged(tmp_path / "whole")[6]


@pytest.mark.parametrize("probability", [-0.1, 1.5, float("nan")])
def test_impossible_shares_are_refused(probability: float) -> None:
    with pytest.raises(UsageError, match="--train.scheduled_sampling"):
        train_args(scheduled_sampling=probability)
