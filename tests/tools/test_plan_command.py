"""`litce plan` against a real run, what it prints and draws, what it finds to fit and what it refuses."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from litce import cli
from litce.args import EvalArgs, TrainArgs, UsageError
from litce.peft import Adapter, LoRA
from litce.recipes import pretrain
from litce.tools import plan
from litce.tools.allocations import allocator_peak_bytes
from litce.tools.plan_report import advice
from tests.tiny import Numbers

MODEL = {"name": "small", "block_size": 256, "vocab_size": 3000, "n_layer": 2, "n_head": 4, "n_embd": 128}


@dataclass
class LongNumbers(Numbers):
    """Sequences as long as asked for."""

    length: int = 0

    def connect(self, tokenizer: Any, max_seq_length: int, seed: int = 42) -> None:
        self.length = max_seq_length

    def train_dataset(self) -> Any:
        ids = torch.arange(self.length + 1) % 3000
        return [{"input_ids": ids[:-1], "targets": ids[1:]}] * 8

    def val_dataset(self) -> Any:
        return self.train_dataset()


@pytest.mark.parametrize("micro_batch_size", [1, 4])
@pytest.mark.parametrize("strategy", ["dense", "auto"])
def test_predicts_a_run_of_pretrain(tmp_path: Path, micro_batch_size: int, strategy: Any) -> None:
    train = TrainArgs(
        global_batch_size=4,
        micro_batch_size=micro_batch_size,
        lr_warmup_steps=0,
        max_steps=2,
        cross_entropy=strategy,
        cross_entropy_chunk_size="auto",
    )
    options = {"model_config": MODEL, "train": train, "precision": "32-true"}
    data, eval = LongNumbers(num_samples=8), EvalArgs(final_validation=False)
    measured = allocator_peak_bytes(
        lambda: pretrain.setup(data=data, eval=eval, devices="auto", out_dir=tmp_path, **options)
    )
    assert plan.setup(**options).peak_bytes == pytest.approx(measured, rel=0.05)


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    png = tmp_path / "plan.png"
    words = "--model_name demo --precision 32-true --train.micro_batch_size 8 --memory 400MB --devices 2"
    cli.main(["plan", *words.split(), "--png", str(png)])
    printed = capsys.readouterr().out
    for text in (
        "demo, pretrain, 32-true, AdamW: micro-batch 8 x 256 tokens, 2 device(s)",
        "weights",
        "optimizer state",
        "gradient buckets",
        "activations",
        "logits, loss blocks",
        "predicted peak: ",
        "generating a sequence of 256 tokens: ",
        "KV cache 2.1 MB",
        "cross-entropy: chunked",
        "it fits: 400.0 MB less 40.0 MB for what is no tensor is 360.0 MB",
        "largest micro-batch that fits: ",
        "longest sequence that fits: 256 tokens, the model's longest: --train.max_seq_length 256",
    ):
        assert text in printed
    assert png.read_bytes().startswith(b"\x89PNG") and list(tmp_path.iterdir()) == [png]


def test_methods_train_less() -> None:
    options = {"precision": "32-true", "train": TrainArgs(micro_batch_size=1, max_seq_length=64)}
    peaks = {
        method: plan.setup("demo", method=method, **options).peak_bytes  # type: ignore[arg-type]
        for method in ("pretrain", "full", "lora", "adapter", "adapter_v2")
    }
    assert peaks["pretrain"] == peaks["full"] > 2 * max(peaks["lora"], peaks["adapter"], peaks["adapter_v2"])
    wide = plan.setup("demo", method="lora", lora=LoRA(r=512, mlp=True), **options)
    assert wide.parts["optimizer state"] > 10**6 and wide.peak_bytes > peaks["lora"]
    with pytest.raises(UsageError, match="--adapter.start_layer 9"):
        plan.setup("demo", method="adapter", adapter=Adapter(start_layer=9), **options)


def test_what_does_not_fit_names_the_part_and_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    plan.setup("demo", train=TrainArgs(cross_entropy="dense", micro_batch_size=64), precision="32-true", memory="20MB")
    printed = " ".join(capsys.readouterr().out.split())
    assert "it does not fit" in printed and "no micro-batch of 256 tokens per sequence fits" in printed
    assert "no sequence of 64 tokens or more fits at micro-batch 64" in printed
    assert "the largest part is logits, loss blocks" in printed and "change --train.cross_entropy auto" in printed


@pytest.mark.parametrize(
    ("part", "changes", "option"),
    [
        ("logits, loss blocks", {}, "--train.cross_entropy auto --train.cross_entropy_chunk_size auto"),
        ("logits, loss blocks", {"cross_entropy_chunk_size": "auto"}, "--train.memory_budget_bytes"),
        ("activations", {"micro_batch_size": 8}, "--train.micro_batch_size 4"),
        ("activations", {"micro_batch_size": 1}, "--train.max_seq_length 512"),
        ("optimizer state", {}, "--optimizer SGD"),
        ("weights", {}, "--precision bf16-true"),
    ],
)
def test_advice(part: str, changes: dict[str, Any], option: str) -> None:
    assert option in advice({part: 100, "activations": 50, **{part: 100}}, TrainArgs(**changes), 1024)


def test_a_checkpoint_without_weights(tmp_path: Path) -> None:
    config = pretrain.resolve_config(None, MODEL, None)
    config.save(tmp_path / "model_config.yaml")
    want = plan.setup(model_config=MODEL, precision="32-true")
    for path in (tmp_path, tmp_path / "model_config.yaml"):
        assert plan.setup(checkpoint_dir=path, precision="32-true") == want


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "--model_name: give the model"),
        ({"model_name": "demo", "memory": "much"}, "--memory much: give a positive size"),
        ({"model_name": "demo", "devices": 0}, "--devices 0"),
        ({"model_name": "demo", "devices": 3}, "--train.global_batch_size 64 is not a multiple"),
        ({"model_name": "demo", "png": Path("/missing/x.png")}, "--png /missing/x.png: the folder"),
        ({"model_name": "demo", "checkpoint_dir": Path("x")}, "--checkpoint_dir x says which model"),
        ({"checkpoint_dir": Path("/missing")}, "/missing/model_config.yaml"),
        ({"model_name": "demo", "optimizer": "Nope"}, "--optimizer Nope"),
        ({"model_name": "demo", "train": TrainArgs(max_seq_length=10**6)}, "--train.max_seq_length 1000000"),
    ],
)
def test_what_it_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan.setup(**options)
