"""The training loop, for every recipe, and the validation."""

import math
import time
from collections.abc import Callable, Iterator
from itertools import islice

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader

from litce.args import EvalArgs, TrainArgs, UsageError
from litce.data.base import IGNORE_INDEX, ResumableSampler, Sample
from litce.training.checkpoint import TrainState
from litce.training.metrics import Metrics
from litce.training.scheduled_sampling import with_own_tokens


def fit(
    fabric: Fabric,
    state: TrainState,
    train_loader: DataLoader[Sample],
    val_loader: DataLoader[Sample],
    train: TrainArgs,
    eval: EvalArgs,
    *,
    learning_rate: Callable[[int], float],
    save: Callable[[str], None],
    metrics: Metrics,
) -> None:
    """Train from `state` until the first of the limits in `train` is reached, at least one step.

    The loss of a step is the sum over the supervised tokens of all its micro-batches and ranks, divided once by their
    number. The end of an epoch makes a smaller step. `save(name)` is called at every `train.save_interval`, after
    the validation of the same step, and, as `save("final")`, before the final validation. With `train.keep_best` every
    validation with a new lowest loss calls `save("best")`; `eval.patience` validations without one end the training.

    Args:
        fabric: launched.
        state: model and optimizer set up by `fabric`; the model maps (input_ids, targets, num_supervised=...) to a
            summed loss. Advanced in place.
        train_loader: as `make_dataloader` builds it.
        val_loader: the same.
        train: batches, limits and intervals.
        eval: when to validate.
        learning_rate: maps the number of steps done to the rate of the next.
        save: writes a checkpoint; called by every rank.
        metrics: gets the losses.

    Raises:
        UsageError: if the loss or the weights stop being finite. No checkpoint is written from such weights.
    """
    sampler = train_loader.sampler
    assert isinstance(sampler, ResumableSampler) and len(sampler) > 0
    accumulation_iters = train.accumulation_iters(fabric.world_size)
    total = _host_sum(fabric)

    def checkpoint(name: str) -> None:
        with metrics.paused():
            _require_finite_weights(state)
            save(name)

    def validation() -> None:
        with metrics.paused():
            begin = time.perf_counter()
            loss = validate(fabric, state.model, val_loader, eval.max_iters)
            metrics.validation(step=state.step, loss=loss, seconds=time.perf_counter() - begin)
        if state.step == 0:
            return
        if loss < state.best_val_loss:
            state.best_val_loss, state.worse_validations = loss, 0
            if train.keep_best:
                checkpoint("best")
        else:
            state.worse_validations += 1

    if eval.initial_validation and state.step == 0:
        validation()
    state.model.train()
    while True:
        sampler.set_position(state.epoch, state.num_samples)
        for micro_batches in _groups(train_loader, accumulation_iters):
            num_tokens = total(sum(map(_num_supervised, micro_batches)))
            lr = learning_rate(state.step)
            loss_sum = _step(fabric, state, micro_batches, num_tokens, lr, train)

            state.step += 1
            state.num_tokens += num_tokens
            state.num_samples += sum(len(batch["input_ids"]) for batch in micro_batches)
            if state.num_samples >= len(sampler):
                state.epoch, state.num_samples = state.epoch + 1, 0
            done = limit_reached(train, step=state.step, num_tokens=state.num_tokens, epoch=state.epoch)
            if train.max_time is not None:
                # The clocks of the ranks differ, and all of them have to stop at the same step.
                done = total(metrics.stopwatch.elapsed >= train.max_time) > 0 or done

            if done or state.step % train.log_interval == 0:
                loss = float(_device_sum(fabric, loss_sum)) / max(1, num_tokens)
                _require_finite(loss, "loss", state.step, lr)
                metrics.train(step=state.step, num_tokens=state.num_tokens, loss=loss, lr=lr)
            if done:
                checkpoint("final")
                if eval.final_validation:
                    validation()
                return
            # First, so that a run that goes on from the checkpoint knows of it.
            if eval.interval is not None and state.step % eval.interval == 0:
                validation()
                if eval.patience is not None and state.worse_validations >= eval.patience:
                    metrics.print(f"no lower validation loss for {state.worse_validations} validations; training ends")
                    checkpoint("final")
                    return
            if train.save_interval is not None and state.step % train.save_interval == 0:
                checkpoint(f"step-{state.step:08d}")


@torch.no_grad()
def validate(fabric: Fabric, model: nn.Module, loader: DataLoader[Sample], max_iters: int | None = None) -> float:
    """Loss per supervised token in nats over the first `max_iters` batches of every rank; nan if there are no tokens.

    Every rank has to call this. The model is left in the mode it was in, and no global random number is drawn.
    """
    sampler = loader.sampler
    assert isinstance(sampler, ResumableSampler)
    sampler.set_position(0, 0)
    was_training = model.training
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=fabric.device)
    for batch in islice(loader, max_iters):
        count = _num_supervised(batch)
        batch = fabric.to_device(batch)
        sums[0] += model(batch["input_ids"], batch["targets"], num_supervised=count)
        sums[1] += count
    model.train(was_training)
    loss_sum, num_tokens = _device_sum(fabric, sums).tolist()
    return loss_sum / num_tokens if num_tokens else math.nan


def limit_reached(train: TrainArgs, *, step: int, num_tokens: int, epoch: int) -> bool:
    """Whether a run that has come so far has nothing left to do; time is not looked at."""
    return (
        (train.max_steps is not None and step >= train.max_steps)
        or (train.max_tokens is not None and num_tokens >= train.max_tokens)
        or (train.epochs is not None and epoch >= train.epochs)
    )


def total_steps(train: TrainArgs, num_samples: int | None, max_seq_length: int) -> int | None:
    """Optimizer steps until the first limit; None if only time limits the run.

    `num_samples` is the size of the training data, None where it is not known yet: epochs then do not count.
    `max_tokens` counts as full sequences here, so where many tokens are not supervised the run goes on beyond the
    result, at the schedule's minimum.

    Raises:
        UsageError: if there is no limit at all.
    """
    limits = []
    if train.max_steps is not None:
        limits.append(train.max_steps)
    if train.max_tokens is not None:
        limits.append(math.ceil(train.max_tokens / (train.global_batch_size * max_seq_length)))
    if train.epochs is not None and num_samples is not None:
        limits.append(train.epochs * math.ceil(num_samples / train.global_batch_size))
    if not limits and train.epochs is None and train.max_time is None:
        raise UsageError(
            "nothing ends the run: give --train.max_steps, --train.max_tokens, --train.epochs or --train.max_time"
        )
    return min(limits, default=None)


def _step(
    fabric: Fabric, state: TrainState, micro_batches: list[Sample], num_tokens: int, lr: float, train: TrainArgs
) -> Tensor:
    """One optimizer step; returns this rank's summed loss, a scalar on the device that nothing has waited for."""
    # Gradients are averaged over the ranks, so each contributes world_size times its share of the mean. Without any
    # supervised token the sum is 0, and so are its gradients.
    scale = fabric.world_size / max(1, num_tokens)
    loss_sum = torch.zeros((), device=fabric.device)
    for i, batch in enumerate(micro_batches, start=1):
        count = _num_supervised(batch)
        batch = fabric.to_device(batch)
        input_ids = batch["input_ids"]
        if train.scheduled_sampling:
            input_ids = with_own_tokens(state.model, input_ids, batch["targets"], train.scheduled_sampling)
        with fabric.no_backward_sync(state.model, enabled=i < len(micro_batches)):
            loss = state.model(input_ids, batch["targets"], num_supervised=count)
            fabric.backward(loss * scale)
        loss_sum += loss.detach()
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    if train.max_norm is not None:
        fabric.clip_gradients(state.model, state.optimizer, max_norm=train.max_norm, error_if_nonfinite=False)
    state.optimizer.step()
    state.optimizer.zero_grad()
    return loss_sum


def _num_supervised(batch: Sample) -> int:
    """The number of supervised targets of a batch that is still on the host."""
    return int((batch["targets"] != IGNORE_INDEX).sum())


def _groups(loader: DataLoader[Sample], size: int) -> Iterator[list[Sample]]:
    """Lists of `size` batches, the last as long as they last."""
    batches = iter(loader)
    while group := list(islice(batches, size)):
        yield group


def _device_sum(fabric: Fabric, value: Tensor) -> Tensor:
    """`value` added up over the ranks, on the device."""
    total = fabric.all_reduce(value, reduce_op="sum")
    assert isinstance(total, Tensor)
    return total


def _host_sum(fabric: Fabric) -> Callable[[int], int]:
    """A function that adds a number up over the ranks, without waiting for what a GPU has queued."""
    if fabric.world_size == 1:
        return int
    group = torch.distributed.new_group(backend="gloo")

    def total(value: int) -> int:
        tensor = torch.tensor(int(value))
        torch.distributed.all_reduce(tensor, group=group)
        return int(tensor)

    return total


def _require_finite(value: float, name: str, step: int, lr: float) -> None:
    if not math.isfinite(value):
        raise UsageError(
            f"the {name} is {value} at step {step} with learning rate {lr:.2e}; lower --optimizer.lr, clip with "
            "--train.max_norm 1.0 or warm up for longer with --train.lr_warmup_steps; earlier checkpoints are intact"
        )


def _require_finite_weights(state: TrainState) -> None:
    # A finite loss says nothing about the update that followed it.
    norms = torch.stack(
        [torch.linalg.vector_norm(parameter.detach(), dtype=torch.float32) for parameter in state.model.parameters()]
    )
    lr = state.optimizer.param_groups[0]["lr"]
    _require_finite(float(norms.sum()), "sum of the weights' norms", state.step, lr)
