import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from safetensors.torch import save_file

from litce.args import EvalArgs, TrainArgs, UsageError
from litce.config import Config
from litce.training import checkpoint, resume
from litce.training.optim import resolve_optimizer
from litce.training.resume import (
    finished,
    prepare_out_dir,
    recover,
    require_position,
    require_resumable,
    resolve_resume,
)
from tests.tiny import MODEL

COUNTERS = {"step": 1, "num_tokens": 0, "epoch": 0, "num_samples": 0}


def write(directory: Path, step: int = 1, **counters: Any) -> Path:
    """A checkpoint that is intact as far as its files go."""
    (directory / "state").mkdir(parents=True)
    save_file({"weight": torch.zeros(4)}, directory / checkpoint.WEIGHTS)
    Config(**MODEL).save(directory / checkpoint.MODEL_CONFIG)
    (directory / checkpoint.HYPERPARAMETERS).write_text("seed: 1\noptimizer:\n  lr: 0.5\n")
    torch.save(
        {"optimizer": {"state": {}}, "precision": {}, "rng": [], "validations": {"best": 1.0, "worse": 0}},
        directory / checkpoint.OPTIMIZER,
    )
    (directory / checkpoint.PROGRESS).write_text(json.dumps({**COUNTERS, "step": step, **counters}))
    return directory


def one_line(error: pytest.ExceptionInfo[UsageError], most: int = 600) -> str:
    text = str(error.value)
    assert "\n" not in text and len(text) < most and "weights_only" not in text
    return text


def test_the_folder_is_created_and_left_as_it_was(tmp_path: Path) -> None:
    out_dir = tmp_path / "a/b"
    for _ in range(2):
        prepare_out_dir(out_dir)
        assert sorted(path.name for path in out_dir.rglob("*")) == ["logs"]


def forbidden(*args: Any, **kwargs: Any) -> None:
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize(
    "case", ["file", "below a file", "logs are a file", "too long", "null", "read-only", "/proc/x"]
)
def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    out_dir = {"file": file, "below a file": file / "x", "too long": tmp_path / ("x" * 300), "null": Path("a\0b")}.get(
        case, tmp_path / "run"
    )
    if case == "logs are a file":
        out_dir.mkdir()
        (out_dir / "logs").write_text("mine")
    if case == "read-only":  # no folder is, to root
        monkeypatch.setattr(resume.tempfile, "TemporaryFile", forbidden)
    if case == "/proc/x":
        if not Path("/proc/self").exists():
            pytest.skip("no /proc")
        out_dir = Path("/proc/x")
    with pytest.raises(UsageError, match=r"--out_dir .*cannot be written \(.+\); give a folder that can") as caught:
        prepare_out_dir(out_dir)
    one_line(caught, most=1000)
    assert file.read_text() == "mine"


def test_resolve_resume(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    assert resolve_resume(False, run) is None and resolve_resume("auto", run) is None
    first, second = write(run / "step-9", 9), write(run / "step-10", 10)
    assert resolve_resume("auto", run) == resolve_resume(True, run) == resolve_resume(run, run) == second
    assert resolve_resume(first, run) == resolve_resume(first, other) == first
    assert resolve_resume(run, other) == second
    write(other / "step-1", 1)
    for value in (False, first):
        with pytest.raises(UsageError, match=f"--out_dir {other} is not empty: it holds a run up to step 1 .step-1."):
            resolve_resume(value, other)
    for value in (True, tmp_path / "nowhere"):
        with pytest.raises(UsageError, match="--resume .*: no checkpoint in"):
            resolve_resume(value, tmp_path / "nowhere")


@pytest.mark.parametrize("value", [False, "auto"])
def test_what_is_no_run_is_named(tmp_path: Path, value: Any) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    (tmp_path / "zebra").mkdir()
    with pytest.raises(UsageError, match="holds thesis.tex and 1 more, which is no checkpoint to .*; give another"):
        resolve_resume(value, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["thesis.tex", "zebra"]


def test_logs_of_a_run_that_saved_nothing_are_no_run(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / ".final.partial").mkdir()
    assert resolve_resume(False, tmp_path) is None


@pytest.mark.parametrize("value", [True, "auto"])
def test_what_a_killed_run_was_replacing_is_put_back(tmp_path: Path, value: Any) -> None:
    write(tmp_path / ".final.replaced", 7)
    write(tmp_path / ".step-9.partial", 9)
    assert resolve_resume(value, tmp_path) == tmp_path / "final"
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_the_run_resumed_from_is_only_read(tmp_path: Path) -> None:
    """It may be running, and writing what looks like the rest of a killed run."""
    write(tmp_path / "other/step-1", 1)
    write(tmp_path / "other/.step-2.partial", 2)
    assert resolve_resume(tmp_path / "other", tmp_path / "run") == tmp_path / "other/step-1"
    assert (tmp_path / "other/.step-2.partial").is_dir() and not (tmp_path / "run").exists()


def test_what_cannot_be_recovered_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".final.partial").mkdir()
    monkeypatch.setattr(resume.shutil, "rmtree", forbidden)
    with pytest.raises(UsageError, match="--out_dir .*final.partial is left of a killed run and stays .*denied"):
        recover(tmp_path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def garbage(path: Path) -> None:
    path.write_bytes(b"garbage" * 10)


def empty(path: Path) -> None:
    path.write_bytes(b"")


class Payload:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("executed"),)


def payload(path: Path) -> None:
    torch.save({"optimizer": Payload(), "precision": {}, "rng": [], "validations": {"best": 1.0, "worse": 0}}, path)


def other_content(path: Path) -> None:
    torch.save([1, 2], path)


def counter(**values: Any) -> Any:
    return lambda path: path.write_text(json.dumps({**COUNTERS, **values}))


DAMAGE = [
    *[(name, how) for name in checkpoint.RESUMABLE for how in (empty, garbage)],
    (checkpoint.WEIGHTS, cut),
    (checkpoint.OPTIMIZER, cut),
    (checkpoint.OPTIMIZER, payload),
    (checkpoint.OPTIMIZER, other_content),
    *[(checkpoint.PROGRESS, counter(**{name: -1})) for name in COUNTERS],
    (checkpoint.PROGRESS, counter(step="3")),
    (checkpoint.PROGRESS, counter(num_samples=1.5)),
    (checkpoint.PROGRESS, lambda path: path.write_text("[1]")),
]


@pytest.mark.parametrize(("name", "how"), DAMAGE)
def test_a_damaged_newest_checkpoint_is_named_with_an_intact_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, how: Any
) -> None:
    """Without reading a tensor or unpickling code; and nothing is taken away."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    for step in (1, 2, 3, 4):
        write(run / f"step-{step}", step)
    how(run / "step-3" / name)
    how(run / "step-4" / name)
    monkeypatch.setattr("torch.Tensor.untyped_storage", lambda self: pytest.fail("a tensor was read"))
    for value in ("auto", True, run, run / "step-4"):
        with pytest.raises(UsageError) as caught:
            resolve_resume(value, run)
        text = one_line(caught)
        assert text.startswith(f"--resume {str(value).lower() if value is True else value}: {run / 'step-4' / name}")
        assert f"; {run / 'step-2'} is intact: remove the damaged one, or go on with --resume {run / 'step-2'}" in text
    assert len(list(run.iterdir())) == 4 and not Path("executed").exists()
    assert resolve_resume(run / "step-2", run) == run / "step-2"


def test_an_older_damaged_checkpoint_is_in_nobodys_way(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path / f"step-{step}", step)
    empty(tmp_path / "step-1" / checkpoint.WEIGHTS)
    assert resolve_resume("auto", tmp_path) == tmp_path / "step-2"


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        (checkpoint.WEIGHTS, "start again with another --out_dir"),
        (checkpoint.OPTIMIZER, "start with --initial_checkpoint_dir .*final and another --out_dir to keep the weights"),
    ],
)
def test_without_an_intact_checkpoint(tmp_path: Path, name: str, way_out: str) -> None:
    empty(write(tmp_path / "final") / name)
    with pytest.raises(UsageError, match=f"final.*is damaged.*; no other checkpoint of the run is intact; {way_out}"):
        resolve_resume("auto", tmp_path)


def require(source: Path, **changes: Any) -> None:
    values: dict[str, Any] = {
        "config": Config(**MODEL),
        "spec": resolve_optimizer("AdamW"),
        "hyperparameters": {"seed": 1, "optimizer": {"lr": 0.5}},
    }
    require_resumable(Fabric(accelerator="cpu", devices=1), source, **{**values, **changes})


def test_nothing_is_said_where_nothing_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require(write(tmp_path / "final"))
    assert capsys.readouterr().out == ""


def test_an_initial_checkpoint_that_is_not_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hyperparameters = {"seed": 1, "optimizer": {"lr": 0.5}, "initial_checkpoint_dir": "a/b"}
    require(write(tmp_path / "final"), hyperparameters=hyperparameters)
    printed = capsys.readouterr().out
    assert printed == f"resume: --initial_checkpoint_dir a/b is not read; the weights come from {tmp_path / 'final'}\n"


@pytest.mark.parametrize("spec", ["SGD", {"class_path": "torch.optim.Adam"}])
def test_another_optimizer_is_refused(tmp_path: Path, spec: Any) -> None:
    resolved = resolve_optimizer(spec)
    source = write(tmp_path / "final")
    with pytest.raises(UsageError, match=f"--optimizer {resolved.cls.__name__}: .*holds the state of AdamW; .*initial"):
        require(source, spec=resolved)
    # The same class under another name, and settings that changed.
    require(source, spec=resolve_optimizer({"class_path": "torch.optim.adamw.AdamW", "lr": 0.1}))


def test_samples_that_the_ranks_cannot_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "a", num_samples=3)
    monkeypatch.setattr(Fabric, "world_size", 2)
    with pytest.raises(UsageError, match="3 samples .* which 2 devices cannot share"):
        require(source)


@pytest.mark.parametrize(("num_samples", "fits"), [(0, True), (8, True), (10, False), (12, False), (10**9, False)])
def test_a_position_that_the_data_does_not_have(tmp_path: Path, num_samples: int, fits: bool) -> None:
    source = write(tmp_path / "a", num_samples=num_samples)
    if fits:
        require_position(source, samples_per_rank=5, world_size=2)
        return
    with pytest.raises(UsageError, match=f"--resume .*: {num_samples} samples .* --data has 10; give the data of"):
        require_position(source, samples_per_rank=5, world_size=2)


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({"max_steps": 3}, False),
        ({"max_steps": 4}, True),
        ({"max_tokens": 70}, False),
        ({"max_tokens": 71}, True),
        ({"epochs": 2}, False),
        ({"max_time": 1.0}, True),
    ],
)
def test_finished(tmp_path: Path, limits: dict[str, Any], left: bool) -> None:
    source = write(tmp_path / "a", 3, num_tokens=70, epoch=2)
    reason = finished(source, TrainArgs(**limits), EvalArgs())
    assert reason is None if left else reason and "at step 3, epoch 2, 70 tokens" in reason
