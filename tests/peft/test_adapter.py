"""The adapter against peft's adaption prompt on transformers' Llama."""

import math
import re

import peft
import pytest
import torch
import transformers

from litce.config import Config
from litce.model import Surroundings
from litce.peft.adapter import Adapter
from tests.peft.models import MODELS, batch, loss_and_grads, make_model, randomize

RENAMES = {
    r"^transformer\.wte\.": "model.embed_tokens.",
    r"^transformer\.ln_f\.": "model.norm.",
    r"^transformer\.h\.": "model.layers.",
    r"\.norm_1\.": ".input_layernorm.",
    r"\.norm_2\.": ".post_attention_layernorm.",
    r"\.attn\.proj\.": ".attn.o.",
    r"\.attn\.([qkvo])\.": r".self_attn.\1_proj.",
    r"\.mlp\.(gate|up|down)\.": r".mlp.\1_proj.",
}


def their_name(name: str) -> str:
    for pattern, replacement in RENAMES.items():
        name = re.sub(pattern, replacement, name)
    return name


def test_outputs_and_gradients_are_those_of_peft() -> None:
    """Theirs adds the prefix after the output projection, so that projection is the identity here; theirs has one gate
    per layer without tanh."""
    config = Config(**MODELS["llama"])
    model = make_model(config)
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.proj.weight.copy_(torch.eye(config.n_embd))
    adapter = Adapter(prompt_length=5, start_layer=1)
    adapter.prepare(model)
    hf = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.n_embd,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.n_layer,
            num_attention_heads=config.n_head,
            num_key_value_heads=config.n_query_groups,
            rms_norm_eps=config.norm_eps,
            rope_theta=config.rope_base,
            tie_word_embeddings=False,
        )
    )
    base = {their_name(name): value for name, value in model.state_dict().items() if not adapter.owns(name)}
    hf.load_state_dict(base)
    theirs = peft.get_peft_model(hf, peft.AdaptionPromptConfig(adapter_len=5, adapter_layers=2, task_type="CAUSAL_LM"))
    named = dict(theirs.named_parameters())
    pairs = []
    with torch.no_grad():
        for index in (1, 2):
            attention = model.transformer.h[index].attn
            attention.adapter_gate.fill_(0.4 * index)
            prefix = f"base_model.model.layers.{index}.self_attn."
            found = {
                name.rpartition(".")[-1]: value
                for name, value in named.items()
                if f"layers.{index}." in name and "adaption" in name
            }
            assert set(found) == {"adaption_prompt", "adaption_gate"}, prefix
            found["adaption_prompt"].copy_(attention.adapter_prefix[None])
            found["adaption_gate"].fill_(math.tanh(0.4 * index))
            pairs.append((index, found))
    ids, targets = batch(config)
    want = theirs(ids).logits
    torch.testing.assert_close(model(ids), want, rtol=1e-5, atol=5e-5)
    loss, grads = loss_and_grads(model, "cut")
    torch.nn.functional.cross_entropy(want.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    for index, found in pairs:
        name = f"transformer.h.{index}.attn.adapter_"
        prompt = found["adaption_prompt"].grad[0]
        assert (grads[f"{name}prefix"] - prompt).norm() <= 1e-5 * prompt.norm()
        gate = found["adaption_gate"].grad * (1 - math.tanh(0.4 * index) ** 2)
        torch.testing.assert_close(grads[f"{name}gate"].sum(), gate[0], rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("model_name", ["qwen2", "gemma"])
def test_a_layer_attends_to_the_prefix_apart_and_each_head_has_its_gate(model_name: str) -> None:
    """Against softmax attention written out; grouped keys, which may be normalised, and scores, which may be capped."""
    config = Config(**MODELS[model_name])
    size = config.head_size
    model = make_model(config)
    Adapter(prompt_length=3, start_layer=0).prepare(model)
    randomize(model)
    attention = model.transformer.h[0].attn.double()

    def weights(keys: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        scores = keys @ q / math.sqrt(config.query_pre_attn_scalar)
        cap = config.attention_softcap
        return torch.softmax(scores if cap is None else cap * torch.tanh(scores / cap), 0)

    with torch.no_grad():
        x = torch.randn(2, 6, config.n_embd, dtype=torch.float64)
        mixed = []
        attention.proj.register_forward_pre_hook(lambda module, inputs: mixed.append(inputs[0]))
        causal = torch.ones(6, 6, dtype=torch.bool).tril()
        attention(x, Surroundings(rope=None, mask=causal))
        norms = {"q": attention.norm_q, "k": attention.norm_k, "v": torch.nn.Identity()}
        heads, own = (
            {n: norms[n](getattr(attention, n)(inputs).unflatten(-1, (-1, size)).transpose(-3, -2)) for n in "qkv"}
            for inputs in (x, attention.adapter_prefix)
        )
        for sample, head, position in ((0, 0, 0), (1, 3, 5), (0, 2, 4)):
            group = head // 2
            q = heads["q"][sample, head, position]
            keys, values = (heads[name][sample, group, : position + 1] for name in "kv")
            gate = math.tanh(float(attention.adapter_gate[head]))
            want = weights(keys, q) @ values + gate * (weights(own["k"][group], q) @ own["v"][group])
            # Softcapped attention is fp32 inside.
            tolerance = {} if config.attention_softcap is None else {"rtol": 1e-5, "atol": 1e-6}
            got = mixed[0][sample, position, size * head : size * (head + 1)]
            torch.testing.assert_close(got, want, **tolerance)


def test_layers_below_the_start_have_no_prefix_and_gates_start_closed() -> None:
    model = make_model(Config(**MODELS["gpt2"]))
    Adapter(prompt_length=7, start_layer=2).prepare(model)
    added = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    assert added == {
        "transformer.h.2.attn.adapter_prefix": (7, 32),
        "transformer.h.2.attn.adapter_gate": (4, 1, 1),
    }
    assert model.transformer.h[2].attn.adapter_gate.abs().max() == 0
    assert 0.7 < model.transformer.h[2].attn.adapter_prefix.std() < 1.3
