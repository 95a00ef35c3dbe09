import subprocess
import sys
from pathlib import Path

import pytest
import torch

import litce
from litce.args import UsageError
from litce.generate import generate
from litce.llm import LLM, TextStream
from litce.prompts import Chat
from litce.tokenizer import Tokenizer
from tests.tiny import save_byte_model, save_byte_tokenizer


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save_byte_model(tmp_path)


@pytest.fixture
def llm(directory: Path) -> LLM:
    return litce.load(directory, device="cpu")


def continuation(llm: LLM, ids: list[int], stop_ids: set[int], **options: object) -> list[int]:
    vocab_size = llm.tokenizer.vocab_size
    return generate(llm.model, [ids], stop_ids=stop_ids, vocab_size=vocab_size, **options)[0]


def test_generate_is_the_decoded_continuation(llm: LLM) -> None:
    ids = continuation(llm, llm.tokenizer.encode("día"), {256}, max_new_tokens=40, temperature=0.0)
    text = llm.generate("día", max_new_tokens=40, temperature=0.0)
    assert text == llm.tokenizer.decode(ids) and len(set(ids)) > 3
    assert "".join(llm.stream("día", max_new_tokens=40, temperature=0.0)) == text
    prompts = ["día", "a", "some more of it"]
    assert llm.generate(prompts, max_new_tokens=40, temperature=0.0) == [
        llm.generate(prompt, max_new_tokens=40, temperature=0.0) for prompt in prompts
    ]
    assert llm.generate([]) == []


def test_each_call_has_its_own_seed(llm: LLM) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, again, other = (llm.generate("a", seed=seed) for seed in (1, 1, 2))
    assert first == again != other and torch.equal(torch.get_rng_state(), state)
    without = llm.generate("a")
    assert not torch.equal(torch.get_rng_state(), state)
    torch.set_rng_state(state)
    assert llm.generate("a") == without
    with pytest.raises(UsageError, match="--seed -1"):
        llm.generate("a", seed=-1)


def test_stop_texts_cut_the_result(llm: LLM) -> None:
    prompts = ["a", "b", "c"]
    full = llm.generate(prompts, max_new_tokens=40, seed=3)
    stop = [full[0][7:9], full[1][20:22]]
    expected = [text[: min([len(text), *(i for s in stop if (i := text.find(s)) >= 0)])] for text in full]
    assert llm.generate(prompts, max_new_tokens=40, seed=3, stop=stop) == expected
    assert llm.generate(prompts, max_new_tokens=40, seed=3, stop="none of it") == full
    assert len(expected[0]) <= 7 and len(expected[1]) <= 20
    with pytest.raises(UsageError, match="stop: an empty text"):
        llm.generate("a", stop="")


def test_generation_ends_once_every_text_is_cut(llm: LLM) -> None:
    steps = []
    llm.model.lm_head.register_forward_hook(lambda *args: steps.append(1))
    full = llm.generate(["a", "b"], max_new_tokens=40, temperature=0.0)
    assert len(steps) == 40
    llm.generate(["a", "b"], max_new_tokens=40, temperature=0.0, stop=[text[:1] for text in full])
    assert len(steps) < 60 and llm.model.kv_cache is None


def test_chat_is_the_continuation_of_the_rendered_messages(llm: LLM) -> None:
    messages = [{"role": "user", "content": "día"}]
    ids = llm.tokenizer.encode("user: día<end>\nassistant: ")
    expected = continuation(llm, ids, {256, 258}, max_new_tokens=40, temperature=0.0)
    assert llm.chat(messages, max_new_tokens=40, temperature=0.0) == llm.tokenizer.decode(expected)
    cut = llm.chat(messages, max_new_tokens=40, temperature=0.0, stop=llm.tokenizer.decode(expected)[3:4])
    assert len(cut) <= 3
    assert Chat(llm.tokenizer).stop_ids == {256, 258}
    save_byte_tokenizer(llm.tokenizer.directory)
    with pytest.raises(UsageError, match="has no chat template"):
        LLM(llm.model, Tokenizer(llm.tokenizer.directory)).chat(messages)


def test_mistakes(llm: LLM, directory: Path) -> None:
    with pytest.raises(UsageError, match="prompt: got '', and the tokenizer has no bos token"):
        llm.generate("")
    with pytest.raises(UsageError, match="--temperature: must be 0"):
        llm.generate("a", temperature=-1)
    with pytest.raises(TypeError, match="temprature"):
        llm.generate("a", temprature=1)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match="holds no tokenizer.json; copy the model's tokenizer files there"):
        litce.load(directory)
    with pytest.raises(UsageError, match="nowhere is not a folder"):
        litce.load(directory / "nowhere")


TEXTS = ["día 日本語 🎉 end", "\ufffd replaced \ufffd", "a<end>b", ""]


@pytest.mark.parametrize("prompt", ["", "x", "été", "a long prompt 日本語"])
@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_is_the_text(tmp_path: Path, prompt: str, text: str) -> None:
    tokenizer = Tokenizer(save_byte_tokenizer(tmp_path))
    stream = TextStream(tokenizer, tokenizer.encode(prompt))
    pieces = [stream.push(i) for i in tokenizer.encode(text)]
    assert "".join(pieces) + stream.rest() == text
    # No piece shows a part of a character.
    assert all(piece in text for piece in pieces)


def test_bytes_of_an_unfinished_character_come_last(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save_byte_tokenizer(tmp_path))
    stream = TextStream(tokenizer, tokenizer.encode("x"))
    ids = tokenizer.encode("aé")[:-1]
    assert [stream.push(i) for i in ids] == ["a", ""] and stream.rest() == "\ufffd"


def test_importing_litce_is_cheap() -> None:
    script = "import sys, litce; assert litce.load and not {'torch', 'tokenizers', 'jinja2'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[1], check=True)
