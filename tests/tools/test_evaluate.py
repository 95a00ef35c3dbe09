import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from litce.args import UsageError
from litce.cli import main
from litce.config import Config
from litce.data import TextFiles
from litce.data.base import Sample
from litce.model import GPT
from litce.tokenizer import Tokenizer
from litce.tools.allocations import peak_new_bytes
from litce.tools.evaluate import evaluate, setup
from litce.tools.model_parity import CASES
from tests.tiny import SEQ_LENGTH, Numbers, pretrain, save_byte_tokenizer, save_tokenizer


def make_model(case: str, **changes: Any) -> GPT:
    torch.manual_seed(0)
    model = GPT(Config.from_hf(CASES[case], name=case, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def dense(model: GPT, data: Numbers) -> tuple[float, float, int]:
    """Loss, accuracy and number of tokens by all logits of each sample alone."""
    loss, correct, count = 0.0, 0, 0
    for i in range(data.num_val_samples):
        sample: Sample = data.val_dataset()[i]
        targets = sample["targets"]
        keep = targets != -100
        with torch.no_grad():
            logits = model(sample["input_ids"][None])[0, keep, : model.config.vocab_size]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss += float(F.cross_entropy(logits, targets[keep], reduction="sum"))
        correct += int((logits.argmax(-1) == targets[keep]).sum())
        count += int(keep.sum())
    return loss / count, correct / count, count


@pytest.mark.parametrize(
    ("case", "changes"), [("gemma2", {}), ("qwen2.5", {"vocab_size": 70}), ("gpt2", {"logit_scale": 0.5})]
)
def test_it_is_the_dense_computation_in_fp64_whatever_the_micro_batch(case: str, changes: dict[str, Any]) -> None:
    model, data = make_model(case, **changes), Numbers(num_val_samples=11)
    loss, accuracy, num_tokens = dense(copy.deepcopy(model).double(), data)
    results = [evaluate(model, data, micro_batch_size, bytes_per_id=[3] * 97) for micro_batch_size in (1, 4, 11, 20)]
    for result in results:
        assert result.num_tokens == num_tokens and result.num_samples == 11 and result.accuracy == accuracy
        # Some roundings of fp32 in each logit.
        assert abs(result.loss - loss) < 2e-6 * loss
        assert result.perplexity == pytest.approx(math.exp(result.loss), rel=1e-12)
        assert result.bits_per_byte == pytest.approx(result.loss / math.log(2) / 3, rel=1e-12)
    assert max(r.loss for r in results) - min(r.loss for r in results) < 1e-6 * loss


def test_errors_of_a_bf16_model_are_those_of_its_logits() -> None:
    model, data = make_model("llama3").bfloat16(), Numbers(num_val_samples=40)
    exact, with_logits, ours = dense(copy.deepcopy(model).double(), data), dense(model, data), evaluate(model, data, 4)
    # One mean: an error that is close to 0 by chance must not be the measure.
    assert abs(ours.loss - exact[0]) <= max(2 * abs(with_logits[0] - exact[0]), torch.finfo(torch.bfloat16).eps)


def test_logits_are_not_held() -> None:
    config = Config(block_size=SEQ_LENGTH, vocab_size=60_000, n_layer=1, n_head=2, n_embd=8)
    torch.manual_seed(0)
    model = GPT(config)
    data = Numbers(num_val_samples=64)
    held = peak_new_bytes(lambda: evaluate(model, data, 64))
    assert held < 64 * SEQ_LENGTH * 60_000 * 4 / 3


def test_max_iters_and_nothing_supervised() -> None:
    model = make_model("llama2")
    assert evaluate(model, Numbers(num_val_samples=11), 2, max_iters=3).num_samples == 6
    with pytest.raises(UsageError, match="--data: no token of the validation samples is supervised"):
        evaluate(model, Numbers(num_val_samples=2, masking="all"), 2)


def test_mode_is_as_it_was() -> None:
    model = make_model("llama2").train()
    evaluate(model, Numbers(), 2)
    assert model.training


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    data = Numbers(tokenizer_folder=save_tokenizer(tmp_path / "tokenizer"))
    final = str(pretrain(tmp_path / "run", data).checkpoint_dir)
    capsys.readouterr()
    path = tmp_path / "result.json"
    words = ["evaluate", final, "--data", "tests.tiny.Numbers", "--data.num_val_samples", "7"]
    main([*words, "--json", str(path), "--micro_batch_size", "3"])
    result = json.loads(path.read_text())
    assert list(tmp_path.glob(".*")) == []
    printed = capsys.readouterr().out.splitlines()[-1]
    assert printed.startswith(f"{result['num_tokens']} tokens in 7 samples: loss {result['loss']:.4f} nats per token")
    assert f"{result['bits_per_byte']:.4f} bits per byte" in printed
    # w0 to w9 have two letters, w10 to w59 three, the end of sequence is no text; the model's last two ids are no
    # token's.
    targets = torch.cat([Numbers().val_dataset()[i]["targets"] for i in range(7)]).tolist()
    sizes = [2] * 10 + [3] * 50 + [0, len("<unk>"), 0, 0]
    assert result["num_bytes"] == sum(sizes[i] for i in targets if i != -100)


def test_bytes_are_those_of_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITCE_CACHE", str(tmp_path / "cache"))
    text = "def f(x):\n    return x  # día, naïve, 日本語\n" * 6
    for folder in ("train", "val"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(text, encoding="utf-8")
        (tmp_path / folder / "b.txt").write_text(text, encoding="utf-8")
    tokenizer = Tokenizer(save_byte_tokenizer(tmp_path / "tokenizer"))
    data = TextFiles(path=tmp_path / "train", val_path=tmp_path / "val")
    data.connect(tokenizer, SEQ_LENGTH)
    config = Config(block_size=SEQ_LENGTH, vocab_size=tokenizer.vocab_size, n_layer=1, n_head=2, n_embd=16)
    result = evaluate(GPT(config), data, 5, bytes_per_id=tokenizer.num_bytes)
    # All but the very first token, which is predicted from nothing.
    assert result.num_bytes == 2 * len(text.encode()) - 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batch_size": 0}, "--micro_batch_size 0: must be at least 1"),
        ({"max_iters": 0}, "--max_iters 0: must be at least 1"),
        ({"json": Path("nowhere/a.json")}, "--json nowhere/a.json: the folder nowhere does not exist"),
        ({"data": None}, "--data: give the data"),
        ({"seed": -1}, "--seed -1"),
        ({"max_seq_length": 9}, "--max_seq_length 9: must be from 1 to the model's block_size 8"),
        ({"max_seq_length": 0}, "--max_seq_length 0: must be from 1"),
    ],
)
def test_mistakes(tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any], message: str) -> None:
    final = pretrain(tmp_path_factory.mktemp("run")).checkpoint_dir
    with pytest.raises(UsageError, match=message):
        setup(final, **{"data": Numbers(), **options})
