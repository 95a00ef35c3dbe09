import torch
import torch.nn.functional as F
from torch import nn

from litce.config import Config
from litce.peft.adapter import Adapter
from litce.peft.adapter_v2 import AdapterV2, ScaledLinear
from tests.peft.models import MODELS, batch, make_model, randomize


def test_every_linear_layer_is_scaled_after_its_bias() -> None:
    model = make_model(Config(**MODELS["gpt2"]))
    AdapterV2(prompt_length=2, start_layer=1).prepare(model)
    randomize(model)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            assert isinstance(module, ScaledLinear)
            x = torch.randn(3, module.in_features)
            want = module.adapter_scale * (F.linear(x, module.weight, module.bias) + module.adapter_bias)
            torch.testing.assert_close(module(x), want)
            weight, bias = module.projection()
            torch.testing.assert_close(F.linear(x, weight, bias), want, rtol=1e-5, atol=1e-5)


def test_what_is_trained() -> None:
    model = make_model(Config(**MODELS["llama"]))
    AdapterV2(prompt_length=2, start_layer=2).prepare(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert "lm_head" in linears
    assert trained == {
        *(f"{name}.adapter_{part}" for name in linears for part in ("scale", "bias")),
        *(f"transformer.h.2.attn.adapter_{part}" for part in ("prefix", "gate")),
        *(f"transformer.h.{i}.norm_{j}.weight" for i in range(3) for j in (1, 2)),
        "transformer.ln_f.weight",
    }


def test_a_prefix_goes_through_the_scaled_projections() -> None:
    """Equal to the first version on a model whose weights and biases are the scaled ones."""
    model = make_model(Config(**MODELS["gpt2"]))
    method = AdapterV2(prompt_length=2, start_layer=0)
    method.prepare(model)
    randomize(model)
    plain = make_model(Config(**{**MODELS["gpt2"], "tie_embeddings": False}))
    Adapter(prompt_length=2, start_layer=0).prepare(plain)
    state = {n: v for n, v in model.state_dict().items() if not n.endswith(("adapter_scale", "adapter_bias"))}
    for name, module in model.named_modules():
        if isinstance(module, ScaledLinear):
            weight, bias = module.projection()
            state |= {f"{name}.weight": weight, f"{name}.bias": bias}
    head_bias = state.pop("lm_head.bias")
    plain.load_state_dict(state)
    ids, _ = batch(model.config)
    torch.testing.assert_close(plain(ids) + head_bias, model(ids), rtol=1e-5, atol=5e-5)
