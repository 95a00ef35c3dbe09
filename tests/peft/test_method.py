import copy
import re
from typing import Any

import pytest
import torch
from torch import nn

from litce.args import UsageError
from litce.config import Config
from litce.model import GPT
from litce.peft.adapter import Adapter
from litce.peft.adapter_v2 import AdapterV2
from litce.peft.lora import LoRA
from litce.peft.method import FinetuneMethod
from tests.peft.models import MODELS, batch, loss_and_grads, make_model, randomize

ALL: dict[str, Any] = {"key": True, "projection": True, "mlp": True, "head": True, "dropout": 0.0}
METHODS: dict[str, FinetuneMethod] = {
    "lora": LoRA(**ALL),
    "rslora": LoRA(**ALL, r=3, rslora=True),
    "dora": LoRA(**ALL, dora=True),
    "lora-qv": LoRA(),
    "adapter": Adapter(prompt_length=3, start_layer=1),
    "adapter_v2": AdapterV2(prompt_length=3, start_layer=0),
}
on_all_methods = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
on_all_models = pytest.mark.parametrize("model_name", MODELS)


@on_all_methods
@on_all_models
def test_a_new_method_changes_nothing_and_adds_no_key_to_the_base(method: FinetuneMethod, model_name: str) -> None:
    model = make_model(Config(**MODELS[model_name]))
    before, keys = model(batch(model.config)[0]), set(model.state_dict())
    method.prepare(model)
    torch.testing.assert_close(model.eval()(batch(model.config)[0]), before)
    assert keys <= set(model.state_dict())
    added = set(model.state_dict()) - keys
    assert added and all(method.owns(name) for name in added)


@on_all_methods
@on_all_models
def test_only_its_own_parameters_train_and_all_of_them_act(method: FinetuneMethod, model_name: str) -> None:
    model = make_model(Config(**MODELS[model_name]))
    method.prepare(model)
    randomize(model)
    _, grads = loss_and_grads(model.eval(), "dense")
    assert grads and all(method.owns(name) for name in grads)
    assert all(grad.abs().max() > 0 for grad in grads.values())
    assert all(p.requires_grad == method.owns(name) for name, p in model.named_parameters())


@pytest.mark.parametrize("strategy", ["dense", "chunked", "cut"])
@on_all_methods
@on_all_models
def test_the_loss_and_its_gradients_are_those_of_the_logits(
    method: FinetuneMethod, model_name: str, strategy: str
) -> None:
    model = make_model(Config(**MODELS[model_name]))
    method.prepare(model)
    randomize(model)
    model.eval()
    exact = copy.deepcopy(model).double()
    want_loss, want = loss_and_grads(exact)
    plain_loss, plain = loss_and_grads(model)
    loss, grads = loss_and_grads(model, strategy)
    assert abs(loss - want_loss) <= 2 * abs(plain_loss - want_loss) + 1e-6 * want_loss
    for name in grads:
        error, allowed = ((g[name].double() - want[name]).norm() for g in (grads, plain))
        assert error <= 2 * allowed + 4e-6 * want[name].norm(), name


@on_all_methods
def test_the_head_in_16_bits(method: FinetuneMethod) -> None:
    """No worse than twice what the logits' own rounding costs."""
    model = make_model(Config(**MODELS["llama"]))
    method.prepare(model)
    randomize(model, 0.05)
    model.bfloat16().eval()
    exact = copy.deepcopy(model).double()
    want_loss, want = loss_and_grads(exact)
    plain_loss, plain = loss_and_grads(model)
    for strategy in ("dense", "chunked", "cut"):
        loss, grads = loss_and_grads(model, strategy)
        assert abs(loss - want_loss) <= 2 * abs(plain_loss - want_loss) + 2**-9 * want_loss
        for name, grad in grads.items():
            assert grad.dtype == torch.bfloat16
            error, allowed = ((g[name].double() - want[name]).norm() for g in (grads, plain))
            assert error <= 2 * allowed + 2**-8 * want[name].norm(), name


@on_all_methods
def test_frozen_parameters_get_no_gradient_buffers(method: FinetuneMethod) -> None:
    model = make_model(Config(**MODELS["gpt2"]))
    method.prepare(model)
    model(*batch(model.config)).backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {
        name for name, _ in model.named_parameters() if method.owns(name)
    }


@pytest.mark.parametrize("mode", [True, False])
def test_a_tied_head_stays_tied(mode: bool) -> None:
    config = Config(**MODELS["gpt2"])
    for method in METHODS.values():
        model = make_model(config)
        method.prepare(model)
        model.train(mode).to(torch.float64).load_state_dict(model.state_dict())
        assert model.lm_head.weight is model.transformer.wte.weight
        assert "lm_head.weight" not in model.state_dict()


def test_norms_are_found_by_name() -> None:
    for values in MODELS.values():
        with torch.device("meta"):
            model = GPT(Config(**values))
        norms = {
            f"{name}.{key}"
            for name, module in model.named_modules()
            if isinstance(module, (nn.LayerNorm, nn.RMSNorm))
            for key, _ in module.named_parameters()
        }
        assert norms == {name for name, _ in model.named_parameters() if AdapterV2().owns(name)}


@pytest.mark.parametrize(
    ("cls", "values", "message"),
    [
        (LoRA, {"r": 0}, "--lora.r 0: must be at least 1"),
        (LoRA, {"alpha": 0}, "--lora.alpha 0: must be greater than 0"),
        (LoRA, {"alpha": float("nan")}, "--lora.alpha nan"),
        (LoRA, {"dropout": 1.0}, "--lora.dropout 1.0: must be 0 or more and below 1"),
        (LoRA, {"dropout": float("nan")}, "--lora.dropout nan"),
        (LoRA, {"query": False, "value": False}, "nothing is adapted; set one of query, key"),
        (LoRA, {"head": True}, "--lora.dropout 0.05 does not go with --lora.head true.*; set --lora.dropout 0 or"),
        (Adapter, {"prompt_length": 0}, "--adapter.prompt_length 0"),
        (AdapterV2, {"start_layer": -1}, "--adapter_v2.start_layer -1"),
    ],
)
def test_options_that_cannot_work(cls: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.compile(message)):
        cls(**values)


def test_a_start_layer_beyond_the_model() -> None:
    with pytest.raises(UsageError, match="--adapter.start_layer 3: the model has layers 0 to 2"):
        Adapter(start_layer=3).check(Config(**MODELS["gpt2"]))
