import base64
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers

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


@pytest.fixture(scope="session")
def qwen_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The 151,643 tokens of Qwen's published ranks, in the package dashscope, as a tokenizer.json."""
    package = importlib.util.find_spec("dashscope")
    if package is None or package.origin is None:
        pytest.skip("dashscope is not installed")
    lines = (Path(package.origin).parent / "resources/qwen.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    # Byte-level BPE writes each byte as a printable character: most as themselves, the others from U+0100 on.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    names = {**{byte: chr(byte) for byte in plain}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}

    def name(token: bytes) -> str:
        return "".join(names[byte] for byte in token)

    # A token is merged from the two parts that the lower ranks leave of it.
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pair_ranks = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:], strict=False)]
            first = min(range(len(pair_ranks)), key=pair_ranks.__getitem__)
            assert pair_ranks[first] < rank
            parts[first : first + 2] = [parts[first] + parts[first + 1]]
        if len(parts) == 2:
            merges.append((name(parts[0]), name(parts[1])))
    vocab = {name(token): rank for token, rank in ranks.items()}
    processor = HFTokenizer(models.BPE(vocab, merges))
    processor.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    processor.decoder = decoders.ByteLevel()
    processor.add_special_tokens(["<|endoftext|>"])
    folder = tmp_path_factory.mktemp("qwen")
    processor.save(str(folder / "tokenizer.json"))
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
