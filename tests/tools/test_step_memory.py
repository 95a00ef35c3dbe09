"""The predicted memory of a training step against what torch's allocator gives out in a real one."""

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric

from litce.args import TrainArgs, UsageError
from litce.config import Config
from litce.generate import generate
from litce.model import GPT
from litce.peft import Adapter, AdapterV2, FinetuneMethod, Full, LoRA
from litce.tools.allocations import allocator_peak_bytes
from litce.tools.planned_loss import LOSS_PART
from litce.tools.step_memory import BACKWARD, FORWARD, STEP, FakeRun, StepMemory
from litce.training.optim import resolve_optimizer
from litce.training.run import Task, resolve_plan


def predicted_and_measured(
    config: Config,
    batch: tuple[int, int],
    precision: Any = "32-true",
    optimizer: Any = "AdamW",
    method: FinetuneMethod = Full(),  # noqa: B008  (never written to)
    **train: Any,
) -> tuple[StepMemory, int]:
    fabric, spec = Fabric(accelerator="cpu", devices=1, precision=precision), resolve_optimizer(optimizer)
    train.setdefault("cross_entropy_chunk_size", "auto")
    accumulation_iters = train.pop("accumulation_iters", 1)
    args = TrainArgs(micro_batch_size=batch[0], global_batch_size=batch[0] * accumulation_iters, **train)
    task = Task(config, method, lambda gpt: None, tokenizer=None)
    plan = resolve_plan(args, task, batch[1], precision, fabric.device)

    def real_run() -> None:
        with fabric.init_module(empty_init=True):
            model = GPT(config)
        model.init_weights()
        model.lm_head.plan = plan
        method.prepare(model)
        stepper = spec.build(model)
        for _ in range(2):
            batches = [torch.randint(config.vocab_size, (2, *batch)) for _ in range(accumulation_iters)]
            for input_ids, targets in batches:
                with fabric.autocast():
                    loss = model(input_ids, targets)
                loss.backward()
            stepper.step()
            stepper.zero_grad()

    predicted = FakeRun(config, method.prepare, spec, fabric).memory(plan, *batch, accumulation_iters)
    return predicted, allocator_peak_bytes(real_run)


SMALL = {"n_layer": 2, "vocab_size": 4000}


@pytest.mark.parametrize("model", ["gpt2", "SmolLM2-135M", "Qwen2.5-0.5B"])
@pytest.mark.parametrize(
    ("batch", "options"),
    [
        ((2, 256), {}),  # activations
        ((2, 256), {"precision": "bf16-mixed", "optimizer": "SGD"}),
        ((2, 256), {"precision": "bf16-true", "optimizer": "SGD", "cross_entropy": "dense"}),
        ((2, 128), {"cross_entropy": "dense", "optimizer": "SGD"}),  # logits
        ((1, 64), {"accumulation_iters": 3}),  # gradients and optimizer state
    ],
    ids=["fp32", "mixed", "bf16", "dense", "accumulated"],
)
def test_within_a_tenth_of_the_allocator(model: str, batch: tuple[int, int], options: dict[str, Any]) -> None:
    predicted, measured = predicted_and_measured(Config.from_name(model, **SMALL), batch, **options)
    assert predicted.peak_bytes == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("model", ["pythia-14m", "gemma-3-270m", "Qwen3-0.6B"])
def test_other_families(model: str) -> None:
    changes = {"n_layer": 2, "vocab_size": 4000, "intermediate_size": 512}
    predicted, measured = predicted_and_measured(Config.from_name(model, **changes), (2, 128), cross_entropy="cut")
    assert predicted.peak_bytes == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    "method",
    [LoRA(), LoRA(head=True, mlp=True, dora=True, dropout=0.0), Adapter(start_layer=1), AdapterV2()],
    ids=["lora", "dora", "adapter", "adapter_v2"],
)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_finetuning(method: FinetuneMethod, precision: str) -> None:
    config = Config.from_name("SmolLM2-135M", **SMALL)
    predicted, measured = predicted_and_measured(config, (2, 128), precision, method=method)
    assert predicted.peak_bytes == pytest.approx(measured, rel=0.05)


def test_full_vocabulary() -> None:
    config = Config.from_name("gpt2", n_layer=1, n_embd=192, n_head=3)
    for strategy in ("dense", "auto"):
        predicted, measured = predicted_and_measured(config, (2, 384), optimizer="SGD", cross_entropy=strategy)
        assert predicted.peak_bytes == pytest.approx(measured, rel=0.05)
        part = predicted.phases[BACKWARD if strategy == "dense" else FORWARD][LOSS_PART]
        assert part > 2 * 768 * 50257 * 4 if strategy == "dense" else part < 40 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "batch"), [("gpt2", (2, 512)), ("SmolLM2-135M", (2, 512)), ("Qwen2.5-0.5B", (1, 256))]
)
def test_whole_models(model: str, batch: tuple[int, int]) -> None:
    predicted, measured = predicted_and_measured(Config.from_name(model), batch)
    assert predicted.peak_bytes == pytest.approx(measured, rel=0.05)


def _fake_run(optimizer: Any = "AdamW", prepare: Any = lambda model: None, **options: Any) -> FakeRun:
    config = Config.from_name("demo", n_layer=1, n_embd=32, n_head=2, vocab_size=100)
    fabric = Fabric(accelerator="cpu", devices=1, precision="32-true")
    return FakeRun(config, prepare, resolve_optimizer(optimizer), fabric, **options)


def _memory(run: FakeRun) -> StepMemory:
    plan = resolve_plan(
        TrainArgs(), Task(run.model.config, Full(), lambda gpt: None, None), 16, "32-true", torch.device("cpu")
    )
    return run.memory(plan, 4, 16, 1)


def test_parts() -> None:
    adam = _memory(_fake_run())
    weights = adam.parts["weights"]
    assert weights == 4 * GPT(Config.from_name("demo", n_layer=1, n_embd=32, n_head=2, vocab_size=100)).num_parameters
    # Two moments; a counter per parameter tensor.
    assert 2 * weights < adam.parts["optimizer state"] < 2 * weights + 1000
    assert adam.phases[STEP]["gradients"] == weights
    assert _memory(_fake_run({"class_path": "SGD", "momentum": 0.9, "lr": 1.0})).parts["optimizer state"] == weights
    assert (
        "optimizer state" not in _memory(_fake_run("SGD")).parts
        or _memory(_fake_run("SGD")).parts["optimizer state"] == 0
    )
    assert _memory(_fake_run(num_devices=2)).parts["gradient buckets"] == weights


def test_frozen_parameters_cost_their_weights_alone() -> None:
    def freeze(model: GPT) -> None:
        model.requires_grad_(False)
        model.transformer.ln_f.requires_grad_(True)

    run = _fake_run(prepare=freeze)
    memory = _memory(run)
    assert run.gradient_bytes == 2 * 32 * 4
    assert memory.phases[STEP]["gradients"] == 2 * 32 * 4
    assert memory.parts["activations"] < _memory(_fake_run()).parts["activations"]


@pytest.mark.parametrize("model", ["gpt2", "Qwen2.5-0.5B", "gemma-3-270m"])
def test_generation(model: str) -> None:
    config = Config.from_name(model, n_layer=2, vocab_size=4000, intermediate_size=512)
    fabric = Fabric(accelerator="cpu", devices=1, precision="32-true")
    generation = FakeRun(config, lambda gpt: None, resolve_optimizer("SGD"), fabric).generation(600)
    assert generation["KV cache"] == 2 * 2 * config.n_query_groups * config.head_size * 600 * 4  # type: ignore[operator]

    def real() -> None:
        gpt = GPT(config)
        generate(gpt, [[1] * 600], max_new_tokens=1)

    assert sum(generation.values()) == pytest.approx(allocator_peak_bytes(real), rel=0.05)


def test_asking_twice_gives_the_same() -> None:
    run = _fake_run()
    assert _memory(run) == _memory(run)


class ReadsValues(torch.optim.SGD):
    """Looks at a gradient, which a fake tensor has not."""

    def step(self, closure: Any = None) -> Any:
        if any(float(p.grad.norm()) > 1 for group in self.param_groups for p in group["params"]):
            return super().step(closure)
        return None


def test_an_optimizer_that_reads_values_is_refused() -> None:
    with pytest.raises(UsageError, match="--optimizer ReadsValues cannot be planned for"):
        _fake_run({"class_path": f"{__name__}.ReadsValues", "lr": 1.0})
