"""The arguments that all recipes share; the docstring under a field is its help on the command line."""

import json
import math
import re
from dataclasses import dataclass
from typing import Literal

BYTE_UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}


class UsageError(ValueError):
    """What the user asked for cannot be done; the message is one line that names the flag, its value and a way out."""


def as_written(value: object) -> str:
    """A value as it is written on the command line and in YAML: null, true, [0.9, 0.95]."""
    if value is None or isinstance(value, (bool, list, tuple)):
        return json.dumps(value)
    return str(value)


def require_seed(seed: int) -> None:
    """Raise `UsageError` unless every random number generator takes `seed`; NumPy's takes 32 bits."""
    if not 0 <= seed < 2**32:
        raise UsageError(f"--seed {seed}: must be from 0 to {2**32 - 1}")


def parse_bytes(value: int | str, flag: str = "--train.memory_budget_bytes") -> int:
    """Bytes of a size such as 33554432, "33554432", "256MiB" (powers of 1024) or "2GB" (powers of 1000).

    Raises:
        UsageError: if `value` is no positive size of that form; it names `flag`.
    """
    match = re.fullmatch(r"\s*(\d[\d_]*(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
    units = {unit.lower(): factor for unit, factor in BYTE_UNITS.items()}
    factor = units.get(match[2].lower() or "b") if match and not isinstance(value, bool) else None
    num_bytes = float(match[1].replace("_", "")) * factor if match and factor else 0
    if num_bytes < 1:
        raise UsageError(f"{flag} {value}: give a positive size such as 33554432, 256MiB or 2GB")
    return int(num_bytes)


@dataclass
class TrainArgs:
    """How to train: batches, duration, learning rate and the loss.

    Raises:
        UsageError: if a value is impossible whatever the others, the model and the data are.
    """

    save_interval: int | None = 1000
    """Optimizer steps between checkpoints; null saves at the end only"""
    keep_last: int | None = None
    """Checkpoints of intervals to keep, the newest ones; null keeps all. The final and the best one stay anyway"""
    keep_best: bool = False
    """Also keep the checkpoint with the lowest validation loss, as best"""
    log_interval: int = 1
    """Optimizer steps between log lines"""
    global_batch_size: int = 64
    """Sequences per optimizer step, over all devices"""
    micro_batch_size: int | Literal["auto"] = 4
    """Sequences per forward pass on one device; auto takes the most that are predicted to fit the memory"""
    memory_limit: int | str | None = None
    """Memory of a device that the run may use, such as 24GB; null takes all where micro_batch_size is auto"""
    lr_warmup_steps: int = 100
    """Optimizer steps over which the learning rate rises to its peak"""
    min_lr: float = 6e-5
    """Learning rate at the end of the cosine decay"""
    epochs: int | None = None
    """Passes over the training data"""
    max_tokens: int | None = None
    """Supervised tokens to train on, over all devices; the step that reaches it is the last"""
    max_steps: int | None = None
    """Optimizer steps"""
    max_time: float | None = None
    """Seconds to train for, anew after a resume; alone, it leaves the learning rate constant after the warm-up"""
    max_seq_length: int | None = None
    """Tokens per sequence; null takes the model's longest"""
    max_norm: float | None = None
    """Largest norm of the gradient, larger ones are scaled down; null leaves them as they are"""
    cross_entropy: Literal["auto", "dense", "chunked", "cut"] = "auto"
    """How the loss is computed: all logits at once, by rows, by rows and vocabulary tiles, or the fastest that fits"""
    cross_entropy_chunk_size: int | Literal["auto"] = 128
    """Rows (tokens) of logits alive at once in the loss; 0 computes all at once, auto picks what fits the budget"""
    memory_budget_bytes: int | str = 33_554_432
    """Memory that the loss may use above its inputs and their gradients, in bytes or as 256MiB or 2GB"""
    cross_entropy_filter_tolerance: float = 0.0
    """Share of the predicted probability whose gradient may be dropped to save time, such as 0.001; 0 is exact"""
    scheduled_sampling: float = 0.0
    """Share of the input tokens that are replaced by the model's own guesses in training, at one more forward pass"""

    def __post_init__(self) -> None:
        self.memory_budget_bytes = parse_bytes(self.memory_budget_bytes)
        if self.memory_limit is not None:
            self.memory_limit = parse_bytes(self.memory_limit, "--train.memory_limit")
        for name in ("save_interval", "keep_last", "log_interval", "global_batch_size"):
            _require_positive("train", name, getattr(self, name))
        for name in ("epochs", "max_tokens", "max_steps", "max_time", "max_seq_length", "max_norm"):
            _require_positive("train", name, getattr(self, name))
        for name in ("lr_warmup_steps", "min_lr"):
            _require_not_negative("train", name, getattr(self, name))
        if not 0 <= self.scheduled_sampling <= 1:
            raise UsageError(f"--train.scheduled_sampling {self.scheduled_sampling}: must be between 0 and 1")
        if self.cross_entropy_chunk_size != "auto":
            _require_not_negative("train", "cross_entropy_chunk_size", self.cross_entropy_chunk_size)
        if self.micro_batch_size == "auto":
            return
        _require_positive("train", "micro_batch_size", self.micro_batch_size)
        if self.global_batch_size % self.micro_batch_size:
            raise UsageError(
                f"--train.global_batch_size {self.global_batch_size} is not a multiple of "
                f"--train.micro_batch_size {self.micro_batch_size}; change one of them"
            )

    @property
    def num_sequences(self) -> int:
        """`micro_batch_size`, once it is a number."""
        assert self.micro_batch_size != "auto"
        return self.micro_batch_size

    def accumulation_iters(self, world_size: int) -> int:
        """Micro-batches per device and optimizer step.

        Raises:
            UsageError: if the global batch does not divide into whole micro-batches on `world_size` devices.
        """
        sequences = self.num_sequences * world_size
        if self.global_batch_size % sequences:
            raise UsageError(
                f"--train.global_batch_size {self.global_batch_size} is not a multiple of --train.micro_batch_size "
                f"{self.micro_batch_size} x {world_size} devices = {sequences}; change one of them"
            )
        return self.global_batch_size // sequences


@dataclass
class EvalArgs:
    """When and how to validate, and what to generate after training.

    Raises:
        UsageError: if an interval or a limit is not positive.
    """

    interval: int | None = 1000
    """Optimizer steps between validations; null validates at the end only"""
    max_iters: int | None = 100
    """Batches per device in one validation; null takes all"""
    initial_validation: bool = False
    """Validate before the first step"""
    final_validation: bool = True
    """Validate after the last step"""
    patience: int | None = None
    """Validations in a row without a new lowest loss that end the training; null never ends it so"""
    prompt: str | None = None
    """Text to continue with the trained model at the end; null generates nothing"""
    max_new_tokens: int | None = 100
    """Tokens to generate after the prompt; null fills the model's window"""

    def __post_init__(self) -> None:
        for name in ("interval", "max_iters", "patience", "max_new_tokens"):
            _require_positive("eval", name, getattr(self, name))


@dataclass
class LogArgs:
    """What a remote logger calls the run."""

    project: str | None = None
    """Project that the run belongs to"""
    run: str | None = None
    """Name of the run"""
    group: str | None = None
    """Group of runs within the project"""


def _require_positive(group: str, name: str, value: float | None) -> None:
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise UsageError(f"--{group}.{name} {value}: must be greater than 0")


def _require_not_negative(group: str, name: str, value: float) -> None:
    if not (value >= 0 and math.isfinite(value)):
        raise UsageError(f"--{group}.{name} {value}: must be 0 or greater")
