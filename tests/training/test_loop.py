import math
from pathlib import Path
from typing import Any

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
from litce.training import loop
from litce.training.checkpoint import find_latest, read_progress
from litce.training.loop import limit_reached, total_steps, validate
from tests.tiny import MODEL, Numbers, pretrain, train_args


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


def folders(out_dir: Path) -> set[str]:
    return {path.name for path in out_dir.iterdir() if path.name != "logs"}


def scripted(monkeypatch: pytest.MonkeyPatch, losses: list[float]) -> None:
    """Let the validations return `losses`, one after the other."""
    remaining = iter(losses)
    monkeypatch.setattr(loop, "validate", lambda *args: next(remaining))


def test_the_best_checkpoint_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Before the first step, after steps 1 to 5, and the final validation.
    scripted(monkeypatch, [0.1, 4.0, math.nan, 2.0, 2.0, 3.0, 9.0])
    args = train_args(max_steps=6, save_interval=None, keep_best=True)
    pretrain(tmp_path, train=args, eval=EvalArgs(interval=1, initial_validation=True))
    assert folders(tmp_path) == {"best", "final"}
    assert read_progress(tmp_path / "best")["step"] == 3
    assert find_latest(tmp_path) == tmp_path / "final"


def test_the_final_validation_can_be_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [4.0, 3.0])
    pretrain(tmp_path, train=train_args(max_steps=3, keep_best=True), eval=EvalArgs(interval=2))
    assert read_progress(tmp_path / "best")["step"] == 3


@pytest.mark.parametrize(("keep_last", "kept"), [(1, {4}), (2, {3, 4}), (9, {1, 2, 3, 4}), (None, {1, 2, 3, 4})])
def test_the_last_checkpoints_are_kept(tmp_path: Path, keep_last: int | None, kept: set[int]) -> None:
    args = train_args(max_steps=5, save_interval=1, keep_last=keep_last, keep_best=True)
    pretrain(tmp_path, train=args, eval=EvalArgs(interval=5))
    assert folders(tmp_path) == {*(f"step-{step:08d}" for step in kept), "final", "best"}


LOSSES = [4.0, 3.0, 3.5, 3.0, 2.9, 2.9, 2.9, 2.9, 2.9]


@pytest.mark.parametrize(("patience", "steps"), [(1, 3), (2, 4), (3, 8), (4, 9)])
def test_training_ends_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience: int, steps: int) -> None:
    scripted(monkeypatch, LOSSES)
    summary = pretrain(tmp_path, train=train_args(max_steps=20), eval=EvalArgs(interval=1, patience=patience))
    assert summary.steps == steps and folders(tmp_path) == {"final"}
    # It is finished, with the same patience.
    again: dict[str, Any] = {"train": train_args(max_steps=20), "resume": True}
    with pytest.raises(UsageError, match=f"end that --eval.patience {patience} sets.*raise it"):
        pretrain(tmp_path, eval=EvalArgs(interval=1, patience=patience), **again)
    scripted(monkeypatch, [5.0] * 20)
    assert pretrain(tmp_path, eval=EvalArgs(interval=1, patience=patience + 1), **again).steps == 1


def test_a_resumed_run_ends_where_the_uninterrupted_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = train_args(max_steps=20, save_interval=3, keep_best=True)
    scripted(monkeypatch, LOSSES)
    assert pretrain(tmp_path / "whole", train=args, eval=EvalArgs(interval=1, patience=2)).steps == 4
    scripted(monkeypatch, LOSSES[3:])
    second = tmp_path / "second"
    resume = tmp_path / "whole/step-00000003"
    assert pretrain(second, train=args, eval=EvalArgs(interval=1, patience=2), resume=resume).steps == 1
    assert "best" not in folders(second)
