"""Finetuning on two ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from litce.peft import AdapterV2, FinetuneMethod, LoRA
from tests.gloo import run_ranks
from tests.tiny import MODEL, Numbers, finetune, logged, pretrain, train_args

METHODS: dict[str, FinetuneMethod] = {
    "lora": LoRA(r=4, dropout=0.0, head=True, mlp=True),
    "adapter_v2": AdapterV2(prompt_length=3, start_layer=0),
    "dropout": LoRA(r=4, dropout=0.5),
}
SGD = {"class_path": "SGD", "lr": 0.3, "momentum": 0.9}


def run_method(root: Path, name: str, out_dir: Path, **changes: Any) -> Any:
    # 13 samples divide neither by 2 ranks nor by the batch of 4.
    args = train_args(max_steps=None, epochs=2, save_interval=3, micro_batch_size=1)
    base = root / "base/final"
    return finetune(METHODS[name], base, out_dir, Numbers(13), train=args, optimizer=SGD, **changes)


def run_all(root: Path) -> None:
    for name in METHODS:
        run_method(root, name, root / name)
        run_method(root, name, root / f"{name}-resumed", resume=root / name / "step-00000003")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ddp")
    pretrain(root / "base", model_config={**MODEL, "n_layer": 2}, train=train_args(max_steps=20))
    run_ranks(run_all, root)
    return root


def own_weights(run: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(run / "final" / METHODS[name].weights_file)


@pytest.mark.parametrize("name", ["lora", "adapter_v2"])
def test_two_ranks_train_as_one(root: Path, tmp_path: Path, name: str) -> None:
    run_method(root, name, tmp_path)
    assert logged(root / name) == pytest.approx(logged(tmp_path), rel=1e-5)
    two, one = own_weights(root / name, name), own_weights(tmp_path, name)
    for key in one:
        torch.testing.assert_close(two[key], one[key], rtol=1e-4, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", METHODS)
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(root: Path, name: str) -> None:
    whole, resumed = own_weights(root / name, name), own_weights(root / f"{name}-resumed", name)
    assert all(torch.equal(value, resumed[key]) for key, value in whole.items())


def test_ranks_drop_different_features(root: Path) -> None:
    states = torch.load(root / "dropout/final/state/optimizer.pt", weights_only=True)["rng"]
    assert not torch.equal(states[0]["torch"], states[1]["torch"])
