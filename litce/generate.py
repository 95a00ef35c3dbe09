"""Continue prompts with a trained model: the functions on token ids, and the command `litce generate`."""

import sys
from collections.abc import Collection, Generator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from litce.args import UsageError, require_seed
from litce.model import GPT
from litce.tokenizer import Tokenizer
from litce.training.checkpoint import require_model


def check_sampling(max_new_tokens: int, temperature: float, top_k: int | None, top_p: float = 1.0) -> None:
    """Raise `UsageError` naming the first of these options that no generation could follow."""
    if max_new_tokens < 1:
        raise UsageError(f"--max_new_tokens: must be at least 1, got {max_new_tokens}")
    # Written so that nan fails too.
    if not 0 <= temperature < float("inf"):
        raise UsageError(f"--temperature: must be 0 (always the likeliest token) or more, got {temperature}")
    if top_k is not None and top_k < 1:
        raise UsageError(f"--top_k: must be at least 1, or null to sample from the whole vocabulary, got {top_k}")
    if not 0 < top_p <= 1:
        raise UsageError(f"--top_p: must be above 0 and at most 1 (the whole vocabulary), got {top_p}")


def sample_tokens(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float, generator: torch.Generator | None
) -> Tensor:
    """Draw one id per row from softmax(logits / temperature) over the likeliest ids, int64, (...).

    Args:
        logits: (V,) or (B, V), any floating dtype.
        temperature: 0 or more; 0 takes the likeliest id.
        top_k: 1 or more ids; None, or more than V, keeps every id.
        top_p: keeps the fewest likeliest of these ids that have this probability together, which is above 0 and at
            most 1 (Holtzman et al. 2020).
        generator: on the device of `logits`; None draws from torch's global one.
    """
    logits = logits.float()
    if temperature == 0:
        return logits.argmax(dim=-1)
    # The maximum is subtracted before the division, which could overflow for a temperature close to 0.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    ids = None
    if top_k is not None and top_k < logits.size(-1):
        logits, ids = logits.topk(top_k)
    elif top_p < 1:
        logits, ids = logits.sort(dim=-1, descending=True)
    probabilities = logits.softmax(dim=-1)
    if top_p < 1:
        likelier = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(likelier >= top_p, 0.0)
    drawn = torch.multinomial(probabilities, num_samples=1, generator=generator)
    return (drawn if ids is None else ids.gather(-1, drawn)).squeeze(-1)


def generate(model: GPT, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    """The ids that continue each of `prompts`, without the prompt and the stop id; options as of `stream`."""
    continuations: list[list[int]] = [[] for _ in prompts]
    for step in stream(model, prompts, **options):
        for continuation, token_id in zip(continuations, step, strict=True):
            if token_id is not None:
                continuation.append(token_id)
    return continuations


@torch.inference_mode()
def stream(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 100,
    temperature: float = 0.8,
    top_k: int | None = 50,
    top_p: float = 1.0,
    stop_ids: Collection[int] = (),
    vocab_size: int | None = None,
    generator: torch.Generator | None = None,
    num_cached: int | None = None,
) -> Generator[list[int | None], None, None]:
    """Yield, step by step, the next id of each of `prompts`, None where it has ended.

    Prompts of different lengths are padded on the left, and each continues as it would alone. A sequence longer than
    `model.max_seq_length` is continued from its last `model.max_seq_length` tokens, computed anew for each token: the
    cached keys are of tokens that saw more than these. Only the last position goes through the head. Until the
    generator ends, or is closed, the model is in evaluation mode and has a KV cache of this generation; then mode and
    cache are again what they were.

    Args:
        model: on the device to run on, not wrapped.
        prompts: at least one id each.
        max_new_tokens: most ids to generate for a prompt.
        temperature: divides the logits; 0 takes the likeliest id.
        top_k: sample among this many likeliest ids; None for all.
        top_p: sample among the likeliest ids of this probability; 1 for all.
        stop_ids: each ends the continuation when drawn, and is no part of it.
        vocab_size: ids from here on are never drawn; the model's `config.vocab_size` when not given.
        generator: on the model's device; None draws from torch's global one.
        num_cached: with a number the model's own KV cache is used and kept. It already holds so many tokens of the
            only prompt, not all of them, and has room for the continuation or as many positions as the model.

    Raises:
        UsageError: for an option out of range or an empty prompt.
    """
    check_sampling(max_new_tokens, temperature, top_k, top_p)
    _check_prompts(prompts, model.transformer.wte.num_embeddings)
    if not prompts:
        return
    vocab_size = model.config.vocab_size if vocab_size is None else vocab_size
    window = model.max_seq_length
    device = model.transformer.wte.weight.device
    kept = [torch.tensor(prompt[-window:], dtype=torch.int64) for prompt in prompts]
    ids = pad_sequence(kept, batch_first=True, padding_side="left").to(device)
    num_padding = torch.tensor([ids.size(1) - len(prompt) for prompt in kept])
    padding = num_padding.to(device) if num_padding.any() else None

    was_training, cache = model.training, model.kv_cache
    ended = [False] * len(prompts)
    try:
        model.eval()
        if num_cached is None:
            model.kv_cache = None
            model.set_kv_cache(len(prompts), min(window, ids.size(1) + max_new_tokens - 1))
        start = num_cached or 0
        for _ in range(max_new_tokens):
            dropped = ids.size(1) - window
            if dropped <= 0:
                input_pos = torch.arange(start, ids.size(1))
                x = model.hidden_states(ids[:, start:], input_pos=input_pos, num_padding=padding)
                start = ids.size(1)
            else:
                left = None if padding is None else (padding - dropped).clamp(min=0)
                x = model.hidden_states(ids[:, dropped:], num_padding=left)
            logits = model.lm_head(x[:, -1])[:, :vocab_size]
            drawn = sample_tokens(logits, temperature, top_k, top_p, generator)
            step = drawn.tolist()
            ended = [before or token_id in stop_ids for before, token_id in zip(ended, step, strict=True)]
            if all(ended):
                return
            yield [None if end else token_id for end, token_id in zip(ended, step, strict=True)]
            ids = torch.cat((ids, drawn[:, None]), dim=1)
    finally:
        model.train(was_training)
        if num_cached is None:
            model.kv_cache = cache


def _check_prompts(prompts: Sequence[Sequence[int]], num_embeddings: int) -> None:
    for i, prompt in enumerate(prompts):
        name = f"prompt {i}" if len(prompts) > 1 else "prompt"
        if not prompt:
            raise UsageError(f"{name}: needs at least one token")
        if max(prompt) >= num_embeddings:
            raise UsageError(
                f"{name}: token id {max(prompt)} is outside the model's vocabulary of {num_embeddings}; use the "
                "tokenizer that the model was trained with"
            )


def encode_prompt(tokenizer: Tokenizer, prompt: str, flag: str = "--prompt") -> list[int]:
    """Token ids of `prompt`, after the tokenizer's beginning-of-sequence token if it has one.

    Raises:
        UsageError: if that leaves no token to start from.
    """
    ids = tokenizer.encode(prompt, bos=tokenizer.bos_id is not None)
    if not ids:
        raise UsageError(f"{flag}: got {prompt!r}, and the tokenizer has no bos token to start from; give some text")
    return ids


def setup(
    checkpoint_dir: Path,
    prompt: str = "",
    *,
    max_new_tokens: int = 100,
    temperature: float = 0.8,
    top_k: int | None = 50,
    top_p: float = 1.0,
    seed: int = 1234,
) -> None:
    """Print a prompt and its continuation by a trained model.

    Args:
        checkpoint_dir: Folder with the model and its tokenizer, as training writes it.
        prompt: Text to continue. May be empty if the tokenizer has a bos token.
        max_new_tokens: Most tokens to generate; fewer when the model ends the text.
        temperature: Below 1 sharpens the distribution, above 1 flattens it, 0 always takes the likeliest token.
        top_k: Sample among this many likeliest tokens; null for the whole vocabulary.
        top_p: Sample among the likeliest tokens that have this probability together; 1 for the whole vocabulary.
        seed: Seed of the sampling; the same seed gives the same text.
    """
    from litce.llm import LLM, load_tokenizer

    check_sampling(max_new_tokens, temperature, top_k, top_p)
    require_seed(seed)
    require_model(checkpoint_dir)
    prompt_ids = encode_prompt(load_tokenizer(checkpoint_dir), prompt)
    llm = LLM.load(checkpoint_dir)
    window = llm.model.max_seq_length
    if len(prompt_ids) > window:
        print(f"The prompt has {len(prompt_ids)} tokens; the model sees the last {window} of them.", file=sys.stderr)
    # The prompt is printed as typed: its ids may start with bos.
    print(prompt, end="", flush=True)
    for text in llm.stream(
        prompt, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    ):
        print(text, end="", flush=True)
    print()
