"""A model that reads keys and values from its cache computes what it computes without one."""

import copy
import functools
import weakref

import pytest
import torch
from torch import Tensor

from litce.config import Config
from litce.kv_cache import KVCache
from litce.model import GPT
from litce.peft import METHODS
from litce.tools.model_parity import CASES, TOLERANCE

LENGTH = 40


@functools.cache
def model(case: str) -> GPT:
    """A model with all parts of its family, and parameters far from their initial values."""
    gpt = GPT(Config.from_hf(CASES[case], name=case)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            is_norm = "norm" in name or "ln_f" in name
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + is_norm * 0.5)
    return gpt


def fresh(case: str) -> GPT:
    """The same model, for the test to change."""
    gpt = copy.deepcopy(model(case))
    gpt.clear_kv_cache()
    return gpt


def tokens(batch_size: int = 3, length: int = LENGTH) -> Tensor:
    return torch.randint(97, (batch_size, length), generator=torch.Generator().manual_seed(1))


def step_by_step(gpt: GPT, idx: Tensor, pieces: list[int], num_padding: Tensor | None = None) -> Tensor:
    """Logits of all tokens, (B, T, V), computed piece by piece with the cache."""
    gpt.set_kv_cache(len(idx), idx.size(1))
    start, logits = 0, []
    for size in pieces:
        input_pos = torch.arange(start, start + size)
        logits.append(gpt(idx[:, start : start + size], input_pos=input_pos, num_padding=num_padding))
        start += size
    assert start == idx.size(1)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("pieces", [[17] + [1] * 23, [1] * 40, [9, 1, 1, 13, 16]], ids=["prefill", "steps", "chunks"])
@pytest.mark.parametrize("case", CASES)
def test_cached_is_uncached(case: str, pieces: list[int]) -> None:
    gpt, idx = model(case), tokens()
    expected = gpt(idx).detach()
    error = (step_by_step(gpt, idx, pieces) - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE


@pytest.mark.parametrize("method", ["lora", "adapter", "adapter_v2"])
@pytest.mark.parametrize("case", ["gpt2", "qwen3", "gemma2"])
def test_cached_is_uncached_in_a_finetuned_model(case: str, method: str) -> None:
    options = {"start_layer": 0} if method.startswith("adapter") else {}
    gpt, before = fresh(case), model(case)(tokens()).detach()
    METHODS[method](**options).prepare(gpt)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in gpt.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    gpt.eval()
    expected = gpt(tokens()).detach()
    assert (expected - before).abs().max() > 0.01
    error = (step_by_step(gpt, tokens(), [17] + [1] * 23) - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE


@pytest.mark.parametrize("case", ["mistral", "gemma2", "gemma3", "qwen2.5-window"])
def test_the_window_matters_to_these_lengths(case: str) -> None:
    """What the comparison above would not see otherwise."""
    gpt = fresh(case)
    assert gpt.config.sliding_window is not None and gpt.config.sliding_window < 17
    changed = copy.copy(gpt.config)
    changed.sliding_window = None
    other = GPT(changed)
    other.load_state_dict(gpt.state_dict())
    assert (gpt(tokens()) - other(tokens())).abs().max() > 0.01


@pytest.mark.parametrize("case", ["gpt2", "qwen3", "gemma2"])
def test_bf16_errors_are_those_without_the_cache(case: str) -> None:
    low = fresh(case).bfloat16()
    exact = copy.deepcopy(low).float()(tokens()).detach()
    without = (low(tokens()) - exact).norm()
    with_cache = (step_by_step(low, tokens(), [17] + [1] * 23) - exact).norm()
    assert 0 < with_cache <= 2 * without
    with torch.autocast("cpu", torch.bfloat16):
        mixed = copy.deepcopy(low).float()
        without = (mixed(tokens()) - exact).norm()
        with_cache = (step_by_step(mixed, tokens(), [17] + [1] * 23) - exact).norm()
    assert 0 < with_cache <= 2 * without


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_padding_changes_nothing(case: str, cached: bool) -> None:
    gpt, idx = model(case), tokens()
    num_padding = torch.tensor([0, 5, LENGTH - 1])
    logits = step_by_step(gpt, idx, [38, 1, 1], num_padding) if cached else gpt(idx, num_padding=num_padding)
    for row, padding in enumerate(num_padding.tolist()):
        alone = gpt(idx[row : row + 1, padding:])[0]
        error = (logits[row, padding:] - alone).abs().max() / alone.abs().max()
        assert error <= TOLERANCE, row
    assert logits.isfinite().all()


def test_full_context() -> None:
    gpt = model("llama2")
    idx = tokens(1, gpt.config.block_size)
    gpt.set_kv_cache(1)
    assert gpt.kv_cache is not None and gpt.kv_cache.length == gpt.config.block_size == 64
    expected = gpt(idx)
    for i in range(64):
        logits = gpt(idx[:, i : i + 1], input_pos=torch.tensor([i]))
    assert (logits[0, -1] - expected[0, -1]).abs().max() / expected.abs().max() <= TOLERANCE
    with pytest.raises(RuntimeError, match="input_pos goes up to 64, and the KV cache ends at 63; call set_kv_cache"):
        gpt(idx[:, :1], input_pos=torch.tensor([64]))


def test_going_back_forgets_what_follows() -> None:
    gpt, idx = model("qwen2.5"), tokens()
    step_by_step(gpt, idx, [LENGTH])
    changed = idx.flip(1)
    changed[:, :10] = idx[:, :10]
    logits = gpt(changed[:, 10:], input_pos=torch.arange(10, LENGTH))
    expected = gpt(changed)[:, 10:]
    assert (logits - expected).abs().max() / expected.abs().max() <= TOLERANCE
    gpt(idx[:, :2], input_pos=torch.arange(2))
    with pytest.raises(RuntimeError, match="input_pos starts at 3, and the KV cache holds 2 tokens"):
        gpt(idx[:, :1], input_pos=torch.tensor([3]))


def test_an_interrupted_forward_leaves_what_was_before_it() -> None:
    gpt, idx = fresh("llama2"), tokens()

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    gpt.set_kv_cache(len(idx))
    gpt(idx[:, :10], input_pos=torch.arange(10))
    handle = gpt.transformer.h[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        gpt(idx[:, 8:20], input_pos=torch.arange(8, 20))
    handle.remove()
    assert gpt.kv_cache is not None and gpt.kv_cache.num_tokens == 8
    logits = gpt(idx[:, 8:], input_pos=torch.arange(8, LENGTH))
    assert (logits - gpt(idx)[:, 8:]).abs().max() / logits.abs().max() <= TOLERANCE


def test_misuse_says_what_to_do() -> None:
    gpt, idx = fresh("gpt2"), tokens(2, 4)
    with pytest.raises(RuntimeError, match=r"without a KV cache; call set_kv_cache\(batch_size\) first"):
        gpt(idx, input_pos=torch.arange(4))
    gpt.set_kv_cache(2, 8)
    with pytest.raises(RuntimeError, match="a batch of 1 sequences for a KV cache of 2; call set_kv_cache"):
        gpt(idx[:1], input_pos=torch.arange(4))
    for wrong in ([0, 1, 2], [0, 1, 3, 2], [0, 0, 0, 0], [[0, 1, 2, 3]] * 2):
        with pytest.raises(RuntimeError, match="input_pos must be the indices of the 4 tokens, one after the other"):
            gpt(idx, input_pos=torch.tensor(wrong))
    with pytest.raises(RuntimeError, match="input_pos starts at -1"):
        gpt(idx, input_pos=torch.arange(-1, 3))
    gpt(idx, input_pos=torch.arange(4))
    gpt.max_seq_length = 32
    with pytest.raises(RuntimeError, match="max_seq_length is 32 now, and was 64 when the KV cache was made; call"):
        gpt(idx, input_pos=torch.arange(4))
    gpt.set_kv_cache(2)
    gpt(idx, input_pos=torch.arange(4))
    assert gpt.kv_cache is not None and gpt.kv_cache.length == 32
    for length in (0, 33):
        with pytest.raises(
            ValueError, match=rf"max_seq_length: must lie in \[1, 32\], that of the model, got {length}"
        ):
            gpt.set_kv_cache(2, length)
    with pytest.raises(ValueError, match="batch_size: must be at least 1, got 0"):
        gpt.set_kv_cache(0)
    gpt.set_kv_cache(1)
    gpt.clear_kv_cache()
    gpt.clear_kv_cache()
    assert gpt.kv_cache is None


def test_growing_frees_the_old_cache_first(monkeypatch: pytest.MonkeyPatch) -> None:
    gpt = fresh("llama2")
    gpt.set_kv_cache(2, 8)
    gpt(tokens(2, 4), input_pos=torch.arange(4))
    assert gpt.kv_cache is not None
    old = [weakref.ref(x.untyped_storage()) for layer in gpt.kv_cache.layers for x in layer]
    alive_when_made: list[int] = []
    make = KVCache.__init__

    def watch(*args: object) -> None:
        alive_when_made.append(sum(ref() is not None for ref in old))
        make(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(KVCache, "__init__", watch)
    assert sum(ref() is not None for ref in old) == len(old) == 4
    gpt.set_kv_cache(2, 16)
    assert alive_when_made == [0]


def test_memory_is_that_of_the_groups() -> None:
    gpt = fresh("qwen2.5").bfloat16()
    gpt.set_kv_cache(3, 10)
    config = gpt.config
    assert gpt.kv_cache is not None and config.n_query_groups is not None and config.n_query_groups < config.n_head
    num_bytes = sum(x.untyped_storage().nbytes() for layer in gpt.kv_cache.layers for x in layer)
    assert num_bytes == 2 * 2 * config.n_layer * 3 * 10 * config.n_query_groups * config.head_size


def test_training_does_not_know_of_the_cache() -> None:
    gpt, idx = fresh("gemma3"), tokens()
    targets = idx.roll(-1, 1)
    gpt(idx, targets).backward()
    expected = {name: parameter.grad for name, parameter in gpt.named_parameters()}
    gpt.zero_grad()
    keys = list(gpt.state_dict())
    gpt.set_kv_cache(1, 12)
    gpt(tokens(1, 5), input_pos=torch.arange(5))
    assert list(gpt.state_dict()) == keys and not list(gpt.buffers())
    gpt(idx, targets).backward()
    for name, parameter in gpt.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name


def test_nothing_is_differentiated_through_the_cache() -> None:
    gpt = fresh("gpt2")
    gpt.set_kv_cache(1, 12)
    loss = gpt(tokens(1, 5), tokens(1, 5), input_pos=torch.arange(5))
    assert not loss.requires_grad and not gpt.hidden_states(tokens(1, 5), input_pos=torch.arange(5)).requires_grad


def test_a_cache_made_in_inference_mode_serves_outside() -> None:
    gpt = fresh("gpt2")
    with torch.inference_mode():
        gpt.set_kv_cache(1, 12)
        gpt(tokens(1, 5), input_pos=torch.arange(5))
    gpt(tokens(1, 5), input_pos=torch.arange(5, 10))
