import builtins
import io
import subprocess
import sys
from pathlib import Path

import pytest

import litce
from litce import chat
from litce.args import UsageError
from litce.chat import Conversation, setup
from litce.cli import main
from litce.llm import LLM
from tests.tiny import CHAT_TEMPLATE, save_byte_model, save_byte_tokenizer

GREEDY = {"max_new_tokens": 20, "temperature": 0.0}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return save_byte_model(tmp_path, block_size=256)


@pytest.fixture
def llm(directory: Path) -> LLM:
    return litce.load(directory, device="cpu")


def lengths_of(llm: LLM) -> list[int]:
    """A list that gets the number of tokens of each forward pass."""
    lengths: list[int] = []
    llm.model.transformer.wte.register_forward_hook(lambda module, args, output: lengths.append(args[0].size(1)))
    return lengths


def test_each_reply_is_that_to_the_whole_conversation_and_computes_the_new_part_alone(
    llm: LLM, directory: Path
) -> None:
    fresh, lengths = litce.load(directory, device="cpu"), lengths_of(llm)
    conversation = Conversation(llm, **GREEDY)
    for i, message in enumerate(["día", "and", "what is it?"]):
        previous = len(lengths)
        messages = [*conversation.messages, {"role": "user", "content": message}]
        reply = "".join(conversation.reply(message))
        assert conversation.messages == [*messages, {"role": "assistant", "content": reply}]
        assert reply == fresh.chat(messages, **GREEDY) and len(set(reply)) > 3
        new = f"user: {message}<end>\nassistant: " if i == 0 else f"<end>\nuser: {message}<end>\nassistant: "
        # The last token of the reply before, too, which nothing was computed from.
        assert lengths[previous] == len(llm.tokenizer.encode(new)) + (i > 0)
        assert set(lengths[previous + 1 :]) == {1}


def test_the_cache_grows_and_the_replies_stay(llm: LLM, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MIN_CACHE", 1)
    fresh = litce.load(directory, device="cpu")
    conversation = Conversation(llm, **{**GREEDY, "max_new_tokens": 8})
    sizes = []
    for _ in range(9):
        reply = "".join(conversation.reply("more"))
        assert reply == fresh.chat(conversation.messages[:-1], **{**GREEDY, "max_new_tokens": 8})
        assert llm.model.kv_cache is not None
        sizes.append(llm.model.kv_cache.length)
    # At the end the conversation is longer than the window.
    assert len(conversation.ids) > 256 == sizes[-1] and sizes == sorted(sizes) and len(set(sizes)) == 3


def test_a_template_that_rewrites_replies_is_followed(llm: LLM, directory: Path) -> None:
    """The cache serves up to where the texts part."""
    save_byte_tokenizer(directory, chat_template=CHAT_TEMPLATE.replace("m.content", "(m.content | replace('e', 'E'))"))
    llm, fresh = litce.load(directory, device="cpu"), litce.load(directory, device="cpu")
    lengths = lengths_of(llm)
    conversation = Conversation(llm, **GREEDY)
    "".join(conversation.reply("hello"))
    conversation.messages[-1]["content"] = "rewritten"
    previous = len(lengths)
    reply = "".join(conversation.reply("again"))
    assert reply == fresh.chat(conversation.messages[:-1], **GREEDY)
    text = "rEwrittEn<end>\nuser: again<end>\nassistant: "
    assert lengths[previous] == len(llm.tokenizer.encode(text))


def test_an_interrupted_reply_is_what_was_read_of_it(llm: LLM, directory: Path) -> None:
    fresh = litce.load(directory, device="cpu")
    conversation = Conversation(llm, **GREEDY)
    pieces = conversation.reply("day")
    read = "".join(next(pieces) for _ in range(7))
    pieces.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": read}
    assert "".join(conversation.reply("on")) == fresh.chat(conversation.messages[:-1], **GREEDY)

    calls = 0

    def interrupt(*args: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt

    handle = llm.model.transformer.h[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        "".join(conversation.reply("and on"))
    handle.remove()
    assert "".join(conversation.reply("so")) == fresh.chat(conversation.messages[:-1], **GREEDY)


def test_a_refused_message_leaves_the_conversation(llm: LLM, directory: Path) -> None:
    template = "{% if messages[-1].content == 'bad' %}{{ raise_exception('no such word') }}{% endif %}" + CHAT_TEMPLATE
    save_byte_tokenizer(directory, chat_template=template)
    conversation = Conversation(litce.load(directory, device="cpu"), **GREEDY)
    "".join(conversation.reply("good"))
    before = list(conversation.messages)
    with pytest.raises(ValueError, match="no such word"):
        next(conversation.reply("bad"))
    assert conversation.messages == before


def run(monkeypatch: pytest.MonkeyPatch, directory: Path, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    setup(directory, max_new_tokens=10, temperature=0.0)


def test_lines_of_a_pipe_are_answered_one_by_one(
    llm: LLM, directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"max_new_tokens": 10, "temperature": 0.0}
    first = llm.chat([{"role": "user", "content": "one"}], **options)
    messages = [*({"role": r, "content": c} for r, c in (("user", "one"), ("assistant", first), ("user", "two")))]
    expected = f"{first}\n{llm.chat(messages, **options)}\n"
    for text in ("one\ntwo\n", "one\n\n  \ntwo", "one\ntwo\n/quit\nthree\n", "one\ntwo\n  /quit  "):
        run(monkeypatch, directory, text)
        captured = capsys.readouterr()
        assert captured.out == expected and captured.err == ""
    run(monkeypatch, directory, "")
    assert capsys.readouterr().out == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_prompt_and_ctrl_c_stops_a_reply(
    llm: LLM, directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed: list[str | type[BaseException]] = []
    shown = []

    def type_in(prompt: str) -> str:
        shown.append(prompt)
        line = typed.pop(0)
        if isinstance(line, str):
            return line
        raise line

    reply = Conversation.reply

    def interrupted(self: Conversation, message: str) -> object:
        for i, piece in enumerate(reply(self, message)):
            if message == "stop" and i == 3:
                raise KeyboardInterrupt
            yield piece

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr(builtins, "input", type_in)
    monkeypatch.setattr(Conversation, "reply", interrupted)
    for end in ("/quit", EOFError, KeyboardInterrupt):
        typed[:], shown[:] = ["stop", "go on", end], []
        setup(directory, max_new_tokens=10, temperature=0.0)
        assert typed == [] and shown == ["> "] * 3
        lines = capsys.readouterr().out.split("\n")
        assert lines[0] == f"{directory}: /quit or ctrl-d ends, ctrl-c stops a reply"
        whole = llm.chat([{"role": "user", "content": "stop"}], max_new_tokens=10, temperature=0.0)
        assert whole.startswith(lines[1]) and 0 < len(lines[1]) < len(whole)


def test_messages_that_the_template_refuses_are_told(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_byte_tokenizer(directory, chat_template="{{ raise_exception('too rude') }}")
    run(monkeypatch, directory, "hey\n")
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("The message is refused by the chat template in ")
    assert "too rude" in captured.err and captured.err.count("\n") == 1


def test_a_conversation_beyond_the_window_is_told(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(monkeypatch, directory, "a" * 300 + "\n")
    tokens = 300 + len("user: <end>\nassistant: ") - len("<end>") + 1 + 10
    assert capsys.readouterr().err == f"The conversation has {tokens} tokens; the model sees the last 256.\n"


def test_a_tokenizer_without_a_template_is_refused_before_loading(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_byte_tokenizer(directory)
    (directory / "lit_model.safetensors").write_bytes(b"damaged")
    with pytest.raises(SystemExit):
        main(["chat", str(directory)])
    error = capsys.readouterr().err
    assert "has no chat template" in error and "litce generate" in error and error.count("\n") == 1
    with pytest.raises(UsageError, match="--temperature"):
        setup(directory, temperature=-1.0)


def test_a_real_process(directory: Path) -> None:
    script = "from litce.cli import main; main()"
    words = ["chat", str(directory), "--max_new_tokens", "5"]
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", script, *words], input="one\ntwo\n/quit\n", capture_output=True, text=True, cwd=root
    )
    assert done.returncode == 0 and done.stdout and done.stderr == ""
