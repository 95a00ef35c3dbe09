import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from litce import lm_head
from litce.args import EvalArgs, TrainArgs, UsageError
from litce.config import Config
from litce.data.base import Sample, make_dataloader
from litce.model import GPT
from litce.training.loop import limit_reached, total_steps, validate
from tests.tiny import MODEL, Numbers, pretrain


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    model = GPT(Config(**MODEL))
    model.init_weights()
    return model


def loader_of(data: Numbers, batch_size: int = 2) -> DataLoader[Sample]:
    return make_dataloader(data.val_dataset(), data, batch_size=batch_size, shuffle=False, seed=0, rank=0, world_size=1)


def reference(model: GPT, data: Numbers, num_samples: int) -> float:
    samples = [data.val_dataset()[i] for i in range(num_samples)]
    logits = model(torch.stack([sample["input_ids"] for sample in samples]))
    return F.cross_entropy(logits.flatten(0, 1), torch.stack([s["targets"] for s in samples]).flatten()).item()


@pytest.mark.parametrize(("max_iters", "num_samples"), [(None, 5), (100, 5), (3, 5), (2, 4), (1, 2)])
def test_validation_is_the_mean_over_tokens(model: GPT, max_iters: int | None, num_samples: int) -> None:
    """Samples have different numbers of supervised tokens, and the last batch is smaller."""
    data = Numbers(num_val_samples=5)
    fabric = Fabric(accelerator="cpu", devices=1)
    loader = loader_of(data)
    for _ in range(2):  # a second time from the start again
        assert validate(fabric, model, loader, max_iters) == pytest.approx(
            reference(model, data, num_samples), rel=1e-6
        )


@pytest.mark.parametrize("training", [True, False])
def test_validation_leaves_mode_gradients_and_random_numbers_alone(model: GPT, training: bool) -> None:
    model.train(training)
    modes = []
    model.register_forward_hook(lambda module, args, output: modes.append((module.training, output.requires_grad)))
    before = torch.get_rng_state()
    validate(Fabric(accelerator="cpu", devices=1), model, loader_of(Numbers()))
    assert modes == [(False, False)] * 3
    assert model.training == training and torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_head_is_told_how_many_targets_are_supervised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In training and validation: without it the head of a GPU spends time on the others."""
    told, run_plan = [], lm_head.run_plan

    def spy(plan, x, weight, target, *, num_supervised, **options):
        told.append((num_supervised, int((target != -100).sum())))
        return run_plan(plan, x, weight, target, num_supervised=num_supervised, **options)

    monkeypatch.setattr(lm_head, "run_plan", spy)
    pretrain(tmp_path / "run", Numbers(num_samples=8), eval=EvalArgs(initial_validation=False, final_validation=True))
    assert len(told) == 2 * 2 + 3  # micro-batches of two steps, batches of the validation
    assert all(a == b for a, b in told) and len(set(told)) > 1


def test_validation_without_tokens_is_nan(model: GPT) -> None:
    assert math.isnan(validate(Fabric(accelerator="cpu", devices=1), model, loader_of(Numbers(masking="all"))))


def args(**limits: float | None) -> TrainArgs:
    return TrainArgs(global_batch_size=8, micro_batch_size=4, **limits)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limits", "num_samples", "steps"),
    [
        ({"max_steps": 5}, 100, 5),
        ({"epochs": 1}, 16, 2),
        ({"epochs": 1}, 17, 3),
        ({"epochs": 3}, 17, 9),
        ({"max_tokens": 1}, 100, 1),
        ({"max_tokens": 80}, 100, 1),
        ({"max_tokens": 81}, 100, 2),
        ({"max_steps": 5, "epochs": 1}, 16, 2),
        ({"max_steps": 5, "epochs": 1, "max_tokens": 1}, 100, 1),
        ({"max_time": 3.0}, 100, None),
        ({"max_time": 3.0, "max_steps": 4}, 100, 4),
        ({"epochs": 1}, None, None),
    ],
)
def test_total_steps(limits: dict[str, float], num_samples: int | None, steps: int | None) -> None:
    assert total_steps(args(**limits), num_samples, max_seq_length=10) == steps


def test_something_has_to_end_the_run() -> None:
    with pytest.raises(UsageError, match="--train.max_steps, --train.max_tokens, --train.epochs or --train.max_time"):
        total_steps(args(), 100, 10)


def test_limit_reached() -> None:
    assert limit_reached(args(max_steps=3), step=3, num_tokens=0, epoch=0)
    assert limit_reached(args(max_tokens=3), step=1, num_tokens=4, epoch=0)
    assert limit_reached(args(max_tokens=3), step=1, num_tokens=3, epoch=0)
    assert not limit_reached(args(max_tokens=3), step=1, num_tokens=2, epoch=0)
    assert limit_reached(args(epochs=1), step=1, num_tokens=4, epoch=1)
    assert not limit_reached(args(max_steps=3, max_tokens=5, epochs=1), step=2, num_tokens=4, epoch=0)
