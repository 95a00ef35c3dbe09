"""The parts of the GPU check, on the CPU; the whole of it with a pretended GPU."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from litce.tools import gpu_check
from litce.tools.gpu_check import Measurement, check_case, contenders, main, make_inputs, measure, reference, table

CPU = torch.device("cpu")
SHAPE = (40, 16, 301)
REQUIRED = {
    "dense",
    "litce auto, 32 MiB",
    "litce auto, 256 MiB",
    "litce chunked, 256 MiB",
    "litce cut, 256 MiB",
    "torch.compile(dense)",
}


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function: function)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_reference_is_fp64_autograd(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "REFERENCE_ROWS", 16)
    x, weight, target = make_inputs(SHAPE, dtype, CPU)
    got = reference(x, weight, target)
    a, b = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    loss = F.cross_entropy(a @ b.t(), target)
    loss.backward()
    for value, want in zip(got.values(), (loss.detach(), a.grad, b.grad), strict=True):
        torch.testing.assert_close(value, want)


@pytest.mark.parametrize("name", sorted(REQUIRED) + ["torch F.linear_cross_entropy"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_contenders_are_right(name: str, dtype: str) -> None:
    if name not in contenders():
        pytest.skip("this torch has no F.linear_cross_entropy")
    inputs = make_inputs(SHAPE, dtype, CPU)
    row = measure(name, contenders()[name], inputs, reference(*inputs))
    assert row.failure is None and row.seconds > 0 and row.contender == name
    assert set(row.errors) == {"loss", "dX", "dW"}
    assert all(error < (1e-5 if dtype == "fp32" else 2e-2) for error in row.errors.values())
    assert inputs[0].grad is None and inputs[1].grad is None


def test_errors_are_those_of_the_contender() -> None:
    inputs = make_inputs(SHAPE, "fp32", CPU)
    row = measure("double", lambda x, w, t: 2 * F.cross_entropy(F.linear(x, w), t), inputs, reference(*inputs))
    assert row.errors == pytest.approx({"loss": 1.0, "dX": 1.0, "dW": 1.0}, rel=1e-4)


def fail(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    raise ValueError("only | bf16\nis taken")


def exhaust(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("no memory")


@pytest.mark.parametrize(
    ("contender", "failure"), [(fail, "ValueError: only / bf16"), (exhaust, "out of memory")], ids=["fail", "exhaust"]
)
def test_a_contender_that_fails_is_a_row(contender, failure: str) -> None:
    row = measure("name", contender, make_inputs(SHAPE, "fp32", CPU), {})
    assert row == Measurement("name", failure)
    assert f"| name | {failure} |" in table(SHAPE, "fp32", [row])


def test_a_case_has_a_row_for_everyone_even_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = check_case(SHAPE, "bf16", CPU, time.monotonic() + 60)
    assert [row.contender for row in rows] == list(contenders()) and set(contenders()) >= REQUIRED
    assert all(row.failure is None for row in rows if row.contender in REQUIRED)
    late = check_case(SHAPE, "bf16", CPU, time.monotonic() - 1)
    assert [row.failure for row in late] == ["not measured: out of time"] * len(rows)
    ticks = iter([0, 0, 0, 2] + [2] * 20)
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks))
    partly = check_case(SHAPE, "bf16", CPU, 1)
    assert [row.contender for row in partly] == list(contenders())
    assert [row.failure is None for row in partly][:3] == [True, True, False]


def test_table() -> None:
    rows = [
        Measurement("dense", None, 0.010, 2_000_000, 3_000_000, {"loss": 1e-3, "dX": 2e-3, "dW": 3e-3}),
        Measurement("litce", None, 0.005, 1_000_000, 1_000_000, {}),
        Measurement("other", "out of memory"),
    ]
    lines = table((8, 4, 100), "bf16", rows).splitlines()
    assert lines[0] == "## N x D x V = 8 x 4 x 100, bf16"
    assert lines[4] == "| dense | 10.00 | 1.00 | 2 | 3 | 1.0e-03 | 2.0e-03 | 3.0e-03 |"
    assert lines[5] == "| litce | 5.00 | 0.50 | 1 | 1 |  |  |  |"
    assert len({line.count("|") for line in lines[2:]}) == 1
    assert "| 0.50 |" not in table((8, 4, 100), "bf16", rows[1:])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_one_line_and_exit_code_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "litce.tools.gpu_check", "--out", str(tmp_path / "check.md")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "needs a CUDA device" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Pretended")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(gpu_check, "CASES", [("40x16x301", "fp32"), ("8x16x301", "bf16")])
    monkeypatch.setattr(gpu_check, "run_gpu_tests", lambda: (True, "7 passed"))
    original = gpu_check.check_case
    monkeypatch.setattr(gpu_check, "check_case", lambda shape, dtype, device, end: original(shape, dtype, CPU, end))


@pytest.mark.usefixtures("pretended_gpu")
def test_the_file(tmp_path: Path) -> None:
    out = tmp_path / "check.md"
    assert main(["--out", str(out)]) == 0
    text = out.read_text()
    assert text.startswith("# GPU check\n") and "on Pretended" in text and "`gpu`: 7 passed." in text
    assert "## N x D x V = 40 x 16 x 301, fp32" in text and "## N x D x V = 8 x 16 x 301, bf16" in text
    assert text.count("| litce cut, 256 MiB |") == 2
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize("broken", ["tests", "loss"])
def test_failures_are_exit_code_1(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "tests":
        monkeypatch.setattr(gpu_check, "run_gpu_tests", lambda: (False, "1 failed"))
    else:
        monkeypatch.setattr(gpu_check, "linear_cross_entropy", lambda *args, **options: fail(*args))
    assert main(["--out", str(tmp_path / "check.md")]) == 1
    assert (tmp_path / "check.md").exists()


@pytest.mark.usefixtures("pretended_gpu")
def test_impossible_output_is_found_before_the_tests_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "run_gpu_tests", lambda: pytest.fail("ran"))
    for out in (tmp_path / "no folder" / "check.md", tmp_path):
        assert main(["--out", str(out)]) == 2
        assert str(out) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "stdout", "expected"),
    [
        (0, "...\n===== 9 passed in 3.00s =====\n", (True, "9 passed in 3.00s")),
        (1, "F\n=== 1 failed, 8 passed in 3.00s ===\n", (False, "1 failed, 8 passed in 3.00s")),
        (5, "no tests ran in 0.01s\n", (False, "no tests ran in 0.01s")),
        (-9, "", (False, "exit status -9")),
    ],
)
def test_the_gpu_tests_are_run(status: int, stdout: str, expected: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: object) -> subprocess.CompletedProcess:
        assert command[command.index("pytest") :][1:3] == ["-m", "gpu"]
        return subprocess.CompletedProcess(command, status, stdout, "")

    monkeypatch.setattr(subprocess, "run", run)
    assert gpu_check.run_gpu_tests() == expected


def test_gpu_tests_that_hang_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], *, timeout: float, **options: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    assert gpu_check.run_gpu_tests() == (False, f"not finished after {gpu_check.TEST_SECONDS} seconds")
