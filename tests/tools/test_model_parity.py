"""Every family against `transformers`: same weights in, same logits, loss and gradients out."""

import functools
import tempfile
from pathlib import Path

import pytest
import torch

from litce.args import UsageError
from litce.loss.options import LossOptions
from litce.model import GPT
from litce.tools import model_parity as parity
from litce.tools.model_parity import CASES, CHECKS, Pair, build


@pytest.fixture(params=CASES, scope="module")
def pair(request, tmp_path_factory):
    return build(request.param, tmp_path_factory.mktemp("parity"))


@pytest.mark.parametrize("check", CHECKS)
def test_family(pair, check):
    result = CHECKS[check](pair)
    assert result.ok, f"{result.where}: {result}, limit {result.limit}"


def configured(**values):
    def change(model: GPT) -> None:
        for field, value in values.items():
            assert getattr(model.config, field) != value
            setattr(model.config, field, value)

    return change


def attending(**values):
    def change(model: GPT) -> None:
        for block in model.transformer.h:
            for name, value in values.items():
                assert getattr(block.attn, name) != value
                setattr(block.attn, name, value)

    return change


def without_softcap(model: GPT) -> None:
    model.lm_head.options = LossOptions()


def with_another_weight(model: GPT) -> None:
    with torch.no_grad():
        model.transformer.h[1].mlp.down.weight[3, 4] += 0.01


@functools.cache
def built(case: str) -> Pair:
    with tempfile.TemporaryDirectory() as folder:
        return build(case, Path(folder))


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("gpt2", with_another_weight),
        ("llama3", configured(rope_scaling=None)),
        ("mistral", configured(sliding_window=8)),
        ("qwen2.5-window", configured(sliding_window_pattern=None)),
        ("phi3", configured(rotary_percentage=1.0)),
        ("gemma2", without_softcap),
        ("gemma2", attending(softcap=8.0)),
        ("gemma2", attending(scale=0.25)),
        ("gemma3", configured(rope_local_base=None)),
        ("gemma3", configured(rope_scaling=None)),
        ("gemma3", configured(scale_embeddings=False)),
    ],
)
def test_a_difference_turns_red(case, change, monkeypatch):
    """What a check is there for fails it."""
    pair = built(case)
    model = GPT(pair.model.config)
    model.load_state_dict(pair.model.state_dict())
    saved = dict(vars(model.config))
    change(model)
    try:
        for check in ("logits", "chunked"):
            assert not CHECKS[check](Pair(pair.reference, model, pair.sources, pair.directory)).ok
    finally:
        vars(model.config).update(saved)


def test_the_command_prints_a_table(capsys):
    parity.parity("llama2")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == " ".join(CHECKS).split()
    assert lines[1].split()[0] == "llama2" and "RED" not in lines[1]
    assert lines[2:] == ["all agree"]


def test_the_command_fails_when_a_check_does(capsys, monkeypatch):
    monkeypatch.setitem(parity.CHECKS, "logits", lambda pair: parity.Result(float("nan"), 1.0, "somewhere"))
    with pytest.raises(SystemExit) as caught:
        parity.parity("llama2")
    assert caught.value.code == 1
    assert "llama2, logits: somewhere nan RED, limit 1.0" in capsys.readouterr().out


def test_unknown_model_and_missing_package(monkeypatch):
    with pytest.raises(UsageError, match="--model gpt9: choose one of gpt2, "):
        parity.parity("gpt9")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install transformers"):
        parity.parity()
