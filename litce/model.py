"""One decoder-only transformer for the GPT-2, GPT-NeoX, Llama, Mistral, Qwen, Phi-3 and Gemma families.

`Config` says which parts it has.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from litce.config import Config, RopeScaling
from litce.kv_cache import KVCache, LayerCache
from litce.lm_head import LMHead
from litce.loss.options import LossOptions


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
            config.n_embd,
            config.padded_vocab_size,
            vocab_size=config.vocab_size,
            fp32=config.fp32_head,
            options=LossOptions(logit_softcap=config.logit_softcap, logit_scale=config.logit_scale),
        )
        self._max_seq_length = config.block_size
        self.kv_cache: KVCache | None = None
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
        input_pos: Tensor | None = None,
        num_padding: Tensor | None = None,
    ) -> Tensor:
        """Logits of the next token, or their summed cross-entropy.

        Args:
            idx: token ids, int64, (B, T).
            targets: the id that follows each token of `idx`, int64, (B, T); -100 where nothing is to be predicted.
            num_supervised: the number of the other targets where the host knows it; a GPU skips the ignored ones.
            sample: temperature at which to draw a next token for each position.
            input_pos: indices of the tokens in their sequences, int64, (T,), one after the other; those before them
                are read from the KV cache, and these are written to it. Best on the CPU: the host reads it. Nothing
                is differentiated then.
            num_padding: how many tokens at the start of each sequence are padding, which no other token sees and
                positions do not count, int64, (B,); what is computed for them means nothing. None: 0.

        Returns:
            Without targets the logits, (B, T, padded_vocab_size). With targets the cross-entropy in nats summed over
            the supervised tokens, an fp32 scalar; the head computes it as `lm_head.plan` says. With `sample` the drawn
            ids, int64, (B, T).

        Raises:
            ValueError: if T exceeds `max_seq_length`.
            RuntimeError: if `input_pos` does not fit the KV cache.
        """
        with torch.no_grad() if input_pos is not None else nullcontext():
            x = self.hidden_states(idx, input_pos=input_pos, num_padding=num_padding)
            return self.lm_head(x, targets, num_supervised=num_supervised, sample=sample)

    def hidden_states(
        self, idx: Tensor, *, input_pos: Tensor | None = None, num_padding: Tensor | None = None
    ) -> Tensor:
        """The head's input, (B, T, n_embd), for arguments as of `forward`, which says what it raises."""
        if idx.size(1) > self.max_seq_length:
            raise ValueError(f"sequence of {idx.size(1)} tokens is longer than max_seq_length={self.max_seq_length}")
        if input_pos is None:
            return self.transformer(idx, num_padding=num_padding)
        if self.kv_cache is None:
            raise RuntimeError("input_pos without a KV cache; call set_kv_cache(batch_size) first")
        with torch.no_grad():
            start = self.kv_cache.begin(idx, input_pos, self.max_seq_length)
            x = self.transformer(idx, start=start, num_padding=num_padding, cache=self.kv_cache)
            self.kv_cache.num_tokens = start + idx.size(1)
            return x

    def set_kv_cache(self, batch_size: int, max_seq_length: int | None = None) -> None:
        """Make an empty cache of keys and values for `forward` with `input_pos`, in place of the one there was.

        That one is freed first. The cache lies on the device of the weights and has their dtype, and no forward without
        `input_pos` reads it. To grow, call this again: what was cached has to be computed anew.

        Args:
            batch_size: sequences at a time.
            max_seq_length: positions of a sequence; the model's `max_seq_length` when not given.

        Raises:
            ValueError: if it exceeds the model's `max_seq_length`, or one of the two is below 1.
        """
        self.clear_kv_cache()
        length = self.max_seq_length if max_seq_length is None else max_seq_length
        if not 1 <= length <= self.max_seq_length:
            raise ValueError(f"max_seq_length: must lie in [1, {self.max_seq_length}], that of the model, got {length}")
        if batch_size < 1:
            raise ValueError(f"batch_size: must be at least 1, got {batch_size}")
        self.kv_cache = KVCache(self.config, batch_size, length, self.max_seq_length, self.transformer.wte.weight)

    def clear_kv_cache(self) -> None:
        """Free the cache of keys and values, if there is one."""
        self.kv_cache = None

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
            elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):  # UnitOffsetRMSNorm is one
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
        self.ln_f = make_norm(config, config.n_embd)

    def forward(
        self, idx: Tensor, *, start: int = 0, num_padding: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """Hidden states of the tokens `idx`, of which the first stands at the index `start`; see `GPT.forward`."""
        indices = torch.arange(start + idx.size(1), device=idx.device)
        positions = indices[start:] if num_padding is None else (indices[start:] - num_padding[:, None]).clamp(min=0)
        x = self.wte(idx)
        if self.config.scale_embeddings:
            # Rounded to the activations' dtype first, as in the training of the models that have it.
            x = x * torch.tensor(math.sqrt(self.config.n_embd), dtype=x.dtype)
        if self.config.positions == "learned":
            x = x + self.wpe(positions)
        windowed = [self.config.has_window(i) for i in range(self.config.n_layer)]
        surroundings = {
            kind: Surroundings(
                rope_cos_sin(self.config, positions, kind) if self.config.positions == "rope" else None,
                make_mask(self.config, indices, start, kind, num_padding),
            )
            for kind in set(windowed)
        }
        for i, (block, kind) in enumerate(zip(self.h, windowed, strict=True)):
            x = block(x, surroundings[kind], None if cache is None else cache.layer(i, start))
        return self.ln_f(x)


class Surroundings(NamedTuple):
    """What all layers of a kind, with or without a sliding window, know about the positions of a sequence."""

    rope: tuple[Tensor, Tensor] | None
    """Cosines and sines of the rotary angles, each fp32, (T, rotary_size / 2) or (B, 1, T, rotary_size / 2)."""
    mask: Tensor | None
    """Which keys each query sees, bool, (T, S) or (B, 1, T, S); None: all up to its own."""


def make_mask(
    config: Config, indices: Tensor, start: int, windowed: bool, num_padding: Tensor | None = None
) -> Tensor | None:
    """Which keys each query sees in layers with (`windowed`) or without a sliding window, as `Surroundings.mask`.

    The keys stand at `indices`, int64, (S,), counted from 0, and the queries are those from the index `start` on; of
    each sequence the first `num_padding`, int64, (B,), are padding.
    """
    window = config.sliding_window if windowed else None
    queries = indices[start:, None]
    mask = indices <= queries
    if window is not None and len(indices) > window:
        mask = mask & (indices > queries - window)
    elif num_padding is None and config.attention_softcap is None and (start == 0 or len(queries) == 1):
        return None
    if num_padding is None:
        return mask
    # Padding sees itself: a softmax over nothing would be nan, and 0 * nan is nan in the layers above.
    return (mask & (indices >= num_padding[:, None, None]) | (indices == queries))[:, None]


class Block(nn.Module):
    """Attention and MLP on the residual stream, one after the other or side by side. (B, T, n_embd) -> the same."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.parallel_residual = config.parallel_residual
        self.norm_1 = make_norm(config, config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.post_norm_1 = make_norm(config, config.n_embd) if config.post_norms else nn.Identity()
        self.norm_2 = make_norm(config, config.n_embd)
        self.mlp = MLP(config)
        self.post_norm_2 = make_norm(config, config.n_embd) if config.post_norms else nn.Identity()

    def forward(self, x: Tensor, surroundings: Surroundings, cache: LayerCache | None = None) -> Tensor:
        attended = x + self.post_norm_1(self.attn(self.norm_1(x), surroundings, cache))
        mlp_input = x if self.parallel_residual else attended
        return attended + self.post_norm_2(self.mlp(self.norm_2(mlp_input)))


class CausalSelfAttention(nn.Module):
    """Softmax attention to the tokens before and at each position, with grouped keys and values (Ainslie et al. 2023).

    (B, T, n_embd) -> (B, T, n_embd).
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        assert config.head_size is not None and config.query_pre_attn_scalar is not None
        assert config.n_query_groups is not None and config.qkv_bias is not None
        self.head_size = config.head_size
        self.heads_per_group = config.n_head // config.n_query_groups
        self.scale = config.query_pre_attn_scalar**-0.5
        self.softcap = config.attention_softcap
        q_size, kv_size = config.n_head * config.head_size, config.n_query_groups * config.head_size
        # Three projections and not one fused: each can be adapted, sharded or converted without slicing the others.
        self.q = nn.Linear(config.n_embd, q_size, bias=config.qkv_bias)
        self.k = nn.Linear(config.n_embd, kv_size, bias=config.qkv_bias)
        self.v = nn.Linear(config.n_embd, kv_size, bias=config.qkv_bias)
        self.norm_q = make_norm(config, config.head_size) if config.qk_norm else nn.Identity()
        self.norm_k = make_norm(config, config.head_size) if config.qk_norm else nn.Identity()
        self.proj = nn.Linear(q_size, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor, surroundings: Surroundings, cache: LayerCache | None = None) -> Tensor:
        q, k, v = (self._split_heads(projection(x)) for projection in (self.q, self.k, self.v))
        q, k = self.norm_q(q), self.norm_k(k)
        if surroundings.rope is not None:
            q, k = apply_rope(q, *surroundings.rope), apply_rope(k, *surroundings.rope)
        if cache is not None:
            k, v = cache.extend(k, v)
        return self.proj(self.attend(q, k, v, surroundings.mask).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Mix `v` by the softmax of the scores of `q` (B, n_head, T, head_size) against `k`; shaped like `q`.

        `k` and `v` are (B, n_query_groups, S, head_size). `mask` says which keys each query sees, bool, (T, S) or
        (B, 1, T, S); None stands for those up to its own position, and a single query stands at the last.
        """
        single = q.size(2) == 1
        if single:
            # The heads of a group read the same keys: as queries of one head they need no copies of them.
            q = q.reshape(len(q), k.size(1), -1, self.head_size)
        elif self.heads_per_group > 1:
            # Not enable_gqa: some of SDPA's backends lack it, and the fallback would hold the (T, T) scores.
            k, v = (x.repeat_interleave(self.heads_per_group, dim=1) for x in (k, v))
        if self.softcap is None:
            is_causal = mask is None and not single
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=self.scale)
        else:
            # Recomputed in backward, so that the scores of one layer are alive at a time, and not those of all.
            y = checkpoint(
                softcapped_attention,
                *(q, k, v, mask, self.scale, self.softcap),
                use_reentrant=False,
                preserve_rng_state=False,
            )
        return y.flatten(1, 2).unsqueeze(2) if single else y

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


def softcapped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    """Attention whose scores are `softcap * tanh(scale * q k^T / softcap)` (Gemma 2, arXiv:2408.00118).

    Args:
        q: (B, heads, T, head_size).
        k: (B, heads, S, head_size).
        v: like k.
        mask: which keys each query sees, bool, (T, S) or (B, 1, T, S).
        scale: factor of the products of queries and keys.
        softcap: bound of the scores.

    Returns:
        Like q. Softmax and all that leads to it are fp32, whatever the dtype of q.
    """
    scores = softcap * torch.tanh((q @ k.mT).float() * (scale / softcap))
    return scores.masked_fill(~mask, -math.inf).softmax(dim=-1).to(v.dtype) @ v


class MLP(nn.Module):
    """`down(gelu(up(x)))`, or gated `down(act(gate(x)) * up(x))` (Shazeer 2020). (B, T, n_embd) -> the same."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        assert config.intermediate_size is not None and config.mlp_bias is not None
        self.kind = config.mlp
        if config.mlp in ("swiglu", "geglu_tanh"):
            self.gate = nn.Linear(config.n_embd, config.intermediate_size, bias=config.mlp_bias)
        self.up = nn.Linear(config.n_embd, config.intermediate_size, bias=config.mlp_bias)
        self.down = nn.Linear(config.intermediate_size, config.n_embd, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "swiglu":
            return self.down(F.silu(self.gate(x)) * self.up(x))
        if self.kind == "geglu_tanh":
            return self.down(F.gelu(self.gate(x), approximate="tanh") * self.up(x))
        return self.down(F.gelu(self.up(x), approximate="tanh" if self.kind == "gelu_tanh" else "none"))


class RMSNorm(nn.RMSNorm):
    """RMSNorm in the weight's dtype; queries and keys are narrower under autocast. (..., features) -> the same."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class UnitOffsetRMSNorm(nn.RMSNorm):
    """RMSNorm that multiplies by 1 + weight (Gemma), all in fp32. (..., features) -> the same."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).to(x.dtype)


def make_norm(config: Config, num_features: int) -> nn.Module:
    """The normalisation over the last `num_features` features that `config.norm` names."""
    norms = {"layernorm": nn.LayerNorm, "rmsnorm": RMSNorm, "rmsnorm_unit_offset": UnitOffsetRMSNorm}
    return norms[config.norm](num_features, eps=config.norm_eps)


def rope_cos_sin(config: Config, positions: Tensor, windowed: bool = False) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles (Su et al. 2021, equation 15), fp32, (T, rotary_size / 2) each.

    They follow from the configuration alone and cost next to nothing beside one block, so they are no buffers: a
    buffer would be rounded by a cast of the model to bf16 and hold garbage after leaving the meta device.

    Args:
        config: gives base, rotated features and scaling.
        positions: int64, (T,); or (B, T), for angles that are (B, 1, T, rotary_size / 2).
        windowed: for layers with a sliding window, which may have a base of their own and then no scaling.
    """
    local = windowed and config.rope_local_base is not None
    exponents = torch.arange(0, config.rotary_size, 2, device=positions.device, dtype=torch.float32)
    base = config.rope_local_base if local else config.rope_base
    assert base is not None
    frequencies = base ** -(exponents / config.rotary_size)
    if config.rope_scaling is not None and not local:
        frequencies = scale_rope_frequencies(frequencies, config.rope_scaling)
    angles = positions.float()[..., None] * frequencies
    if positions.ndim == 2:
        angles = angles[:, None]
    return angles.cos(), angles.sin()


def scale_rope_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """All rotary frequencies divided by `factor`; with "llama3" slow ones divided, fast ones kept, a blend between.

    `frequencies` is fp32, in radians per position, of any shape, which the result shares. The blend is linear in the
    number of turns that a frequency makes over `original_max_seq_len` positions (Llama 3.1 reference code).
    """
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    low, high, length = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_seq_len
    assert low is not None and high is not None and length is not None
    turns = length * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first `2 * cos.size(-1)` features of each head, feature i with feature i + cos.size(-1).

    Args:
        x: queries or keys, (B, heads, T, head_size).
        cos: (T, rotary_size / 2) or (B, 1, T, rotary_size / 2), fp32; so the rotation is fp32 whatever the dtype of x.
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
