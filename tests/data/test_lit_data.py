import sys

import numpy as np
import pytest
import torch

from litce.args import UsageError
from litce.data import LitData


def test_blocks_are_shifted_int64_samples_by_index(fake_litdata: None) -> None:
    data = LitData("train", "val")
    data.connect(None, max_seq_length=8)
    train = data.train_dataset()
    assert (len(train), len(data.val_dataset())) == (2, 1)
    assert train[1]["input_ids"].tolist() == list(range(65_539, 65_547))
    assert train[1]["targets"].tolist() == list(range(65_540, 65_548))
    assert train[1]["targets"].dtype == torch.int64
    with pytest.raises(IndexError):
        train[2]


def test_unusable_streams_are_refused(fake_litdata: None) -> None:
    with pytest.raises(UsageError, match=r"--data\.val_path val holds no block of 16 tokens"):
        LitData("train", "val").connect(None, max_seq_length=15)
    with pytest.raises(UsageError, match=r"--data\.path other is not a readable litdata stream"):
        LitData("other", "val").connect(None, max_seq_length=8)


def test_missing_extra_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "litdata", None)
    with pytest.raises(UsageError, match=r"pip install 'litce\[streaming\]'"):
        LitData("train", "val").connect(None, max_seq_length=8)


def test_real_streams_keep_ids_above_16_bits(tmp_path_factory: pytest.TempPathFactory) -> None:
    litdata = pytest.importorskip("litdata")
    from litdata.streaming.writer import BinaryWriter

    folder = tmp_path_factory.mktemp("stream")
    ids = np.arange(65_500, 65_500 + 90, dtype=np.int32)
    writer = BinaryWriter(str(folder), chunk_bytes="64MB", item_loader=litdata.TokensLoader(block_size=9))
    for i, document in enumerate(np.split(ids, 3)):
        writer.add_item(i, torch.from_numpy(document))
    writer.done()
    writer.merge()
    data = LitData(str(folder), str(folder))
    data.connect(None, max_seq_length=8)
    blocks = data.train_dataset()
    assert torch.cat([blocks[i]["targets"][-1:] for i in range(len(blocks))]).tolist() == ids[8::9].tolist()
