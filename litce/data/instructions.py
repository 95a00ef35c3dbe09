"""Instruction data: conversations as samples whose targets are the replies, for the modules that read them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, Literal

import numpy as np
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from numpy.typing import NDArray
from torch.utils.data import Dataset

from litce.args import UsageError
from litce.data.base import IGNORE_INDEX, DataModule, Sample
from litce.data.token_file import token_dtype
from litce.prompts import STYLES, Message, PromptStyle, Turn
from litce.tokenizer import Tokenizer

StyleOption = Literal["default", "alpaca", "raw", "chat"]

# How many of the longest samples open the first epoch: enough for the first micro-batch of every device, and a number
# that depends on the data alone, as does the order that a run on other devices resumes.
MAX_OPENING = 64
OPENING_FRACTION = 0.05

# Conversations that are tokenized at once.
BATCH = 1024


@dataclass(frozen=True)
class Row:
    """A conversation, and where it stands, such as "data.jsonl line 3"."""

    place: str
    messages: Sequence[Message]
    input: str = ""
    """What the first message is about"""
    style: str = "alpaca"
    """How it is written if nothing else is asked for"""


@dataclass(frozen=True)
class Conversations:
    """Token ids of conversations, one after the other."""

    ids: NDArray[Any]
    """All ids, in `token_dtype(vocab_size)`"""
    is_reply: NDArray[np.bool_]
    """Whether each id is part of a reply"""
    starts: NDArray[np.int64]
    """Position of the first id of each conversation, and the end of the last"""


class InstructionDataset(Dataset[Sample]):
    """Conversations cut to `seq_length` positions, without those that then have nothing of a reply to predict.

    The targets are the replies and the end of sequence after the last, or every token where `mask_prompt` is False.
    """

    def __init__(self, conversations: Conversations, seq_length: int, mask_prompt: bool) -> None:
        self.conversations = conversations
        self.seq_length = seq_length
        self.mask_prompt = mask_prompt
        starts, ends = conversations.starts[:-1], conversations.starts[1:]
        # The token after the last position is predicted too; the first token never is.
        limits = np.minimum(ends, starts + seq_length + 1)
        num_replies = np.concatenate(([0], np.cumsum(conversations.is_reply)))
        self.kept = np.flatnonzero(num_replies[limits] > num_replies[np.minimum(starts + 1, limits)])
        self.lengths = (limits - starts - 1)[self.kept]
        """Positions of each sample"""
        self.num_dropped = len(starts) - len(self.kept)
        self.num_cut = int((ends > limits)[self.kept].sum())

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = self.conversations.starts[self.kept[index]]
        span = slice(start, start + self.lengths[index] + 1)
        ids = torch.from_numpy(self.conversations.ids[span].astype(np.int64))
        targets = ids[1:].clone()
        if self.mask_prompt:
            targets[torch.from_numpy(~self.conversations.is_reply[span][1:])] = IGNORE_INDEX
        return {"input_ids": ids[:-1], "targets": targets}

    def targets(self) -> NDArray[np.int64]:
        """The supervised targets of all samples, (number of them,)."""
        firsts = self.conversations.starts[self.kept] + 1
        edges = np.zeros(len(self.conversations.ids) + 1, np.int64)
        np.add.at(edges, firsts, 1)
        np.add.at(edges, firsts + self.lengths, -1)
        supervised = np.cumsum(edges[:-1]) > 0
        if self.mask_prompt:
            supervised &= self.conversations.is_reply
        return self.conversations.ids[supervised].astype(np.int64)


class InstructionDataModule(DataModule):
    """A module whose samples are conversations.

    The longest samples open the first epoch, so that memory that does not suffice is noticed at once.
    """

    prompt_style: StyleOption = "default"
    mask_prompt: bool = True

    def connect_rows(
        self,
        train: Sequence[Row],
        val: Sequence[Row],
        tokenizer: Tokenizer | None,
        max_seq_length: int,
        *,
        train_name: str,
        val_name: str,
        num_empty: int = 0,
    ) -> None:
        """Build the datasets, and print what became of the rows, `num_empty` of them left out for an empty reply.

        The names stand for the data in an error.

        Raises:
            UsageError: no tokenizer, one without an end of sequence or the chat template that is asked for, a row that
                the style cannot express, or no row whose prompt leaves room for a reply.
        """
        name = type(self).__name__
        if tokenizer is None:
            raise UsageError(f"--data {name} needs a tokenizer; give --tokenizer_dir, or a checkpoint that holds one")
        self._vocab_size = tokenizer.vocab_size
        styles: dict[str, PromptStyle] = {}
        self._train, self._val = (
            InstructionDataset(self._encode(rows, tokenizer, styles), max_seq_length, self.mask_prompt)
            for rows in (train, val)
        )
        for dataset, part, flag in ((self._train, "training", train_name), (self._val, "validation", val_name)):
            if len(dataset) == 0:
                raise UsageError(
                    f"{flag} has no {part} sample: {dataset.num_dropped} conversations, and the prompt of each fills "
                    f"--train.max_seq_length {max_seq_length}; raise it or give others"
                )
        report = f"--data {name}: {len(self._train)} training and {len(self._val)} validation samples"
        if num_empty:
            report += f"; {num_empty} left out, as the reply is empty"
        if dropped := self._train.num_dropped + self._val.num_dropped:
            report += f"; {dropped} left out, as the prompt fills --train.max_seq_length {max_seq_length}"
        if cut := self._train.num_cut + self._val.num_cut:
            report += f"; {cut} cut off at --train.max_seq_length {max_seq_length}"
        _print_once(report)

    def train_dataset(self) -> InstructionDataset:
        """Training samples of up to `max_seq_length` positions."""
        return self._train

    def val_dataset(self) -> InstructionDataset:
        """Validation samples of up to `max_seq_length` positions."""
        return self._val

    def opening_samples(self) -> list[int]:
        """See `DataModule.opening_samples`: the longest, longest first."""
        number = min(MAX_OPENING, max(1, int(OPENING_FRACTION * len(self._train))))
        return np.argsort(-self._train.lengths, kind="stable")[:number].tolist()

    def unigram_loss(self) -> float:
        """See `DataModule.unigram_loss`; over the supervised targets of both."""
        counts = np.bincount(self._train.targets(), minlength=self._vocab_size)
        losses = np.log(counts.sum() + self._vocab_size) - np.log(counts + 1.0)
        return float(losses[self._val.targets()].mean())

    def _encode(self, rows: Sequence[Row], tokenizer: Tokenizer, styles: dict[str, PromptStyle]) -> Conversations:
        dtype = token_dtype(tokenizer.vocab_size)
        ids: list[NDArray[Any]] = [np.empty(0, dtype)]
        is_reply: list[NDArray[np.bool_]] = [np.empty(0, np.bool_)]
        conversations = ((style, turns) for row in rows for style, turns in self._conversations(row, tokenizer, styles))
        for style, group in groupby(conversations, key=lambda pair: pair[0]):
            while batch := [turns for _, turns in islice(group, BATCH)]:
                for row_ids, row_is_reply in style.encode(batch):
                    ids.append(np.array(row_ids, dtype))
                    is_reply.append(np.array(row_is_reply, np.bool_))
        lengths = np.array([len(row_ids) for row_ids in ids], np.int64)
        return Conversations(np.concatenate(ids), np.concatenate(is_reply), np.cumsum(lengths))

    def _conversations(
        self, row: Row, tokenizer: Tokenizer, styles: dict[str, PromptStyle]
    ) -> Iterator[tuple[PromptStyle, list[Turn]]]:
        name = row.style if self.prompt_style == "default" else self.prompt_style
        if name not in styles:
            styles[name] = STYLES[name](tokenizer)
        try:
            conversations = styles[name].conversations(row.messages, row.input)
        except ValueError as error:
            raise UsageError(f"{row.place} {error}") from error
        return ((styles[name], turns) for turns in conversations)


@rank_zero_only
def _print_once(line: str) -> None:
    print(line, flush=True)
