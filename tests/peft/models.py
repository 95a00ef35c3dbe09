"""Models to finetune, and a comparison of what two of them compute."""

from typing import Any

import torch
from torch import Tensor

from litce.config import Config
from litce.loss import plan_cross_entropy
from litce.model import GPT

SIZE: dict[str, Any] = {"block_size": 16, "vocab_size": 300, "n_layer": 3, "n_head": 4, "n_embd": 32}
LLAMA: dict[str, Any] = {"bias": False, "norm": "rmsnorm", "mlp": "swiglu", "positions": "rope", "n_query_groups": 2}
GEMMA: dict[str, Any] = {
    **LLAMA,
    "head_size": 16,
    "norm": "rmsnorm_unit_offset",
    "post_norms": True,
    "qk_norm": True,
    "sliding_window": 4,
    "sliding_window_pattern": [True, False],
    "attention_softcap": 5.0,
    "logit_softcap": 8.0,
    "query_pre_attn_scalar": 24,
}
MODELS = {
    "gpt2": SIZE,
    "llama": {**SIZE, **LLAMA, "tie_embeddings": False},
    "qwen2": {**SIZE, **LLAMA, "qkv_bias": True},
    "gemma": {**SIZE, **GEMMA},
}


def make_model(config: Config, seed: int = 0) -> GPT:
    """A model whose weights, biases and norms are all random."""
    torch.manual_seed(seed)
    model = GPT(config)
    randomize(model)
    return model


@torch.no_grad()
def randomize(model: torch.nn.Module, std: float = 0.2) -> None:
    """Add noise to all parameters: zeros and ones would hide a part that is not read."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=std)


def batch(config: Config) -> tuple[Tensor, Tensor]:
    """Ids and targets (2, 7), some of them masked."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(config.vocab_size, (2, 8), generator=generator)
    targets = ids[:, 1:].clone()
    targets[0, :3] = -100
    return ids[:, :-1], targets


def loss_and_grads(model: GPT, strategy: str | None = None, chunk_size: Any = 5) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss by a strategy, or without one from the model's logits, and the gradients of the trained parameters."""
    ids, targets = batch(model.config)
    if strategy is None:
        loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), reduction="sum")
    else:
        size = 0 if strategy == "dense" else chunk_size
        model.lm_head.plan = plan_cross_entropy(
            targets.numel(), model.config.vocab_size, model.config.n_embd, strategy=strategy, chunk_size=size
        )
        loss = model(ids, targets)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    grads = torch.autograd.grad(loss, list(trained.values()))
    return loss.detach(), dict(zip(trained, grads, strict=True))
