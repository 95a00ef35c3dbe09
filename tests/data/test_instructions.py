import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import models, pre_tokenizers

from litce.args import EvalArgs, UsageError
from litce.config import Config
from litce.data import JSON
from litce.data.base import ResumableSampler, make_dataloader
from litce.data.instructions import MAX_OPENING
from litce.model import GPT
from litce.tokenizer import Tokenizer
from litce.training.checkpoint import load_model
from tests.tiny import MODEL, assert_equal_weights, logged, pretrain, train_args

EOS = 0
NUM_WORDS = 300


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Word `w<i>` has id i; the end of sequence has 0, the id that batches are padded with."""
    folder = tmp_path_factory.mktemp("tokenizer")
    vocab = {"<|endoftext|>": EOS} | {f"w{i}": i for i in range(1, NUM_WORDS)}
    processor = HFTokenizer(models.WordLevel(vocab, unk_token="w1"))
    processor.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    processor.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return Tokenizer(folder)


def words(ids: range | list[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


def instructions(path: Path, *pairs: tuple[range | list[int], range | list[int]], **options: Any) -> JSON:
    """Rows of a prompt's and a reply's ids, validated on themselves."""
    rows = [{"instruction": words(prompt), "output": words(reply)} for prompt, reply in pairs]
    path.write_text("\n".join(map(json.dumps, rows)))
    return JSON(path, path, prompt_style="raw", **options)


def numbered(path: Path, number: int, **options: Any) -> JSON:
    """Row i has the prompt i + 1 and a reply of 1 to 7 words."""
    return instructions(path, *(([i + 1], [200 + i] * (1 + i * 5 % 7)) for i in range(number)), **options)


def targets_of(data: JSON, index: int = 0) -> list[int]:
    return data.train_dataset()[index]["targets"].tolist()


@pytest.mark.parametrize(
    ("max_seq_length", "expected"),
    [
        (100, [-100, -100, 4, 5, 6, EOS]),
        (6, [-100, -100, 4, 5, 6, EOS]),
        (5, [-100, -100, 4, 5, 6]),
        (4, [-100, -100, 4, 5]),
        (3, [-100, -100, 4]),
    ],
)
def test_the_end_of_sequence_is_supervised_when_it_fits(
    tmp_path: Path, tokenizer: Tokenizer, max_seq_length: int, expected: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    data = instructions(tmp_path / "a.jsonl", ([1, 2, 3], [4, 5, 6]))
    data.connect(tokenizer, max_seq_length)
    assert targets_of(data) == expected
    assert data.train_dataset()[0]["input_ids"].tolist() == [1, 2, 3, 4, 5, 6][: len(expected)]
    cut = f"; 2 cut off at --train.max_seq_length {max_seq_length}" if len(expected) < 6 else ""
    assert capsys.readouterr().out == f"--data JSON: 1 training and 1 validation samples{cut}\n"


def test_a_padding_id_that_is_the_end_of_sequence_stays_supervised(tmp_path: Path, tokenizer: Tokenizer) -> None:
    data = instructions(tmp_path / "a.jsonl", ([1], [2]), ([3, 4], [5, 6, 7]))
    data.connect(tokenizer, 8)
    batch = data.collate([data.train_dataset()[0], data.train_dataset()[1]])
    assert batch["input_ids"].tolist() == [[1, 2, 0, 0, 0], [3, 4, 5, 6, 7]]
    assert batch["targets"].tolist() == [[2, EOS, -100, -100, -100], [-100, 5, 6, 7, EOS]]


def test_prompts_that_fill_the_window_are_counted_and_left_out(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [(range(1, 21), [5]), ([1], [2]), (range(1, 10), [5]), (range(1, 9), [5, 6])]
    for mask_prompt in (True, False):
        data = instructions(tmp_path / "a.jsonl", *rows, mask_prompt=mask_prompt)
        data.connect(tokenizer, max_seq_length=8)
        assert capsys.readouterr().out == (
            "--data JSON: 2 training and 2 validation samples; 4 left out, as the prompt fills --train.max_seq_length "
            "8; 2 cut off at --train.max_seq_length 8\n"
        )
        assert targets_of(data, 0) == [2, EOS]
        assert targets_of(data, 1) == [*([-100] * 7 if mask_prompt else range(2, 9)), 5]
    loader = make_dataloader(data.train_dataset(), data, batch_size=1, shuffle=True, seed=0, rank=0, world_size=1)
    assert len(list(loader)) == 2
    assert all((batch["targets"] != -100).any() for batch in loader)
    with pytest.raises(
        UsageError, match=r"a\.jsonl has no training sample: 1 conversations, .*max_seq_length 8; raise"
    ):
        instructions(tmp_path / "a.jsonl", rows[0]).connect(tokenizer, 8)


def test_without_a_mask_every_token_but_the_first_is_learned(tmp_path: Path, tokenizer: Tokenizer) -> None:
    data = instructions(tmp_path / "a.jsonl", ([1, 2, 3], [4, 5]), mask_prompt=False)
    data.connect(tokenizer, 8)
    assert targets_of(data) == [2, 3, 4, 5, EOS]


def test_index_outside_is_an_error(tmp_path: Path, tokenizer: Tokenizer) -> None:
    data = numbered(tmp_path / "a.jsonl", 3)
    data.connect(tokenizer, 8)
    for index in (-1, 3):
        with pytest.raises(IndexError):
            data.train_dataset()[index]


def test_ids_are_stored_in_the_smallest_type(tmp_path: Path, tokenizer: Tokenizer, big_tokenizer: Tokenizer) -> None:
    data = numbered(tmp_path / "a.jsonl", 3)
    for some_tokenizer, dtype in ((tokenizer, "uint16"), (big_tokenizer, "uint32")):
        data.connect(some_tokenizer, 8)
        assert data.train_dataset().conversations.ids.dtype == dtype


@pytest.mark.parametrize("number", [1, 5, 100, 2000])
def test_the_longest_samples_open_the_first_epoch(tmp_path: Path, tokenizer: Tokenizer, number: int) -> None:
    data = instructions(tmp_path / "a.jsonl", *(([1], range(1, 2 + i * 7 % 23)) for i in range(number)))
    data.connect(tokenizer, 16)
    dataset = data.train_dataset()
    loader = make_dataloader(dataset, data, batch_size=4, shuffle=True, seed=1, rank=0, world_size=1)
    lengths = [len(dataset[i]["input_ids"]) for i in loader.sampler]
    num_opening = min(MAX_OPENING, max(1, number // 20))
    assert (
        lengths[:num_opening]
        == sorted((len(dataset[i]["input_ids"]) for i in range(number)), reverse=True)[:num_opening]
    )
    assert sorted(loader.sampler) == list(range(number))
    assert next(iter(loader))["input_ids"].shape[1] == max(lengths)
    assert isinstance(loader.sampler, ResumableSampler)
    loader.sampler.set_position(1, 0)
    assert number < 100 or [len(dataset[i]["input_ids"]) for i in loader.sampler][:num_opening] != lengths[:num_opening]
    val_loader = make_dataloader(data.val_dataset(), data, batch_size=4, shuffle=False, seed=1, rank=0, world_size=1)
    assert list(val_loader.sampler) == list(range(number))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resuming_at_any_position_gives_the_uninterrupted_ids(
    tmp_path: Path, tokenizer: Tokenizer, num_workers: int
) -> None:
    """20 rows with ids, in epoch 0 and 1, for another object of the module."""

    def first_ids(workers: int, epoch: int, consumed: int) -> list[int]:
        data = numbered(tmp_path / "a.jsonl", 20, num_workers=workers)
        data.connect(tokenizer, 8)
        loader = make_dataloader(data.train_dataset(), data, batch_size=3, shuffle=True, seed=5, rank=0, world_size=1)
        assert isinstance(loader.sampler, ResumableSampler)
        loader.sampler.set_position(epoch, consumed)
        return [int(ids) for batch in loader for ids in batch["input_ids"][:, 0]]

    for epoch in (0, 1):
        whole = first_ids(0, epoch, 0)
        assert sorted(whole) == list(range(1, 21))
        for consumed in (0, 3, 10, 20):
            assert first_ids(num_workers, epoch, consumed) == whole[consumed:]


def test_workers_can_be_sent_the_module(tmp_path: Path, tokenizer: Tokenizer) -> None:
    data = numbered(tmp_path / "a.jsonl", 3)
    data.connect(tokenizer, 8)
    copy = pickle.loads(pickle.dumps(data))
    assert copy.train_dataset()[2]["targets"].tolist() == targets_of(data, 2)


def test_unigram_loss_by_hand(tmp_path: Path, tokenizer: Tokenizer) -> None:
    train = instructions(tmp_path / "a.jsonl", ([1], [2, 2]), ([1], [3]))
    val = instructions(tmp_path / "b.jsonl", ([9], [2, 4]))
    data = JSON(train.json_path, val.json_path, prompt_style="raw")
    data.connect(tokenizer, 8)
    # The targets 2, 2, 3 and twice the end of sequence, and one of each of the vocabulary.
    total = 5 + tokenizer.vocab_size
    assert data.unigram_loss() == pytest.approx(-np.log([3 / total, 1 / total, 3 / total]).mean(), rel=1e-12)


@pytest.mark.parametrize("mask_prompt", [True, False])
def test_targets_of_all_samples(tmp_path: Path, tokenizer: Tokenizer, mask_prompt: bool) -> None:
    rows = [([1], [2]), (range(1, 20), [5]), ([3, 4], [5, 6]), ([7], range(20, 40))]
    data = instructions(tmp_path / "a.jsonl", *rows, mask_prompt=mask_prompt)
    data.connect(tokenizer, 8)
    dataset = data.train_dataset()
    expected = [target for i in range(len(dataset)) for target in targets_of(data, i) if target != -100]
    assert dataset.targets().tolist() == expected


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit comparisons are made where kernels are deterministic."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def run(out_dir: Path, data: JSON, tokenizer: Tokenizer, block_size: int, **changes: Any) -> Any:
    model = {**MODEL, "vocab_size": NUM_WORDS, "block_size": block_size}
    return pretrain(out_dir, data, model_config=model, tokenizer_dir=tokenizer.directory, **changes)


@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_a_step_over_uneven_replies_is_that_of_the_mean_over_their_tokens(
    tmp_path: Path, tokenizer: Tokenizer, cpu: None, micro_batch_size: int
) -> None:
    """One reply of 2 supervised tokens and one of 200: neither batching nor padding changes the step."""
    data = instructions(tmp_path / "a.jsonl", ([1, 2, 3], [4]), ([5], range(50, 249)))
    args = train_args(global_batch_size=2, micro_batch_size=micro_batch_size, max_steps=1, min_lr=0.0)
    optimizer = {"class_path": "SGD", "lr": 0.5}
    summary = run(tmp_path / "out", data, tokenizer, 256, train=args, optimizer=optimizer)

    torch.manual_seed(42)
    model = GPT(Config(**{**MODEL, "vocab_size": NUM_WORDS, "block_size": 256}))
    torch.manual_seed(42)
    model.init_weights()
    samples = [([1, 2, 3, 4], [-100, -100, 4, EOS]), ([5, *range(50, 249)], [*range(50, 249), EOS])]
    losses = [
        F.cross_entropy(model(torch.tensor([ids]))[0], torch.tensor(targets), reduction="sum")
        for ids, targets in samples
    ]
    loss = (losses[0] + losses[1]) / 202
    loss.backward()
    assert summary.num_tokens == 202
    assert summary.train_loss == pytest.approx(loss.item(), rel=1e-6)
    trained = load_model(tmp_path / "out/final")
    for (name, before), after in zip(model.named_parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(after.detach(), before.detach() - 0.5 * before.grad, rtol=1e-5, atol=1e-7, msg=name)


def test_an_epoch_ends_with_its_samples(tmp_path: Path, tokenizer: Tokenizer, cpu: None) -> None:
    """4 samples in batches of 2 are 2 steps, also where a fifth row has no sample."""
    rows = [([i], [200 + i]) for i in range(1, 5)]
    data = instructions(tmp_path / "a.jsonl", *rows, (range(1, 10), [9]))
    args = train_args(global_batch_size=2, micro_batch_size=1, max_steps=None, epochs=1)
    summary = run(tmp_path / "out", data, tokenizer, 8, train=args)
    assert (summary.steps, summary.num_tokens) == (2, 8)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(
    tmp_path: Path, tokenizer: Tokenizer, cpu: None, num_workers: int
) -> None:
    """20 rows in batches of 8: step 4 lies in the second epoch, step 2 is in the middle of the first."""
    data = numbered(tmp_path / "a.jsonl", 20, num_workers=num_workers)
    args = train_args(global_batch_size=8, max_steps=6, save_interval=2)
    changes: dict[str, Any] = {"train": args, "eval": EvalArgs(interval=3)}
    run(tmp_path / "whole", data, tokenizer, 8, **changes)
    losses = logged(tmp_path / "whole")
    for step in (2, 4):
        out_dir = tmp_path / f"resumed-{step}"
        run(out_dir, data, tokenizer, 8, **changes, resume=tmp_path / f"whole/step-{step:08d}")
        assert_equal_weights(tmp_path / "whole/final", out_dir / "final")
        assert logged(out_dir) == {later: losses[later] for later in range(step + 1, 7)}
