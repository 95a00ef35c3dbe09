import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from litce import data as data_modules
from litce.args import UsageError
from litce.data import JSON, Docstrings, LitData, PythonStdlib, TextFiles, TokenFile
from litce.data.base import PADDING_SAMPLE, DataModule, ResumableSampler, Sample, make_dataloader, require_data
from litce.tokenizer import Tokenizer

NUM_SAMPLES = 20


class Numbered(Dataset[Sample]):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Sample:
        assert 0 <= index < self.num_samples
        length = 2 + index % 3
        return {"input_ids": torch.full((length,), index), "targets": torch.full((length,), index + 1)}


class NumberedData(DataModule):
    def __init__(self, num_samples: int = NUM_SAMPLES, num_workers: int = 0) -> None:
        self.num_samples = num_samples
        self.num_workers = num_workers

    def connect(self, tokenizer: object, max_seq_length: int, seed: int = 42) -> None: ...

    def train_dataset(self) -> Numbered:
        return Numbered(self.num_samples)

    def val_dataset(self) -> Numbered:
        return Numbered(self.num_samples)


def loader_of(
    data: NumberedData, rank: int = 0, world_size: int = 1, shuffle: bool = True, seed: int = 7
) -> DataLoader[Sample]:
    return make_dataloader(
        data.train_dataset(), data, batch_size=2, shuffle=shuffle, seed=seed, rank=rank, world_size=world_size
    )


def sample_ids(loader: DataLoader[Sample]) -> Iterator[int]:
    """Id of each sample in the order of the batches, -1 for a masked one."""
    for batch in loader:
        for inputs, targets in zip(batch["input_ids"], batch["targets"], strict=True):
            yield -1 if (targets == -100).all() else int(inputs[0])


def epochs_from(loader: DataLoader[Sample], epoch: int, consumed: int) -> list[int]:
    """The rest of the epoch, and the whole of the next."""
    assert isinstance(loader.sampler, ResumableSampler)
    loader.sampler.set_position(epoch, consumed)
    rest = list(sample_ids(loader))
    loader.sampler.set_position(epoch + 1, 0)
    return rest + list(sample_ids(loader))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_resuming_at_every_position_gives_the_uninterrupted_ids(world_size: int, num_workers: int) -> None:
    per_rank = NUM_SAMPLES // world_size
    for rank in range(world_size):
        uninterrupted = {epoch: epochs_from(loader_of(NumberedData(), rank, world_size), epoch, 0) for epoch in (0, 1)}
        for epoch, consumed in itertools.product((0, 1), range(per_rank + 1)):
            resumed = epochs_from(loader_of(NumberedData(num_workers=num_workers), rank, world_size), epoch, consumed)
            assert resumed == uninterrupted[epoch][consumed:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_workers_read_ahead_is_not_lost(num_workers: int) -> None:
    data = NumberedData(num_workers=num_workers)
    interrupted = list(itertools.islice(sample_ids(loader_of(data)), 6))
    assert interrupted + epochs_from(loader_of(data), 0, 6) == epochs_from(loader_of(NumberedData()), 0, 0)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("num_samples", "world_size"), [(20, 1), (20, 2), (20, 3), (7, 4), (1, 4)])
def test_ranks_agree_on_counts_and_see_each_sample_once(num_samples: int, world_size: int, shuffle: bool) -> None:
    data = NumberedData(num_samples)
    ranks = [list(sample_ids(loader_of(data, rank, world_size, shuffle))) for rank in range(world_size)]
    assert {len(ids) for ids in ranks} == {math.ceil(num_samples / world_size)}
    seen = sorted(itertools.chain.from_iterable(ranks))
    padding = -num_samples % world_size
    assert seen == [-1] * padding + list(range(num_samples))


def test_consumed_samples_are_a_prefix_whatever_the_world_size() -> None:
    order = list(ResumableSampler(NUM_SAMPLES, shuffle=True, seed=3))
    halves = [list(ResumableSampler(NUM_SAMPLES, shuffle=True, seed=3, rank=rank, world_size=2)) for rank in (0, 1)]
    assert sorted(halves[0][:4] + halves[1][:4]) == sorted(order[:8])


def test_opening_samples_open_the_first_epoch_alone_and_whatever_the_world_size() -> None:
    opening = [17, 3, 5]
    sampler = ResumableSampler(NUM_SAMPLES, shuffle=True, seed=3, opening=opening)
    order = list(sampler)
    assert order[:3] == opening
    assert sorted(order) == list(range(NUM_SAMPLES))
    plain = ResumableSampler(NUM_SAMPLES, shuffle=True, seed=3)
    assert order[3:] == [index for index in plain if index not in opening]
    for rank in (0, 1):
        half = ResumableSampler(NUM_SAMPLES, shuffle=True, seed=3, rank=rank, world_size=2, opening=opening)
        assert list(half) == order[rank::2]
        half.set_position(0, 2)
        assert list(half) == order[rank + 4 :: 2]
    for epoch_sampler in (sampler, plain):
        epoch_sampler.set_position(1, 0)
    assert list(sampler) == list(plain)


def test_order_changes_with_epoch_and_seed_and_not_without_shuffling() -> None:
    orders = []
    for seed, epoch in itertools.product((0, 1), (0, 1)):
        sampler = ResumableSampler(NUM_SAMPLES, shuffle=True, seed=seed)
        sampler.set_position(epoch, 0)
        orders.append(tuple(sampler))
    assert len(set(orders)) == 4
    assert list(ResumableSampler(5, shuffle=False, seed=0)) == [0, 1, 2, 3, 4]


def test_length_is_that_of_the_epoch_after_a_resume() -> None:
    loader = loader_of(NumberedData(5))
    assert len(loader) == 3
    assert isinstance(loader.sampler, ResumableSampler)
    loader.sampler.set_position(0, 4)
    assert len(loader) == 3
    assert len(list(loader)) == 1


def test_sampler_refuses_impossible_positions_and_ranks() -> None:
    sampler = ResumableSampler(5, shuffle=True, seed=0, world_size=2)
    for epoch, consumed in ((-1, 0), (0, 4), (0, -1)):
        with pytest.raises(ValueError, match="epoch of 3 samples per rank"):
            sampler.set_position(epoch, consumed)
    with pytest.raises(ValueError, match="rank 2 of world_size 2"):
        ResumableSampler(5, shuffle=True, seed=0, rank=2, world_size=2)


def test_padding_sample_is_masked() -> None:
    loader = loader_of(NumberedData(1), rank=1, world_size=2)
    assert list(loader.sampler) == [PADDING_SAMPLE]
    (batch,) = loader
    assert (batch["targets"] == -100).all()
    assert batch["input_ids"].shape == batch["targets"].shape == (1, 2)


def test_collate_pads_to_the_longest() -> None:
    data = NumberedData()
    batch = data.collate([data.train_dataset()[1], data.train_dataset()[2]])
    assert batch["input_ids"].tolist() == [[1, 1, 1, 0], [2, 2, 2, 2]]
    assert batch["targets"].tolist() == [[2, 2, 2, -100], [3, 3, 3, 3]]
    assert batch["input_ids"].dtype == batch["targets"].dtype == torch.int64


@pytest.mark.parametrize("name", sorted(set(data_modules.__all__) - {"DataModule"}))
def test_ids_above_16_bits_are_kept_by_every_module(
    name: str, tmp_path: Path, stdlib: Path, fake_litdata: None, big_tokenizer: Tokenizer
) -> None:
    words, ids = "w65535 w65536 w69999 w1", [65_535, 65_536, 69_999, 1, 70_000]
    text, rows, binary = tmp_path / "a.txt", tmp_path / "a.json", tmp_path / "a.bin"
    for path in (text, text.with_name("b.txt")):
        path.write_text(words)
    rows.write_text(json.dumps([{"instruction": "w2", "output": words}]))
    np.array(ids, "uint32").tofile(binary)
    for path in stdlib.rglob("module*.py"):
        path.write_text(f'def {path.stem}():\n    """{words}"""\n    pass\n' if name == "Docstrings" else words)
    modules: dict[str, tuple[Callable[[], DataModule], list[int]]] = {
        "Docstrings": (lambda: Docstrings(prompt_style="raw"), ids),
        "JSON": (lambda: JSON(rows, rows, prompt_style="raw"), ids),
        "LitData": (lambda: LitData("train", "val"), list(range(65_531, 65_539))),
        "PythonStdlib": (lambda: PythonStdlib(vocab_size=257), ids[1:]),
        "TextFiles": (lambda: TextFiles(text, text.with_name("b.txt")), ids[1:]),
        "TokenFile": (lambda: TokenFile(binary, binary, dtype="uint32"), ids[1:]),
    }
    build, expected = modules[name]
    data = build()
    data.prepare()
    data.connect(big_tokenizer, max_seq_length=4 if expected == ids[1:] else 8)
    for dataset in (data.train_dataset(), data.val_dataset()):
        targets = dataset[0]["targets"]
        assert targets[targets != -100].tolist() == expected


@pytest.mark.slow
def test_a_published_vocabulary_of_151643_tokens_survives(tmp_path: Path, qwen_tokenizer: Tokenizer) -> None:
    """Every token that is text on its own, through a text file and through a reply."""
    assert qwen_tokenizer.eos_id == 151_643
    texts = [qwen_tokenizer.decode([i]) for i in range(151_643)]
    whole = [i for i, text in enumerate(texts) if "\ufffd" not in text and "\r" not in text]
    assert len(whole) > 140_000
    ids = qwen_tokenizer.encode_batch([texts[i] for i in whole])
    assert ids == [[i] for i in whole]
    replies = [texts[i] for i in whole if texts[i].strip()]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"instruction": "a", "output": text}) for text in replies))
    data = JSON(tmp_path / "a.jsonl", tmp_path / "a.jsonl", prompt_style="raw")
    data.connect(qwen_tokenizer, 8)
    expected = [i for i in whole if texts[i].strip()]
    assert data.train_dataset().targets().reshape(-1, 2)[:, 0].tolist() == expected
    for name, text in (("a", "".join(texts[i] for i in whole)), ("b", "".join(texts[i] for i in whole[::-1]))):
        (tmp_path / f"{name}.txt").write_bytes(text.encode())
    text_data = TextFiles(tmp_path / "a.txt", tmp_path / "b.txt")
    text_data.connect(qwen_tokenizer, 8)
    for dataset, order in ((text_data.train_dataset(), whole), (text_data.val_dataset(), whole[::-1])):
        assert int(dataset.tokens.max()) == 151_643
        assert qwen_tokenizer.decode(dataset.tokens.tolist()[:-1]) == "".join(texts[i] for i in order)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_reading_leaves_the_global_generator_alone(num_workers: int) -> None:
    before = torch.get_rng_state()
    list(loader_of(NumberedData(4, num_workers)))
    assert torch.equal(before, torch.get_rng_state())


def test_the_loader_has_a_seeded_generator_of_its_own() -> None:
    """Workers seed theirs from it: augmentations are repeated by a run of the same seed, and differ by the seed."""
    first, again, other = (loader_of(NumberedData(), seed=seed).generator for seed in (1, 1, 2))
    drawn = [int(torch.randint(2**40, (), generator=generator)) for generator in (first, again, other)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("cuda", [True, False])
def test_batches_are_page_locked_for_a_gpu(monkeypatch: pytest.MonkeyPatch, cuda: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert loader_of(NumberedData()).pin_memory == cuda


def test_no_data_and_negative_workers_are_refused() -> None:
    with pytest.raises(UsageError, match="--data: give the data to train on"):
        require_data(None)
    with pytest.raises(UsageError, match="--data.num_workers -1: must be 0"):
        require_data(NumberedData(num_workers=-1))
    data = NumberedData(num_workers=2)
    assert require_data(data) is data


def test_ids_that_the_model_lacks_are_refused_when_they_are_read() -> None:
    data = NumberedData()
    options = {"batch_size": 2, "shuffle": False, "seed": 0, "rank": 0, "world_size": 1}
    loader = make_dataloader(data.val_dataset(), data, vocab_size=NUM_SAMPLES + 1, **options)
    assert len(list(loader)) == NUM_SAMPLES / 2
    with pytest.raises(UsageError, match="--data: sample 14 holds the token id 15, and the model has 15 ids; use the"):
        list(make_dataloader(data.val_dataset(), data, vocab_size=15, **options))
