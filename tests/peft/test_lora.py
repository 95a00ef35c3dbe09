"""LoRA against the package peft, which wraps the same layers of the same model."""

import copy
from itertools import product
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from litce.config import Config
from litce.model import GPT
from litce.peft.lora import TARGETS, LoRA, LoRALinear, merge_lora
from tests.peft.models import MODELS, batch, loss_and_grads, make_model, randomize

MODULES = {
    "query": ["q"],
    "key": ["k"],
    "value": ["v"],
    "projection": ["proj"],
    "mlp": ["gate", "up", "down"],
    "head": ["lm_head"],
}
KINDS: dict[str, dict[str, Any]] = {"lora": {}, "rslora": {"rslora": True}, "dora": {"dora": True}}
PARTS = {"lora_A": "lora_A.default.weight", "lora_B": "lora_B.default.weight"}


def only(*targets: str, **options: Any) -> LoRA:
    return LoRA(r=4, alpha=6, **{"dropout": 0.0, **{name: name in targets for name in TARGETS}, **options})


def adapted(model_name: str, lora: LoRA) -> GPT:
    """A model whose additions are random and as large as its weights."""
    # The head caps its logits, and peft adds to what the head returns.
    model = make_model(Config(**{**MODELS[model_name], "logit_softcap": None}))
    lora.prepare(model)
    randomize(model)
    return model


def reference(model: GPT, lora: LoRA) -> torch.nn.Module:
    """The same by peft."""
    plain = GPT(model.config)
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if not lora.owns(name)})
    modules = [name for target in TARGETS if getattr(lora, target) for name in MODULES[target]]
    config = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        target_modules=[name for name in modules if any(n.endswith(name) for n, _ in plain.named_modules())],
    )
    wrapped = peft.inject_adapter_in_model(config, plain)
    named = dict(wrapped.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if lora.owns(name):
                named[their_name(name)].copy_(parameter)
    return wrapped.train(model.training)


def their_name(name: str) -> str:
    module, _, part = name.rpartition(".")
    return f"{module}.{PARTS.get(part, 'lora_magnitude_vector.default.weight')}"


def their_loss_and_grads(model: torch.nn.Module, ours: GPT) -> tuple[Tensor, dict[str, Tensor]]:
    ids, targets = batch(ours.config)
    loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    named = dict(model.named_parameters())
    return loss.detach(), {n: named[their_name(n)].grad for n, p in ours.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("target", [*TARGETS, "all"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_name", MODELS)
def test_outputs_and_gradients_are_those_of_peft(model_name: str, kind: str, target: str) -> None:
    lora = only(*(TARGETS if target == "all" else [target]), **KINDS[kind])
    model = adapted(model_name, lora)
    theirs = reference(model, lora)
    ids, _ = batch(model.config)
    torch.testing.assert_close(model(ids), theirs(ids), rtol=1e-5, atol=2e-5)
    # fp32 roundings of sums over some hundred terms; DoRA's reference subtracts and adds the plain output again.
    loss, grads = loss_and_grads(model, "chunked")
    their_loss, their_grads = their_loss_and_grads(theirs, model)
    torch.testing.assert_close(loss, their_loss, rtol=1e-6, atol=0)
    assert grads.keys() == their_grads.keys() and grads
    for name, grad in grads.items():
        assert (grad - their_grads[name]).norm() <= 5e-6 * their_grads[name].norm(), name


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_drops_what_peft_drops(kind: str) -> None:
    lora = only("query", "value", "projection", "mlp", dropout=0.4, **KINDS[kind])
    model = adapted("gpt2", lora)
    theirs = reference(model, lora)
    ids, _ = batch(model.config)
    outputs = []
    for module in (model, theirs, model):
        torch.manual_seed(3)
        outputs.append(module(ids))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=2e-5)
    assert torch.equal(outputs[0], outputs[2])
    torch.manual_seed(4)
    assert (model(ids) - outputs[0]).abs().max() > 0.01
    assert torch.equal(model.eval()(ids), model(ids))


@pytest.mark.parametrize(("model_name", "kind"), list(zip(["gpt2", "qwen2", "llama"], KINDS, strict=True)))
def test_merged_is_the_same_for_every_set_of_targets_and_merging_again_changes_nothing(
    model_name: str, kind: str
) -> None:
    for chosen in product([False, True], repeat=len(TARGETS)):
        targets = [target for target, use in zip(TARGETS, chosen, strict=True) if use]
        if not targets:
            continue
        model = adapted(model_name, only(*targets, **KINDS[kind])).eval()
        ids, targets_ids = batch(model.config)
        with torch.no_grad():
            want, want_loss = model(ids), model(ids, targets_ids)
            merged = merge_lora(model)
            scale = float(want.abs().max())
            assert (merged(ids) - want).abs().max() <= 1e-5 * max(1.0, scale)
            assert abs(merged(ids, targets_ids) - want_loss) <= 1e-5 * want_loss
        assert not any(isinstance(module, LoRALinear) for module in merged.modules())
        assert merged.config.tie_embeddings == (model.config.tie_embeddings and "head" not in targets)
        plain = GPT(merged.config)
        plain.load_state_dict(merged.state_dict())
        again = merge_lora(merged)
        assert all(torch.equal(again.state_dict()[name], value) for name, value in merged.state_dict().items())


def test_merging_leaves_the_model_alone() -> None:
    model = adapted("gpt2", only(*TARGETS))
    before = copy.deepcopy(model.state_dict())
    merged = merge_lora(model)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert merged.training and model.lm_head.weight is model.transformer.wte.weight
    assert all(parameter.requires_grad for parameter in merged.parameters())


def test_merging_rounds_once() -> None:
    """16-bit weights: the merged weight is the rounded exact sum."""
    model = adapted("llama", only(*TARGETS)).bfloat16()
    merged = merge_lora(model)
    layer, weight = model.transformer.h[0].attn.q, merged.transformer.h[0].attn.q.weight
    exact = layer.weight.double() + layer.scaling * layer.lora_B.double() @ layer.lora_A.double()
    assert weight.dtype == torch.bfloat16
    assert (weight.double() - exact).abs().max() <= (2**-8 + 1e-6) * exact.abs().max() / 2


def test_additions_of_16_bits_are_not_rounded_by_autocast() -> None:
    model = adapted("gpt2", only("head"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weight, _ = model.lm_head.projection()
    assert torch.equal(weight, model.lm_head.projection()[0])


def test_scale_and_initial_values() -> None:
    assert LoRA(r=16, alpha=8).scaling == 0.5 and LoRA(r=16, alpha=8, rslora=True).scaling == 2.0
    torch.manual_seed(0)
    model = GPT(Config(**MODELS["gpt2"]))
    LoRA(r=32, dora=True).prepare(model)
    layer = model.transformer.h[0].attn.q
    assert layer.lora_B.abs().max() == 0
    # U(-1/sqrt(D), 1/sqrt(D)), as `nn.Linear` draws its weight.
    bound = model.config.n_embd**-0.5
    assert 0.95 * bound < layer.lora_A.abs().max() <= bound
    assert abs(layer.lora_A.std() - bound / 3**0.5) < 0.05 * bound
    torch.testing.assert_close(layer.lora_magnitude, layer.weight.norm(dim=1))
