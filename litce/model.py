"""One decoder-only transformer for the GPT-2, GPT-NeoX, Llama and Qwen2 families; `Config` says which parts it has."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from litce.config import Config, RopeScaling
from litce.lm_head import LMHead


class GPT(nn.Module):
    """Token embedding, transformer blocks, final norm and language-model head.

    With `config.tie_embeddings` the head's weight *is* `transformer.wte.weight`: one parameter, which the state dict
    holds once, under the embedding's name. It stays one through `to`, `to_empty` and `load_state_dict`.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        assert config.padded_vocab_size is not None
        self.config = config
        self.transformer = Transformer(config)
        self.lm_head = LMHead(
            config.n_embd, config.padded_vocab_size, vocab_size=config.vocab_size, fp32=config.fp32_head
        )
        self._max_seq_length = config.block_size
        if config.tie_embeddings:
            self.tie_weights()
            self.register_state_dict_post_hook(_drop_tied_head)
            self.register_load_state_dict_pre_hook(_insert_tied_head)
            self.register_load_state_dict_post_hook(_retie)

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        *,
        num_supervised: int | None = None,
        sample: float | None = None,
    ) -> Tensor:
        """Logits of the next token, or their summed cross-entropy.

        Args:
            idx: token ids, int64, (B, T).
            targets: the id that follows each token of `idx`, int64, (B, T); -100 where nothing is to be predicted.
            num_supervised: the number of the other targets where the host knows it; a GPU skips the ignored ones.
            sample: temperature at which to draw a next token for each position.

        Returns:
            Without targets the logits, (B, T, padded_vocab_size). With targets the cross-entropy in nats summed over
            the supervised tokens, an fp32 scalar; the head computes it as `lm_head.plan` says. With `sample` the drawn
            ids, int64, (B, T).

        Raises:
            ValueError: if T exceeds `max_seq_length`.
        """
        x = self.hidden_states(idx)
        return self.lm_head(x, targets, num_supervised=num_supervised, sample=sample)

    def hidden_states(self, idx: Tensor) -> Tensor:
        """The head's input, (B, T, n_embd), for token ids `idx`, int64, (B, T).

        Raises:
            ValueError: if T exceeds `max_seq_length`.
        """
        if idx.size(1) > self.max_seq_length:
            raise ValueError(f"sequence of {idx.size(1)} tokens is longer than max_seq_length={self.max_seq_length}")
        return self.transformer(idx)

    @property
    def max_seq_length(self) -> int:
        """Longest sequence, in tokens, that `forward` accepts; at most, and at first, `config.block_size`."""
        return self._max_seq_length

    @max_seq_length.setter
    def max_seq_length(self, value: int) -> None:
        if not 1 <= value <= self.config.block_size:
            raise ValueError(f"max_seq_length: must lie in [1, block_size={self.config.block_size}], got {value}")
        self._max_seq_length = value

    @property
    def num_parameters(self) -> int:
        """Number of parameters; a tied head counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw the initial weights of GPT-2 from torch's global generator.

        Matrices are normal with standard deviation 0.02, those that write to the residual stream divided by
        sqrt(2 n_layer) so that its variance does not grow with depth; biases are 0, norms the identity
        (Radford et al. 2019, section 2.3).
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                if module.weight is self.transformer.wte.weight:
                    continue
                writes_residual = name.endswith(("attn.proj", "mlp.down"))
                std = 0.02 / math.sqrt(2 * self.config.n_layer) if writes_residual else 0.02
                nn.init.normal_(module.weight, std=std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
                module.reset_parameters()

    def tie_weights(self) -> None:
        """Make the head's weight the token embedding's parameter again, if the configuration says so."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.transformer.wte.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "GPT":
        # Leaving the meta device replaces parameters module by module, which would part the tied ones.
        super()._apply(fn, recurse)
        self.tie_weights()
        return self


class Transformer(nn.Module):
    """Everything before the head: embeddings, blocks and final norm. (B, T) int64 -> (B, T, n_embd)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        assert config.padded_vocab_size is not None
        self.config = config
        self.wte = nn.Embedding(config.padded_vocab_size, config.n_embd)
        if config.positions == "learned":
            self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = make_norm(config)

    def forward(self, idx: Tensor) -> Tensor:
        positions = torch.arange(idx.size(1), device=idx.device)
        x = self.wte(idx)
        rope = None
        if self.config.positions == "learned":
            x = x + self.wpe(positions)
        else:
            rope = rope_cos_sin(self.config, positions)
        for block in self.h:
            x = block(x, rope)
        return self.ln_f(x)


class Block(nn.Module):
    """Attention and MLP on the residual stream, one after the other or side by side. (B, T, n_embd) -> the same."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.parallel_residual = config.parallel_residual
        self.norm_1 = make_norm(config)
        self.attn = CausalSelfAttention(config)
        self.norm_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        if self.parallel_residual:
            return x + self.attn(self.norm_1(x), rope) + self.mlp(self.norm_2(x))
        x = x + self.attn(self.norm_1(x), rope)
        return x + self.mlp(self.norm_2(x))


class CausalSelfAttention(nn.Module):
    """Softmax attention to the tokens before and at each position, with grouped keys and values (Ainslie et al. 2023).

    (B, T, n_embd) -> (B, T, n_embd).
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        assert config.n_query_groups is not None and config.qkv_bias is not None
        self.head_size = config.head_size
        self.heads_per_group = config.n_head // config.n_query_groups
        kv_size = config.n_query_groups * config.head_size
        # Three projections and not one fused: each can be adapted, sharded or converted without slicing the others.
        self.q = nn.Linear(config.n_embd, config.n_embd, bias=config.qkv_bias)
        self.k = nn.Linear(config.n_embd, kv_size, bias=config.qkv_bias)
        self.v = nn.Linear(config.n_embd, kv_size, bias=config.qkv_bias)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        q, k, v = (self._split_heads(projection(x)) for projection in (self.q, self.k, self.v))
        if rope is not None:
            q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        if self.heads_per_group > 1:
            # Not enable_gqa: some of SDPA's backends lack it, and the fallback would hold the (T, T) scores.
            k, v = (x.repeat_interleave(self.heads_per_group, dim=1) for x in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


class MLP(nn.Module):
    """`down(gelu(up(x)))`, or SwiGLU's `down(silu(gate(x)) * up(x))` (Shazeer 2020). (B, T, n_embd) -> the same."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        assert config.intermediate_size is not None
        self.kind = config.mlp
        if config.mlp == "swiglu":
            self.gate = nn.Linear(config.n_embd, config.intermediate_size, bias=config.bias)
        self.up = nn.Linear(config.n_embd, config.intermediate_size, bias=config.bias)
        self.down = nn.Linear(config.intermediate_size, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "swiglu":
            return self.down(F.silu(self.gate(x)) * self.up(x))
        return self.down(F.gelu(self.up(x), approximate="tanh" if self.kind == "gelu_tanh" else "none"))


def make_norm(config: Config) -> nn.Module:
    """The normalisation over n_embd features that `config.norm` names."""
    norm = nn.LayerNorm if config.norm == "layernorm" else nn.RMSNorm
    return norm(config.n_embd, eps=config.norm_eps)


def rope_cos_sin(config: Config, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles (Su et al. 2021, equation 15), each fp32, (T, rotary_size / 2).

    They follow from the configuration alone and cost next to nothing beside one block, so they are no buffers: a
    buffer would be rounded by a cast of the model to bf16 and hold garbage after leaving the meta device.

    Args:
        config: gives base, rotated features and scaling.
        positions: int64, (T,).
    """
    exponents = torch.arange(0, config.rotary_size, 2, device=positions.device, dtype=torch.float32)
    frequencies = config.rope_base ** -(exponents / config.rotary_size)
    if config.rope_scaling is not None:
        frequencies = scale_rope_frequencies(frequencies, config.rope_scaling)
    angles = positions.float()[:, None] * frequencies
    return angles.cos(), angles.sin()


def scale_rope_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3's rotary frequencies: slow ones divided by `factor`, fast ones kept, a linear blend between them.

    `frequencies` is fp32, in radians per position, of any shape, which the result shares. The blend is linear in the
    number of turns that a frequency makes over `original_max_seq_len` positions (Llama 3.1 reference code).
    """
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first `2 * cos.size(-1)` features of each head, feature i with feature i + cos.size(-1).

    Args:
        x: queries or keys, (B, heads, T, head_size).
        cos: (T, rotary_size / 2), fp32; so the rotation is fp32 whatever the dtype of x.
        sin: like `cos`.

    Returns:
        Like x, in x's dtype.
    """
    half = cos.size(-1)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return torch.cat((rotated, rest), dim=-1) if rest.size(-1) else rotated


def _drop_tied_head(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    state_dict.pop(f"{prefix}lm_head.weight", None)


def _insert_tied_head(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
) -> None:
    embedding = state_dict.get(f"{prefix}transformer.wte.weight")
    if embedding is None:
        return
    head = state_dict.setdefault(f"{prefix}lm_head.weight", embedding)
    if head is not embedding and not head.is_meta and not torch.equal(head, embedding):
        error_messages = args[-1]
        error_messages.append(
            f"{prefix}lm_head.weight differs from {prefix}transformer.wte.weight, which the configuration ties; "
            "set tie_embeddings: false"
        )


def _retie(module: nn.Module, incompatible_keys: Any) -> None:
    assert isinstance(module, GPT)
    module.tie_weights()
