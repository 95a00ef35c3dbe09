"""Break the maths of the loss in many ways and see that the tests notice each: `make mutants`.

Every mutant is one replaced piece of source in a copy of the tree, on which the tests named with it have to fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEFAULT_TESTS = ("loss/test_options.py", "loss/test_contract.py", "test_lm_head.py", "loss/test_function.py")

PARITY = (*DEFAULT_TESTS, "loss/test_parity.py")


@dataclass(frozen=True)
class Mutant:
    """One fault: `old`, found once in litce/`path`, becomes `new`; some test of `tests` has to fail."""

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...] = DEFAULT_TESTS

    def source(self) -> str:
        """Return the faulty file.

        Raises:
            ValueError: if `old` is not found exactly once.
        """
        text = (ROOT / "litce" / self.path).read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"mutant {self.name!r}: {self.old!r} is {text.count(self.old)} times in litce/{self.path}")
        return text.replace(self.old, self.new)


MUTANTS = [
    # chunked.py
    Mutant("drop the upstream gradient", "loss/chunked.py", "        grad.mul_(upstream)\n", "        pass\n"),
    Mutant(
        "ignore the sign of the upstream gradient",
        "loss/chunked.py",
        "grad.mul_(upstream)",
        "grad.mul_(upstream.abs())",
    ),
    Mutant("drop the row weights from the loss", "loss/chunked.py", " @ row_weights[block]\n", ".sum()\n"),
    Mutant(
        "drop the row weights from the gradients",
        "loss/chunked.py",
        "row_scale = row_weights[block] * (projection.options.logit_scale / total)",
        "row_scale = projection.options.logit_scale / total",
    ),
    Mutant(
        "forget the logit scale's derivative",
        "loss/chunked.py",
        "(projection.options.logit_scale / total)",
        "(1.0 / total)",
    ),
    Mutant(
        "read lent tiles from the first to the last",
        "loss/chunked.py",
        "for tile in reversed(list(tiles(len(logits), columns))):",
        "for tile in tiles(len(logits), columns):",
    ),
    Mutant(
        "overwrite the weight's gradient with each block",
        "loss/chunked.py",
        "columns, x, accumulate=first_row > 0)",
        "columns, x, accumulate=False)",
    ),
    Mutant(
        "start the weight's gradient anew at a later block",
        "loss/chunked.py",
        "columns, x, accumulate=first_row > 0)",
        "columns, x, accumulate=first_row > 16)",
    ),
    Mutant("leave padded rows of the gradient unwritten", "loss/chunked.py", "weight_grad[unwritten:].zero_()", "pass"),
    Mutant(
        "sum the weight's gradient in its own dtype",
        "loss/chunked.py",
        "torch.empty(projection.weight.shape, dtype=dtype, device=device)",
        "torch.empty(projection.weight.shape, dtype=projection.weight.dtype, device=device)",
    ),
    Mutant(
        "hold fp16 gradients in fp16",
        "loss/chunked.py",
        "return torch.float32 if input.dtype == torch.float16 else input.dtype",
        "return input.dtype",
        DEFAULT_TESTS,
    ),
    Mutant(
        "hand over the gradients twice", "loss/chunked.py", "grads, ctx.grads = ctx.grads, None", "grads = ctx.grads"
    ),
    Mutant(
        "leave label smoothing out of the loss",
        "loss/chunked.py",
        "options.row_losses(row_max, total, target_logit, logit_sum, len(logits))",
        "options.row_losses(row_max, total, target_logit, None, len(logits))",
    ),
    Mutant(
        "take the maximum of the last tile only",
        "loss/chunked.py",
        "row_max = torch.maximum(row_max, column_max(logits[tile]))",
        "row_max = column_max(logits[tile])",
    ),
    # rows.py
    Mutant("forget the maximum in exp", "loss/rows.py", "exp_(slab - row_max).sum(0)", "exp_(slab.clone()).sum(0)"),
    Mutant("exp for 2**x", "loss/rows.py", "x.mul_(LOG2_E).exp2_()", "x.exp2_()"),
    Mutant(
        "count the target twice",
        "loss/rows.py",
        "torch.where(inside, -amount, 0.0)",
        "torch.where(inside, -2 * amount, 0.0)",
    ),
    Mutant("subtract in the wrong tile", "loss/rows.py", "torch.where(inside, -amount, 0.0)", "-amount"),
    Mutant("shift the target by one", "loss/rows.py", "local = target - start", "local = target - start - 1"),
    Mutant(
        "drop the softcap's derivative",
        "loss/rows.py",
        "        if slope is not None:\n            slab.mul_(slope)\n",
        "",
    ),
    Mutant(
        "drop the softcap's derivative at the target",
        "loss/rows.py",
        "        amount = amount * options.cap_slope(target_logit)\n",
        "        pass\n",
    ),
    Mutant(
        "drop the softcap's derivative in cut",
        "loss/rows.py",
        "        total += exp_(slab.sub_(row_max)).sum(0)\n        slab.mul_(slope)\n",
        "        total += exp_(slab.sub_(row_max)).sum(0)\n",
    ),
    Mutant("drop the uniform part of label smoothing", "loss/rows.py", ".sub_(uniform)", ""),
    Mutant(
        "smooth without taking from the target",
        "loss/rows.py",
        "exp_sum * (1.0 - options.label_smoothing)",
        "exp_sum * 1.0",
    ),
    # options.py
    Mutant("keep half of the z-loss's derivative", "loss/options.py", "1.0 + 2.0 * self.z_loss", "1.0 + self.z_loss"),
    Mutant(
        "take the z-loss of the sum alone",
        "loss/options.py",
        "self.z_loss * (log_sum + row_max).square()",
        "self.z_loss * log_sum.square()",
    ),
    Mutant(
        "add the maximum to the target's logit",
        "loss/options.py",
        "log_sum - (target_logit - row_max)",
        "log_sum - target_logit",
    ),
    Mutant(
        "lose huge logits' difference",
        "loss/options.py",
        "losses = log_sum - (target_logit - row_max)",
        "losses = (log_sum + row_max) - target_logit",
    ),
    Mutant(
        "cap before scaling", "loss/options.py", "            logits.mul_(self.logit_scale)\n", "            pass\n"
    ),
    # projection.py
    Mutant("bypass the bias", "loss/projection.py", "        if self.bias is not None:\n", "        if False:\n"),
    Mutant(
        "read the bias from the start",
        "loss/projection.py",
        "self.bias[start : start + block.shape[0], None]",
        "self.bias[: block.shape[0], None]",
    ),
    Mutant(
        "overwrite the input's gradient with each tile",
        "loss/projection.py",
        "accumulate=accumulate or a > start)",
        "accumulate=accumulate)",
        PARITY,
    ),
    Mutant(
        "keep hidden states as precise as they come",
        "loss/projection.py",
        "x.to(self.input_dtype).to(self.dtype)",
        "x.to(self.dtype)",
    ),
    Mutant(
        "multiply 16-bit operands in 16 bits",
        "loss/projection.py",
        '    if weight.device.type == "cpu":\n        return torch.promote_types(weight.dtype, torch.float32)\n',
        '    if weight.device.type == "cpu":\n        return weight.dtype\n',
        PARITY,
    ),
    Mutant(
        "sum few rows in one running sum",
        "loss/projection.py",
        "FEW_ROWS = 16\n",
        "FEW_ROWS = 0\n",
        PARITY,
    ),
    # cut.py
    Mutant(
        "do not rescale the running product", "loss/cut.py", "weighted.mul_(exp_(old_max - row_max)[:, None])", "pass"
    ),
    Mutant(
        "do not rescale the running sum",
        "loss/rows.py",
        "total * exp_(row_max - new_max) + exp_sum_",
        "total + exp_sum_",
    ),
    Mutant("leave the input's gradient unnormalised", "loss/cut.py", "weighted.mul_(softmax_scale[:, None])", "pass"),
    Mutant("leave the target out of the input's gradient", "loss/cut.py", "grad.addcmul_(", "torch.addcmul(grad, "),
    Mutant(
        "leave the target out of the softmax",
        "loss/cut.py",
        "share = target_share - (1.0 - options.label_smoothing)",
        "share = target_share * 0 - (1.0 - options.label_smoothing)",
    ),
    Mutant(
        "average label smoothing over the rows",
        "loss/cut.py",
        "alpha=options.label_smoothing / vocab_size",
        "alpha=options.label_smoothing / len(grad)",
    ),
    Mutant(
        "forget the scale in cut's weight gradient",
        "loss/cut.py",
        "upstream.to(dtype) * (options.logit_scale / statistics.exp_sum)",
        "upstream.to(dtype) / statistics.exp_sum",
    ),
    Mutant("forget the scale in cut's input gradient", "loss/cut.py", "weighted.mul_(options.logit_scale)", "weighted"),
    Mutant(
        "keep the last block of rows of each tile",
        "loss/cut.py",
        "logits, scaled, accumulate=block.start > 0)",
        "logits, scaled, accumulate=False)",
    ),
    Mutant(
        "leave out the last tile",
        "loss/cut.py",
        "    for start in range(0, vocab_size, vocab_tile):\n        stop",
        "    for start in range(0, max(1, vocab_size - vocab_tile), vocab_tile):\n        stop",
    ),
    # supervised_rows.py, linear_cross_entropy.py, function.py, logits.py, dense.py
    Mutant(
        "count ignored rows",
        "loss/supervised_rows.py",
        "keep = flat_target != ignore_index",
        "keep = flat_target != ignore_index - 1",
    ),
    Mutant(
        "write a block's gradients to the first rows",
        "loss/supervised_rows.py",
        "out.index_copy_(0, self.index[block], values.to(out.dtype))",
        "out[block] = values",
    ),
    Mutant(
        "drop the last rows",
        "loss/supervised_rows.py",
        "for start in range(first, len(self), rows):",
        "for start in range(first, max(1, len(self) - rows + 1), rows):",
    ),
    Mutant(
        "divide the mean by all rows",
        "loss/linear_cross_entropy.py",
        "return (target != ignore_index).sum().clamp(min=1)",
        "return target.new_tensor(max(1, target.numel()))",
    ),
    Mutant("divide by 0 where nothing is supervised", "loss/linear_cross_entropy.py", ".sum().clamp(min=1)", ".sum()"),
    Mutant(
        "hold the divisor's weights constant",
        "loss/linear_cross_entropy.py",
        "token_weights.sum(dtype=torch.float32)",
        "token_weights.detach().sum(dtype=torch.float32)",
    ),
    Mutant(
        "compute gradients under no_grad",
        "loss/linear_cross_entropy.py",
        "    if torch.is_grad_enabled():\n        return tensors\n",
        "    return tensors\n",
        ("loss/test_memory.py", *DEFAULT_TESTS),
    ),
    Mutant(
        "let autocast into the blocks",
        "loss/function.py",
        "return torch.autocast(device_type, enabled=False)",
        "return nullcontext()",
    ),
    Mutant(
        "lose second derivatives in silence",
        "loss/function.py",
        "        if not create_graph:\n            return grads\n",
        "        return grads\n",
    ),
    Mutant(
        "give ignored logits a gradient",
        "loss/logits.py",
        "torch.where(keep[:, None], probs.mul_(upstream), 0.0)",
        "probs.mul_(upstream)",
        ("loss/test_logits.py",),
    ),
    Mutant(
        "drop the upstream gradient of logits",
        "loss/logits.py",
        "probs.mul_(upstream)",
        "probs",
        ("loss/test_logits.py",),
    ),
    Mutant(
        "put padded rows into dense's softmax",
        "loss/dense.py",
        "    if settings.vocab_size < len(weight):\n",
        "    if False:\n",
    ),
    # token_stats.py, sampling.py, column_filter.py
    Mutant(
        "forget the entropy's shift",
        "loss/token_stats.py",
        "torch.where(shrink > 0, shrink * total * drop, 0)",
        "0",
        ("loss/test_token_stats.py",),
    ),
    Mutant(
        "take the argmax within its tile",
        "loss/token_stats.py",
        "logits.argmax(0) + tile.start",
        "logits.argmax(0)",
        ("loss/test_token_stats.py",),
    ),
    Mutant(
        "sample without noise",
        "loss/sampling.py",
        "scores.sub_(noise, alpha=temperature)",
        "pass",
        ("loss/test_sampling.py",),
    ),
    Mutant(
        "sample at temperature 1", "loss/sampling.py", "alpha=temperature)", "alpha=1.0)", ("loss/test_sampling.py",)
    ),
    Mutant(
        "drop twice what is allowed",
        "loss/column_filter.py",
        "(totals <= allowance)",
        "(totals <= 2 * allowance)",
        ("loss/test_column_filter.py",),
    ),
    Mutant(
        "drop targets",
        "loss/column_filter.py",
        "mass[local[(local >= 0) & (local < columns)]] = 1.0",
        "pass",
        ("loss/test_column_filter.py",),
    ),
    # plan.py
    Mutant(
        "plan beyond the budget",
        "loss/plan.py",
        "fitting = min(largest, ",
        "fitting = max(largest, ",
        ("loss/test_plan.py", "loss/test_memory.py"),
    ),
]


def killed(mutant: Mutant, tree: Path) -> bool:
    """Whether the mutant's tests fail in `tree`, a copy of the project."""
    path = tree / "litce" / mutant.path
    original = path.read_text(encoding="utf-8")
    path.write_text(mutant.source(), encoding="utf-8")
    try:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += [f"tests/{test}" for test in mutant.tests]
        # The copy shadows an installed litce.
        environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            raise RuntimeError(
                f"mutant {mutant.name!r}: pytest could not run\n{done.stdout[-2000:]}{done.stderr[-500:]}"
            )
        return done.returncode == 1
    finally:
        path.write_text(original, encoding="utf-8")


def main(words: list[str]) -> int:
    """Run the mutants whose names hold all `words`; return the exit status, 1 if any survives."""
    chosen = [mutant for mutant in MUTANTS if all(word in mutant.name for word in words)]
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in ("litce", "tests"):
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", tree)
        for number, mutant in enumerate(chosen, start=1):
            dead = killed(mutant, tree)
            print(
                f"{number}/{len(chosen)} {'killed  ' if dead else 'SURVIVED'} {mutant.path}: {mutant.name}", flush=True
            )
            if not dead:
                survivors.append(mutant.name)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
