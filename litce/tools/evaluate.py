"""`litce evaluate`: loss, perplexity, bits per byte and accuracy of a model on a data module's validation samples."""

import json as json_format
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch

from litce.args import UsageError, require_seed
from litce.data import DataModule
from litce.data.base import IGNORE_INDEX, make_dataloader, require_data
from litce.model import GPT
from litce.tokenizer import Tokenizer
from litce.training.checkpoint import load_model, require_model


@dataclass(frozen=True)
class Evaluation:
    """How well a model predicts the supervised tokens of a data set."""

    loss: float
    """Cross-entropy in nats per token"""
    perplexity: float
    """Its exponential"""
    bits_per_byte: float | None
    """Cross-entropy in bits, by the bytes of UTF-8 that the tokens stand for; comparable between tokenizers"""
    accuracy: float
    """Share of tokens that have the largest logit"""
    num_tokens: int
    """Supervised tokens"""
    num_bytes: int | None
    """Bytes that they stand for, without special tokens; None where no tokenizer says so"""
    num_samples: int
    """Samples read"""

    def __str__(self) -> str:
        bits = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.4f} bits per byte"
        return (
            f"{self.num_tokens:,} tokens in {self.num_samples:,} samples: loss {self.loss:.4f} nats per token, "
            f"perplexity {self.perplexity:.4f}{bits}, accuracy {100 * self.accuracy:.2f} %"
        )


def setup(
    checkpoint_dir: Path,
    data: DataModule | None = None,
    max_seq_length: int | None = None,
    micro_batch_size: int = 4,
    max_iters: int | None = None,
    json: Path | None = None,
    seed: int = 42,
) -> Evaluation:
    """Evaluate a model on the validation part of any data.

    The loss is that of training and validation; no logits are held. A padded or partly ignored sample counts with its
    supervised tokens alone, so that the result does not depend on the batches.

    Args:
        checkpoint_dir: Folder with the model and its tokenizer, as training or convert_from_hf writes it.
        data: Data whose validation part to evaluate on, read with the checkpoint's tokenizer.
        max_seq_length: Tokens per sequence; null takes the model's longest.
        micro_batch_size: Sequences per forward pass; changes time and memory, not the result.
        max_iters: Most forward passes; null takes all the data.
        json: Write the numbers to this file too.
        seed: Seed by which some data choose their validation part; that of the training.

    Raises:
        UsageError: if the checkpoint or the data cannot be read, or no token is supervised.
    """
    require_seed(seed)
    for flag, value in (("micro_batch_size", micro_batch_size), ("max_iters", max_iters)):
        if value is not None and value < 1:
            raise UsageError(f"--{flag} {value}: must be at least 1")
    if json is not None and not json.parent.is_dir():
        raise UsageError(f"--json {json}: the folder {json.parent} does not exist")
    data = require_data(data)
    require_model(checkpoint_dir)
    model = load_model(checkpoint_dir).to("cuda" if torch.cuda.is_available() else "cpu")
    if max_seq_length is not None:
        if not 1 <= max_seq_length <= model.config.block_size:
            raise UsageError(
                f"--max_seq_length {max_seq_length}: must be from 1 to the model's block_size {model.config.block_size}"
            )
        model.max_seq_length = max_seq_length
    data.prepare()
    tokenizer = Tokenizer(checkpoint_dir) if (checkpoint_dir / "tokenizer.json").is_file() else data.tokenizer
    if tokenizer is not None and tokenizer.needed_vocab_size > model.config.vocab_size:
        raise UsageError(
            f"the tokenizer has {tokenizer.needed_vocab_size} ids, more than the model's vocab_size "
            f"{model.config.vocab_size}; put the model's own tokenizer files into {checkpoint_dir}"
        )
    data.connect(tokenizer, model.max_seq_length, seed)
    data.check_vocabulary(model.config.vocab_size)
    result = evaluate(model, data, micro_batch_size, max_iters, None if tokenizer is None else tokenizer.num_bytes)
    if json is not None:
        temporary = json.with_name(f".{json.name}.{os.getpid()}")
        temporary.write_text(json_format.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
        temporary.replace(json)
    print(result)
    return result


@torch.inference_mode()
def evaluate(
    model: GPT,
    data: DataModule,
    micro_batch_size: int,
    max_iters: int | None = None,
    bytes_per_id: Sequence[int] | None = None,
) -> Evaluation:
    """Evaluate `model` on the validation samples of `data`, which is connected, `micro_batch_size` at a time.

    Raises:
        UsageError: if no token is supervised.
    """
    device = model.transformer.wte.weight.device
    loader = make_dataloader(
        data.val_dataset(),
        data,
        batch_size=micro_batch_size,
        shuffle=False,
        seed=0,
        rank=0,
        world_size=1,
        vocab_size=model.config.vocab_size,
    )
    sizes = None if bytes_per_id is None else torch.tensor(bytes_per_id)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    correct = torch.zeros((), dtype=torch.int64, device=device)
    num_tokens = num_samples = num_bytes = 0
    was_training = model.training
    model.eval()
    for batch in islice(loader, max_iters):
        supervised = batch["targets"][batch["targets"] != IGNORE_INDEX]
        num_samples += len(batch["targets"])
        num_tokens += len(supervised)
        num_bytes += 0 if sizes is None else int(sizes[supervised].sum())
        x = model.hidden_states(batch["input_ids"].to(device))
        stats = model.lm_head.token_stats(x, batch["targets"].to(device))
        loss += stats.loss.double().sum()
        correct += stats.correct.sum()
    model.train(was_training)
    if num_tokens == 0:
        raise UsageError("--data: no token of the validation samples is supervised, so there is nothing to evaluate")
    mean = float(loss) / num_tokens
    return Evaluation(
        loss=mean,
        perplexity=math.exp(mean) if mean < 700 else math.inf,
        bits_per_byte=float(loss) / math.log(2) / num_bytes if num_bytes else None,
        accuracy=int(correct) / num_tokens,
        num_tokens=num_tokens,
        num_bytes=None if sizes is None else num_bytes,
        num_samples=num_samples,
    )
