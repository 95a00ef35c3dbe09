from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import litce
from litce.llm import LLM
from litce.tokenizer import Tokenizer
from litce.tools.harness import as_lm, generation_options, score
from tests.tiny import save_byte_model, save_byte_tokenizer


@pytest.fixture
def llm(tmp_path: Path) -> LLM:
    return litce.load(save_byte_model(tmp_path), device="cpu")


def by_hand(llm: LLM, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """From all logits, in fp64, of the last tokens that fit into the window."""
    ids = torch.tensor([*context, *continuation])
    inputs = ids[:-1][-llm.model.max_seq_length :]
    model = llm.model.double()
    with torch.no_grad():
        logits = model(inputs[None])[0, :, : model.config.vocab_size]
    llm.model.float()
    num = min(len(continuation), len(inputs))
    logits, targets = logits[-num:], ids[-num:]
    return float(logits.log_softmax(-1)[range(num), targets].sum()), bool((logits.argmax(-1) == targets).all())


def test_scores_are_those_of_the_logits(llm: LLM) -> None:
    likeliest = llm.tokenizer.encode(llm.generate("abc", max_new_tokens=5, temperature=0.0))
    texts = [("abc", "de"), ("a", "longer one"), ("x" * 60, "y" * 10), ("", "z" * 70)]
    pairs = [(llm.tokenizer.encode("?" + a), llm.tokenizer.encode(b)) for a, b in texts]
    pairs.append((llm.tokenizer.encode("abc"), likeliest))
    expected = [by_hand(llm, *pair) for pair in pairs]
    assert [greedy for _, greedy in expected] == [False, False, False, False, True]
    for micro_batch_size in (1, 2, 8):
        actual = list(score(llm, pairs, micro_batch_size))
        assert [greedy for _, greedy in actual] == [greedy for _, greedy in expected]
        for (logprob, _), (exact, _) in zip(actual, expected, strict=True):
            assert logprob == pytest.approx(exact, rel=2e-6)


def test_options_of_tasks() -> None:
    assert generation_options({"until": "\n", "max_gen_toks": 7, "temperature": 0.5}) == {
        "stop": ["\n"],
        "max_new_tokens": 7,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": None,
    }
    sampled = generation_options({"until": ["", "a"], "do_sample": True, "temperature": 0.5})
    assert sampled["stop"] == ["a"] and sampled["temperature"] == 0.5 and sampled["max_new_tokens"] == 256


def requests(*arguments: tuple) -> list[SimpleNamespace]:
    return [SimpleNamespace(args=args) for args in arguments]


def test_the_harness_gets_what_it_asks_for(llm: LLM) -> None:
    api = pytest.importorskip("lm_eval.api.model")
    lm = as_lm(llm, micro_batch_size=2)
    assert isinstance(lm, api.LM) and lm.tokenizer_name == llm.tokenizer.directory.name
    encode = llm.tokenizer.encode
    eos = llm.tokenizer.eos_id
    assert eos is not None and lm.eot_token_id == lm.prefix_token_id == eos

    pairs = [("abc ", "de"), ("", "fg"), ("a", " b")]
    # Spaces at the end of a context belong to the continuation.
    expected = [(encode("abc"), encode(" de")), ([eos], encode("fg")), (encode("a"), encode(" b"))]
    for (logprob, greedy), pair in zip(lm.loglikelihood(requests(*pairs)), expected, strict=True):
        exact = by_hand(llm, *pair)
        assert logprob == pytest.approx(exact[0], rel=2e-6) and greedy == exact[1]

    long = "the quick brown fox " * 5
    ids = encode(long)
    totals = lm.loglikelihood_rolling(requests((long,), ("ab",)))
    window = llm.model.max_seq_length
    # The first window, and a second one that ends with the text and scores what the first did not.
    rest = len(ids) - window
    exact = by_hand(llm, [eos], ids[:window])[0] + by_hand(llm, ids[-window - 1 : -rest], ids[-rest:])[0]
    assert totals == [pytest.approx(exact, rel=2e-6), pytest.approx(by_hand(llm, [eos], encode("ab"))[0], rel=2e-6)]

    stop = {"until": ["!"], "max_gen_toks": 20}
    texts = lm.generate_until(requests(("a", stop), ("b", stop), ("c", stop), ("d", {"until": [], "max_gen_toks": 5})))
    options = {"max_new_tokens": 20, "temperature": 0.0, "stop": "!"}
    assert texts[:3] == [llm.generate(prompt, **options) for prompt in "abc"]
    assert texts[3] == llm.generate("d", max_new_tokens=5, temperature=0.0)
    assert lm.apply_chat_template([{"role": "user", "content": "a"}]) == "user: a<end>\nassistant: "

    save_byte_tokenizer(llm.tokenizer.directory, bos="<bos>")
    lm = as_lm(LLM(llm.model, Tokenizer(llm.tokenizer.directory)))
    assert lm.tok_encode("a") == [257, *encode("a")] and lm.tok_encode("<bos>a") == [257, *encode("a")]
    assert lm.tok_encode("a", add_special_tokens=False) == encode("a") and lm.prefix_token_id == 257
