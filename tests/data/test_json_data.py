import json
import re
from pathlib import Path
from typing import Any

import pytest

from litce import cli, cli_parser
from litce.args import UsageError
from litce.data import JSON
from litce.recipes import pretrain
from litce.tokenizer import Tokenizer
from tests.tiny import save_tokenizer

ROW = {"instruction": "w1 w2", "output": "w3 w4"}
CHAT = {
    "messages": [
        {"role": "user", "content": "w1"},
        {"role": "assistant", "content": "w2"},
        {"role": "user", "content": "w3"},
        {"role": "assistant", "content": "w4 w5"},
    ]
}
TEMPLATE = (
    "{% for message in messages %}{{ ' w90' if message.role == 'user' else ' w91' }} {{ message.content }}"
    "{% if message.role == 'assistant' %} <|endoftext|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %} w91{% endif %}"
)
EOS = 70_000


def rows(number: int) -> list[dict[str, Any]]:
    return [{"instruction": f"w{i}", "output": f"w{i + 1000} w{i}"} for i in range(number)]


def write(path: Path, content: str | bytes | list[Any]) -> Path:
    """The text, or a row per line."""
    if isinstance(content, list):
        content = "\n".join(map(json.dumps, content))
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def connected(path: Path, tokenizer: Tokenizer, max_seq_length: int = 64, **options: Any) -> JSON:
    data = JSON(path, **options)
    data.connect(tokenizer, max_seq_length)
    return data


def supervised(data: JSON, index: int = 0) -> list[int]:
    targets = data.train_dataset()[index]["targets"]
    return targets[targets != -100].tolist()


@pytest.fixture
def chat_tokenizer(tmp_path: Path, big_tokenizer: Tokenizer) -> Tokenizer:
    big_tokenizer.save(tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer(tmp_path / "chat")


@pytest.mark.parametrize(
    "form",
    [
        json.dumps([ROW, ROW | {"input": None}]),
        "\ufeff" + json.dumps([ROW, ROW | {"input": ""}], indent=2),
        f"{json.dumps(ROW)}\n{json.dumps(ROW)}",
        f"\ufeff\n\n{json.dumps(ROW)}\r\n  \r\n{json.dumps(ROW)}\r\n\n",
    ],
    ids=["list", "indented list with byte order mark", "lines", "lines with byte order mark and blank ones"],
)
def test_lists_and_lines_are_read(tmp_path: Path, big_tokenizer: Tokenizer, form: str) -> None:
    val = write(tmp_path / "val.json", [ROW])
    data = connected(write(tmp_path / "a.json", form), big_tokenizer, val_path=val, prompt_style="raw")
    assert len(data.train_dataset()) == 2
    for i in (0, 1):
        assert data.train_dataset()[i]["input_ids"].tolist() == [1, 2, 3, 4]
        assert data.train_dataset()[i]["targets"].tolist() == [-100, 3, 4, EOS]


def test_line_separators_inside_a_text_do_not_end_the_row(tmp_path: Path, big_tokenizer: Tokenizer) -> None:
    text = json.dumps({"instruction": "w1\u2028w2", "output": "w3\x85w4"}, ensure_ascii=False)
    data = connected(write(tmp_path / "a.jsonl", text), big_tokenizer, val_path=tmp_path / "a.jsonl")
    assert supervised(data) == [3, 4, EOS]


def test_input_is_read_and_not_learned(tmp_path: Path, big_tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "a.jsonl", [ROW | {"input": "w7 w8"}])
    assert supervised(connected(path, big_tokenizer, val_path=path)) == [3, 4, EOS]
    data = connected(path, big_tokenizer, val_path=path, prompt_style="raw")
    assert data.train_dataset()[0]["input_ids"].tolist() == [1, 2, 7, 8, 3, 4]
    data = connected(path, big_tokenizer, val_path=path, prompt_style="raw", mask_prompt=False)
    assert supervised(data) == [2, 7, 8, 3, 4, EOS]


def test_every_assistant_message_is_learned(tmp_path: Path, chat_tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "a.jsonl", [CHAT, ROW])
    data = connected(path, chat_tokenizer, val_path=path, prompt_style="chat")
    sample = data.train_dataset()[0]
    assert sample["input_ids"].tolist() == [90, 1, 91, 2, EOS, 90, 3, 91, 4, 5]
    assert sample["targets"].tolist() == [-100, -100, 2, EOS, -100, -100, -100, 4, 5, EOS]
    assert data.train_dataset()[1]["input_ids"].tolist() == [90, 1, 2, 91, 3, 4]
    data = connected(path, chat_tokenizer, val_path=path)  # each row in its own style
    assert data.train_dataset()[0]["input_ids"].tolist() == sample["input_ids"].tolist()
    assert 90 not in data.train_dataset()[1]["input_ids"].tolist()
    assert supervised(data, 1) == [3, 4, EOS]


def test_one_question_and_answer_may_be_messages_in_any_style(tmp_path: Path, big_tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "a.jsonl", [{"messages": CHAT["messages"][:2]}])
    assert supervised(connected(path, big_tokenizer, val_path=path, prompt_style="alpaca")) == [2, EOS]


def test_calls_of_tools_may_come_without_words(tmp_path: Path, chat_tokenizer: Tokenizer) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "w6", "arguments": {}}}]}
    messages = [CHAT["messages"][0], call, {"role": "tool", "content": "w9"}, CHAT["messages"][1]]
    template = TEMPLATE.replace("message.content", "(message.content or message.tool_calls[0].function.name)")
    (chat_tokenizer.directory / "chat_template.jinja").write_text(template)
    path = write(tmp_path / "a.jsonl", [{"messages": messages}])
    assert supervised(connected(path, chat_tokenizer, val_path=path)) == [6, EOS, 2, EOS]


def test_empty_replies_are_left_out_and_counted(
    tmp_path: Path, big_tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = [ROW | {"output": " \n"}, {"messages": [CHAT["messages"][0], {"role": "assistant", "content": ""}]}]
    path = write(tmp_path / "a.jsonl", [ROW, *empty, ROW | {"output": "w5"}])
    data = connected(path, big_tokenizer, val_path=write(tmp_path / "b.jsonl", [ROW, empty[0]]))
    assert [supervised(data, i) for i in (0, 1)] == [[3, 4, EOS], [5, EOS]]
    assert len(data.train_dataset()) == 2
    line = "--data JSON: 2 training and 1 validation samples; 3 left out, as the reply is empty\n"
    assert capsys.readouterr().out == line
    with pytest.raises(UsageError, match=r"--data\.json_path .*a\.jsonl has no row with a reply, of 2 rows"):
        connected(write(path, empty), big_tokenizer)


def test_fraction_is_held_out_by_content(tmp_path: Path, big_tokenizer: Tokenizer) -> None:
    content = rows(100)
    path = write(tmp_path / "a.jsonl", content)
    data = connected(path, big_tokenizer, val_fraction=0.1)
    parts = [{int(d[i]["targets"][-2]) for i in range(len(d))} for d in (data.train_dataset(), data.val_dataset())]
    assert [len(part) for part in parts] == [90, 10]
    assert parts[0] | parts[1] == set(range(100))
    # Neither the order of the rows nor their copies nor the seed change which they are.
    data = JSON(write(path, content[::-1] + content), val_fraction=0.1)
    data.connect(big_tokenizer, 64, seed=1)
    assert (len(data.train_dataset()), len(data.val_dataset())) == (180, 20)
    assert {int(data.val_dataset()[i]["targets"][-2]) for i in range(20)} == parts[1]
    data = connected(write(path, content[:2]), big_tokenizer)
    assert (len(data.train_dataset()), len(data.val_dataset())) == (1, 1)
    with pytest.raises(UsageError, match=r"a\.jsonl has 1 row to train on and to validate on; give --data\.val_path"):
        connected(write(path, [ROW, ROW]), big_tokenizer)


def message(**changes: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2", **changes}]}


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (
            [ROW, {"instruction": "w1"}],
            r'a\.json line 2 has no "output", only "instruction"; a row needs "instruction" and',
        ),
        ([ROW, {}], r'line 2 has no "instruction", only nothing; a row needs'),
        (
            json.dumps([ROW, {"prompt": "w1", "output": "w2"}]),
            r'a\.json row 2 has no "instruction", only "prompt", "output"',
        ),
        ([ROW, ROW | {"output": 3}], r'line 2 has a number as "output"; give a text'),
        ([ROW, ROW | {"output": True}], r'line 2 has true or false as "output"'),
        ([ROW | {"instruction": None}], r'line 1 has null as "instruction"'),
        ([ROW | {"input": ["w1"]}], r'line 1 has a list as "input"'),
        ([ROW | {"instruction": "  "}], r'line 1 has an empty "instruction"'),
        ([ROW | {"output": "a\ud800"}], r'line 1 has a broken character in "output"'),
        ([ROW, 5], r"line 2 is a number; a row needs"),
        ('["w1"]', r"row 1 is a text; a row needs"),
        ('{"data": [1]}', r'line 1 has no "instruction", only "data"'),
        (f"{json.dumps(ROW)}\n\n{{'a': 1}}", r"line 3 is not valid JSON \(.*double quotes, column 2\)"),
        (
            f"{json.dumps(ROW)}\n{json.dumps(ROW)[:-4]}",
            r"line 2 is not valid JSON \(Unterminated string .*column \d+\)",
        ),
        ('[{"instruction": "w1"},\n {"output" "w2"}]', r"a\.json is not valid JSON \(.*line 2, column 12\)"),
        (json.dumps(ROW, indent=1), r"line 1 is not valid JSON .*or has a row on each line"),
        ("[" * 100_000, r"a\.json is nested too deeply"),
        (b'{"instruction": "\xff"}', r"a\.json is not UTF-8 \(byte 17\); convert it"),
        ("", r"--data\.json_path .*a\.json has no row with a reply, of 0 rows"),
        ([{"messages": {}}], r'line 1 has an object as "messages"; give a list'),
        ([{"messages": []}], r'line 1 has no message with the "role" assistant'),
        ([{"messages": ["w1"]}], r"line 1 message 1 is a text"),
        (
            [message(role="assitant")],
            r"line 1 message 2 has the \"role\" 'assitant'; give one of system, .* assistant, tool",
        ),
        ([message(content=None)], r'line 1 message 2 has null as "content"'),
        ([{"messages": [{"from": "human", "value": "w1"}]}], r'line 1 message 1 has no "role", only "from", "value"'),
        ([CHAT, ROW], r"has no chat template; add a chat_template\.jinja"),
    ],
)
def test_bad_rows_are_named(
    tmp_path: Path, big_tokenizer: Tokenizer, content: str | bytes | list[Any], error: str
) -> None:
    path = write(tmp_path / "a.json", content)
    with pytest.raises(UsageError, match=error) as caught:
        connected(path, big_tokenizer)
    assert "\n" not in str(caught.value)


def test_the_row_that_a_style_cannot_express_is_named(tmp_path: Path, chat_tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "a.jsonl", [ROW, CHAT])
    with pytest.raises(
        UsageError, match=r"a\.jsonl line 2 has messages of user, assistant, user, assistant, and prompt"
    ):
        connected(path, chat_tokenizer, prompt_style="alpaca", val_path=path)
    (chat_tokenizer.directory / "chat_template.jinja").write_text("{{ raise_exception('No tools') }}")
    with pytest.raises(UsageError, match=r"a\.jsonl line 2 is refused by the chat template in .*jinja: No tools"):
        connected(path, chat_tokenizer, val_path=path)


def test_missing_files_and_tokenizers_are_refused(tmp_path: Path, big_tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "a.jsonl", [ROW])
    with pytest.raises(UsageError, match=r"--data\.json_path .*none\.json is not a file"):
        connected(tmp_path / "none.json", big_tokenizer)
    with pytest.raises(UsageError, match=r"--data\.val_path .*none\.json is not a file"):
        connected(path, big_tokenizer, val_path=tmp_path / "none.json")
    with pytest.raises(UsageError, match=r"--data JSON needs a tokenizer; give --tokenizer_dir"):
        JSON(path, path).connect(None, 8)
    with pytest.raises(UsageError, match=r"--data\.val_fraction must be between 0 and 1, got 2"):
        JSON(path, val_fraction=2)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = cli_parser.build_parser("pretrain", pretrain.setup)
    words = ["--data", "JSON", "--data.json_path=a.json", "--data.prompt_style=chat", "--data.mask_prompt=false"]
    assert cli_parser.parse(parser, words)["data"] == JSON(Path("a.json"), prompt_style="chat", mask_prompt=False)
    with pytest.raises(UsageError, match=r"--data\.json_path is required"):
        cli_parser.parse(parser, words[:2])
    # From a wrong row to one line and exit code 2, before anything is saved.
    path = write(tmp_path / "a.json", [ROW, {"instruction": "w1"}])
    words = [
        "--data=JSON",
        f"--data.json_path={path}",
        "--tokenizer_dir",
        save_tokenizer(tmp_path),
        "--eval.prompt=null",
    ]
    with pytest.raises(SystemExit) as caught:
        cli.main(["pretrain", *words, f"--out_dir={tmp_path / 'out'}"])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r'litce pretrain: error: \S+a\.json line 2 has no "output".*\n', error)
    assert not (tmp_path / "out" / "final").exists()
