"""`litce chat`: a conversation with a model, of which the cache keeps what has been computed."""

import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from litce.args import UsageError, require_seed
from litce.generate import check_sampling
from litce.llm import LLM, load_tokenizer
from litce.prompts import Chat, Message
from litce.training.checkpoint import require_model

QUIT = "/quit"

# Positions of the first KV cache: several short turns.
MIN_CACHE = 1024


class Conversation:
    """Messages to a model and its replies.

    The model's KV cache is kept between the replies, and only what it does not hold yet is computed: where the text of
    the conversation goes on from that of the last reply, as with most templates, the new part alone.

    Args:
        llm: the model; its KV cache belongs to the conversation from now on.
        options: as of `litce.generate.stream`.

    Raises:
        UsageError: the tokenizer has no chat template.
    """

    def __init__(self, llm: LLM, **options: Any) -> None:
        self.llm = llm
        self.style = Chat(llm.tokenizer)
        self.options = options
        self.messages: list[Message] = []
        self.text = ""  # up to the end of the last reply, if that came to its end
        self.ids: list[int] = []  # of the text
        self.cached: list[int] = []  # those in the model's cache

    def reply(self, message: str) -> Generator[str, None, None]:
        """The reply to `message`, piece by piece. If it is not read to its end, what was read becomes the reply.

        Raises:
            ValueError: the template refuses the conversation, which then stays without the message.
        """
        messages = [*self.messages, {"role": "user", "content": message}]
        text = self.style.render(messages, add_generation_prompt=True)
        prompt_ids = self._encode(text)
        num_cached = self._reuse(prompt_ids)
        drawn: list[int] = []
        reply, finished = "", False
        try:
            for piece in self.llm.stream_ids(
                prompt_ids, stop_ids=self.style.stop_ids, drawn=drawn, num_cached=num_cached, **self.options
            ):
                reply += piece
                yield piece
            finished = True
        finally:
            cache = self.llm.model.kv_cache
            assert cache is not None
            window = self.llm.model.max_seq_length
            self.cached = (prompt_ids[-window:] + drawn)[: cache.num_tokens]
            self.messages = [*messages, {"role": "assistant", "content": reply}]
            # An interrupted reply may lack the text of its last ids.
            self.text, self.ids = text + reply if finished else "", prompt_ids + drawn

    def _encode(self, text: str) -> list[int]:
        if self.text and text.startswith(self.text):
            # As in training, where no token reaches from a reply into what follows it.
            (_, new), *_ = self.llm.tokenizer.encode_pieces([[self.text, text[len(self.text) :]]])
            return self.ids + new
        return self.llm.tokenizer.encode(text)

    def _reuse(self, prompt_ids: list[int]) -> int:
        """The number of the prompt's tokens that the model's cache holds; the cache has room for the reply."""
        model = self.llm.model
        prompt_ids = prompt_ids[-model.max_seq_length :]
        room = min(model.max_seq_length, len(prompt_ids) + self.options["max_new_tokens"])
        if model.kv_cache is None or model.kv_cache.length < room:
            # Twice as much, so that a long conversation is computed anew a few times only.
            model.set_kv_cache(1, min(model.max_seq_length, max(2 * room, MIN_CACHE)))
            return 0
        equal = [a == b for a, b in zip(self.cached, prompt_ids[:-1], strict=False)]
        return equal.index(False) if False in equal else len(equal)


def setup(
    checkpoint_dir: Path,
    *,
    max_new_tokens: int = 512,
    temperature: float = 0.8,
    top_k: int | None = 50,
    top_p: float = 1.0,
    seed: int = 1234,
) -> None:
    """Talk to a finetuned model, in the form of its tokenizer's chat template.

    A line is a message. /quit or the end of the input ends the conversation, ctrl-c a reply. What comes from a pipe is
    answered line by line.

    Args:
        checkpoint_dir: Folder with the model and its tokenizer, as training or convert_from_hf writes it.
        max_new_tokens: Most tokens of a reply; fewer when the model ends it.
        temperature: Below 1 sharpens the distribution, above 1 flattens it, 0 always takes the likeliest token.
        top_k: Sample among this many likeliest tokens; null for the whole vocabulary.
        top_p: Sample among the likeliest tokens that have this probability together; 1 for the whole vocabulary.
        seed: Seed of the sampling; the same seed gives the same replies.
    """
    check_sampling(max_new_tokens, temperature, top_k, top_p)
    require_seed(seed)
    require_model(checkpoint_dir)
    if load_tokenizer(checkpoint_dir).chat_template is None:
        raise UsageError(
            f"the tokenizer in {checkpoint_dir} has no chat template, so it does not say how a conversation is "
            "written; add the model's chat_template.jinja, or continue a text with litce generate"
        )
    llm = LLM.load(checkpoint_dir)
    conversation = Conversation(
        llm,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        generator=llm.generator(seed),
    )
    interactive = sys.stdin.isatty()
    if interactive:
        with suppress(ImportError):  # as on Windows; `input` edits and remembers lines with it
            import readline  # noqa: F401
        print(f"{llm.model.config.name or checkpoint_dir}: {QUIT} or ctrl-d ends, ctrl-c stops a reply")
    try:
        for message in _lines(interactive):
            _answer(conversation, message)
    except KeyboardInterrupt:
        print()


def _lines(interactive: bool) -> Iterator[str]:
    """The messages, without empty ones, up to /quit or the end of the input."""
    while True:
        try:
            line = input("> " if interactive else "")
        except EOFError:
            if interactive:
                print()
            return
        if line.strip() == QUIT:
            return
        if line.strip():
            yield line


def _answer(conversation: Conversation, message: str) -> None:
    pieces = conversation.reply(message)
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pieces.close()
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        print(f"The message {error}", file=sys.stderr)
        return
    print()
    window = conversation.llm.model.max_seq_length
    if len(conversation.ids) > window:
        print(
            f"The conversation has {len(conversation.ids)} tokens; the model sees the last {window}.", file=sys.stderr
        )
