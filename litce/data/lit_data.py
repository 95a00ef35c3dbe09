"""Token streams in the format of `litdata` (optional extra `streaming`)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

from litce.args import UsageError
from litce.data.base import DataModule, Sample
from litce.tokenizer import Tokenizer


class StreamBlocks(Dataset[Sample]):
    """The blocks of a stream, by index: `seq_length + 1` tokens each, without overlap.

    Map-style, so order, sharding over ranks and resuming are those of `ResumableSampler`, as for every other module.
    litdata's blocks do not overlap, so the first token of each is read and never predicted, and the tokens of a
    chunk that do not fill a block are left out.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.num_blocks = len(stream)

    def __len__(self) -> int:
        return self.num_blocks

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        block = torch.as_tensor(self.stream[index]).to(torch.int64)
        return {"input_ids": block[:-1], "targets": block[1:]}


@dataclass
class LitData(DataModule):
    """Pre-tokenised streams written by `litdata.optimize(..., item_loader=TokensLoader())`, local or in the cloud."""

    path: str
    """Folder or URL of the training stream"""
    val_path: str
    """Folder or URL of the validation stream"""
    num_workers: int = 0
    """Processes that read samples ahead of the training loop, 0 to read them in the loop"""

    def connect(self, tokenizer: Tokenizer | None, max_seq_length: int, seed: int = 42) -> None:
        """Open the streams.

        Raises:
            UsageError: litdata is not installed, or a stream cannot be read or holds no whole block.
        """
        self._train = self._open("--data.path", self.path, max_seq_length)
        self._val = self._open("--data.val_path", self.val_path, max_seq_length)

    def train_dataset(self) -> StreamBlocks:
        """Training samples of `max_seq_length` positions."""
        return self._train

    def val_dataset(self) -> StreamBlocks:
        """Validation samples of `max_seq_length` positions."""
        return self._val

    def _open(self, flag: str, path: str, max_seq_length: int) -> StreamBlocks:
        try:
            from litdata import StreamingDataset, TokensLoader
        except ImportError as error:
            raise UsageError(
                f"--data LitData needs litdata ({error}); install it: pip install 'litce[streaming]'"
            ) from error
        try:
            blocks = StreamBlocks(StreamingDataset(path, item_loader=TokensLoader(block_size=max_seq_length + 1)))
        except Exception as error:  # litdata and the cloud clients raise their own kinds
            raise UsageError(f"{flag} {path} is not a readable litdata stream of tokens: {error}") from error
        if len(blocks) == 0:
            raise UsageError(
                f"{flag} {path} holds no block of {max_seq_length + 1} tokens (--train.max_seq_length "
                f"{max_seq_length}, and the token after it) in any chunk; lower it or give more data"
            )
        return blocks
