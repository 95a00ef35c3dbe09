"""A model, data and a run small enough to train in a second."""

import csv
import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from torch.utils.data import Dataset

from litce.args import EvalArgs, TrainArgs
from litce.config import Config
from litce.data.base import DataModule, Sample
from litce.model import GPT
from litce.peft import FinetuneMethod, Full
from litce.recipes.pretrain import setup
from litce.tokenizer import Tokenizer
from litce.training.checkpoint import load_model
from litce.training.metrics import Summary

SEQ_LENGTH = 8
MODEL = {"name": "tiny", "block_size": SEQ_LENGTH, "vocab_size": 64, "n_layer": 1, "n_head": 2, "n_embd": 16}


class _Sequences(Dataset[Sample]):
    def __init__(self, first: int, num_samples: int, masking: str) -> None:
        self.first = first
        self.num_samples = num_samples
        self.masking = masking

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Sample:
        generator = torch.Generator().manual_seed(self.first + index)
        ids = torch.randint(64, (SEQ_LENGTH + 1,), generator=generator)
        # The first input tells which sample it is.
        ids[0] = index
        targets = ids[1:].clone()
        if self.masking == "uneven":
            targets[: index % SEQ_LENGTH] = -100
        elif self.masking == "all" or (self.masking == "odd" and index % 2):
            targets[:] = -100
        elif self.masking == "broken":
            raise OSError("a broken sample")
        return {"input_ids": ids[:-1], "targets": targets}


@dataclass
class Numbers(DataModule):
    """Random sequences, the same ones every time."""

    num_samples: int = 16
    num_val_samples: int = 5
    masking: str = "uneven"
    """Targets to leave out: none, uneven, odd (samples of odd index entirely), all, broken (validation fails)"""
    num_workers: int = 0
    tokenizer_folder: str | None = None

    @property
    def tokenizer(self) -> Tokenizer | None:
        return Tokenizer(self.tokenizer_folder) if self.tokenizer_folder else None

    def connect(self, tokenizer: Tokenizer | None, max_seq_length: int, seed: int = 42) -> None:
        assert max_seq_length == SEQ_LENGTH

    def train_dataset(self) -> _Sequences:
        return _Sequences(0, self.num_samples, "uneven" if self.masking == "broken" else self.masking)

    def val_dataset(self) -> _Sequences:
        return _Sequences(1000, self.num_val_samples, self.masking)

    def unigram_loss(self) -> float:
        return 4.0


def train_args(**changes: Any) -> TrainArgs:
    """Batches of 4 sequences and no warm-up, for 2 steps, unless changed."""
    values: dict[str, Any] = {"global_batch_size": 4, "micro_batch_size": 2, "lr_warmup_steps": 0, "max_steps": 2}
    return TrainArgs(**{**values, **changes})


def pretrain(out_dir: Path, data: DataModule | None = None, **changes: Any) -> Summary:
    """The real recipe on the tiny model."""
    values: dict[str, Any] = {
        "model_config": MODEL,
        "out_dir": out_dir,
        "data": data or Numbers(),
        "train": train_args(),
        "eval": EvalArgs(final_validation=False),
        "optimizer": {"lr": 0.01},
        "devices": "auto",
    }
    return setup(**{**values, **changes})


def finetune(
    method: FinetuneMethod, base: Path, out_dir: Path, data: DataModule | None = None, **changes: Any
) -> Summary:
    """The real recipe of a method on the checkpoint `base`."""
    recipe = importlib.import_module(f"litce.recipes.{method.name}")
    values: dict[str, Any] = {
        "checkpoint_dir": base,
        "out_dir": out_dir,
        "data": data or Numbers(),
        "train": train_args(),
        "eval": EvalArgs(final_validation=False),
        "optimizer": {"lr": 0.01},
        **({} if isinstance(method, Full) else {method.name: method}),
    }
    return recipe.setup(**{**values, **changes})


def logged(out_dir: Path, column: str = "train_loss") -> dict[int, float]:
    """Values of a column of the csv log of the run's last start, by step."""
    path = max(out_dir.glob("logs/csv/version_*/metrics.csv"), key=lambda path: int(path.parent.name.split("_")[1]))
    with path.open(newline="") as file:
        return {int(row["step"]): float(row[column]) for row in csv.DictReader(file) if row.get(column)}


def weights(checkpoint: Path) -> dict[str, Tensor]:
    """Tensors of a checkpoint by name."""
    return dict(load_model(checkpoint).state_dict())


def assert_equal_weights(first: Path, second: Path) -> None:
    """Fails unless two checkpoints hold the same bits."""
    a, b = weights(first), weights(second)
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def save_tokenizer(folder: Path, num_words: int = 60) -> str:
    """A folder with a tokenizer of words w0, w1, ... and an end-of-sequence token."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {f"w{i}": i for i in range(num_words)} | {"<|endoftext|>": num_words, "<unk>": num_words + 1}
    processor = HFTokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    processor.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    processor.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return str(folder)


def save_byte_tokenizer(folder: Path, bos: str | None = None, chat_template: str | None = None) -> str:
    """A folder with a tokenizer that has an id per byte, and the special tokens <eos> (256), <bos> and <end>."""
    folder.mkdir(parents=True, exist_ok=True)
    processor = HFTokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}, merges=[]))
    processor.pre_tokenizer = ByteLevel(add_prefix_space=False)
    processor.decoder = decoders.ByteLevel()
    processor.add_special_tokens(["<eos>", "<bos>", "<end>"])
    processor.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<eos>", "bos_token": bos, "chat_template": chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def save_byte_model(folder: Path, block_size: int = 64) -> Path:
    """A folder with a random model over `save_byte_tokenizer`, and a chat template."""
    save_byte_tokenizer(folder, chat_template=CHAT_TEMPLATE)
    size = {"block_size": block_size, "n_layer": 2, "n_head": 2, "n_embd": 32}
    config = Config(vocab_size=259, padded_vocab_size=270, tie_embeddings=False, **size)
    config.save(folder / "model_config.yaml")
    torch.manual_seed(0)
    model = GPT(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and "ln_f" not in name:
                parameter.normal_(std=0.5)
        # It writes the 94 visible characters of ASCII: others are no character alone, and not read as they are written.
        model.lm_head.weight[94:] = 0
    save_file(model.state_dict(), folder / "lit_model.safetensors")
    return folder
