"""A model with its tokenizer: text in, text out. `litce.load(directory)` gives one."""

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, overload

import torch

from litce.args import UsageError, require_seed
from litce.generate import encode_prompt, stream
from litce.model import GPT
from litce.prompts import Chat, Message
from litce.tokenizer import Tokenizer
from litce.training.checkpoint import load_model, require_model


class LLM:
    """A model and its tokenizer.

    The methods take options: `max_new_tokens`, `temperature`, `top_k` and `top_p` as `litce.generate.stream` does, and
    `seed`, that of this call alone; without it torch's global generator draws. With `stop`, one text or several, the
    result is cut off before the first of them. It ends too where the model ends it, and what is longer than the
    model's window is continued from the last tokens that fit. Options out of range raise `UsageError`.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer) -> None:
        self.model = model
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, directory: Path | str, device: torch.device | str | None = None) -> "LLM":
        """The model in a checkpoint folder, on `device`, or on the GPU if there is one when not given.

        Raises:
            UsageError: if the folder does not hold a model and its tokenizer.
        """
        require_model(Path(directory))
        tokenizer = load_tokenizer(directory)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        return cls(load_model(directory).to(device), tokenizer)

    @overload
    def generate(self, prompt: str, *, stop: str | Sequence[str] = (), **options: Any) -> str: ...
    @overload
    def generate(self, prompt: Sequence[str], *, stop: str | Sequence[str] = (), **options: Any) -> list[str]: ...
    def generate(
        self, prompt: str | Sequence[str], *, stop: str | Sequence[str] = (), **options: Any
    ) -> str | list[str]:
        """The continuation of a text, or of each of several that are computed together, without the text itself.

        Raises:
            UsageError: for an empty text where the tokenizer has no bos token.
        """
        prompts = [prompt] if isinstance(prompt, str) else prompt
        ids = [encode_prompt(self.tokenizer, text, flag="prompt") for text in prompts]
        texts = self._texts(ids, stop, self.tokenizer.stop_ids, options)
        return texts[0] if isinstance(prompt, str) else texts

    def stream(self, prompt: str, **options: Any) -> Iterator[str]:
        """The continuation of a text, piece by piece; without `stop`."""
        yield from self.stream_ids(encode_prompt(self.tokenizer, prompt, flag="prompt"), **options)

    def chat(self, messages: Sequence[Message], *, stop: str | Sequence[str] = (), **options: Any) -> str:
        """The assistant's reply to `messages`, {"role", "content"} each, written by the tokenizer's chat template.

        Raises:
            UsageError: if the tokenizer has no template.
            ValueError: if the template refuses the messages.
        """
        style = Chat(self.tokenizer)
        ids = self.tokenizer.encode(style.render(messages, add_generation_prompt=True))
        return self._texts([ids], stop, style.stop_ids, {"max_new_tokens": 512, **options})[0]

    def stream_ids(
        self,
        prompt_ids: Sequence[int],
        *,
        stop_ids: Collection[int] | None = None,
        drawn: list[int] | None = None,
        **options: Any,
    ) -> Iterator[str]:
        """The text behind `prompt_ids`, piece by piece; the ids of it are added to `drawn`, where a list is given."""
        text = TextStream(self.tokenizer, prompt_ids)
        with closing(self._steps([prompt_ids], stop_ids or self.tokenizer.stop_ids, options)) as steps:
            for (token_id,) in steps:
                assert token_id is not None
                if drawn is not None:
                    drawn.append(token_id)
                yield text.push(token_id)
        yield text.rest()

    @property
    def vocab_size(self) -> int:
        """Ids from here on are never drawn."""
        return min(self.tokenizer.vocab_size, self.model.config.vocab_size)

    def generator(self, seed: int | None) -> torch.Generator | None:
        """A generator on the model's device; None, which stands for torch's global one, without a seed.

        Raises:
            UsageError: for a seed that generators do not take.
        """
        if seed is None:
            return None
        require_seed(seed)
        return torch.Generator(self.model.transformer.wte.weight.device).manual_seed(seed)

    def _steps(
        self, prompts: Sequence[Sequence[int]], stop_ids: Collection[int], options: Mapping[str, Any]
    ) -> Generator[list[int | None], None, None]:
        options = dict(options)
        if "generator" not in options:
            options["generator"] = self.generator(options.pop("seed", None))
        return stream(self.model, prompts, stop_ids=stop_ids, vocab_size=self.vocab_size, **options)

    def _texts(
        self,
        prompts: Sequence[Sequence[int]],
        stop: str | Sequence[str],
        stop_ids: Collection[int],
        options: Mapping[str, Any],
    ) -> list[str]:
        stop = [stop] if isinstance(stop, str) else stop
        if "" in stop:
            raise UsageError("stop: an empty text would end every result; leave it out")
        streams = [TextStream(self.tokenizer, ids) for ids in prompts]
        texts, running = [""] * len(prompts), set(range(len(prompts)))
        with closing(self._steps(prompts, stop_ids, options)) as steps:
            for step in steps:
                for row, token_id in enumerate(step):
                    if token_id is None or row not in running:
                        continue
                    texts[row] += streams[row].push(token_id)
                    if found := [i for text in stop if (i := texts[row].find(text)) >= 0]:
                        texts[row] = texts[row][: min(found)]
                        running.remove(row)
                if not running:
                    break
        return [text + streams[row].rest() if row in running else text for row, text in enumerate(texts)]


class TextStream:
    """Text of ids that come one by one, as it would be decoded together with `prompt_ids` before them."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        # Decoders treat the first token of a text differently, and none looks further back than a character.
        self.ids = list(prompt_ids[-8:])
        self.shown = self.tokenizer.decode(self.ids)

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while it ends within a character of several bytes."""
        self.ids.append(token_id)
        text = self.tokenizer.decode(self.ids)
        if text.endswith("\ufffd"):
            return ""
        new = text[len(self.shown) :]
        self.ids = self.ids[-8:]
        self.shown = self.tokenizer.decode(self.ids)
        return new

    def rest(self) -> str:
        """What is left: a character that never came to its end."""
        return self.tokenizer.decode(self.ids)[len(self.shown) :]


def load_tokenizer(directory: Path | str) -> Tokenizer:
    """The tokenizer of a checkpoint.

    Raises:
        UsageError: if there is none.
    """
    if not (Path(directory) / "tokenizer.json").is_file():
        raise UsageError(f"{directory} holds no tokenizer.json; copy the model's tokenizer files there")
    return Tokenizer(directory)
