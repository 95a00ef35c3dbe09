import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import models, pre_tokenizers

from litce.data import python_stdlib
from litce.tokenizer import Tokenizer

NUM_WORDS = 70_000


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LITCE_CACHE", str(tmp_path / "cache"))
    # The pool of threads of the tokenizer would not survive the forks of these tests.
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def big_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Word `w<i>` has id i, up to 69,999; then the end of the text and the unknown word."""
    folder = tmp_path_factory.mktemp("big_tokenizer")
    vocab = {f"w{i}": i for i in range(NUM_WORDS)} | {"<|endoftext|>": NUM_WORDS, "<unk>": NUM_WORDS + 1}
    processor = HFTokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    processor.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    processor.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return Tokenizer(folder)


@pytest.fixture
def stdlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of 30 files, with everything in it that has to be left out."""
    root = tmp_path / "python3"
    for i in range(30):
        file = root / ("package" if i % 2 else ".") / f"module{i:02}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"def function_{i}(x):\n    return x + {i}\n\n\n" * 8, encoding="utf-8")
    for name in ("test/a.py", "email/tests/a.py", "site-packages/a.py", "idlelib/idle_test/a.py", "__pycache__/a.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("excluded = True\n")
    (root / "latin.py").write_bytes(b"# \xe9\n")
    (root / "empty.py").write_bytes(b"")
    monkeypatch.setattr(python_stdlib, "stdlib_root", lambda: root)
    return root


class FakeStream(list[torch.Tensor]):
    """Blocks of `block_size` tokens of a stream of ids above 16 bits, as litdata returns them by index."""

    def __init__(self, path: str, item_loader: SimpleNamespace) -> None:
        num_tokens = {"train": 20, "val": 10}[path]
        ids = torch.arange(65_530, 65_530 + num_tokens, dtype=torch.int32)
        size = item_loader.block_size
        super().__init__(ids[i : i + size] for i in range(0, num_tokens - size + 1, size))


@pytest.fixture
def fake_litdata(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("litdata")
    module.StreamingDataset = FakeStream  # type: ignore[attr-defined]
    module.TokensLoader = lambda block_size: SimpleNamespace(block_size=block_size)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "litdata", module)
