"""Finetuning a small pretrained model lowers its loss, by every method and with every way to compute the loss.

The model is LITCE_DEMO_CHECKPOINT, or what `litce pretrain` left in out/pretrain/demo, or one that is trained here.
"""

import csv
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRETRAIN_STEPS = 60
STEPS = 40


@dataclass
class Result:
    before: float
    """Validation loss in nats per token."""
    after: float
    train_losses: list[float]
    tokens_per_second: float
    peak_bytes: float

    def __str__(self) -> str:
        return (
            f"validation loss {self.before:.4f} -> {self.after:.4f} | {self.tokens_per_second:.0f} tokens/s | "
            f"peak memory {self.peak_bytes / 2**20:.0f} MiB"
        )


def litce(*words: object) -> None:
    """A process of its own, because peak memory is that of a process."""
    command = [sys.executable, "-c", "from litce.cli import main; main()", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("LITCE_DEMO_CHECKPOINT")
    found = Path(given) if given else ROOT / "out/pretrain/demo/final"
    if given or found.is_dir():
        return found.resolve()
    out_dir = tmp_path_factory.mktemp("demo") / "run"
    limits = ("--train.max_steps", PRETRAIN_STEPS, "--train.save_interval", "null", "--eval.final_validation", "false")
    litce("pretrain", "--config", "pretrain/demo", "--out_dir", out_dir, *limits)
    return out_dir / "final"


def run(method: str, checkpoint: Path, out_dir: Path, *words: object) -> Result:
    """The demo's configuration, for fewer steps."""
    short = ("--train.max_steps", STEPS, "--train.save_interval", "null", "--eval.initial_validation", "true")
    places = ("--checkpoint_dir", checkpoint, "--out_dir", out_dir)
    litce(f"finetune_{method}", "--config", f"finetune/demo/{method}", *places, *short, *words)
    (path,) = out_dir.glob("logs/csv/version_*/metrics.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    columns = {name: [float(row[name]) for row in rows if row[name]] for name in rows[0]}
    rates = columns["tokens_per_second"]
    return Result(
        before=columns["val_loss"][0],
        after=columns["val_loss"][-1],
        train_losses=columns["train_loss"],
        tokens_per_second=sum(rates) / len(rates),
        peak_bytes=max(columns["peak_memory_bytes"]),
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora", "adapter", "adapter_v2"])
def test_the_demo_lowers_the_loss(
    method: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = run(method, checkpoint, tmp_path / "planned")
    dense = run(
        *(method, checkpoint, tmp_path / "dense"),
        *("--train.cross_entropy", "dense", "--train.cross_entropy_chunk_size", 0),
    )
    with capsys.disabled():
        print(f"\n{method}, {STEPS} steps\n  as planned: {planned}\n  dense:      {dense}")
    # A step alone moves the loss by some hundredths; noise of 160 samples is the same before and after.
    assert planned.after < planned.before - 0.02
    assert planned.before == pytest.approx(dense.before, abs=1e-4)
    assert planned.after == pytest.approx(dense.after, abs=1e-3)
    assert planned.train_losses == pytest.approx(dense.train_losses, abs=1e-3)
