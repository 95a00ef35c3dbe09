"""Continue a prompt with a trained model: the function, and the command `litce generate`."""

import sys
from pathlib import Path

import torch
from torch import Tensor

from litce.args import UsageError, require_seed
from litce.model import GPT
from litce.tokenizer import Tokenizer
from litce.training.checkpoint import load_model, require_model


def check_sampling(max_new_tokens: int, temperature: float, top_k: int | None) -> None:
    """Raise `UsageError` naming the first of these options that no generation could follow."""
    if max_new_tokens < 1:
        raise UsageError(f"--max_new_tokens: must be at least 1, got {max_new_tokens}")
    # Written so that nan fails too.
    if not 0 <= temperature < float("inf"):
        raise UsageError(f"--temperature: must be 0 (always the likeliest token) or more, got {temperature}")
    if top_k is not None and top_k < 1:
        raise UsageError(f"--top_k: must be at least 1, or null to sample from the whole vocabulary, got {top_k}")


def sample_token(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> int:
    """Draw one id from softmax(logits / temperature) over the `top_k` likeliest ids.

    Args:
        logits: of one position, (V,), any floating dtype.
        temperature: 0 or more; 0 takes the likeliest id.
        top_k: 1 or more; None, or more than V, keeps every id.
        generator: on the device of `logits`; None draws from torch's global one.
    """
    logits = logits.float()
    if temperature == 0:
        return int(logits.argmax())
    # The maximum is subtracted before the division, which could overflow for a temperature close to 0.
    logits = (logits - logits.max()) / temperature
    ids = None
    if top_k is not None and top_k < logits.numel():
        logits, ids = logits.topk(top_k)
    drawn = torch.multinomial(logits.softmax(dim=-1), num_samples=1, generator=generator)
    return int(drawn if ids is None else ids[drawn])


@torch.inference_mode()
def generate(
    model: GPT,
    prompt_ids: list[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    eos_id: int | None = None,
    vocab_size: int | None = None,
    generator: torch.Generator | None = None,
) -> list[int]:
    """The ids that continue `prompt_ids`, without the prompt and without `eos_id`.

    The model sees the last `model.max_seq_length` tokens, and only the last position goes through the head.

    Args:
        model: on the device to run on, not wrapped.
        prompt_ids: at least one id.
        max_new_tokens: most ids to generate.
        temperature: divides the logits; 0 takes the likeliest id.
        top_k: sample among this many likeliest ids; None for all.
        eos_id: ends the generation when drawn.
        vocab_size: ids from here on are never drawn; the model's `config.vocab_size` when not given.
        generator: on the model's device; None draws from torch's global one.

    Raises:
        UsageError: for an option out of range or an empty prompt.
    """
    check_sampling(max_new_tokens, temperature, top_k)
    if not prompt_ids:
        raise UsageError("prompt: needs at least one token")
    if max(prompt_ids) >= model.transformer.wte.num_embeddings:
        raise UsageError(
            f"prompt: token id {max(prompt_ids)} is outside the model's vocabulary of "
            f"{model.transformer.wte.num_embeddings}; use the tokenizer that the model was trained with"
        )
    vocab_size = model.config.vocab_size if vocab_size is None else vocab_size
    ids = torch.tensor(prompt_ids, dtype=torch.int64, device=model.transformer.wte.weight.device)
    for _ in range(max_new_tokens):
        last = model.hidden_states(ids[None, -model.max_seq_length :])[:, -1]
        next_id = sample_token(model.lm_head(last)[0, :vocab_size], temperature, top_k, generator)
        if next_id == eos_id:
            break
        ids = torch.cat((ids, ids.new_tensor([next_id])))
    return ids[len(prompt_ids) :].tolist()


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
    seed: int = 1234,
) -> None:
    """Print a prompt and its continuation by a trained model.

    Args:
        checkpoint_dir: Folder with the model and its tokenizer, as training writes it.
        prompt: Text to continue. May be empty if the tokenizer has a bos token.
        max_new_tokens: Most tokens to generate; fewer when the model ends the text.
        temperature: Below 1 sharpens the distribution, above 1 flattens it, 0 always takes the likeliest token.
        top_k: Sample among this many likeliest tokens; null for the whole vocabulary.
        seed: Seed of the sampling; the same seed gives the same text.
    """
    check_sampling(max_new_tokens, temperature, top_k)
    require_seed(seed)
    require_model(checkpoint_dir)
    if not (checkpoint_dir / "tokenizer.json").is_file():
        raise UsageError(f"{checkpoint_dir} holds no tokenizer.json; copy the model's tokenizer files there")
    tokenizer = Tokenizer(checkpoint_dir)
    prompt_ids = encode_prompt(tokenizer, prompt)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(checkpoint_dir).to(device)
    window = model.max_seq_length
    if len(prompt_ids) > window:
        print(f"The prompt has {len(prompt_ids)} tokens; the model sees the last {window} of them.", file=sys.stderr)
    continuation = generate(
        model,
        prompt_ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        eos_id=tokenizer.eos_id,
        vocab_size=min(tokenizer.vocab_size, model.config.vocab_size),
        generator=torch.Generator(device).manual_seed(seed),
    )
    # Decoded after the prompt, not alone: decoders treat the first token of a text differently. And the prompt is
    # printed as typed: its ids may start with bos.
    text = tokenizer.decode(prompt_ids + continuation)
    print(prompt + text[len(tokenizer.decode(prompt_ids)) :])
