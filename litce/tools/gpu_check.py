"""`make gpu-check`: on one CUDA device, run the tests marked `gpu`, then measure the loss against its alternatives.

The result is a Markdown file: per shape and dtype the time and the peak memory of a forward and backward pass, and the
errors of loss and gradients against fp64.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from litce.loss import linear_cross_entropy
from litce.tools.bench import DEFAULT_SHAPES
from litce.tools.bench_worker import DTYPES

Shape = tuple[int, int, int]  # N, D, V
Contender = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden states (N, D), weight (V, D), targets (N,) -> mean loss

WARM_UP_STEPS, STEPS = 2, 10
# Together with the start of the processes less than eight minutes.
TEST_SECONDS, MEASURE_SECONDS = 180, 250
CASES = [
    ("8192x4096x128256", "bf16"),
    *((shape, dtype) for shape in DEFAULT_SHAPES for dtype in ("fp32", "bf16")),
]
REFERENCE_ROWS = 256
MIB = 2**20


@dataclass(frozen=True)
class Measurement:
    """One contender at one shape and dtype; `failure` says why there are no numbers."""

    contender: str
    failure: str | None = None
    seconds: float = 0.0  # median of a forward and backward pass
    allocated_bytes: int = 0  # peak above inputs and their gradients
    reserved_bytes: int = 0  # peak above inputs
    errors: dict[str, float] = field(default_factory=dict)  # of loss, dX and dW, relative to fp64


def contenders() -> dict[str, Contender]:
    """Return the functions to measure by name: those of other packages only where they are installed."""
    found: dict[str, Contender] = {
        "dense": _dense,
        "litce auto, 32 MiB": lambda x, w, t: linear_cross_entropy(x, w, t, memory_budget_bytes=32 * MIB),
        "litce auto, 256 MiB": lambda x, w, t: linear_cross_entropy(x, w, t, memory_budget_bytes=256 * MIB),
        "litce chunked, 256 MiB": lambda x, w, t: linear_cross_entropy(
            x, w, t, strategy="chunked", memory_budget_bytes=256 * MIB
        ),
        "litce cut, 256 MiB": lambda x, w, t: linear_cross_entropy(
            x, w, t, strategy="cut", memory_budget_bytes=256 * MIB
        ),
        "torch.compile(dense)": torch.compile(_dense),
    }
    if hasattr(F, "linear_cross_entropy"):
        found["torch F.linear_cross_entropy"] = lambda x, w, t: F.linear_cross_entropy(
            x, w, t, options=torch.nn.LinearCrossEntropyOptions()
        )
    if importlib.util.find_spec("liger_kernel"):
        found["liger-kernel"] = _liger
    if importlib.util.find_spec("cut_cross_entropy"):
        found["cut-cross-entropy"] = _cut_cross_entropy
    return found


def _dense(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), target)


def _liger(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    result = liger_fused_linear_cross_entropy(x, weight, target)
    return result[0] if isinstance(result, tuple) else result


def _cut_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy as apple

    return apple(x, weight, target)


def make_inputs(shape: Shape, dtype: str, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states (N, D), weight (V, D) and targets (N,), such that logits have a standard deviation of 1."""
    num_rows, n_embd, vocab_size = shape
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(num_rows, n_embd, generator=generator, device=device).to(DTYPES[dtype])
    weight = torch.randn(vocab_size, n_embd, generator=generator, device=device).mul_(n_embd**-0.5).to(DTYPES[dtype])
    target = torch.randint(vocab_size, (num_rows,), generator=generator, device=device)
    return x.requires_grad_(), weight.requires_grad_(), target


@torch.no_grad()
def reference(x: Tensor, weight: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Return the mean loss and its gradients dX (N, D) and dW (V, D), all fp64, some rows of logits at a time."""
    wide = weight.double()
    loss = torch.zeros((), dtype=torch.float64, device=x.device)
    input_grad, weight_grad = torch.empty_like(x, dtype=torch.float64), torch.zeros_like(wide)
    for start in range(0, len(x), REFERENCE_ROWS):
        rows = slice(start, start + REFERENCE_ROWS)
        hidden = x[rows].double()
        grad = (hidden @ wide.t()).log_softmax(-1)
        loss -= grad.gather(1, target[rows, None]).sum() / len(x)
        grad.exp_().scatter_add_(1, target[rows, None], grad.new_full((len(hidden), 1), -1.0)).div_(len(x))
        input_grad[rows] = grad @ wide
        weight_grad.addmm_(grad.t(), hidden)
    return {"loss": loss, "dX": input_grad, "dW": weight_grad}


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return |got - want| / |want| in the 2-norm, without a copy of the whole of `got`."""
    got, want = got.reshape(-1), want.reshape(-1)
    squares = [(a.double() - b).square().sum() for a, b in zip(got.split(2**24), want.split(2**24), strict=True)]
    return float((torch.stack(squares).sum().sqrt() / want.norm()).cpu())


def measure(
    name: str, contender: Contender, inputs: tuple[Tensor, Tensor, Tensor], want: dict[str, Tensor]
) -> Measurement:
    """Return the measurements of one contender; `want` are `reference`'s results, or none of them.

    On the CPU, where torch counts no memory, the peaks are 0.
    """
    x, weight, target = inputs
    try:
        for _ in range(WARM_UP_STEPS):
            _step(contender, x, weight, target)
        x.grad = weight.grad = None
        allocated, reserved = _reset_peaks(x.device)
        seconds, loss = _timed_steps(contender, x, weight, target)
        peak_allocated, peak_reserved = _peaks(x.device)
        assert x.grad is not None and weight.grad is not None
        got = {"loss": loss, "dX": x.grad, "dW": weight.grad}
        errors = {k: relative_error(got[k], v) for k, v in want.items()}
        grads = x.grad.nbytes + weight.grad.nbytes
        above_grads = peak_allocated - allocated - grads if peak_allocated else 0
        return Measurement(name, None, seconds, above_grads, peak_reserved - reserved, errors)
    except torch.OutOfMemoryError:
        return Measurement(name, "out of memory")
    except Exception as error:  # another package's: the table goes on without it
        reason = (str(error).splitlines() or [""])[0].replace("|", "/")
        return Measurement(name, f"{type(error).__name__}: {reason}"[:100])
    finally:
        x.grad = weight.grad = None


def _step(contender: Contender, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    x.grad = weight.grad = None
    loss = contender(x, weight, target)
    loss.backward()
    return loss.detach()


def _timed_steps(contender: Contender, x: Tensor, weight: Tensor, target: Tensor) -> tuple[float, Tensor]:
    """Return the median seconds of a step, measured where it runs, and the last loss."""
    if x.device.type == "cpu":
        seconds = []
        for _ in range(STEPS):
            begin = time.perf_counter()
            loss = _step(contender, x, weight, target)
            seconds.append(time.perf_counter() - begin)
        return statistics.median(seconds), loss
    events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    events[0].record()
    for event in events[1:]:
        loss = _step(contender, x, weight, target)
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) / 1e3 for a, b in zip(events, events[1:], strict=False)), loss


def _reset_peaks(device: torch.device) -> tuple[int, int]:
    """Forget the peaks and return the bytes allocated and reserved now."""
    if device.type == "cpu":
        return 0, 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def _peaks(device: torch.device) -> tuple[int, int]:
    if device.type == "cpu":
        return 0, 0
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def check_case(shape: Shape, dtype: str, device: torch.device, deadline: float) -> list[Measurement]:
    """Return the measurements of all contenders, in the order of the table, until `deadline` (`time.monotonic`)."""
    late = [Measurement(name, "not measured: out of time") for name in contenders()]
    if time.monotonic() > deadline:
        return late
    inputs = make_inputs(shape, dtype, device)
    want = _reference_that_fits(inputs)
    rows: list[Measurement] = []
    for name, contender in contenders().items():
        if time.monotonic() > deadline:
            break
        rows.append(measure(name, contender, inputs, want))
    return rows + late[len(rows) :]


def _reference_that_fits(inputs: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    try:
        return reference(*inputs)
    except torch.OutOfMemoryError:
        return {}


def run_gpu_tests() -> tuple[bool, str]:
    """Run the tests of the folder `tests` that are marked `gpu`; return whether they passed, and pytest's last line."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--tb=short", "tests"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TEST_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return False, f"not finished after {TEST_SECONDS} seconds"
    if done.returncode != 0:
        print(done.stdout[-8000:], done.stderr[-2000:], sep="\n", file=sys.stderr)
    lines = (done.stdout + done.stderr).strip().splitlines()
    return done.returncode == 0, lines[-1].strip("= ") if lines else f"exit status {done.returncode}"


def table(shape: Shape, dtype: str, rows: Iterable[Measurement]) -> str:
    """Return a Markdown section for one shape and dtype."""
    rows = list(rows)
    dense = next((row.seconds for row in rows if row.contender == "dense" and row.failure is None), None)
    lines = [
        f"## N x D x V = {' x '.join(map(str, shape))}, {dtype}",
        "",
        "| | ms | time / dense | MB allocated | MB reserved | loss error | dX error | dW error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.failure is not None:
            lines.append(f"| {row.contender} | {row.failure} | | | | | | |")
            continue
        ratio = "" if not dense else f"{row.seconds / dense:.2f}"
        errors = (f"{row.errors[k]:.1e}" if k in row.errors else "" for k in ("loss", "dX", "dW"))
        memory = f"{row.allocated_bytes / 1e6:.0f} | {row.reserved_bytes / 1e6:.0f}"
        lines.append(f"| {row.contender} | {row.seconds * 1e3:.2f} | {ratio} | {memory} | {' | '.join(errors)} |")
    return "\n".join(lines)


def report(device_name: str, tests: str, tables: Iterable[str]) -> str:
    """Return the Markdown file."""
    head = [
        "# GPU check",
        "",
        f"Written by `make gpu-check` on {device_name}, torch {torch.__version__}, CUDA {torch.version.cuda}.",
        "",
        f"Tests marked `gpu`: {tests}.",
        "",
        f"A forward and backward pass, the median of {STEPS} after {WARM_UP_STEPS} to warm up. Allocated: the peak",
        "above inputs and their gradients; reserved: the allocator's peak above inputs. Errors: 2-norm of the",
        "difference from fp64 over that of fp64, for the same rounded inputs.",
        "",
    ]
    return "\n".join(head) + "\n" + "\n\n".join(tables) + "\n"


def write(path: Path, text: str) -> None:
    """Write a file that is either whole or not there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 0, 1 where a test or the loss itself failed, 2 where nothing can be checked."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/gpu_check.md"), help="the Markdown file to write")
    out = parser.parse_args(arguments).out
    if not torch.cuda.is_available():
        print(f"gpu-check needs a CUDA device, and torch {torch.__version__} finds none", file=sys.stderr)
        return 2
    if not out.parent.is_dir() or out.is_dir():
        print(f"--out {out}: give a file in a folder that exists", file=sys.stderr)
        return 2
    passed, tests = run_gpu_tests()
    print(tests, flush=True)
    device = torch.device("cuda", torch.cuda.current_device())
    deadline = time.monotonic() + MEASURE_SECONDS
    tables = []
    for name, dtype in CASES:
        num_rows, n_embd, vocab_size = map(int, name.split("x"))
        shape = num_rows, n_embd, vocab_size
        rows = check_case(shape, dtype, device, deadline)
        # What was measured stays if a later contender takes the process down.
        passed = passed and not any(row.failure for row in rows if row.contender.startswith("litce"))
        tables.append(table(shape, dtype, rows))
        print(tables[-1], flush=True)
        write(out, report(torch.cuda.get_device_name(device), tests, tables))
        torch.cuda.empty_cache()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
