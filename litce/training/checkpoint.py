"""Checkpoint folders: how they are written, found and read.

    lit_model.safetensors   weights; tied tensors once (or what finetuned.py says)
    model_config.yaml       the model
    hyperparameters.yaml    the arguments of the run, usable as `--config`
    tokenizer files
    state/progress.json     counters and the position in the data
    state/optimizer.pt      optimizer, gradient scaler and random number generators of every rank; tensors and numbers

A folder appears under its name only when all of it is on disk. Reading never unpickles code.
"""

import json
import math
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from litce.args import UsageError
from litce.config import Config
from litce.model import GPT
from litce.peft import METHODS, FinetuneMethod, Full
from litce.tokenizer import Tokenizer
from litce.training.finetuned import Base, read_method, require_base, write_method

if TYPE_CHECKING:  # generating text does not need Lightning
    from lightning.fabric import Fabric

WEIGHTS = "lit_model.safetensors"
MODEL_CONFIG = "model_config.yaml"
HYPERPARAMETERS = "hyperparameters.yaml"
PROGRESS = "state/progress.json"
OPTIMIZER = "state/optimizer.pt"
RESUMABLE = (WEIGHTS, MODEL_CONFIG, OPTIMIZER, PROGRESS)

FULL = Full()

# Names of folders that are being written, or replaced; a leading dot keeps them out of `find_latest`.
PARTIAL = ".partial"
REPLACED = ".replaced"

# torch.compile puts this before the names of the modules it wraps.
COMPILED_PREFIX = "_orig_mod."


@dataclass
class TrainState:
    """A run between two optimizer steps."""

    model: Any
    """Wrapped by Fabric."""
    optimizer: Any
    """Wrapped by Fabric."""
    step: int = 0
    """Optimizer steps done."""
    num_tokens: int = 0
    """Supervised tokens seen, over all ranks."""
    epoch: int = 0
    """Passes over the data done."""
    num_samples: int = 0
    """Samples of the current epoch that this rank has consumed."""
    best_val_loss: float = math.inf
    """The lowest of the validations after a step, nats per token."""
    worse_validations: int = 0
    """Validations since then."""


def save_checkpoint(
    fabric: "Fabric",
    directory: Path,
    state: TrainState,
    *,
    config: Config,
    hyperparameters: dict[str, Any],
    tokenizer: Tokenizer | None,
    method: FinetuneMethod = FULL,
    base: Base | None = None,
) -> None:
    """Write `directory` from all ranks' state, replacing one of the same name. Every rank has to call this.

    Of the model only what `method` owns is written; where that is not all, `base` is what it adds to.

    Raises:
        UsageError: if it cannot be written; older checkpoints are intact.
    """
    rng_states = _gather(fabric, _rng_state(fabric.device))
    failure = None
    if fabric.is_global_zero:
        partial = directory.with_name(f".{directory.name}{PARTIAL}")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            (partial / "state").mkdir(parents=True)
            weights = _plain_state_dict(unwrap(state.model))
            own = {name: tensor for name, tensor in weights.items() if method.owns(name)}
            save_file(own, partial / method.weights_file)
            if method.weights_file != WEIGHTS:
                assert base is not None
                write_method(partial, method, base)
            config.save(partial / MODEL_CONFIG)
            (partial / HYPERPARAMETERS).write_text(yaml.safe_dump(hyperparameters, sort_keys=False), encoding="utf-8")
            if tokenizer is not None:
                tokenizer.save(partial)
            training = {
                "optimizer": state.optimizer.state_dict(),
                "precision": fabric.strategy.precision.state_dict(),
                "rng": rng_states,
                "validations": {"best": state.best_val_loss, "worse": state.worse_validations},
            }
            torch.save(training, partial / OPTIMIZER)
            progress = {
                "step": state.step,
                "num_tokens": state.num_tokens,
                "epoch": state.epoch,
                "num_samples": state.num_samples * fabric.world_size,
            }
            (partial / PROGRESS).write_text(json.dumps(progress), encoding="utf-8")
            publish(partial, directory)
        except (OSError, SafetensorError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
            shutil.rmtree(partial, ignore_errors=True)
            failure = str(error)
    failure = fabric.broadcast(failure)
    if failure is not None:
        raise UsageError(f"--out_dir {directory.parent}: {directory.name} cannot be written ({failure}); make room")


def is_complete(directory: Path) -> bool:
    """Whether a folder is named as a checkpoint and holds the files to resume from, whatever is in them."""
    return not directory.name.startswith(".") and all(path.is_file() for path in _resumable(directory))


def _resumable(directory: Path) -> list[Path]:
    return [weights_path(directory) if name == WEIGHTS else directory / name for name in RESUMABLE]


def weights_path(directory: Path) -> Path:
    """The file with the weights of a checkpoint: a model's, or a method's own. It need not exist."""
    files = (directory / cls().weights_file for cls in METHODS.values())
    return next((path for path in files if path.is_file()), directory / WEIGHTS)


def find_latest(out_dir: Path) -> Path | None:
    """The complete checkpoint in `out_dir` with the most steps; of two with as many, `final`. None without any."""
    found = []
    for folder in out_dir.iterdir() if out_dir.is_dir() else ():
        if is_complete(folder) and (step := steps(folder)) is not None:
            found.append((step, folder.name == "final", folder.name, folder))
    return max(found)[-1] if found else None


def remove_older(out_dir: Path, keep: int) -> None:
    """Remove all but the `keep` newest checkpoints of intervals, `step-...`.

    Each loses its name first, so that no half-removed one is taken for a checkpoint.
    """
    found = [(steps(folder) or 0, folder) for folder in out_dir.glob("step-*") if is_complete(folder)]
    for _, folder in sorted(found)[:-keep]:
        doomed = folder.with_name(f".{folder.name}{PARTIAL}")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def worse_validations(directory: Path) -> int:
    """Validations since the one with the lowest loss, when the checkpoint was written.

    Raises:
        UsageError: if they cannot be read.
    """
    return int(_read_training(directory / OPTIMIZER, mmap=True)["validations"]["worse"])


def steps(directory: Path) -> int | None:
    """Optimizer steps that a checkpoint is the result of; None if that cannot be read."""
    try:
        return read_progress(directory)["step"]
    except UsageError:
        return None


def read_progress(directory: Path) -> dict[str, int]:
    """The counters of a checkpoint: step, num_tokens, epoch, num_samples (of that epoch, over all ranks).

    Raises:
        UsageError: if they cannot be read, or are no counts.
    """
    path = directory / PROGRESS
    try:
        progress = json.loads(path.read_text(encoding="utf-8"))
        counters = {name: progress[name] for name in ("step", "num_tokens", "epoch", "num_samples")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is damaged ({error!r}); resume from another checkpoint") from error
    for name, value in counters.items():
        if type(value) is not int or value < 0:
            raise UsageError(f"{path} is damaged ({name} is {value!r}); resume from another checkpoint")
    return counters


def damage(directory: Path) -> str | None:
    """What keeps a run from resuming a checkpoint, as far as a look that reads no tensor shows; None for nothing."""
    for path in _resumable(directory):
        if not path.is_file():
            return f"{path} is missing"
    try:
        read_progress(directory)
        Config.from_file(directory / MODEL_CONFIG)
        require_weights(weights_path(directory))
        _read_training(directory / OPTIMIZER, mmap=True)
    except UsageError as error:
        return str(error).split("; ")[0]
    return None


def require_weights(path: Path) -> None:
    """Refuse a safetensors file whose header or length is wrong; no tensor is read.

    Raises:
        UsageError: in these cases.
    """
    try:
        with safe_open(path, framework="pt"):
            pass
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path} is damaged ({_short(error)}); use another checkpoint") from error


def _read_training(path: Path, mmap: bool = False) -> dict[str, Any]:
    """What `save_checkpoint` stored for resuming. With `mmap` no tensor is read.

    Raises:
        UsageError: if it is something else.
    """
    try:
        training = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise UsageError(f"{path} is damaged (holds more than tensors and numbers); use another checkpoint") from error
    except Exception as error:  # torch.load raises many kinds for a damaged file
        raise UsageError(f"{path} is damaged ({_short(error)}); use another checkpoint") from error
    if not isinstance(training, dict) or not training.keys() >= {"optimizer", "precision", "rng", "validations"}:
        raise UsageError(f"{path} is damaged (holds no state of a run); use another checkpoint")
    return training


def load_state(
    fabric: "Fabric",
    directory: Path,
    state: TrainState,
    optimizer_settings: Iterable[str] = (),
    method: FinetuneMethod = FULL,
) -> None:
    """Continue `state` from a checkpoint: weights, optimizer, counters, position and random number generators.

    The optimizer keeps its own values of `optimizer_settings`, so that a changed setting acts. On another number of
    ranks the order of the data goes on as it was, and only the random number generators start anew.

    Raises:
        UsageError: if the folder does not fit the model or the optimizer.
    """
    progress = read_progress(directory)
    load_weights(unwrap(state.model), directory / method.weights_file, owns=method.owns)
    training = _read_training(directory / OPTIMIZER)
    try:
        fresh = [{name: group[name] for name in optimizer_settings} for group in state.optimizer.param_groups]
        state.optimizer.load_state_dict(training["optimizer"])
        for group, settings in zip(state.optimizer.param_groups, fresh, strict=True):
            group.update(settings)
        fabric.strategy.precision.load_state_dict(training["precision"])
        validations = training["validations"]
        state.best_val_loss, state.worse_validations = float(validations["best"]), int(validations["worse"])
        if len(training["rng"]) == fabric.world_size:
            _set_rng_state(training["rng"][fabric.global_rank], fabric.device)
        else:
            fabric.print(
                f"resume: {fabric.world_size} devices in place of {len(training['rng'])}: the data goes on in the same "
                "order, and random numbers such as dropout's start anew"
            )
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"--resume {directory}: {OPTIMIZER} does not fit this run's optimizer ({_short(error)}); start with "
            f"--initial_checkpoint_dir {directory} to keep the weights alone"
        ) from error
    state.step, state.num_tokens, state.epoch = progress["step"], progress["num_tokens"], progress["epoch"]
    state.num_samples = progress["num_samples"] // fabric.world_size


def load_model(directory: Path | str) -> GPT:
    """The model in a checkpoint folder, on the CPU, in the dtype it was saved in, in evaluation mode.

    A checkpoint of a method's own weights gives the base with the method's parts, in the dtype of these.

    Raises:
        UsageError: if the folder is no checkpoint, weights and configuration do not fit, or a base is missing.
    """
    directory = Path(directory)
    require_model(directory)
    config = Config.from_file(directory / MODEL_CONFIG)
    with torch.device("meta"):
        model = GPT(config)
    finetuned = read_method(directory)
    if finetuned is None:
        load_weights(model, directory / WEIGHTS, assign=True)
        return model.eval()
    method, base = finetuned
    require_base(directory, base, WEIGHTS)
    load_weights(model, base.directory / WEIGHTS, assign=True)
    with torch.random.fork_rng(devices=[]):  # the new parts are drawn, to be overwritten
        method.prepare(model)
    load_weights(model, directory / method.weights_file, assign=True, owns=method.owns)
    own_dtype = next(p.dtype for name, p in model.named_parameters() if method.owns(name))
    return model.to(own_dtype).eval()


def require_model(directory: Path) -> None:
    """Refuse a folder without the files of a model; that of a run is told from its checkpoints.

    Raises:
        UsageError: naming the missing file, and the run's newest checkpoint.
    """
    for path in (directory / MODEL_CONFIG, weights_path(directory)):
        if not path.is_file():
            latest = find_latest(directory)
            hint = f"did you mean {latest}?" if latest else "give a folder that training wrote, such as RUN/final"
            problem = f"holds no {path.name}" if directory.is_dir() else "is not a folder"
            raise UsageError(f"{directory} {problem}; {hint}")


def load_weights(model: nn.Module, path: Path, assign: bool = False, owns: Callable[[str], bool] = FULL.owns) -> None:
    """Fill `model` from a safetensors file, which must hold exactly the tensors that `owns` says; all by default.

    `assign` takes the file's dtypes.

    Raises:
        UsageError: if the file cannot be read, or keys or shapes differ, naming them.
    """
    try:
        tensors = _strip_compiled(load_file(path))
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path} is damaged ({_short(error)}); use another checkpoint") from error
    try:
        # Not strict, so that the complete lists of keys come back; they are checked below.
        plain = unwrap(model)
        compiled = {name.replace(COMPILED_PREFIX, ""): name for name in plain.state_dict()}
        tensors = {compiled.get(name, name): tensor for name, tensor in tensors.items()}
        missing, unexpected = plain.load_state_dict(tensors, strict=False, assign=assign)
    except RuntimeError as error:
        raise UsageError(f"{path} does not fit the model: {' '.join(str(error).split())}") from error
    missing, unexpected = [k for k in missing if owns(k)], [*unexpected, *(k for k in tensors if not owns(k))]
    problems = [f"{kind} {_listed(keys)}" for kind, keys in (("missing", missing), ("unexpected", unexpected)) if keys]
    if problems:
        raise UsageError(f"{path} does not fit the model: {'; '.join(problems)}; check --model_name and --model_config")


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside Fabric's, DDP's and torch.compile's wrappers."""
    while True:
        if isinstance(model, torch._dynamo.OptimizedModule):
            model = model._orig_mod
        elif type(model).__name__ in ("_FabricModule", "DistributedDataParallel"):
            model = model.module  # type: ignore[assignment]
        else:
            return model


def _plain_state_dict(model: nn.Module) -> dict[str, Tensor]:
    # A tensor that shares its storage under a second name is restored by the module that ties it.
    seen: set[int] = set()
    tensors = {}
    for name, tensor in _strip_compiled(model.state_dict()).items():
        if tensor.data_ptr() not in seen or tensor.numel() == 0:
            seen.add(tensor.data_ptr())
            tensors[name] = tensor.contiguous()
    return tensors


def _strip_compiled(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace(COMPILED_PREFIX, ""): tensor for name, tensor in state_dict.items()}


def publish(partial: Path, directory: Path) -> None:
    """Make `partial` appear as `directory`, after all of it has reached the disk."""
    for path in [*partial.rglob("*"), partial]:
        fsync(path)
    replaced = directory.with_name(f".{directory.name}{REPLACED}")
    if directory.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        directory.rename(replaced)
    partial.rename(directory)
    fsync(directory.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def fsync(path: Path) -> None:
    if path.is_dir() and os.name == "nt":  # Windows opens no directories
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rng_state(device: torch.device) -> dict[str, Any]:
    numpy_state: Any = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (numpy_state[0], torch.from_numpy(numpy_state[1].astype(np.int64)), *numpy_state[2:]),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def _set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


def _gather(fabric: "Fabric", value: Any) -> list[Any]:
    if fabric.world_size == 1:
        return [value]
    values: list[Any] = [None] * fabric.world_size
    torch.distributed.all_gather_object(values, value)
    return values


def _listed(keys: list[str], most: int = 8) -> str:
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return ", ".join(keys[:most]) + more


def _short(error: Exception, most: int = 100) -> str:
    """The first sentence of an error: the rest of torch's is advice on what to unpickle."""
    text = " ".join(str(error).split()).split(". ")[0] or type(error).__name__
    return text if len(text) <= most else f"{text[:most]}..."
