import math
import time
from pathlib import Path

import pytest
import torch
from lightning.fabric import Fabric

from litce.training.metrics import Metrics, Stopwatch, Summary, peak_memory_bytes


def test_peak_memory_of_the_process_is_in_bytes() -> None:
    peak = peak_memory_bytes(torch.device("cpu"))
    # Importing torch alone takes 100 MB; 100 GB would be a mistaken unit.
    assert peak is not None and 1e8 < peak < 1e11


def test_summary_leaves_out_what_is_not_known() -> None:
    summary = Summary(3, 60, 2.0, 30.0, 1.25, None, None, None, Path("out"))
    assert str(summary) == "trained 3 steps, 60 tokens in 2.0 s | 30 tokens/s | train loss 1.2500 | checkpoint out"


def test_stopwatch_excludes_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    stopwatch = Stopwatch()
    now[0] = 2.0
    with stopwatch.paused():
        now[0] = 7.0
    now[0] = 8.0
    assert (stopwatch.elapsed, stopwatch.training) == (8.0, 3.0)


def test_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    fabric = Fabric(accelerator="cpu", devices=1)
    metrics = Metrics(fabric, total_steps=14, first_step=10, first_tokens=1000)
    now[0] = 2.0
    metrics.train(step=12, num_tokens=1100, loss=2.5, lr=1e-3)
    with metrics.paused():
        now[0] = 100.0
        metrics.validation(step=12, loss=math.log(8.0), seconds=98.0)
    now[0] = 102.0
    metrics.train(step=14, num_tokens=1300, loss=2.0, lr=1e-4)
    metrics.validation(step=14, loss=math.nan, seconds=0.0)
    metrics.close()
    first, val, last, empty = capsys.readouterr().out.splitlines()
    assert first.startswith("step 12/14 | loss 2.5000 | lr 1.00e-03 | 50 tokens/s") and first.endswith("0:02 left")
    assert val == "step 12 | val loss 2.0794, perplexity 8.0 | 98.0 s"
    assert "| 100 tokens/s" in last and "left" not in last
    assert "no supervised tokens" in empty
    summary = metrics.summary(step=14, num_tokens=1300, unigram_loss=3.0, checkpoint_dir=Path("x"))
    assert (summary.steps, summary.num_tokens, summary.seconds, summary.tokens_per_second) == (4, 300, 102.0, 75.0)
    assert summary.train_loss == 2.0


def test_progress_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    metrics = Metrics(Fabric(accelerator="cpu", devices=1), total_steps=None)
    metrics.train(step=1, num_tokens=8, loss=2.5, lr=1e-3)
    metrics.print("saved [somewhere]")
    metrics.close()
    printed = capsys.readouterr().out
    assert "loss 2.5000" in printed and "saved [somewhere]" in printed
