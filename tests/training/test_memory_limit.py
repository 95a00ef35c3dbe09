"""A micro-batch that fits the memory, and what is said when memory has run out."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric

from litce.args import TrainArgs, UsageError
from litce.config import Config
from litce.peft import Full
from litce.tools.planner import Planner
from litce.training import memory_limit, run
from litce.training.memory_limit import device_memory, is_out_of_memory
from litce.training.run import Task
from tests.tiny import MODEL, logged, pretrain, train_args


def chosen(capsys: pytest.CaptureFixture[str]) -> int:
    match = re.search(r"micro-batch of (\d+): predicted peak ", capsys.readouterr().out)
    assert match is not None
    return int(match[1])


def test_auto_takes_the_most_that_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = Task(Config(**MODEL), Full(), lambda gpt: None, tokenizer=None)
    optimizer = {"class_path": "SGD", "lr": 0.01}
    peaks = {}
    for size in (2, 4):
        train = train_args(micro_batch_size=size, global_batch_size=8)
        peaks[size] = Planner(task, "32-true", train, optimizer, 1).memory(train).peak_bytes
    assert peaks[2] < peaks[4]
    # A tenth is left for what is no tensor.
    for size, limit in ((1, peaks[2]), (2, peaks[2] / 0.89), (4, peaks[4] / 0.89), (8, 10**9)):
        train = train_args(micro_batch_size="auto", memory_limit=f"{int(limit)}B", global_batch_size=8)
        pretrain(tmp_path / str(size), train=train, optimizer=optimizer)
        assert chosen(capsys) == size
    pretrain(tmp_path / "given", train=train_args(micro_batch_size=2, global_batch_size=8), optimizer=optimizer)
    assert logged(tmp_path / "2") == logged(tmp_path / "given")
    assert "micro_batch_size: auto" in (tmp_path / "2/final/hyperparameters.yaml").read_text()


def test_auto_without_a_limit_takes_the_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pretrain(tmp_path, train=train_args(micro_batch_size="auto"))
    assert chosen(capsys) == 4  # the global batch


@pytest.mark.parametrize("micro_batch_size", [2, "auto"])
def test_a_limit_that_cannot_be_kept_is_refused_before_the_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, micro_batch_size: Any
) -> None:
    monkeypatch.setattr(run, "prepare_out_dir", lambda out_dir: pytest.fail("too late"))
    message = (
        r"--train.memory_limit 0.1 MB: a micro-batch of \d is predicted to take .*the largest part is .*; change --"
    )
    with pytest.raises(UsageError, match=message):
        pretrain(tmp_path, train=train_args(micro_batch_size=micro_batch_size, memory_limit="100KB"))


def test_a_limit_that_is_kept_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pretrain(tmp_path, train=train_args(memory_limit="1GB"))
    assert chosen(capsys) == 2


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
    ids=["cuda", "cpu", "python"],
)
def test_out_of_memory_says_what_to_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fit(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(run, "fit", fit)
    message = r"out of memory: a step with --train.micro_batch_size 2 takes .* \(.*weights .*\); the largest part is .*"
    with pytest.raises(UsageError, match=message + "; change --.*, or see what fits with litce plan") as caught:
        pretrain(tmp_path)
    assert caught.value.__cause__ is error


def test_other_errors_stay_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(*args: Any, **options: Any) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(run, "fit", fit)
    with pytest.raises(RuntimeError, match="something else"):
        pretrain(tmp_path)


def test_what_the_allocator_says() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value) and not is_out_of_memory(RuntimeError("shape mismatch"))


def test_device_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (Fabric(accelerator="cpu", devices=n, strategy="ddp" if n > 1 else "auto") for n in (1, 2))
    whole = device_memory(one)
    assert whole > 2**28 and device_memory(two) == whole // 2
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory_limit, "CONTAINER_LIMITS", (str(limit),))
    limit.write_text("max\n")
    assert device_memory(one) >= whole
    limit.write_text("1000000\n")
    assert device_memory(one) == 1_000_000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_batch_size": 0}, "--train.micro_batch_size 0: must be greater than 0"),
        ({"memory_limit": "lots"}, "--train.memory_limit lots: give a positive size"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainArgs(**changes)
