"""One contender of `litce bench loss` in a process of its own: `python -m litce.tools.bench_worker JSON`.

Each contender is a function of hidden states (N, D), weight (V, D) and targets (N,) that leaves gradients in `.grad`.
"""

from __future__ import annotations

import functools
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from litce.loss import linear_cross_entropy
from litce.tools.operands import load_operands

Contender = Callable[[Tensor, Tensor, Tensor, int], None]
LITGPT_CHUNK_ROWS = 128
CHECKPOINT_CHUNKS = 8


def dense(x: Tensor, weight: Tensor, target: Tensor, budget: int) -> None:
    """All logits at once."""
    F.cross_entropy(F.linear(x, weight).float(), target).backward()


def logits_chunked(x: Tensor, weight: Tensor, target: Tensor, budget: int) -> None:
    """All logits at once, their cross-entropy by 128 rows: litgpt's way."""
    logits = F.linear(x, weight)
    parts = zip(logits.split(LITGPT_CHUNK_ROWS), target.split(LITGPT_CHUNK_ROWS), strict=True)
    torch.cat([F.cross_entropy(z.float(), t, reduction="none") for z, t in parts]).mean().backward()


def rows_checkpoint(x: Tensor, weight: Tensor, target: Tensor, budget: int) -> None:
    """Eight chunks of rows, each recomputed in the backward pass."""

    def chunk_loss(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), target, reduction="sum")

    parts = zip(x.chunk(CHECKPOINT_CHUNKS), target.chunk(CHECKPOINT_CHUNKS), strict=True)
    total = sum(checkpoint(chunk_loss, a, t, use_reentrant=False) for a, t in parts)
    (total / len(target)).backward()


def vocab_checkpoint(x: Tensor, weight: Tensor, target: Tensor, budget: int) -> None:
    """Eight chunks of the vocabulary, each reduced to a log-sum-exp and recomputed in the backward pass."""

    def chunk_lse(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight).float().logsumexp(-1)

    parts = [checkpoint(chunk_lse, x, w, use_reentrant=False) for w in weight.chunk(CHECKPOINT_CHUNKS)]
    target_logit = (x * weight[target]).float().sum(-1)
    (torch.stack(parts).logsumexp(0) - target_logit).mean().backward()


def torch_native(x: Tensor, weight: Tensor, target: Tensor, budget: int) -> None:
    """torch's own op with its default chunking (torch >= 2.13); without options it is dense."""
    F.linear_cross_entropy(x, weight, target, options=torch.nn.LinearCrossEntropyOptions()).backward()


def gemms(x: Tensor, weight: Tensor, target: Tensor, budget: int) -> None:
    """The three matrix products alone: no loss, the limit without dropping any of the softmax."""
    with torch.no_grad():
        logits = x @ weight.T
        x.grad, weight.grad = logits @ weight, logits.T @ x


def litce(x: Tensor, weight: Tensor, target: Tensor, budget: int, filter_tolerance: float = 0.0) -> None:
    """litce, "auto" within the budget."""
    linear_cross_entropy(x, weight, target, memory_budget_bytes=budget, filter_tolerance=filter_tolerance).backward()


CONTENDERS: dict[str, Contender] = {
    "dense": dense,
    "logits_chunked": logits_chunked,
    "rows_checkpoint": rows_checkpoint,
    "vocab_checkpoint": vocab_checkpoint,
    "torch": torch_native,
    "gemms": gemms,
    "litce": litce,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def measure(
    contender: str,
    shape: tuple[int, int, int],
    dtype: str,
    budget: int,
    repeats: int,
    operands: str | None = None,
    filter_tolerance: float = 0.0,
) -> dict[str, float]:
    """Return the best time of `repeats` forward and backward passes, and the first one's peak."""
    run = CONTENDERS[contender]
    if run is litce:
        run = functools.partial(litce, filter_tolerance=filter_tolerance)
    warm = _inputs((16, shape[1], 512), dtype)
    run(*warm, budget)  # loads code and starts threads, which are neither the contender's time nor its memory
    del warm
    x, weight, target = _inputs(shape, dtype) if operands is None else _saved_inputs(Path(operands), dtype)
    base = reset_peak_memory()
    seconds, peak = [], 0
    for _ in range(repeats):
        x.grad = weight.grad = None
        start = time.perf_counter()
        run(x, weight, target, budget)
        seconds.append(time.perf_counter() - start)
        peak = peak or peak_memory() - base
    grads = [t.grad for t in (x, weight) if t.grad is not None]
    return {"seconds": min(seconds), "peak_bytes": peak, "grad_bytes": sum(g.nbytes for g in grads)}


def _inputs(shape: tuple[int, int, int], dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, n_embd, vocab_size = shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, n_embd, generator=generator).to(DTYPES[dtype]).requires_grad_()
    weight = (torch.randn(vocab_size, n_embd, generator=generator) * n_embd**-0.5).to(DTYPES[dtype]).requires_grad_()
    return x, weight, torch.randint(vocab_size, (num_rows,), generator=generator)


def _saved_inputs(path: Path, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, target = load_operands(path)
    return hidden.to(DTYPES[dtype]).requires_grad_(), weight.to(DTYPES[dtype]).requires_grad_(), target


def reset_peak_memory() -> int:
    """Forget the peak seen so far and return the resident memory now, in bytes."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")
    return peak_memory()


def peak_memory() -> int:
    """Return the peak resident memory of this process since the last reset, in bytes (macOS: since its start)."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))))
