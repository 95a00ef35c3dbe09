import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from litce.args import UsageError
from litce.prompts import STYLES, Chat, Turn
from litce.tokenizer import Tokenizer

MERGES = ["u n", "b e", "un be", "l i", "li e", "unbe lie", "v a", "b le", "l e", "unbelie va", "unbelieva ble"]
EOS, START, END = "</s>", "<|im_start|>", "<|im_end|>"

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Llama 2: roles have to take turns, the end of sequence is written by name, the begin too.
TURNS = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ ' ' + message['content'] + ' ' + eos_token }}"
    "{% endif %}{% endfor %}"
)
# As Gemma: what ends a turn is not the end of sequence.
OTHER_END = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen 3: the reasoning of old replies is left out.
REASONING = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{% continue %}{% endif %}"
    "{{ message | tojson }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}{% endif %}"
)

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "one un"},
    {"role": "assistant", "content": "believable"},
    {"role": "user", "content": "naïve 日本 <b>?"},
    {"role": "assistant", "content": "\nun\n"},
]


def tokenizer_of(
    folder: Path, kind: str = "bytes", template: str | None = None, eos: str = END, bos: str | None = None
) -> Tokenizer:
    """A BPE with the word "unbelievable", as one of the kinds that are in use."""
    if kind in ("bytes", "bytes with space"):
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "bytes with space", use_regex=False)
        decoder = decoders.ByteLevel()
        normalizer = None
    else:
        alphabet = ["▁", *map(chr, range(33, 127)), *(f"<0x{i:02X}>" for i in range(256))]
        pre_tokenizer = None
        normalizer = None
        if kind == "prepend":
            normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        else:
            pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind.split()[1], split=False)
        decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    tokens = dict.fromkeys(["<unk>", *sorted(alphabet), *(merge.replace(" ", "") for merge in MERGES)])
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split()) for merge in MERGES]
    processor = HFTokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    if normalizer is not None:
        processor.normalizer = normalizer
    if pre_tokenizer is not None:
        processor.pre_tokenizer = pre_tokenizer
    processor.decoder = decoder
    processor.add_special_tokens([EOS, "<s>", START, END])
    folder.mkdir(exist_ok=True)
    processor.save(str(folder / "tokenizer.json"))
    config = {"eos_token": eos, "bos_token": bos, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return Tokenizer(folder)


def replies(tokenizer: Tokenizer, ids: list[int], is_reply: list[bool]) -> list[str]:
    """Text of each run of supervised ids."""
    runs: list[list[int]] = []
    for i, (token_id, supervised) in enumerate(zip(ids, is_reply, strict=True)):
        if supervised and (i == 0 or not is_reply[i - 1]):
            runs.append([])
        if supervised:
            runs[-1].append(token_id)
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("bos", [None, "<s>"])
@pytest.mark.parametrize(
    "kind", ["bytes", "bytes with space", "prepend", "metaspace always", "metaspace first", "metaspace never"]
)
def test_exactly_the_reply_is_supervised_where_a_token_would_reach_over_the_seam(
    tmp_path: Path, kind: str, bos: str | None
) -> None:
    tokenizer = tokenizer_of(tmp_path, kind, bos=bos)
    assert len(tokenizer.encode("unbelievable")) < len(tokenizer.encode("un")) + len(tokenizer.encode("believable"))
    style = STYLES["raw"](tokenizer)
    for prompt, reply in [("so un", "believable"), ("un ", "believable un"), ("un\n", "\nun"), ("un", " un")]:
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]
        ((ids, is_reply),) = style.encode(style.conversations(messages))
        num_prompt = is_reply.index(True)
        assert is_reply == [i >= num_prompt for i in range(len(ids))]
        assert ids[:num_prompt] == style.encode_prompt(prompt)
        assert ids[-1] == tokenizer.eos_id and ids.count(tokenizer.eos_id) == 1
        # The decoder may drop a space where a text starts, which is why the reply is not decoded alone.
        start = tokenizer.decode(ids[:num_prompt])
        whole = tokenizer.decode(ids)
        assert whole[len(start) :] == reply + END
        assert whole.removeprefix("<s>").strip() == (prompt + reply + END).strip()


def test_alpaca_is_the_published_text(tmp_path: Path) -> None:
    style = STYLES["alpaca"](tokenizer_of(tmp_path))
    assert style.prompt("Add.") == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\nAdd.\n\n### Response:\n"
    )
    assert style.prompt("Add {input}.", "1 {instruction}") == (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nAdd {input}.\n\n### Input:\n"
        "1 {instruction}\n\n### Response:\n"
    )
    assert STYLES["raw"](tokenizer_of(tmp_path)).prompt("a", "b") == "a\n\nb"


def test_single_turn_styles_refuse_conversations(tmp_path: Path) -> None:
    for name in ("alpaca", "raw"):
        with pytest.raises(ValueError, match=f"system, user, .* prompt style {name} .*use --data.prompt_style chat"):
            STYLES[name](tokenizer_of(tmp_path)).conversations(CHAT)


@pytest.mark.parametrize(
    ("template", "messages", "eos"),
    [(CHATML, CHAT, END), (TURNS, CHAT[1:], EOS), (OTHER_END, CHAT, EOS), (REASONING, CHAT, END), (CONTROL, CHAT, END)],
)
def test_templates_render_as_in_transformers(tmp_path: Path, template: str, messages: list, eos: str) -> None:
    style = Chat(tokenizer_of(tmp_path, template=template, eos=eos, bos="<s>"))
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for prompt in (True, False):
        expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert style.render(messages, add_generation_prompt=prompt) == expected


@pytest.mark.parametrize("kind", ["bytes", "metaspace first", "prepend"])
def test_every_assistant_turn_is_supervised_as_in_transformers(tmp_path: Path, kind: str) -> None:
    tokenizer = tokenizer_of(tmp_path, kind, CHATML)
    # The seam before a line break would be a token of its own in transformers.
    messages = [*CHAT[:4], {"role": "assistant", "content": "un 2\n"}]
    style = Chat(tokenizer)
    ((ids, is_reply),) = style.encode(style.conversations(messages))
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path).apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    line_break = reference["input_ids"][len(ids) :]
    assert tokenizer.decode(line_break).strip(" ") == "\n"  # behind the last reply's end, where nothing is generated
    assert reference["input_ids"][: len(ids)] == ids
    assert reference["assistant_masks"][: len(ids)] == [int(reply) for reply in is_reply]
    assert replies(tokenizer, ids, is_reply) == [f"believable{END}", f"un 2\n{END}"]


@pytest.mark.parametrize(
    ("template", "eos", "bos", "expected"),
    [
        (CHATML, END, None, [f"believable{END}", f"\nun\n{END}"]),
        (TURNS, EOS, "<s>", [f" believable {EOS}", f" \nun\n {EOS}"]),
        (OTHER_END, EOS, "<s>", [f"believable{END}", f"un{END}{EOS}"]),
    ],
)
def test_replies_end_as_the_template_ends_them(
    tmp_path: Path, template: str, eos: str, bos: str | None, expected: list[str]
) -> None:
    tokenizer = tokenizer_of(tmp_path, template=template, eos=eos, bos=bos)
    style = Chat(tokenizer)
    messages = CHAT[1:] if template == TURNS else CHAT
    conversations = style.conversations([*messages, {"role": "user", "content": "left out"}])
    ((ids, is_reply),) = style.encode(conversations)
    assert replies(tokenizer, ids, is_reply) == expected
    text = style.render(messages, add_generation_prompt=False)
    assert tokenizer.decode(ids) == (text if text.endswith(eos) else text.rstrip() + (EOS if eos == EOS else ""))
    assert ids.count(3) <= 1  # the begin of sequence is the template's, not doubled
    start = style.render(messages[: messages.index(CHAT[2])], add_generation_prompt=True)
    assert ids[: is_reply.index(True)] == tokenizer.encode(start)


@pytest.mark.parametrize(
    ("template", "eos", "ends"),
    [(CHATML, END, {END}), (CHATML, EOS, {EOS, END}), (TURNS, EOS, {EOS}), (OTHER_END, EOS, {EOS, END})],
)
def test_a_reply_stops_where_the_template_ends_it(tmp_path: Path, template: str, eos: str, ends: set[str]) -> None:
    tokenizer = tokenizer_of(tmp_path, template=template, eos=eos, bos="<s>")
    assert Chat(tokenizer).stop_ids == {tokenizer.processor.token_to_id(end) for end in ends}


def test_a_template_without_an_end_or_for_other_messages_leaves_the_end_of_text(tmp_path: Path) -> None:
    for template in ("{{ messages[-1].content }}", "{{ raise_exception('no') }}", "nothing"):
        tokenizer = tokenizer_of(tmp_path, template=template, eos=EOS)
        assert Chat(tokenizer).stop_ids == {tokenizer.eos_id}


def test_replies_that_are_read_otherwise_later_are_conversations_of_their_own(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, template=REASONING)
    style = Chat(tokenizer)
    conversations = style.conversations(CHAT)
    think = "<think>\n\n</think>\n\n"
    assert [turn.reply for turns in conversations for turn in turns] == [
        f"{think}believable{END}",
        f"{think}\nun\n{END}",
    ]
    for turns, number in zip(conversations, (2, 4), strict=True):
        assert turns == [Turn(style.render(CHAT[:number], add_generation_prompt=True), turns[0].reply)]
    assert think not in conversations[1][0].prompt


def test_chat_takes_instructions(tmp_path: Path) -> None:
    style = Chat(tokenizer_of(tmp_path, template=CHATML))
    assert style.prompt("a", "b") == f"{START}user\na\n\nb{END}\n{START}assistant\n"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}]
    assert style.conversations(messages, "b") == [[Turn(style.prompt("a", "b"), f"c{END}")]]
    assert style.encode_prompt("a", "b") == style.tokenizer.encode(style.prompt("a", "b"))


def test_templates_are_found_where_hugging_face_has_them(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    with pytest.raises(UsageError, match=r"has no chat template; add a chat_template\.jinja"):
        Chat(tokenizer)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for value in ("A", [{"name": "tool_use", "template": "B"}, {"name": "default", "template": "A"}]):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": value}))
        assert Chat(tokenizer).render([], add_generation_prompt=True) == "A"
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}")
    assert Chat(tokenizer).render([], add_generation_prompt=True) == END


def test_the_date_is_written_only_where_the_template_insists(tmp_path: Path) -> None:
    guarded = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}26 Jul 2024{% endif %}"
    assert Chat(tokenizer_of(tmp_path, template=guarded)).render([], add_generation_prompt=True) == "26 Jul 2024"
    style = Chat(tokenizer_of(tmp_path, template="{{ strftime_now('%Y') }}"))
    assert re.fullmatch(r"\d{4}", style.render([], add_generation_prompt=True))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (TURNS, "refused by the chat template in .*chat_template.jinja: Roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{{ messages[99].content }}", "no element 99"),
        (
            "{% if add_generation_prompt %}<think>{% endif %}{{ messages[-1].content }}",
            "number 1, that the chat template in .* writes differently from its own prompt",
        ),
    ],
)
def test_what_a_template_cannot_write_is_refused(tmp_path: Path, template: str, message: str) -> None:
    style = Chat(tokenizer_of(tmp_path, template=template))
    with pytest.raises(ValueError, match=message):
        style.conversations(CHAT)


def test_broken_templates_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"chat_template\.jinja is broken \(.*endfor"):
        Chat(tokenizer_of(tmp_path, template="{% for message in messages %}"))


def test_a_tokenizer_without_end_of_sequence_is_refused(tmp_path: Path) -> None:
    processor = HFTokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    processor.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UsageError, match="has no eos token"):
        STYLES["raw"](Tokenizer(tmp_path)).encode([[Turn("a", "a")]])
