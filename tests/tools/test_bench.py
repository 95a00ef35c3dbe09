"""The benchmarks on operands so small that their numbers say nothing: what they run, write and refuse."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from litce import cli
from litce.args import UsageError
from litce.tools import bench, bench_accuracy, bench_worker
from litce.tools.operands import load_operands
from litce.tools.operands import setup as save_operands
from tests.loss.oracle import relative_error
from tests.tiny import Numbers, pretrain, save_tokenizer

SHAPE = (32, 8, 300)


@pytest.mark.parametrize("contender", list(bench_worker.CONTENDERS))
def test_every_contender_computes_the_same_gradients(contender: str) -> None:
    if contender == "torch" and not hasattr(torch.nn.functional, "linear_cross_entropy"):
        pytest.skip("torch has no linear_cross_entropy")
    x, weight, target = bench_worker._inputs(SHAPE, "fp32")
    bench_worker.dense(x, weight, target, 0)
    want = x.grad, weight.grad
    x.grad = weight.grad = None
    bench_worker.CONTENDERS[contender](x, weight, target, 20_000)
    if contender == "gemms":  # no loss
        assert (x.grad.shape, weight.grad.shape) == (x.shape, weight.shape)
    else:
        assert relative_error(x.grad, want[0]) < 1e-5 and relative_error(weight.grad, want[1]) < 1e-5


def test_rows_of_bench_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    words = "--shapes [32x8x300] --contenders [dense,litce] --rounds 1"
    cli.main(["bench", "loss", *words.split(), "--json", str(path), "--png", str(tmp_path / "rows.png")])
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads(path.read_text())
    assert [row["contender"] for row in rows] == ["dense", "litce"]
    for row in rows:
        assert (row["shape"], row["dtype"]) == (list(SHAPE), "fp32")
        assert row["seconds"] > 0 and row["peak_bytes"] >= 0 and row["grad_bytes"] == 4 * 8 * (32 + 300)
    assert rows[0]["ratio_to_dense"] == 1.0
    assert "time / dense" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shapes": ["32x8"]}, "--shapes 32x8"),
        ({"contenders": ["fast"]}, "--contenders fast"),
        ({"rounds": 0}, "--rounds 0"),
        ({"repeats": 0}, "--repeats 0"),
        ({"filter_tolerance": 1.0}, "--filter_tolerance 1.0"),
        ({"json": Path("/missing/x.json")}, "--json /missing/x.json"),
        ({"png": Path("/missing/x.png")}, "--png /missing/x.png"),
        ({"operands": Path("missing.safetensors")}, "--operands missing.safetensors cannot be read"),
    ],
)
def test_what_bench_loss_refuses(arguments: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bench.loss(**arguments)


def test_saved_operands_and_accuracy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer")
    pretrain(tmp_path / "run", Numbers(tokenizer_folder=folder))
    path = tmp_path / "operands.safetensors"
    with pytest.raises(UsageError, match="--num_tokens 1000: the validation data has"):
        save_operands(tmp_path / "run/final", path, Numbers(), num_tokens=1000)
    save_operands(tmp_path / "run/final", path, Numbers(), num_tokens=20)
    hidden, weight, target = load_operands(path)
    assert (hidden.shape, weight.shape, target.shape) == ((20, 16), (64, 16), (20,))
    # The loss of these operands is that of the model on the same tokens.
    assert 0 < float(torch.nn.functional.cross_entropy(hidden @ weight.T, target)) < 8

    # A softmax that a filter can drop something of.
    save_file({"hidden": 8 * hidden, "weight": weight + torch.randn_like(weight), "target": target}, path)
    bench_accuracy.accuracy(path, rounds=1, json=tmp_path / "a.json", png=tmp_path / "a.png")
    results = json.loads((tmp_path / "a.json").read_text())
    assert results["shape"] == [20, 16, 64] and [row["blocks"] for row in results["blocks"]] == [1, 4, 16]
    exact, *_, coarse = results["filter"]
    assert exact["tolerance"] == 0 and exact["weight_error"] < 1e-6 < coarse["weight_error"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_errors_do_not_grow_with_the_number_of_blocks() -> None:
    """Those of a gradient that is summed in bf16 do."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(256, 16, generator=generator), torch.randn(101, 16, generator=generator)
    rows = bench_accuracy.errors_by_blocks((hidden, weight, torch.randint(101, (256,), generator=generator)))
    assert [row["blocks"] for row in rows] == [1, 4, 16, 64, 256]
    for name in ("chunked", "cut"):
        assert rows[-1][name] < 1.1 * rows[0][name]
    assert rows[-1]["summed in bf16"] > 3 * rows[0]["summed in bf16"]
