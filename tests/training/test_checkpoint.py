import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from safetensors.torch import load_file, save_file

from litce.args import UsageError
from litce.config import Config
from litce.model import GPT
from litce.training import checkpoint
from litce.training.checkpoint import (
    TrainState,
    find_latest,
    load_model,
    load_state,
    load_weights,
    save_checkpoint,
)
from litce.training.optim import resolve_optimizer
from litce.training.resume import recover
from tests.tiny import MODEL

CONFIG = Config(**MODEL)


def make_state(config: Config = CONFIG, compiled: str = "", seed: int = 0) -> tuple[Fabric, TrainState]:
    """A state after one optimizer step; `compiled` is the "model" or its "blocks", or nothing."""
    torch.manual_seed(seed)
    fabric = Fabric(accelerator="cpu", devices=1)
    model: Any = GPT(config)
    model.init_weights()
    optimizer = resolve_optimizer("AdamW").build(model)
    if compiled == "blocks":
        model.transformer.h[0] = torch.compile(model.transformer.h[0], backend="eager")
    elif compiled == "model":
        model = torch.compile(model, backend="eager")
    state = TrainState(*fabric.setup(model, optimizer))
    ids = torch.arange(8)[None]
    fabric.backward(state.model(ids, ids))
    state.optimizer.step()
    state.step = 1
    return fabric, state


def save(fabric: Fabric, state: TrainState, directory: Path, config: Config = CONFIG) -> None:
    save_checkpoint(fabric, directory, state, config=config, hyperparameters={"seed": 1}, tokenizer=None)


def fake(directory: Path, step: int) -> Path:
    """A folder that has what a complete checkpoint has."""
    (directory / "state").mkdir(parents=True)
    for name in checkpoint.RESUMABLE:
        (directory / name).touch()
    values = f'{{"step": {step}, "num_tokens": 0, "epoch": 0, "num_samples": 0}}'
    (directory / checkpoint.PROGRESS).write_text(values)
    return directory


@pytest.mark.parametrize("tied", [True, False])
def test_weights_come_back_and_tied_ones_are_stored_once(tmp_path: Path, tied: bool) -> None:
    config = Config(**{**MODEL, "tie_embeddings": tied})
    fabric, state = make_state(config)
    save(fabric, state, tmp_path / "a", config)
    assert ("lm_head.weight" in load_file(tmp_path / "a" / checkpoint.WEIGHTS)) != tied
    model = load_model(tmp_path / "a")
    assert (model.lm_head.weight is model.transformer.wte.weight) == tied
    assert model.config == config and not model.training
    original = checkpoint.unwrap(state.model)
    for (name, first), second in zip(original.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(first, second) and second.requires_grad, name


def test_loading_keeps_the_dtype(tmp_path: Path) -> None:
    fabric, state = make_state()
    checkpoint.unwrap(state.model).bfloat16()
    save(fabric, state, tmp_path / "a")
    assert {parameter.dtype for parameter in load_model(tmp_path / "a").parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("compiled", ["model", "blocks"])
@pytest.mark.parametrize("saving", [True, False])
def test_compiled_and_plain_models_read_each_other(tmp_path: Path, compiled: str, saving: bool) -> None:
    fabric, state = make_state(compiled=compiled if saving else "")
    save(fabric, state, tmp_path / "a")
    assert not any("_orig_mod" in name for name in load_file(tmp_path / "a" / checkpoint.WEIGHTS))
    fabric, other = make_state(compiled="" if saving else compiled, seed=1)
    load_state(fabric, tmp_path / "a", other)
    first, second = checkpoint.unwrap(state.model), checkpoint.unwrap(other.model)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_state_and_random_numbers_come_back(tmp_path: Path) -> None:
    fabric, state = make_state()
    state.step, state.num_tokens, state.epoch, state.num_samples = 7, 70, 2, 3
    save(fabric, state, tmp_path / "a")
    expected = random.random(), np.random.rand(), torch.rand(1)
    fabric, other = make_state(seed=5)
    load_state(fabric, tmp_path / "a", other)
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected
    assert (other.step, other.num_tokens, other.epoch, other.num_samples) == (7, 70, 2, 3)
    first, second = state.optimizer.state_dict(), other.optimizer.state_dict()
    assert first["param_groups"] == second["param_groups"]
    assert all(
        torch.equal(value, second["state"][index][name])
        for index, values in first["state"].items()
        for name, value in values.items()
    )


def test_settings_of_the_new_optimizer_can_win(tmp_path: Path) -> None:
    fabric, state = make_state()
    state.optimizer.param_groups[0]["betas"] = (0.1, 0.2)
    save(fabric, state, tmp_path / "a")
    for settings, expected in (((), (0.1, 0.2)), (("betas",), (0.9, 0.95))):
        fabric, other = make_state()
        load_state(fabric, tmp_path / "a", other, settings)
        assert other.optimizer.param_groups[0]["betas"] == expected


def test_state_is_read_without_unpickling_code(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "executed",)

    fabric, state = make_state()
    save(fabric, state, tmp_path / "a")
    torch.save({"optimizer": Payload(), "rng": []}, tmp_path / "a" / checkpoint.OPTIMIZER)
    with pytest.raises(UsageError, match="damaged .holds more than tensors and numbers."):
        load_state(fabric, tmp_path / "a", state)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("transformer.wpe.weight"), "missing transformer.wpe.weight"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "unexpected extra"),
        (lambda tensors: tensors.update({"transformer.wpe.weight": torch.zeros(2, 16)}), "wpe.weight.*8, 16"),
        (lambda tensors: tensors.clear(), "missing .* and 13 more"),
    ],
)
def test_loading_is_strict_in_both_directions(tmp_path: Path, change: Any, message: str) -> None:
    fabric, state = make_state()
    save(fabric, state, tmp_path / "a")
    tensors = load_file(tmp_path / "a" / checkpoint.WEIGHTS)
    change(tensors)
    save_file(tensors, tmp_path / "a" / checkpoint.WEIGHTS)
    for load in (lambda: load_model(tmp_path / "a"), lambda: load_state(fabric, tmp_path / "a", state)):
        with pytest.raises(UsageError, match=message) as caught:
            load()
        assert "\n" not in str(caught.value)


def test_damaged_or_missing_files(tmp_path: Path) -> None:
    fabric, state = make_state()
    save(fabric, state, tmp_path / "run/final")
    with pytest.raises(UsageError, match="run holds no model_config.yaml; did you mean .*run/final"):
        load_model(tmp_path / "run")
    with pytest.raises(
        UsageError, match="nowhere is not a folder; give a folder that training wrote, such as RUN/final"
    ):
        load_model(tmp_path / "nowhere")
    path = tmp_path / "run/final" / checkpoint.WEIGHTS
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UsageError, match="lit_model.safetensors is damaged"):
        load_weights(GPT(CONFIG), path)


def test_latest_is_the_highest_complete_step(tmp_path: Path) -> None:
    assert find_latest(tmp_path / "nowhere") is None
    for step in (9, 10, 100):
        fake(tmp_path / f"step-{step}", step)
    assert find_latest(tmp_path) == tmp_path / "step-100"
    fake(tmp_path / "step-100000000", 100000000)
    assert find_latest(tmp_path) == tmp_path / "step-100000000"
    for name in checkpoint.RESUMABLE:
        folder = fake(tmp_path / f"step-{10**9}", 10**9)
        (folder / name).unlink()
        assert find_latest(tmp_path) == tmp_path / "step-100000000"
        shutil.rmtree(folder)
    fake(tmp_path / f".step-{10**9}.partial", 10**9)
    (tmp_path / "logs").mkdir()
    assert find_latest(tmp_path) == tmp_path / "step-100000000"
    fake(tmp_path / "final", 100000000)
    assert find_latest(tmp_path) == tmp_path / "final"
    fake(tmp_path / "step-100000001", 100000001)
    assert find_latest(tmp_path) == tmp_path / "step-100000001"


class Killed(BaseException):
    """Stands for a process that ends."""


@pytest.mark.parametrize("at", range(14))
def test_replacing_a_checkpoint_can_be_cut_off_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Before each fsync, rename and removal; afterwards the old or the new one is there, whole."""
    fabric, state = make_state()
    save(fabric, state, tmp_path / "final")
    state.step = 2
    calls = 0

    def counting(function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > at:
                raise Killed
            return function(*args, **kwargs)

        return counted

    with monkeypatch.context() as context:
        context.setattr(checkpoint.os, "fsync", counting(checkpoint.os.fsync))
        context.setattr(Path, "rename", counting(Path.rename))
        context.setattr(checkpoint.shutil, "rmtree", counting(checkpoint.shutil.rmtree))
        try:
            save(fabric, state, tmp_path / "final")
        except Killed:
            pass
        else:
            assert at >= 12, "more could be cut off"
    recover(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    load_model(tmp_path / "final")
    assert checkpoint.read_progress(tmp_path / "final")["step"] in (1, 2)
    save(fabric, state, tmp_path / "final")
    assert checkpoint.read_progress(tmp_path / "final")["step"] == 2


def test_a_full_disk_leaves_older_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fabric, state = make_state()
    save(fabric, state, tmp_path / "step-00000001")

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.torch, "save", full)
    with pytest.raises(UsageError, match="--out_dir .*: step-00000002 cannot be written .*No space left"):
        save(fabric, state, tmp_path / "step-00000002")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
