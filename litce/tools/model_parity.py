"""`litce bench parity`: litce's models against those of transformers, family by family."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import importlib.util
import io
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from litce.args import UsageError
from litce.hf_weights import Source, sources
from litce.loss.plan import STRATEGIES, plan_cross_entropy
from litce.model import GPT
from litce.tools.convert_hf import convert_from_hf, convert_to_hf
from litce.training.checkpoint import load_model

SEQ_LENGTH = 24
VOCAB_SIZE = 97

# Some 100 fp32 roundings of 1.2e-7: absolute for logits, which reach 10, relative to the largest entry for the others.
TOLERANCE = 2e-5
# Largest error in bf16, as a multiple of that of transformers in bf16; both from transformers in fp32. Over so many
# batches, because the error of a few numbers varies by more than the factor, and the loss is but one number.
BF16_FACTOR = 2.0
BF16_BATCHES = 6
BF16_LOSSES = 40

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GPT2: dict[str, Any] = {
    **{key: _COMMON[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")},
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
}
# Wavelengths of the six frequencies: 6, 56, 499, 4.4e3, 4e4, 3.5e5 positions; two kept, one blended, three stretched.
_LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
    "rope_theta": 500000.0,
}
_LINEAR_ROPE: dict[str, Any] = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}

CASES: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", **_GPT2},
    "gpt2-untied": {"model_type": "gpt2", **_GPT2, "n_inner": 40, "tie_word_embeddings": False},
    "pythia": {"model_type": "gpt_neox", **_COMMON, "num_attention_heads": 2},
    "gpt-neox-20b": {
        "model_type": "gpt_neox",
        **_COMMON,
        "hidden_act": "gelu_fast",
        "use_parallel_residual": False,
        "attention_bias": False,
        "rope_parameters": {**_LINEAR_ROPE, "partial_rotary_factor": 0.5},
    },
    "llama2": {"model_type": "llama", **_COMMON},
    "llama3": {
        "model_type": "llama",
        **_COMMON,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": _LLAMA3_ROPE,
    },
    "smollm2": {"model_type": "llama", **_COMMON, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "tinyllama": {"model_type": "llama", **_COMMON, "num_key_value_heads": 1, "rope_parameters": _LINEAR_ROPE},
    "mistral": {"model_type": "mistral", **_COMMON, "num_key_value_heads": 2, "head_dim": 12, "sliding_window": 7},
    "qwen2.5": {"model_type": "qwen2", **_COMMON, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen2.5-window": {
        "model_type": "qwen2",
        **_COMMON,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", **_COMMON, "num_key_value_heads": 2, "head_dim": 16, "attention_bias": True},
    "phi3": {
        "model_type": "phi3",
        **_COMMON,
        "num_key_value_heads": 2,
        "sliding_window": 7,
        "partial_rotary_factor": 0.5,
    },
    "gemma2": {
        "model_type": "gemma2",
        **_COMMON,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 12,
        "sliding_window": 7,
        # Low enough to bend the logits of these models.
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **_COMMON,
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "query_pre_attn_scalar": 12,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "final_logit_softcapping": 3.0,
        "rope_parameters": {
            "full_attention": {**_LINEAR_ROPE, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
}


@dataclass(frozen=True)
class Result:
    """How far a check is from its reference."""

    error: float
    """The largest, in the unit of `limit`."""
    limit: float
    """The largest that passes."""
    where: str = ""
    """Tensor that has it."""

    @property
    def ok(self) -> bool:
        """False for nan too."""
        return self.error <= self.limit

    def __str__(self) -> str:
        return f"{self.error:.2g}{'' if self.ok else ' RED'}"


@dataclass
class Pair:
    """A model of transformers with random weights, and ours after save_pretrained and `convert_from_hf`."""

    reference: Any
    model: GPT
    sources: dict[str, Source]
    directory: Path
    """Holds what save_pretrained wrote, and ours."""

    def ours(self, loss: Tensor, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Loss and gradients of the reference, by its names of parameters, under our names."""
        # The parameter's name is that of the file but for GPT-NeoX's head, embed_out there.
        renamed = {name.replace("embed_out", "lm_head"): source for name, source in self.sources.items()}
        parts = {ours: part for name, x in gradients.items() for ours, part in renamed[name].split(x).items()}
        return {"loss": loss, **parts}

    @cached_property
    def bf16_references(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """`bf16_values` of transformers in fp32 and in bf16, both with weights rounded to bf16."""
        rounded = copy.deepcopy(self.reference).bfloat16()
        exact = copy.deepcopy(rounded).float()
        return (
            bf16_values(lambda *batch: self.ours(*reference_gradients(exact, *batch))),
            bf16_values(lambda *batch: self.ours(*reference_gradients(rounded, *batch))),
        )


def build(case: str, directory: Path) -> Pair:
    """The pair of `CASES[case]`, saved in `directory`."""
    transformers = _transformers()
    torch.manual_seed(0)
    # Its default attention, whose bf16 errors are the measure, wherever it has the softcap.
    attention = "eager" if CASES[case].get("attn_logit_softcapping") else "sdpa"
    reference = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**CASES[case]), attn_implementation=attention
    ).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            # Far from their initial values, so that every norm, bias and position matters.
            is_norm = re.search(r"(norm|ln_\w)\.weight$", name) is not None
            parameter.copy_(torch.randn_like(parameter) * 0.2 + is_norm * 0.5)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        reference.save_pretrained(directory)
        convert_from_hf(directory)
    model = load_model(directory)
    return Pair(reference, model, sources(model.config), directory)


def make_batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    """Token ids (3, SEQ_LENGTH) and their targets, some and one whole row of them ignored."""
    tokens = torch.randint(VOCAB_SIZE, (3, SEQ_LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    targets = tokens[:, 1:].clone()
    targets[0, :7] = -100
    targets[2] = -100
    return tokens[:, :-1], targets


def check_logits(pair: Pair) -> Result:
    """Largest difference of the logits, fp32."""
    idx, _ = make_batch()
    with torch.no_grad():
        return Result(float((pair.model(idx) - pair.reference(idx).logits).abs().max()), TOLERANCE)


def check_round_trip(pair: Pair) -> Result:
    """Number of tensors that are not the same bits after a conversion to shards of transformers' and back."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        out_dir = convert_to_hf(pair.directory, out_dir=Path(folder) / "hf", max_shard_size="20KiB")
        before = load_file(pair.directory / "model.safetensors")
        after = {name: x for path in out_dir.glob("*.safetensors") for name, x in load_file(path).items()}
    different = sorted(before.keys() ^ after.keys())
    different += [name for name in before.keys() & after.keys() if not torch.equal(before[name], after[name])]
    return Result(len(different), 0, ", ".join(different))


def check_gradients(pair: Pair, strategy: str) -> Result:
    """Largest relative difference of the loss and of the gradient of any parameter, fp32."""
    expected = pair.ours(*reference_gradients(pair.reference))
    actual = gradients(pair.model, strategy)
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    errors = {}
    for name, x in expected.items():
        scale = x.abs().max()
        if name.endswith("attn.k.bias") and pair.model.config.positions == "learned":
            # Unless positions turn it, a key bias shifts all scores of a query alike: its gradient is 0 but for
            # rounding, which the weight's gradient gives the scale of.
            scale = expected[name.replace("bias", "weight")].abs().max()
        errors[name] = float((actual[name] - x).abs().max() / scale)
    worst = max(errors, key=lambda name: errors[name])
    return Result(errors[worst], TOLERANCE, worst)


def check_bf16(pair: Pair, strategy: str) -> Result:
    """Largest error of the loss and of the gradient of any parameter in bf16, over transformers' own.

    Errors are norms of the difference from transformers in fp32 with the weights rounded to bf16, over all batches.
    """
    model = copy.deepcopy(pair.model).bfloat16()
    ours = bf16_values(lambda *batch: gradients(model, strategy, *batch))
    exact, theirs = pair.bf16_references
    ratios = {name: float((ours[name] - x).norm() / (theirs[name] - x).norm()) for name, x in exact.items()}
    worst = max(ratios, key=lambda name: ratios[name])
    return Result(ratios[worst], BF16_FACTOR, worst)


def bf16_values(compute: Callable[[int, bool], dict[str, Tensor]]) -> dict[str, Tensor]:
    """For each name its gradients of the first batches, and the losses of all; in fp32, (batches, ...).

    `compute` takes the seed of a batch and whether only the loss is asked for.
    """
    values = [compute(seed, seed >= BF16_BATCHES) for seed in range(BF16_LOSSES)]
    return {name: torch.stack([v[name].float() for v in values if name in v]) for name in values[0]}


def gradients(model: GPT, strategy: str, seed: int = 1, loss_only: bool = False) -> dict[str, Tensor]:
    """Gradients of `model` by name, and its "loss", with several blocks of rows and of the vocabulary."""
    idx, targets = make_batch(seed)
    config = model.config
    plan = plan_cross_entropy(
        targets.numel(),
        VOCAB_SIZE,
        config.n_embd,
        dtype=model.transformer.wte.weight.dtype,
        strategy=strategy,  # type: ignore[arg-type]
        chunk_size="auto" if strategy == "dense" else 10,
    )
    model.lm_head.plan = dataclasses.replace(plan, vocab_tile=40) if strategy == "cut" else plan
    model.zero_grad()
    loss = model(idx, targets)
    if not loss_only:
        loss.backward()
    return {"loss": loss.detach(), **{name: x.grad for name, x in model.named_parameters() if x.grad is not None}}


def reference_gradients(reference: Any, seed: int = 1, loss_only: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """The summed loss of a model of transformers, and the gradients of its parameters by name."""
    idx, targets = make_batch(seed)
    reference.zero_grad()
    loss = reference.loss_function(
        reference(idx).logits, labels=None, shift_labels=targets, vocab_size=VOCAB_SIZE, num_items_in_batch=1
    )
    if not loss_only:
        loss.backward()
    return loss.detach(), {name: x.grad for name, x in reference.named_parameters() if x.grad is not None}


CHECKS: dict[str, Callable[[Pair], Result]] = {
    "logits": check_logits,
    "round trip": check_round_trip,
    **{f"{strategy}": partial(check_gradients, strategy=strategy) for strategy in STRATEGIES},
    **{f"{strategy} bf16": partial(check_bf16, strategy=strategy) for strategy in STRATEGIES},
}


def parity(model: str | None = None) -> None:
    """Compare litce's models with those of transformers, and exit with code 1 if one differs.

    Every model is small, with random weights and all its family's parts. Logits, loss and the gradients of all
    parameters are compared in fp32 (the largest difference is printed), loss and gradients in bf16 too (the error as a
    multiple of that of transformers in bf16), and the tensors after a conversion to litce and back (the number of
    different ones).

    Args:
        model: Compare this one only, such as gemma2.

    Raises:
        UsageError: if transformers is not installed, or there is no such model.
    """
    _transformers()
    if model is not None and model not in CASES:
        raise UsageError(f"--model {model}: choose one of {', '.join(CASES)}")
    print("".join([f"{'':<15}", *(f"{name:>13}" for name in CHECKS)]))
    failures = []
    for case in CASES if model is None else [model]:
        with tempfile.TemporaryDirectory() as folder:
            pair = build(case, Path(folder))
            results = {name: check(pair) for name, check in CHECKS.items()}
        print("".join([f"{case:<15}", *(f"{result!s:>13}" for result in results.values())]), flush=True)
        failures += [f"{case}, {name}: {r.where} {r}, limit {r.limit}" for name, r in results.items() if not r.ok]
    print("\n".join(failures) or "all agree")
    if failures:
        sys.exit(1)


def _transformers() -> Any:
    if importlib.util.find_spec("transformers") is None:
        raise UsageError(
            "this compares with transformers, which is not installed; install it: pip install transformers"
        )
    return importlib.import_module("transformers")
