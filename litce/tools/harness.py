"""A model for the tasks of EleutherAI's lm-evaluation-harness, the package lm_eval."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from litce.args import UsageError
from litce.data.base import IGNORE_INDEX
from litce.llm import LLM
from litce.prompts import Chat


def as_lm(llm: LLM, micro_batch_size: int = 8) -> Any:
    """An `lm_eval.api.model.LM`, to be given to `lm_eval.simple_evaluate(model=..., tasks=[...])`.

    Texts start with the bos token where the tokenizer has one. Continuations are scored through the head's
    `token_stats`, so that no logits are held.

    Raises:
        UsageError: lm_eval is not installed.
    """
    try:
        from lm_eval.api.model import TemplateLM
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    except ImportError as error:
        raise UsageError(f"lm_eval cannot be imported ({error}); install it: pip install lm_eval") from error

    class HarnessLM(TemplateLM):
        @property
        def eot_token_id(self) -> int | None:
            return llm.tokenizer.eos_id

        @property
        def prefix_token_id(self) -> int | None:
            return llm.tokenizer.eos_id if llm.tokenizer.bos_id is None else llm.tokenizer.bos_id

        @property
        def tokenizer_name(self) -> str:
            return llm.tokenizer.directory.name

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            ids = llm.tokenizer.encode(string)
            bos_id = llm.tokenizer.bos_id
            wanted = add_special_tokens is not False and bos_id is not None and ids[:1] != [bos_id]
            return [bos_id, *ids] if wanted and bos_id is not None else ids

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return Chat(llm.tokenizer).render(chat_history, add_generation_prompt=add_generation_prompt)

        def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any) -> Any:
            pairs = [(context, continuation) for _, context, continuation in requests]
            return list(score(llm, pairs, micro_batch_size))

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            totals = []
            for request in requests:
                windows = get_rolling_token_windows(
                    token_list=llm.tokenizer.encode(request.args[0]),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=llm.model.max_seq_length,
                    context_len=1,
                )
                pairs = [make_disjoint_window(window) for window in windows]
                totals.append(sum(logprob for logprob, _ in score(llm, pairs, micro_batch_size)))
            return totals

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            texts: list[str] = []
            for _, group in groupby(requests, key=lambda request: repr(request.args[1])):
                same = list(group)
                options = generation_options(same[0].args[1])
                for i in range(0, len(same), micro_batch_size):
                    texts += llm.generate([request.args[0] for request in same[i : i + micro_batch_size]], **options)
            return texts

    return HarnessLM()


@torch.inference_mode()
def score(
    llm: LLM, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], micro_batch_size: int
) -> Iterator[tuple[float, bool]]:
    """The log-probability of each continuation (ids) behind its context, and whether each of its ids is the likeliest.

    What is longer than the model's window loses its start.
    """
    device = llm.model.transformer.wte.weight.device
    window = llm.model.max_seq_length
    for start in range(0, len(pairs), micro_batch_size):
        inputs, targets = [], []
        for context, continuation in pairs[start : start + micro_batch_size]:
            ids = torch.tensor([*context, *continuation])
            target = ids[1:].clone()
            target[: len(target) - len(continuation)] = IGNORE_INDEX
            inputs.append(ids[:-1][-window:])
            targets.append(target[-window:])
        x = llm.model.hidden_states(pad_sequence(inputs, batch_first=True).to(device))
        padded = pad_sequence(targets, batch_first=True, padding_value=IGNORE_INDEX).to(device)
        stats = llm.model.lm_head.token_stats(x, padded)
        is_likeliest = (stats.correct | (padded == IGNORE_INDEX)).all(dim=1)
        yield from zip((-stats.loss.double().sum(dim=1)).tolist(), is_likeliest.tolist(), strict=True)


def generation_options(arguments: dict[str, Any]) -> dict[str, Any]:
    """Options of `LLM.generate` for those of a task of lm_eval."""
    until = arguments.get("until") or []
    sampled = arguments.get("do_sample", False)
    return {
        "stop": [until] if isinstance(until, str) else [text for text in until if text],
        "max_new_tokens": arguments.get("max_gen_toks", 256),
        "temperature": arguments.get("temperature", 1.0) if sampled else 0.0,
        "top_p": arguments.get("top_p", 1.0),
        "top_k": arguments.get("top_k"),
    }
