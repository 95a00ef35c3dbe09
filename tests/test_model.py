"""The model against `transformers`: same weights in, same logits, loss and gradients out."""

import copy
import math
import re

import pytest
import torch
import transformers
from torch import Tensor

from litce.config import Config, RopeScaling
from litce.model import GPT, rope_cos_sin

# Worst |difference| from the reference: some 100 fp32 roundings of 1.2e-7. The logits here reach 5; loss and gradients
# are compared relative to their largest entry.
TOLERANCE = 2e-5
COMMON = {"block_size": 48, "vocab_size": 97, "n_layer": 2, "n_embd": 32}
LLAMA = {**COMMON, "bias": False, "norm": "rmsnorm", "mlp": "swiglu", "positions": "rope"}

CONFIGS = {
    "gpt2": Config(**COMMON, n_head=4),
    "gpt_neox": Config(
        **COMMON,
        n_head=2,
        mlp="gelu",
        positions="rope",
        rotary_percentage=0.25,
        parallel_residual=True,
        tie_embeddings=False,
    ),
    # Wavelengths of the four frequencies: 6, 167, 4.4e3 and 1.2e5 positions; one kept, one blended, two stretched.
    "llama": Config(
        **LLAMA,
        n_head=4,
        n_query_groups=2,
        intermediate_size=72,
        rope_base=500000.0,
        rope_scaling=RopeScaling(8.0, 1.0, 4.0, 256),
        tie_embeddings=False,
    ),
    "qwen2": Config(
        **LLAMA, n_head=4, n_query_groups=1, intermediate_size=72, qkv_bias=True, norm_eps=1e-6, rope_base=1e6
    ),
}


def reference_model(family: str, config: Config) -> torch.nn.Module:
    common = {
        "vocab_size": config.vocab_size,
        "attn_implementation": "eager",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family == "gpt2":
        hf_config = transformers.GPT2Config(
            **common,
            n_positions=config.block_size,
            n_embd=config.n_embd,
            n_layer=config.n_layer,
            n_head=config.n_head,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
        )
        return transformers.GPT2LMHeadModel(hf_config)
    common |= {
        "hidden_size": config.n_embd,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "max_position_embeddings": 8 * config.block_size,
        "tie_word_embeddings": config.tie_embeddings,
    }
    if family == "gpt_neox":
        hf_config = transformers.GPTNeoXConfig(**common, rotary_pct=config.rotary_percentage, layer_norm_eps=1e-5)
        return transformers.GPTNeoXForCausalLM(hf_config)
    common |= {
        "num_key_value_heads": config.n_query_groups,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_base,
    }
    if family == "qwen2":
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**common))
    scaling = {
        "rope_type": "llama3",
        "factor": config.rope_scaling.factor,
        "low_freq_factor": config.rope_scaling.low_freq_factor,
        "high_freq_factor": config.rope_scaling.high_freq_factor,
        "original_max_position_embeddings": config.rope_scaling.original_max_seq_len,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**common, rope_scaling=scaling))


def translate(family: str, config: Config, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """One parameter of the reference, or its gradient, under our names."""
    name = re.sub(r"^(transformer|gpt_neox|model)\.", "", name)
    name = re.sub(r"^(layers|h)\.", "transformer.h.", name)
    renames = {
        r"^(wte|embed_in|embed_tokens)\.": "transformer.wte.",
        r"^wpe\.": "transformer.wpe.",
        r"^(ln_f|final_layer_norm|norm)\.": "transformer.ln_f.",
        r"^embed_out\.": "lm_head.",
        r"\.(ln_1|input_layernorm)\.": ".norm_1.",
        r"\.(ln_2|post_attention_layernorm)\.": ".norm_2.",
        r"\.(self_attn|attention)\.": ".attn.",
        r"\.attn\.([qkv])_proj\.": r".attn.\1.",
        r"\.attn\.(c_proj|dense|o_proj)\.": ".attn.proj.",
        r"\.mlp\.(c_fc|dense_h_to_4h|up_proj)\.": ".mlp.up.",
        r"\.mlp\.(c_proj|dense_4h_to_h|down_proj)\.": ".mlp.down.",
        r"\.mlp\.gate_proj\.": ".mlp.gate.",
    }
    for pattern, replacement in renames.items():
        name = re.sub(pattern, replacement, name)
    # GPT-2's linear layers keep their weight as (in, out).
    if family == "gpt2" and re.search(r"(c_attn|proj|up|down)\.weight$", name):
        tensor = tensor.T
    if ".c_attn." in name:
        return {name.replace("c_attn", part): x for part, x in zip("qkv", tensor.chunk(3), strict=True)}
    if ".query_key_value." in name:
        by_head = tensor.unflatten(0, (config.n_head, 3, config.head_size))
        return {name.replace("query_key_value", p): by_head[:, i].flatten(0, 1) for i, p in enumerate("qkv")}
    return {name: tensor}


def make_pair(family: str) -> tuple[GPT, torch.nn.Module, Config]:
    torch.manual_seed(0)
    config = CONFIGS[family]
    reference = reference_model(family, config)
    with torch.no_grad():
        for parameter in reference.parameters():
            # Far from their initial values, so that every norm, bias and position matters.
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1) * 0.5)
    state = {}
    for name, parameter in reference.named_parameters():
        state |= translate(family, config, name, parameter.detach())
    model = GPT(config)
    model.load_state_dict(state)
    return model, reference, config


def batch(config: Config, length: int = 40) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(config.vocab_size, (3, length + 1), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].clone()
    targets[0, :7] = -100
    targets[2] = -100
    return tokens[:, :-1], targets


def assert_close(actual: Tensor, expected: Tensor, message: str = "") -> None:
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE, f"{message}: relative error {error:.1e}"


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_loss_and_gradients_match_transformers(family):
    model, reference, config = make_pair(family)
    idx, targets = batch(config)
    expected = reference(idx)
    torch.testing.assert_close(model(idx), expected.logits, rtol=0, atol=TOLERANCE)

    loss = model(idx, targets)
    expected_loss = reference.loss_function(
        expected.logits, labels=None, shift_labels=targets, vocab_size=config.vocab_size, num_items_in_batch=1
    )
    assert loss.dtype == torch.float32 and loss.ndim == 0
    assert_close(loss.detach(), expected_loss.detach(), "loss")

    loss.backward()
    expected_loss.backward()
    expected_grads = {}
    for name, parameter in reference.named_parameters():
        expected_grads |= translate(family, config, name, parameter.grad)
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        if family == "gpt2" and name.endswith("attn.k.bias"):
            # Unless positions turn it, a key bias shifts all scores of a query alike: its gradient is 0 but for
            # rounding, which the weight's gradient gives the scale of.
            scale = grads[name.replace("bias", "weight")].abs().max()
            assert (grad - expected_grads[name]).abs().max() <= TOLERANCE * scale
            continue
        assert_close(grad, expected_grads[name], name)


def test_llama3_scaling_covers_its_three_regimes():
    config = CONFIGS["llama"]
    plain = copy.copy(config)
    plain.rope_scaling = None
    one = torch.ones(1, dtype=torch.int64)
    ratio = torch.atan2(*rope_cos_sin(config, one)[::-1]) / torch.atan2(*rope_cos_sin(plain, one)[::-1])
    assert ratio[0, 0] == 1
    assert 1 / 8 < ratio[0, 1] < 1
    torch.testing.assert_close(ratio[0, 2:], torch.full((2,), 1 / 8))


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_tied_gradient_is_the_sum_of_both_uses(family):
    model, _, config = make_pair(family)
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
    config = CONFIGS["gpt2"]
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
    model = GPT(CONFIGS["qwen2"])
    state = model.state_dict()
    GPT(CONFIGS["qwen2"]).load_state_dict({**state, "lm_head.weight": state["transformer.wte.weight"].clone()})
    with pytest.raises(RuntimeError, match="lm_head.weight differs from transformer.wte.weight"):
        model.load_state_dict({**state, "lm_head.weight": state["transformer.wte.weight"] + 1})
    del state["transformer.wte.weight"]
    with pytest.raises(RuntimeError, match="Missing key.*transformer.wte.weight"):
        model.load_state_dict(state)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights_and_autocast(family, dtype):
    model, _, config = make_pair(family)
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


@pytest.mark.parametrize("family", CONFIGS)
def test_no_position_sees_the_future(family):
    model, _, config = make_pair(family)
    idx, _ = batch(config)
    changed = idx.clone()
    changed[:, 20] = (changed[:, 20] + 1) % config.vocab_size
    before, after = model(idx), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20], rtol=0, atol=1e-5)
    assert (before[:, 20:] - after[:, 20:]).abs().amax(dim=(0, 2)).min() > 1e-3


def test_padded_vocabulary_has_logits():
    config = Config(**COMMON, n_head=4, padded_vocab_size=128)
    assert GPT(config)(torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3, 128)


def test_max_seq_length():
    model = GPT(CONFIGS["llama"])
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


@pytest.mark.parametrize("family", CONFIGS)
def test_init_weights(family):
    config = copy.copy(CONFIGS[family])
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
            assert (parameter == 1).all(), name
        else:
            std = 0.02 / math.sqrt(2 * 2) if name.endswith(("proj.weight", "down.weight")) else 0.02
            # The sample deviation of n draws is off by std / sqrt(2 n); five times that is never seen.
            assert abs(parameter.std() - std) < 5 * std / math.sqrt(2 * parameter.numel()), name
    idx, targets = batch(config)
    mean_loss = model(idx, targets) / (targets != -100).sum()
    assert abs(mean_loss - math.log(512)) < 0.1


def test_a_few_steps_learn_a_batch():
    model = GPT(CONFIGS["qwen2"])
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
