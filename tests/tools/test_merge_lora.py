from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from litce.args import UsageError
from litce.cli import main
from litce.peft import Adapter, LoRA
from litce.tools.merge_lora import setup as merge
from litce.training.checkpoint import WEIGHTS, load_model
from tests.tiny import MODEL, Numbers, finetune, pretrain, save_tokenizer, train_args

IDS = torch.arange(8)[None]


def make_base(folder: Path, **changes: Any) -> Path:
    data = Numbers(tokenizer_folder=save_tokenizer(folder / "tokenizer"))
    return pretrain(folder / "base", data, model_config={**MODEL, **changes}).checkpoint_dir


def make_lora(base: Path, out_dir: Path, **options: Any) -> Path:
    lora = LoRA(**{"dropout": 0.0, **options})
    return finetune(lora, base, out_dir, train=train_args(max_steps=4), optimizer={"lr": 0.1}).checkpoint_dir


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("options", [{}, {"head": True, "mlp": True, "key": True}, {"head": True, "dora": True}])
def test_the_merged_checkpoint_computes_the_same(tmp_path: Path, tied: bool, options: dict[str, Any]) -> None:
    base = make_base(tmp_path, tie_embeddings=tied)
    before = {path: path.read_bytes() for path in base.rglob("*") if path.is_file()}
    lora = make_lora(base, tmp_path / "lora", **options)
    merged = merge(lora)
    assert merged == tmp_path / "lora/final-merged"
    model = load_model(merged)
    assert model.config.tie_embeddings == (tied and "head" not in options)
    with torch.no_grad():
        want = load_model(lora)(IDS)
        assert (want - load_model(base)(IDS)).abs().max() > 0.01
        torch.testing.assert_close(model(IDS), want, rtol=0, atol=1e-5)
    assert (merged / "tokenizer.json").is_file() and (merged / "hyperparameters.yaml").is_file()
    assert before == {path: path.read_bytes() for path in base.rglob("*") if path.is_file()}
    # Is a base like any other.
    finetune(LoRA(), merged, tmp_path / "again")


def test_the_dtype_is_that_of_the_base(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    tensors = {name: value.bfloat16() for name, value in load_file(base / WEIGHTS).items()}
    save_file(tensors, base / WEIGHTS)
    lora = make_lora(base, tmp_path / "lora", head=True)
    merged = load_file(merge(lora, out_dir=tmp_path / "merged") / WEIGHTS)
    assert {value.dtype for value in merged.values()} == {torch.bfloat16}
    model = load_model(lora)
    exact = model.lm_head.projection()[0]
    assert exact.dtype == torch.float32
    assert torch.equal(merged["lm_head.weight"], exact.bfloat16())


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lora = make_lora(make_base(tmp_path), tmp_path / "lora")
    capsys.readouterr()
    main(["merge_lora", str(lora), "--out_dir", str(tmp_path / "a/merged")])
    assert capsys.readouterr().out == f"merged {lora} into {tmp_path}/a/merged\n"
    main(["generate", str(tmp_path / "a/merged"), "--prompt", "w1"])
    for words, message in (
        ([str(lora), "--out_dir", str(tmp_path / "a/merged")], "a/merged exists already; remove it or give another"),
        ([str(tmp_path / "a/merged")], "a/merged holds a whole model, so there is no LoRA to merge"),
        ([str(tmp_path / "nowhere")], "nowhere is not a folder"),
        ([str(lora), "--out_dir", str(tmp_path / "lora/final/finetune.yaml/x")], "cannot be written"),
    ):
        with pytest.raises(SystemExit) as exit_info:
            main(["merge_lora", *words])
        captured = capsys.readouterr()
        assert exit_info.value.code == 2 and message in captured.err and captured.err.count("\n") == 1


def test_other_methods_have_nothing_to_merge(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    adapter = finetune(Adapter(start_layer=0), base, tmp_path / "adapter").checkpoint_dir
    with pytest.raises(UsageError, match="final holds weights of the method adapter, so there is no LoRA to merge"):
        merge(adapter)
