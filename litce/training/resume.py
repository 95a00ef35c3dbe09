"""What a run finds in its folder: a place to write to, and the checkpoint that it goes on from."""

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric

from litce.args import EvalArgs, TrainArgs, UsageError
from litce.config import Config
from litce.training import checkpoint
from litce.training.hyperparameters import differences, read_hyperparameters
from litce.training.loop import limit_reached
from litce.training.optim import OptimizerSpec, resolve_optimizer

LOGS = "logs"


def prepare_out_dir(out_dir: Path) -> None:
    """Create the folders that the run writes checkpoints and logs to, and write to them.

    Raises:
        UsageError: if they cannot be written.
    """
    for folder in (out_dir, out_dir / LOGS):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(b"\0")
                probe.flush()
        except (OSError, ValueError) as error:  # ValueError: a null character in the path
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(
                f"--out_dir {out_dir}: {folder} cannot be written ({reason}); give a folder that can"
            ) from error


def recover(out_dir: Path) -> None:
    """Put back what a killed run was replacing, and remove what it was writing.

    Raises:
        UsageError: if that cannot be done.
    """
    try:
        for folder in out_dir.glob(f".*{checkpoint.REPLACED}"):
            original = folder.with_name(folder.name[1 : -len(checkpoint.REPLACED)])
            if original.exists():
                shutil.rmtree(folder)
            else:
                folder.rename(original)
        for folder in out_dir.glob(f".*{checkpoint.PARTIAL}"):
            shutil.rmtree(folder)
    except OSError as error:
        raise UsageError(f"--out_dir {out_dir}: {folder} is left of a killed run and stays ({error})") from error


def resolve_resume(resume: bool | str | Path, out_dir: Path) -> Path | None:
    """The checkpoint to continue from: none for False, the newest in `out_dir` for True and "auto", or that of a path.

    A folder of a run stands for its newest checkpoint. A run that does not continue what is in `out_dir` has to find
    it empty, so that no folder mixes two runs; logs alone do not count.

    Raises:
        UsageError: if there is no such checkpoint (except with "auto"), it is damaged as far as a look that reads no
            tensors shows, or `out_dir` holds another run.
    """
    source = Path(resume) if isinstance(resume, (str, Path)) and resume != "auto" else out_dir
    found = None
    if resume is not False:
        # Only in the run's own folder: in another one a run may be writing.
        recover(out_dir)
        found = source if (source / checkpoint.PROGRESS).is_file() else _newest(source)
        if found is None and resume != "auto":
            raise UsageError(
                f"--resume {_typed(resume)}: no checkpoint in {source}; start a new run without --resume, or with "
                "--resume auto"
            )
    if found is None or found.resolve().parent != out_dir.resolve():
        require_empty(out_dir)
    if found is not None:
        _require_intact(found, resume)
    return found


def require_empty(out_dir: Path) -> None:
    """Refuse a folder that holds anything but logs.

    Raises:
        UsageError: saying what is there.
    """
    names = sorted(path.name for path in _entries(out_dir) if not path.name.startswith(".") and path.name != LOGS)
    if not names:
        return
    latest = checkpoint.find_latest(out_dir)
    if latest is None:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise UsageError(
            f"--out_dir {out_dir} is not empty: it holds {names[0]}{more}, which is no checkpoint to resume from; "
            "give another --out_dir"
        )
    step = checkpoint.read_progress(latest)["step"]
    raise UsageError(
        f"--out_dir {out_dir} is not empty: it holds a run up to step {step} ({latest.name}); "
        "continue it with --resume auto, or give another --out_dir"
    )


def require_resumable(
    fabric: Fabric, source: Path, config: Config, spec: OptimizerSpec, hyperparameters: dict[str, Any]
) -> None:
    """Refuse a checkpoint that this run's model, optimizer or devices do not fit; print the arguments that changed.

    Raises:
        UsageError: in these cases.
    """
    require_same_model(source, config)
    require_same_optimizer(source, spec)
    num_samples = checkpoint.read_progress(source)["num_samples"]
    if num_samples % fabric.world_size:
        raise UsageError(
            f"--resume {source}: {num_samples} samples of the epoch are consumed, which {fabric.world_size} devices "
            "cannot share; use the number of devices of the run before"
        )
    for line in differences(source, hyperparameters):
        fabric.print(f"resume: {line}; the run will differ from one that was not interrupted")
    if hyperparameters.get("initial_checkpoint_dir") is not None:
        fabric.print(
            f"resume: --initial_checkpoint_dir {hyperparameters['initial_checkpoint_dir']} is not read; "
            f"the weights come from {source}"
        )


def finished(source: Path, train: TrainArgs, eval: EvalArgs) -> str | None:
    """In words, why a run that goes on from `source` has nothing left to do; None if it has."""
    if eval.patience is not None and checkpoint.worse_validations(source) >= eval.patience:
        return (
            f"{source} is at the end that --eval.patience {eval.patience} sets: so many validations brought no lower "
            "loss; raise it"
        )
    progress = checkpoint.read_progress(source)
    if not limit_reached(train, step=progress["step"], num_tokens=progress["num_tokens"], epoch=progress["epoch"]):
        return None
    return (
        f"{source} is at step {progress['step']}, epoch {progress['epoch']}, {progress['num_tokens']} tokens and this "
        "run asks for no more; raise --train.max_steps, --train.max_tokens or --train.epochs"
    )


def require_same_model(source: Path, config: Config) -> None:
    """Refuse to resume a checkpoint of another model.

    Raises:
        UsageError: naming every field that differs.
    """
    saved, current = asdict(Config.from_file(source / checkpoint.MODEL_CONFIG)), asdict(config)
    differing = [
        f"{key} is {saved[key]} there and {current[key]} here"
        for key in current
        if key not in ("name", "family") and saved[key] != current[key]
    ]
    if differing:
        raise UsageError(f"--resume {source} holds another model: {', '.join(differing)}; give another --out_dir")


def require_same_optimizer(source: Path, spec: OptimizerSpec) -> None:
    """Refuse to resume the state of an optimizer of another class: it would not fit, or be ignored.

    Raises:
        UsageError: naming both.
    """
    try:
        saved = resolve_optimizer(read_hyperparameters(source)["optimizer"]).cls
    except (UsageError, KeyError, TypeError):
        return  # not known; what does not fit is found when the state is loaded
    if saved is not spec.cls:
        raise UsageError(
            f"--optimizer {spec.cls.__name__}: {source} holds the state of {saved.__name__}; resume with that, or "
            f"start anew with --initial_checkpoint_dir {source} and another --out_dir to keep the weights alone"
        )


def require_position(source: Path, samples_per_rank: int, world_size: int) -> None:
    """Refuse a position that the epoch of this run's data does not have.

    Raises:
        UsageError: with both numbers.
    """
    num_samples = checkpoint.read_progress(source)["num_samples"]
    if num_samples // world_size >= samples_per_rank:
        raise UsageError(
            f"--resume {source}: {num_samples} samples of the epoch are consumed, and an epoch of this run's --data "
            f"has {samples_per_rank * world_size}; give the data of the run before"
        )


def _newest(run: Path) -> Path | None:
    """As `find_latest`, but a checkpoint whose progress cannot be read counts as newer than those where it can."""
    unreadable = [path for path in _checkpoints(run) if checkpoint.steps(path) is None]
    return max(unreadable, key=lambda path: path.name) if unreadable else checkpoint.find_latest(run)


def _require_intact(source: Path, resume: bool | str | Path) -> None:
    problem = checkpoint.damage(source)
    if problem is None:
        return
    others = [path for path in _checkpoints(source.parent) if path != source and checkpoint.damage(path) is None]
    if others:
        other = max(others, key=lambda path: checkpoint.read_progress(path)["step"])
        way_out = f"{other} is intact: remove the damaged one, or go on with --resume {other}"
    elif problem.startswith(str(source / "state")):
        way_out = (
            f"no other checkpoint of the run is intact; start with --initial_checkpoint_dir {source} and another "
            "--out_dir to keep the weights alone"
        )
    else:
        way_out = "no other checkpoint of the run is intact; start again with another --out_dir"
    raise UsageError(f"--resume {_typed(resume)}: {problem}; {way_out}")


def _checkpoints(run: Path) -> Iterator[Path]:
    return (path for path in _entries(run) if checkpoint.is_complete(path))


def _entries(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []


def _typed(resume: bool | str | Path) -> str:
    return "true" if resume is True else str(resume)
