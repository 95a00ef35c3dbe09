"""The keys and values that a model keeps of the tokens it has seen, for generation token by token."""

from typing import NamedTuple

import torch
from torch import Tensor

from litce.config import Config


class LayerCache(NamedTuple):
    """Keys and values of one layer, those before `start` of use."""

    keys: Tensor
    values: Tensor
    start: int

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values up to these, of T more tokens; each (B, n_query_groups, T, head_size)."""
        stop = self.start + keys.size(2)
        self.keys[:, :, self.start : stop] = keys
        self.values[:, :, self.start : stop] = values
        return self.keys[:, :, :stop].to(keys.dtype), self.values[:, :, :stop].to(values.dtype)


class KVCache:
    """Keys and values of the tokens that a model has seen, (B, n_query_groups, length, head_size) in each layer.

    No buffers of the model, so that neither its checkpoints nor wrappers that synchronise buffers know of them.

    Args:
        config: of the model.
        batch_size: B.
        length: positions that it can hold.
        max_seq_length: the model's at present; the cache goes with no other.
        like: has the dtype and device to take.
    """

    def __init__(self, config: Config, batch_size: int, length: int, max_seq_length: int, like: Tensor) -> None:
        assert config.n_query_groups is not None and config.head_size is not None
        shape = (batch_size, config.n_query_groups, length, config.head_size)
        self.batch_size, self.length, self.max_seq_length = batch_size, length, max_seq_length
        self.num_tokens = 0  # positions that all layers hold
        with torch.inference_mode(False):  # such tensors could not be written to outside of it
            self.layers = [
                tuple(torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(2))
                for _ in range(config.n_layer)
            ]

    def begin(self, idx: Tensor, input_pos: Tensor, max_seq_length: int) -> int:
        """The index of the first of the tokens `idx`, (B, T), which are to take the places `input_pos`, (T,).

        What was there and after it is forgotten; `num_tokens` counts the new ones when the caller has written them.

        Raises:
            RuntimeError: if they cannot, saying why and what to do.
        """
        again = "call set_kv_cache(batch_size, max_seq_length) again"
        indices = input_pos.tolist()
        start = indices[0] if input_pos.ndim == 1 and indices else 0
        stop = start + idx.size(1)
        if max_seq_length != self.max_seq_length:
            raise RuntimeError(
                f"max_seq_length is {max_seq_length} now, and was {self.max_seq_length} when the KV cache was made; "
                f"{again}"
            )
        if len(idx) != self.batch_size:
            raise RuntimeError(f"a batch of {len(idx)} sequences for a KV cache of {self.batch_size}; {again}")
        if indices != list(range(start, stop)):
            raise RuntimeError(
                f"input_pos must be the indices of the {idx.size(1)} tokens, one after the other, got {input_pos}"
            )
        if stop > self.length:
            raise RuntimeError(f"input_pos goes up to {stop - 1}, and the KV cache ends at {self.length - 1}; {again}")
        if not 0 <= start <= self.num_tokens:
            raise RuntimeError(
                f"input_pos starts at {start}, and the KV cache holds {self.num_tokens} tokens; give it the tokens "
                "between them first"
            )
        self.num_tokens = start
        return start

    def layer(self, index: int, start: int) -> LayerCache:
        """The cache of one layer, to be written from the position `start` on."""
        keys, values = self.layers[index]
        return LayerCache(keys, values, start)
