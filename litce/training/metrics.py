"""What a run reports: a line or a progress bar while it trains, one line at the end."""

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


def peak_memory_bytes(device: torch.device) -> int | None:
    """Most memory that tensors took on a CUDA device, or that this process was resident with; None if not known."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows has no such module
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@dataclass
class Summary:
    """What a run came to. Losses are in nats per token; None stands for what was not measured."""

    steps: int
    num_tokens: int
    seconds: float
    tokens_per_second: float
    train_loss: float | None
    val_loss: float | None
    unigram_loss: float | None
    peak_bytes: int | None
    checkpoint_dir: Path

    def __str__(self) -> str:
        parts = [
            f"trained {self.steps} steps, {self.num_tokens} tokens in {self.seconds:.1f} s",
            f"{self.tokens_per_second:.0f} tokens/s",
            *(
                f"{name} loss {value:.4f}"
                for name, value in (
                    ("train", self.train_loss),
                    ("val", self.val_loss),
                    ("unigram", self.unigram_loss),
                )
                if value is not None
            ),
            *([f"peak memory {_size(self.peak_bytes)}"] if self.peak_bytes else []),
            f"checkpoint {self.checkpoint_dir}",
        ]
        return " | ".join(parts)


class Stopwatch:
    """Seconds of training, without those spent in `paused()`."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.excluded = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the start, pauses included."""
        return time.perf_counter() - self.started

    @property
    def training(self) -> float:
        """Seconds since the start, pauses excluded."""
        return self.elapsed - self.excluded

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude what runs inside."""
        begin = time.perf_counter()
        yield
        self.excluded += time.perf_counter() - begin


class Metrics:
    """Reports of one run, on rank 0; on the other ranks every method but the clocks does nothing.

    A rate is tokens over the seconds between two reports, whose loss has just been read from the device: no other
    moment has to wait for it.

    Args:
        fabric: launched; its loggers get every value.
        total_steps: the step at which the run ends, None if not known.
        first_step: steps that were done before, by the run that is resumed.
        first_tokens: tokens that were seen before.
    """

    def __init__(
        self, fabric: Fabric, *, total_steps: int | None = None, first_step: int = 0, first_tokens: int = 0
    ) -> None:
        self.fabric = fabric
        self.total_steps = total_steps
        self.first_step = first_step
        self.first_tokens = first_tokens
        self.stopwatch = Stopwatch()
        self.train_loss: float | None = None
        self.val_loss: float | None = None
        self._last = (0.0, first_tokens)
        self._progress: Progress | None = None
        console = Console()
        if fabric.is_global_zero and console.is_terminal:
            self._progress = Progress(
                TextColumn("step {task.completed:.0f}"),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._progress.add_task("", total=total_steps, completed=first_step)
            self._progress.start()

    def train(self, *, step: int, num_tokens: int, loss: float, lr: float) -> None:
        """Report an optimizer step: `loss` per token, `num_tokens` seen so far, the learning rate it was made with."""
        self.train_loss = loss
        now = self.stopwatch.training
        seconds, tokens = now - self._last[0], num_tokens - self._last[1]
        self._last = (now, num_tokens)
        rate = tokens / max(seconds, 1e-9)
        peak = peak_memory_bytes(self.fabric.device)
        values = {"train_loss": loss, "learning_rate": lr, "tokens": num_tokens, "tokens_per_second": rate}
        self._log({**values, **({"peak_memory_bytes": peak} if peak else {})}, step)
        memory = f" | peak {_size(peak)}" if peak else ""
        if self._progress:
            text = f"loss {loss:.4f} | {rate:.0f} tokens/s{memory}"
            self._progress.update(self._task, completed=step, description=text)
            return
        left = ""
        if self.total_steps is not None and step < self.total_steps:
            per_step = now / max(1, step - self.first_step)
            left = f" | {_duration(per_step * (self.total_steps - step))} left"
        total = f"/{self.total_steps}" if self.total_steps is not None else ""
        self.print(f"step {step}{total} | loss {loss:.4f} | lr {lr:.2e} | {rate:.0f} tokens/s{memory}{left}")

    def validation(self, *, step: int, loss: float, seconds: float) -> None:
        """Report a validation after `step` optimizer steps; a loss of nan says that nothing was supervised."""
        self.val_loss = loss
        self._log({"val_loss": loss}, step)
        text = "no supervised tokens" if math.isnan(loss) else f"val loss {loss:.4f}, perplexity {_exp(loss):.1f}"
        self.print(f"step {step} | {text} | {seconds:.1f} s")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep what runs inside out of the rates."""
        if self.fabric.device.type == "cuda":  # what is queued belongs to the training before
            torch.cuda.synchronize(self.fabric.device)
        with self.stopwatch.paused():
            yield

    def print(self, text: str) -> None:
        """Print a line on rank 0, above the progress bar."""
        if self._progress:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self.fabric.print(text, flush=True)

    def close(self) -> None:
        """End the progress bar and write out what the loggers hold."""
        if self._progress:
            self._progress.stop()
            self._progress = None
        if self.fabric.is_global_zero:
            for logger in self.fabric.loggers:
                logger.finalize("success")

    def summary(self, *, step: int, num_tokens: int, unigram_loss: float | None, checkpoint_dir: Path) -> Summary:
        """What the run came to, steps, tokens and time since it was started or resumed."""
        tokens = num_tokens - self.first_tokens
        return Summary(
            steps=step - self.first_step,
            num_tokens=tokens,
            seconds=self.stopwatch.elapsed,
            tokens_per_second=tokens / max(self.stopwatch.training, 1e-9),
            train_loss=self.train_loss,
            val_loss=self.val_loss,
            unigram_loss=unigram_loss,
            peak_bytes=peak_memory_bytes(self.fabric.device),
            checkpoint_dir=checkpoint_dir,
        )

    def _log(self, values: dict[str, Any], step: int) -> None:
        if self.fabric.is_global_zero:
            self.fabric.log_dict(values, step=step)


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
