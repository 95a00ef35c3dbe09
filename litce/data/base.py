"""What every data module offers, and the order in which its samples are read."""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

from litce.args import UsageError
from litce.tokenizer import Tokenizer

IGNORE_INDEX = -100
PADDING_SAMPLE = -1

Sample = dict[str, Tensor]


class DataModule(ABC):
    """A source of training and validation samples.

    The order of calls is `prepare()` on rank 0, `connect(...)` on every rank, then the datasets. A sample is
    `{"input_ids": int64 (T,), "targets": int64 (T,)}` with targets[t] the token after input_ids[t], or -100 where
    nothing is to be predicted.
    """

    num_workers: int = 0

    def prepare(self) -> None:  # noqa: B027  (modules that read files in place have nothing to prepare)
        """Download data and build caches. Idempotent, and safe when several processes call it at once."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that comes with the data; None when the user has to bring one."""
        return None

    @abstractmethod
    def connect(self, tokenizer: Tokenizer | None, max_seq_length: int, seed: int = 42) -> None:
        """Build the datasets for samples of at most `max_seq_length` positions.

        Raises:
            UsageError: the data cannot be read, or is shorter than one sequence.
        """

    def check_vocabulary(self, vocab_size: int) -> None:  # noqa: B027  (ids of a tokenizer are below its size)
        """Refuse ids that a model with `vocab_size` ids does not have, as far as that is known after `connect`.

        Raises:
            UsageError: naming such an id.
        """

    @abstractmethod
    def train_dataset(self) -> Dataset[Sample]:
        """Training samples, by index."""

    @abstractmethod
    def val_dataset(self) -> Dataset[Sample]:
        """Validation samples, by index."""

    def collate(self, samples: list[Sample]) -> Sample:
        """Stack samples to int64 (B, T), T the longest; shorter ones end in id 0 with target -100."""
        return {
            "input_ids": pad_sequence([s["input_ids"] for s in samples], batch_first=True, padding_value=0),
            "targets": pad_sequence([s["targets"] for s in samples], batch_first=True, padding_value=IGNORE_INDEX),
        }

    def opening_samples(self) -> Sequence[int]:
        """Indices of the training samples that open the first epoch; a function of the data alone."""
        return ()

    def unigram_loss(self) -> float | None:
        """Validation cross-entropy in nats per token of an add-one unigram model of the training tokens, if known.

        A model that has learned anything from context is below it.
        """
        return None


def require_data(data: DataModule | None) -> DataModule:
    """The module to train on.

    Raises:
        UsageError: there is none, or it asks for a negative number of workers.
    """
    if data is None:
        raise UsageError("--data: give the data to train on, such as --data PythonStdlib")
    if data.num_workers < 0:
        raise UsageError(f"--data.num_workers {data.num_workers}: must be 0 (read in the training loop) or greater")
    return data


class ResumableSampler(Sampler[int]):
    """Indices of one rank, in an order that depends on (seed, epoch) alone; those of `opening` open epoch 0.

    Position i of an epoch belongs to rank `i % world_size`, so that after k samples on every rank exactly the first
    `k * world_size` positions are consumed. Every rank yields `ceil(num_samples / world_size)` indices per epoch;
    where the samples run out it yields `PADDING_SAMPLE` (-1), which `make_dataloader` turns into a masked sample.

    The sampler never moves by itself: a loop counts the samples that it has consumed (a loader with workers reads
    ahead) and calls `set_position` before it iterates, in a new epoch as after a resume.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        shuffle: bool,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        opening: Sequence[int] = (),
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, world_size), got rank {rank} of world_size {world_size}")
        self.num_samples = num_samples
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.opening = torch.tensor(opening, dtype=torch.int64)
        self.epoch = 0
        self.start = 0

    def set_position(self, epoch: int, num_samples_consumed_on_this_rank: int) -> None:
        """Let the next iteration run over `epoch` without its first samples.

        Raises:
            ValueError: the epoch is negative, or has fewer samples than were consumed.
        """
        if epoch < 0 or not 0 <= num_samples_consumed_on_this_rank <= len(self):
            raise ValueError(
                f"position must lie in an epoch of {len(self)} samples per rank, got epoch {epoch}, "
                f"{num_samples_consumed_on_this_rank} samples; was the data changed since the checkpoint was saved?"
            )
        self.epoch = epoch
        self.start = num_samples_consumed_on_this_rank

    def __len__(self) -> int:
        """Samples of this rank in a whole epoch, wherever the position is."""
        return math.ceil(self.num_samples / self.world_size)

    def __iter__(self) -> Iterator[int]:
        order = torch.arange(self.num_samples)
        if self.shuffle:
            # Both numbers enter, so that epoch 1 of seed 0 is not epoch 0 of seed 1.
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
            order = torch.randperm(self.num_samples, generator=generator)
        if self.epoch == 0:
            order = torch.cat((self.opening, order[~torch.isin(order, self.opening)]))
        for step in range(self.start, len(self)):
            position = step * self.world_size + self.rank
            yield int(order[position]) if position < self.num_samples else PADDING_SAMPLE


class _WithPadding(Dataset[Sample]):
    """`dataset`, its ids checked, plus the masked sample that keeps ranks in step."""

    def __init__(self, dataset: Dataset[Sample], vocab_size: int | None) -> None:
        self.dataset = dataset
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # torch's Dataset declares no __len__

    def __getitem__(self, index: int) -> Sample:
        if index != PADDING_SAMPLE:
            sample = self.dataset[index]
            for ids in sample.values():
                if self.vocab_size is not None and ids.numel() and int(ids.max()) >= self.vocab_size:
                    raise UsageError(
                        f"--data: sample {index} holds the token id {int(ids.max())}, and the model has "
                        f"{self.vocab_size} ids; use the model's own tokenizer, and no text of special tokens that the "
                        "model lacks"
                    )
            return sample
        sample = self.dataset[0]
        return {**sample, "targets": torch.full_like(sample["targets"], IGNORE_INDEX)}


def make_dataloader(
    dataset: Dataset[Sample],
    data: DataModule,
    *,
    batch_size: int,
    shuffle: bool,
    seed: int,
    rank: int,
    world_size: int,
    vocab_size: int | None = None,
) -> DataLoader[Sample]:
    """Batches of `dataset`, {"input_ids", "targets"} of int64 (B, T), read through a `ResumableSampler`.

    With `vocab_size` an id from there on raises `UsageError` when its sample is read.

    The sampler is the loader's `.sampler`; its position applies from the next `iter(loader)`. The last batch of an
    epoch may be smaller. The order does not depend on `data.num_workers`.
    """
    if data.num_workers > 0:
        # Forked workers must not touch the thread pool of a tokenizer that this process has used.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    samples = _WithPadding(dataset, vocab_size)
    return DataLoader(
        samples,
        batch_size=batch_size,
        sampler=ResumableSampler(
            len(samples),
            shuffle=shuffle,
            seed=seed,
            rank=rank,
            world_size=world_size,
            opening=data.opening_samples() if shuffle else (),
        ),
        num_workers=data.num_workers,
        collate_fn=data.collate,
        # Only from page-locked memory is a copy to the GPU made while the CPU goes on.
        pin_memory=torch.cuda.is_available(),
        # Otherwise every new iterator draws from the global generator, and a resumed run would see other dropout.
        generator=torch.Generator().manual_seed(seed % 2**63),
    )
