"""Prompts: how an instruction or a conversation becomes the text that a model reads and the text that it learns.

A conversation is tokenized in pieces, prompt and reply apart, and never as one text. Generation encodes the prompt
alone and appends the ids that it draws: a token that reaches over the seam, such as "unbelievable" behind a prompt that
ends in "un", is never drawn, and in training it would hide the start of the reply in the prompt.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from litce.args import UsageError
from litce.tokenizer import Tokenizer

StyleName = Literal["alpaca", "raw", "chat"]
Message = dict[str, Any]

# The texts of Stanford Alpaca (https://github.com/tatsu-lab/stanford_alpaca), with a line break at the end.
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)


@dataclass(frozen=True)
class Turn:
    """Text that is read, and the reply to it, which is learned."""

    prompt: str
    reply: str


class PromptStyle(ABC):
    """How instructions and conversations are written."""

    name: StyleName
    adds_bos = True
    """Whether a text starts with the tokenizer's begin-of-sequence token, if it has one"""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @abstractmethod
    def prompt(self, instruction: str, input: str = "") -> str:
        """The text that ends where the reply begins; `input` is what the instruction is about."""

    @abstractmethod
    def conversations(self, messages: Sequence[Message], input: str = "") -> list[list[Turn]]:
        """The turns of a conversation, {"role", "content"} each, with every assistant's message once.

        `input` is what the first message is about. The result is one list, or one for each reply where the text before
        a late reply does not go on from that of an early one.

        Raises:
            ValueError: the style cannot express the conversation; the message says why and what to do.
        """

    def encode_prompt(self, instruction: str, input: str = "") -> list[int]:
        """Ids of `prompt`, as training has them in front of the reply."""
        return self._bos() + self.tokenizer.encode(self.prompt(instruction, input))

    def encode(self, conversations: Sequence[Sequence[Turn]]) -> list[tuple[list[int], list[bool]]]:
        """Ids of each conversation, and whether each id is part of a reply; the last reply ends in the end of sequence.

        Raises:
            UsageError: the tokenizer has no end-of-sequence token.
        """
        (eos,) = self.tokenizer.encode("", eos=True)
        texts = [[text for turn in turns for text in (turn.prompt, turn.reply)] for turns in conversations]
        encoded = []
        for pieces in self.tokenizer.encode_pieces(texts):
            ids = self._bos()
            is_reply = [False] * len(ids)
            for i, piece in enumerate(pieces):
                ids += piece
                is_reply += [i % 2 == 1] * len(piece)
            # A chat template may have written it.
            if ids[-1:] != [eos]:
                ids.append(eos)
                is_reply.append(True)
            encoded.append((ids, is_reply))
        return encoded

    def _bos(self) -> list[int]:
        bos_id = self.tokenizer.bos_id
        return [bos_id] if self.adds_bos and bos_id is not None else []


class _SingleTurn(PromptStyle):
    """A style for one instruction and the reply to it."""

    def conversations(self, messages: Sequence[Message], input: str = "") -> list[list[Turn]]:
        """See `PromptStyle.conversations`."""
        roles = [message["role"] for message in messages]
        if roles != ["user", "assistant"]:
            raise ValueError(
                f"has messages of {', '.join(roles)}, and prompt style {self.name} has a place for one of user and one "
                "of assistant; use --data.prompt_style chat"
            )
        user, assistant = messages
        return [[Turn(self.prompt(user["content"], input), assistant["content"])]]


class Alpaca(_SingleTurn):
    """The prompts of Stanford Alpaca, with and without input."""

    name = "alpaca"

    def prompt(self, instruction: str, input: str = "") -> str:
        """See `PromptStyle.prompt`."""
        return (ALPACA_INPUT if input else ALPACA).format(instruction=instruction, input=input)


class Raw(_SingleTurn):
    """The instruction and nothing else; an input follows after an empty line."""

    name = "raw"

    def prompt(self, instruction: str, input: str = "") -> str:
        """See `PromptStyle.prompt`."""
        return f"{instruction}\n\n{input}" if input else instruction


class Chat(PromptStyle):
    """The tokenizer's own chat template, in the sandbox and with the extensions that Hugging Face renders it with.

    A reply is what the template writes between the prompt for it and what follows it, up to the end-of-sequence token:
    the assistant's content and the template's mark of its end.

    Raises:
        UsageError: the tokenizer has no template, or one with a mistake.
    """

    name = "chat"
    adds_bos = False  # the template writes it

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        found = tokenizer.chat_template
        if found is None:
            raise UsageError(
                f"the tokenizer in {tokenizer.directory} has no chat template; add a chat_template.jinja, "
                "or use --data.prompt_style alpaca"
            )
        self.path, source = found
        self.special_tokens = tokenizer.special_tokens
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        # Templates that can do without the date of today do: the same data gives the same prompts on every day.
        if "strftime_now is defined" not in source:
            environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self.template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UsageError(f"the chat template in {self.path} is broken ({error}); correct it") from error

    def prompt(self, instruction: str, input: str = "") -> str:
        """See `PromptStyle.prompt`; without a system message unless the template writes one."""
        return self.render([_user_message(instruction, input)], add_generation_prompt=True)

    def conversations(self, messages: Sequence[Message], input: str = "") -> list[list[Turn]]:
        """See `PromptStyle.conversations`; messages after the assistant's last are left out."""
        if input:
            messages = [_user_message(messages[0]["content"], input), *messages[1:]]
        replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        whole = [self._turn(messages[: i + 1], number) for number, i in enumerate(replies, start=1)]
        turns = whole[:1]
        so_far = "".join((turn.prompt + turn.reply) for turn in turns)
        for turn in whole[1:]:
            # Some templates leave out of old replies what they had when they were new, such as reasoning.
            if not turn.prompt.startswith(so_far):
                return [[turn] for turn in whole]
            turns.append(Turn(turn.prompt[len(so_far) :], turn.reply))
            so_far = turn.prompt + turn.reply
        return [turns]

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The text of a conversation, and with `add_generation_prompt` the start of the assistant's reply to it.

        Raises:
            ValueError: the template refuses the conversation, or fails.
        """
        try:
            return self.template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self.special_tokens
            )
        except Exception as error:  # a template is a program, and fails in every way that programs do
            raise ValueError(f"is refused by the chat template in {self.path}: {error}; change one of them") from error

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a reply: those that end a text, and the special token that the template writes behind one."""
        reply = "litce"
        try:
            messages = [_user_message("0", ""), {"role": "assistant", "content": reply}]
            text = self.render(messages, add_generation_prompt=False)
        except ValueError:
            return self.tokenizer.stop_ids
        end = self.tokenizer.encode(text.rpartition(reply)[2].lstrip())[:1]
        return self.tokenizer.stop_ids | (self.tokenizer.special_ids & frozenset(end))

    def _turn(self, messages: Sequence[Message], number: int) -> Turn:
        """The last reply of `messages`, and everything before it."""
        prompt = self.render(messages[:-1], add_generation_prompt=True)
        text = self.render(messages, add_generation_prompt=False)
        if not text.startswith(prompt):
            raise ValueError(
                f"has a reply of the assistant, number {number}, that the chat template in {self.path} writes "
                "differently from its own prompt for it; change the template, or use --data.prompt_style alpaca"
            )
        reply = text[len(prompt) :]
        eos = self.special_tokens.get("eos_token")
        end = reply.rfind(eos) if eos else -1
        # What follows the end of sequence is never generated.
        return Turn(prompt, reply.rstrip() if eos is None or end < 0 else reply[: end + len(eos)])


STYLES: dict[str, type[PromptStyle]] = {"alpaca": Alpaca, "raw": Raw, "chat": Chat}


def _user_message(instruction: str, input: str) -> Message:
    return {"role": "user", "content": f"{instruction}\n\n{input}" if input else instruction}


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Not jinja's own, which escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _GenerationBlocks(Extension):
    """`{% generation %} ... {% endgeneration %}` around the assistant's words; renders as if it were not there."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
