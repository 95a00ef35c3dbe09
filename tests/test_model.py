"""What the model promises beyond the values that tools/test_model_parity.py compares with transformers."""

import copy
import functools
import math
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from litce.config import Config
from litce.model import GPT, rope_cos_sin
from litce.tools.model_parity import CASES, TOLERANCE, build

COMMON = {"block_size": 48, "vocab_size": 97, "n_layer": 2, "n_embd": 32}
LLAMA = {**COMMON, "bias": False, "norm": "rmsnorm", "mlp": "swiglu", "positions": "rope"}


@functools.cache
def built(case: str) -> GPT:
    with tempfile.TemporaryDirectory() as folder:
        return build(case, Path(folder)).model


def make_model(case: str) -> GPT:
    """The model that is compared with transformers, for the test to change."""
    return copy.deepcopy(built(case))


def batch(config: Config, length: int = 24) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(config.vocab_size, (3, length + 1), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].clone()
    targets[0, :7] = -100
    targets[2] = -100
    return tokens[:, :-1], targets


def assert_close(actual: Tensor, expected: Tensor, message: str = "") -> None:
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE, f"{message}: relative error {error:.1e}"


def test_llama3_scaling_covers_its_three_regimes():
    config = built("llama3").config
    plain = copy.copy(config)
    plain.rope_scaling = None
    one = torch.ones(1, dtype=torch.int64)
    ratio = torch.atan2(*rope_cos_sin(config, one)[::-1]) / torch.atan2(*rope_cos_sin(plain, one)[::-1])
    assert (ratio[0, :2] == 1).all()
    assert 1 / 8 < ratio[0, 2] < 1
    torch.testing.assert_close(ratio[0, 3:], torch.full((3,), 1 / 8))


@pytest.mark.parametrize("case", ["gpt2", "qwen2.5", "gemma2"])
def test_tied_gradient_is_the_sum_of_both_uses(case):
    model = make_model(case)
    config = model.config
    untied_config = copy.copy(config)
    untied_config.tie_embeddings = False
    untied = GPT(untied_config)
    untied.load_state_dict({**model.state_dict(), "lm_head.weight": model.lm_head.weight.detach()})
    idx, targets = batch(config)
    model(idx, targets).backward()
    untied(idx, targets).backward()
    embedding, head = untied.transformer.wte.weight.grad, untied.lm_head.weight.grad
    assert embedding.abs().max() > 0 and head.abs().max() > 0
    assert_close(model.lm_head.weight.grad, embedding + head)


def is_tied(model: GPT) -> bool:
    return model.lm_head.weight is model.transformer.wte.weight


def test_tied_weights_stay_one_tensor():
    config = built("gpt2").config
    model = GPT(config)
    untied_count = model.num_parameters
    assert is_tied(model) and is_tied(copy.deepcopy(model))
    assert is_tied(model.to(torch.bfloat16)) and model.num_parameters == untied_count
    state = model.state_dict()
    assert "lm_head.weight" not in state

    with torch.device("meta"):
        on_meta = GPT(config)
    assert is_tied(on_meta)
    assert is_tied(copy.deepcopy(on_meta).to_empty(device="cpu"))
    for assign in (False, True):
        loaded = on_meta if assign else GPT(config)
        loaded.load_state_dict(state, assign=assign)
        assert is_tied(loaded)
        assert all(torch.equal(x.float(), state[name].float()) for name, x in loaded.state_dict().items())
        loaded(torch.zeros(1, 4, dtype=torch.int64))


def test_tied_model_loads_a_checkpoint_that_repeats_the_head():
    model = GPT(built("qwen2.5").config)
    state = model.state_dict()
    GPT(built("qwen2.5").config).load_state_dict({**state, "lm_head.weight": state["transformer.wte.weight"].clone()})
    with pytest.raises(RuntimeError, match="lm_head.weight differs from transformer.wte.weight"):
        model.load_state_dict({**state, "lm_head.weight": state["transformer.wte.weight"] + 1})
    del state["transformer.wte.weight"]
    with pytest.raises(RuntimeError, match="Missing key.*transformer.wte.weight"):
        model.load_state_dict(state)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights_and_autocast(case, dtype):
    model = make_model(case)
    config = model.config
    model.init_weights()
    idx, targets = batch(config)
    expected = model(idx).detach()
    count = (targets != -100).sum()
    expected_loss = model(idx, targets).detach() / count
    eps = torch.finfo(dtype).eps
    with torch.autocast("cpu", dtype):
        logits, loss = model(idx), model(idx, targets)
    low = copy.deepcopy(model).to(dtype)
    for low_logits, low_loss in ((logits, loss), (low(idx), low(idx, targets))):
        assert low_logits.dtype == dtype and low_loss.dtype == torch.float32
        # Logits are O(0.1) and their errors a few roundings of the O(1) features they are made of.
        assert (low_logits - expected).abs().max() <= 8 * eps * expected.abs().max()
        assert abs(low_loss / count - expected_loss) <= 2 * eps
    low(idx, targets).backward()
    assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in low.parameters())


def test_rope_is_as_precise_after_a_cast_of_the_model():
    """Angles at distant positions need fp32; rounded to bf16 they would be off by whole turns."""
    config = Config(**LLAMA | {"block_size": 4096}, n_head=4)
    positions = torch.tensor([4001])
    exact = 4001 * 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    cos, sin = rope_cos_sin(config, positions)
    assert cos.dtype == torch.float32
    assert (cos[0] - exact.cos()).abs().max() < 5e-4 and (sin[0] - exact.sin()).abs().max() < 5e-4
    assert not list(GPT(config).buffers())


@pytest.mark.parametrize("case", CASES)
def test_no_position_sees_the_future(case):
    model = make_model(case)
    config = model.config
    idx, _ = batch(config)
    changed = idx.clone()
    changed[:, 20] = (changed[:, 20] + 1) % config.vocab_size
    before, after = model(idx), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20], rtol=0, atol=1e-5)
    assert (before[:, 20:] - after[:, 20:]).abs().amax(dim=(0, 2)).min() > 1e-3


@pytest.mark.parametrize("case", ["gemma2", "gemma3"])
def test_no_layer_holds_scores_for_backward(case):
    model = make_model(case)
    idx, targets = batch(model.config)
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: shapes.append(x.shape) or x, lambda x: x):
        model(idx, targets)
    length = idx.size(1)
    assert shapes and not [shape for shape in shapes if shape[-2:] == (length, length) and len(shape) == 4]


def test_padded_vocabulary_has_logits():
    config = Config(**COMMON, n_head=4, padded_vocab_size=128)
    assert GPT(config)(torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3, 128)


def test_max_seq_length():
    model = GPT(Config(**LLAMA, n_head=4))
    assert model.max_seq_length == 48
    model(torch.zeros(1, 48, dtype=torch.int64))
    with pytest.raises(ValueError, match="sequence of 49 tokens is longer than max_seq_length=48"):
        model(torch.zeros(1, 49, dtype=torch.int64))
    model.max_seq_length = 8
    with pytest.raises(ValueError, match="sequence of 9 tokens is longer than max_seq_length=8"):
        model(torch.zeros(1, 9, dtype=torch.int64), torch.zeros(1, 9, dtype=torch.int64))
    for value in (0, 49):
        with pytest.raises(ValueError, match=rf"max_seq_length: must lie in \[1, block_size=48\], got {value}"):
            model.max_seq_length = value


@pytest.mark.parametrize("case", CASES)
def test_init_weights(case):
    config = copy.copy(built(case).config)
    config.n_embd, config.vocab_size, config.padded_vocab_size, config.intermediate_size = 64, 512, 512, 256
    model, again = GPT(config), GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    for m in (model, again):
        torch.manual_seed(3)
        m.init_weights()
    for (name, parameter), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(parameter, other), name
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif "norm" in name or "ln_f" in name:
            assert (parameter == (0 if config.norm == "rmsnorm_unit_offset" else 1)).all(), name
        else:
            std = 0.02 / math.sqrt(2 * config.n_layer) if name.endswith(("proj.weight", "down.weight")) else 0.02
            # The sample deviation of n draws is off by std / sqrt(2 n); five times that is never seen.
            assert abs(parameter.std() - std) < 5 * std / math.sqrt(2 * parameter.numel()), name
    idx, targets = batch(config)
    mean_loss = model(idx, targets) / (targets != -100).sum()
    assert abs(mean_loss - math.log(512)) < 0.1


def test_a_few_steps_learn_a_batch():
    model = GPT(built("qwen2.5").config)
    torch.manual_seed(0)
    model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    idx, targets = batch(model.config)
    count = (targets != -100).sum()
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(idx, targets) / count
        loss.backward()
        optimizer.step()
    assert loss < 0.5 and is_tied(model)
