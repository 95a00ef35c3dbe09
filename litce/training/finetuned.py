"""Checkpoints that hold a method's own weights alone: which method, and which checkpoint they add to.

    lit_model.METHOD.safetensors    the method's own weights
    finetune.yaml                   the method, its options, and the base checkpoint

and the other files of a checkpoint.
"""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from litce.args import UsageError, as_written
from litce.peft import METHODS, FinetuneMethod

FINETUNE = "finetune.yaml"

FINGERPRINT_PIECES = 64
FINGERPRINT_PIECE_BYTES = 2**16


@dataclass(frozen=True)
class Base:
    """The checkpoint that is finetuned."""

    directory: Path
    fingerprint: str
    """Of its weights, as `fingerprint` makes it."""


def fingerprint(path: Path) -> str:
    """A hash of a file's size and of 64 pieces of 64 KiB, evenly spaced: all of a small file, 4 MiB of a large one.

    Any training changes some of every piece; to read a whole model would take longer than to load it.

    Raises:
        UsageError: if it cannot be read.
    """
    try:
        size = path.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        with path.open("rb") as file:
            for piece in range(FINGERPRINT_PIECES):
                file.seek(max(0, size - FINGERPRINT_PIECE_BYTES) * piece // (FINGERPRINT_PIECES - 1))
                digest.update(file.read(FINGERPRINT_PIECE_BYTES))
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror})") from error
    return digest.hexdigest()


def write_method(directory: Path, method: FinetuneMethod, base: Base) -> None:
    """Write `finetune.yaml`."""
    values = {
        "method": method.name,
        "options": asdict(method),
        "checkpoint_dir": str(base.directory.resolve()),
        "fingerprint": base.fingerprint,
    }
    (directory / FINETUNE).write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")


def read_method(directory: Path) -> tuple[FinetuneMethod, Base] | None:
    """The method whose own weights a checkpoint holds, and their base; None if it holds a whole model.

    Raises:
        UsageError: if `finetune.yaml` is damaged.
    """
    path = directory / FINETUNE
    if not path.is_file():
        return None
    try:
        values: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        method = METHODS[values["method"]](**values["options"])
        return method, Base(Path(values["checkpoint_dir"]), str(values["fingerprint"]))
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise UsageError(f"{path} is damaged ({' '.join(str(error).split())}); use another checkpoint") from error


def require_base(directory: Path, base: Base, weights: str) -> None:
    """Refuse a base that is gone, or is not the one that the checkpoint in `directory` was trained on.

    Raises:
        UsageError: in these cases; `weights` is the name of the base's file.
    """
    path = base.directory / weights
    if not path.is_file():
        raise UsageError(
            f"{directory} adds to the checkpoint {base.directory}, which is not there; put it back, or write its new "
            f"place into {directory / FINETUNE}"
        )
    if fingerprint(path) != base.fingerprint:
        raise UsageError(
            f"{directory} adds to other weights than those that {base.directory} holds now; put back the checkpoint "
            f"that it was trained on, or write its place into {directory / FINETUNE}"
        )


def require_same_method(source: Path, method: FinetuneMethod, base: Base | None) -> None:
    """Refuse to resume a checkpoint of another method, of the same with other options, or with another base.

    Raises:
        UsageError: naming what differs.
    """
    saved = read_method(source)
    saved_method = METHODS["full"]() if saved is None else saved[0]
    if saved_method.name != method.name:
        raise UsageError(
            f"--resume {source} was made by the method {saved_method.name}, not {method.name}; give another --out_dir"
        )
    before, now = asdict(saved_method), asdict(method)
    for name in now:
        if before[name] != now[name]:
            raise UsageError(
                f"--{method.name}.{name} {as_written(now[name])}: {source} was made with {as_written(before[name])}; "
                "resume with that, or give another --out_dir"
            )
    if saved is not None and base is not None and saved[1].fingerprint != base.fingerprint:
        raise UsageError(
            f"--checkpoint_dir {base.directory} holds other weights than those that {source} adds to "
            f"({saved[1].directory}); give that, or another --out_dir"
        )
