"""`litce profile_memory` on tiny operands: every run, its tables and pictures, and what it refuses."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from litce import cli
from litce.args import UsageError
from litce.tools import profile_memory
from litce.tools.profile_cases import LOSSES, Case, operands
from litce.tools.profile_step import StepCase
from litce.tools.profile_tables import own_bytes
from litce.tools.profile_worker import measure, measure_step, thin_out
from tests.loss.oracle import relative_error

SHAPE = (96, 32, 2500)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting Python for every setting takes seconds."""

    def measure_all(requests: list[tuple[str, Any]]) -> list[dict[str, Any]]:
        results = []
        for run, case in requests:
            step = isinstance(case, StepCase)
            predicted = case.predicted().parts if step else None
            measured = measure_step(case) if step else measure(Case.from_dict(json.loads(json.dumps(case.to_dict()))))
            results.append({"run": run, "case": case.to_dict(), "predicted": predicted, **measured})
        return json.loads(json.dumps(results))

    monkeypatch.setattr(profile_memory, "measure_all", measure_all)


@pytest.mark.usefixtures("in_this_process")
def test_tables_and_pictures(tmp_path: Path) -> None:
    out_dir = tmp_path / "profile"
    words = (
        "--runs [loss,step,budget] --shapes [96x32x2500] --chunk_sizes [8,32,999] --vocab_sizes [500,2500] "
        "--budget_shape 96x32 --memory_budget_bytes 100000 --model_name demo --model_config.n_layer 1 "
        "--model_config.vocab_size 1000 --micro_batch_size 1 --max_seq_length 32"
    )
    cli.main(["profile_memory", *words.split(), "--out_dir", str(out_dir)])
    pictures = ["budget-against-vocabulary.png", "peak-against-chunk-size.png", "timeline.png"]
    assert {path.name for path in out_dir.iterdir()} == {*pictures, "results.json", "tables.md"}
    for name in pictures:
        assert (out_dir / name).read_bytes().startswith(b"\x89PNG") and (out_dir / name).stat().st_size < 200_000
    text = (out_dir / "tables.md").read_text()
    for wanted in (
        f"`litce profile_memory {words} --out_dir {out_dir}`",
        f"torch {torch.__version__}",
        "## Strategies and chunk sizes, N x D x V = 96 x 32 x 2500, fp32",
        "### dense: what is held at the peak",
        "| _log_softmax.default | 96 x 2500 | float32 | 1.0 |",
        "### auto: what is held at the peak",
        "## A whole training step: demo, 1 x 32 tokens",
        "**predicted peak**",
        "## One budget of 0.0953674 MiB, N x D = 96 x 32",
        "### V = 2500",
    ):
        assert wanted in text
    assert re.findall(r"\| chunked \| (\d+) x", text)[:3] == ["8", "32", "48"]  # 999 is more rows than there are
    results = json.loads((out_dir / "results.json").read_text())["results"]
    steps = [result for result in results if result["run"] == "step"]
    for result in steps:
        assert result["allocated"] == pytest.approx(sum(result["predicted"].values()), rel=0.05)
    (out_dir / "tables.md").unlink()
    profile_memory.report(out_dir)
    assert (out_dir / "tables.md").read_text() == text


@pytest.mark.parametrize("loss", ["dense", "chunked", "cut", "auto", "existing logits"])
def test_measured_is_what_is_predicted(loss: str) -> None:
    case = Case(loss, (256, 32, 5000), rows=64 if loss in ("chunked", "existing logits") else None, budget=2**20)
    assert own_bytes(measure(case)) == pytest.approx(case.predicted_bytes, rel=0.1)


def test_copies() -> None:
    """Dense holds the log-probabilities, their gradient and that of the logits; so does a block of existing logits."""
    for loss in ("dense", "existing logits"):
        case = Case(loss, SHAPE)
        result = measure(case)
        assert own_bytes(result) == pytest.approx(3 * case.block_bytes, rel=0.01)
        assert [buffer[3] for buffer in result["buffers"][:3]] == [case.block_bytes] * 3
        assert max(total for _, total in result["timeline"]) == result["allocated"]


def test_ours_holds_one_block_and_the_gradients() -> None:
    case = Case("chunked", SHAPE, rows=16)
    result = measure(case)
    assert result["gradients"] == 4 * 32 * (96 + 2500)
    assert own_bytes(result) == pytest.approx(case.block_bytes, rel=0.1)
    assert {buffer[4] for buffer in result["buffers"][:2]} == {"gradients", "loss"}


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if not loss.startswith("existing")])
def test_every_loss_is_the_same(loss: str) -> None:
    case = Case(loss, SHAPE, rows=32 if loss != "auto" else None)
    x, weight, target = operands(case)
    LOSSES["dense"](case, x, weight, target).backward()
    want = x.grad, weight.grad
    x.grad = weight.grad = None
    LOSSES[loss](case, x, weight, target).backward()
    assert relative_error(x.grad, want[0]) < 1e-5 and relative_error(weight.grad, want[1]) < 1e-5


def test_losses_of_existing_logits_agree() -> None:
    gradients = []
    for loss in ("existing logits", "existing logits, litce"):
        case = Case(loss, SHAPE, rows=48)
        logits, weight, target = operands(case)
        assert logits.shape == (48, 2500)
        LOSSES[loss](case, logits, weight, target).backward()
        gradients.append(logits.grad)
    assert relative_error(*gradients) < 1e-5


def test_a_process_for_each_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("dense", (256, 32, 10_000))
    [result] = profile_memory.measure_all([("loss", case)])
    assert result["case"] == case.to_dict() and result["run"] == "loss"
    assert own_bytes(result) == pytest.approx(3 * case.block_bytes, rel=0.01)
    assert 2 * case.block_bytes < result["resident"] < 6 * case.block_bytes
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(RuntimeError, match=r"loss: Case\(loss='dense'.* failed with exit status 1: out of memory\?"):
        profile_memory.measure_all([("loss", case)])


@pytest.mark.slow
def test_compiled(tmp_path: Path) -> None:
    profile_memory.setup(["compile"], ["256x32x5000"], out_dir=tmp_path)
    text = (tmp_path / "tables.md").read_text()
    assert "## Eager and torch.compile, N x D x V = 256 x 32 x 5000" in text and "| auto |" in text


def test_thin_out_keeps_the_peak() -> None:
    from litce.tools.allocations import AllocatorEvent

    events = [AllocatorEvent(t, 0, t % 1000) for t in range(0, 100_000, 3)]
    points = thin_out(events)
    assert len(points) == 600 and max(total for _, total in points) == 999
    assert [t for t, _ in points] == sorted(t for t, _ in points)
    assert thin_out([]) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shapes": ["2048x512"]}, "--shapes 2048x512: give NxDxV"),
        ({"budget_shape": "2048"}, "--budget_shape 2048: give NxD in positive numbers, such as 2048x512"),
        ({"chunk_sizes": [0]}, r"--chunk_sizes \[0\]"),
        ({"vocab_sizes": []}, r"--vocab_sizes \[\]"),
        ({"memory_budget_bytes": "none"}, "--memory_budget_bytes none"),
        ({"model_name": "nope"}, "--model_name nope"),
        ({"max_seq_length": 0}, "--max_seq_length 0"),
        ({"micro_batch_size": 0}, "--micro_batch_size 0"),
        ({"max_seq_length": 4096}, "--max_seq_length 4096"),
    ],
)
def test_what_it_refuses(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        profile_memory.setup(**arguments, out_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()
