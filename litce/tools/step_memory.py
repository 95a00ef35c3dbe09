"""The memory of a training step before there is any: the real model's operators, run on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from litce.args import UsageError
from litce.config import Config
from litce.loss import CrossEntropyPlan
from litce.model import GPT
from litce.tools.allocations import Allocations, Buffer
from litce.tools.planned_loss import LOSS_PART, planned_loss
from litce.training.optim import OptimizerSpec

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer state"
BUCKETS, ACTIVATIONS, TEMPORARIES, BATCH = "gradient buckets", "activations", "optimizer temporaries", "batch"
KV_CACHE = "KV cache"
PARTS = (WEIGHTS, OPTIMIZER, BUCKETS, GRADIENTS, ACTIVATIONS, LOSS_PART, TEMPORARIES, KV_CACHE, BATCH)
FORWARD, BACKWARD, STEP = PHASES = ("forward pass", "backward pass", "optimizer step")


@dataclass(frozen=True)
class StepMemory:
    """What a training step holds at the peak of each of its phases."""

    phases: dict[str, dict[str, int]]
    """Phase -> part -> bytes."""

    @property
    def phase(self) -> str:
        """The phase with the largest peak."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part at the step's peak."""
        return self.phases[self.phase]

    @property
    def peak_bytes(self) -> int:
        """The most bytes that tensors hold at once."""
        return sum(self.parts.values())


class FakeRun:
    """A model and its optimizer, set up as for training, of tensors without memory.

    Only tensors count: not the process itself, a GPU's context, or what an allocator keeps in fragments.

    Args:
        config: of the model.
        prepare: adds a finetuning method's parts and freezes what does not train.
        spec: the optimizer.
        fabric: gives device and precision; not launched.
        num_devices: with more than one, gradients are summed in buckets (DDP).

    Raises:
        UsageError: if the optimizer cannot take a step on fake tensors.
    """

    def __init__(
        self, config: Config, prepare: Callable[[GPT], None], spec: OptimizerSpec, fabric: Fabric, num_devices: int = 1
    ) -> None:
        self.fabric = fabric
        self._mode = FakeTensorMode()
        with self._mode:
            with fabric.init_module(empty_init=True):
                self.model = GPT(config)
            prepare(self.model)
            self.model.train()
        self._trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._shapes = {tuple(shape) for p in self._trainable for shape in (p.shape, p.shape[::-1]) if p.ndim > 1}
        self.gradient_bytes = sum(parameter.nbytes for parameter in self._trainable)
        self._fixed = {WEIGHTS: storage_bytes([*self.model.parameters(), *self.model.buffers()])}
        temporaries = self._step_optimizer(spec)
        if num_devices > 1:
            self._fixed[BUCKETS] = self.gradient_bytes
        self._optimizer_step = {**self._fixed, GRADIENTS: self.gradient_bytes, TEMPORARIES: temporaries}

    def memory(
        self, plan: CrossEntropyPlan, micro_batch_size: int, max_seq_length: int, accumulation_iters: int
    ) -> StepMemory:
        """What a step holds whose micro-batches are (micro_batch_size, max_seq_length) tokens, all supervised."""
        counter = Allocations()
        shape, device = (micro_batch_size, max_seq_length), self.fabric.device
        with self._mode, counter:
            counter.enter_phase(FORWARD, BATCH)
            # The loop fetches the micro-batches of a step together, and sends them to a GPU one by one.
            num_batches = accumulation_iters if device.type == "cpu" else 1
            batches = [torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(2 * num_batches)]
            if accumulation_iters > 1:
                # All but the first micro-batch find the gradients of those before.
                counter.part = GRADIENTS
                for parameter in self._trainable:
                    parameter.grad = torch.empty_like(parameter)
            counter.part = ACTIVATIONS
            with self.fabric.autocast():
                hidden = self.model.hidden_states(batches[0])
                loss = planned_loss(self.model.lm_head, hidden, batches[1], plan, counter)
            del hidden
            counter.enter_phase(BACKWARD, ACTIVATIONS)
            loss.backward()
            counter.assign(GRADIENTS, [p.grad for p in self._trainable if p.grad is not None])
        for parameter in self._trainable:
            parameter.grad = None
        logits_shape = (micro_batch_size * max_seq_length, self.model.lm_head.out_features)
        phases = {}
        for phase, peak in counter.peaks.items():
            parts = dict(self._fixed)
            for buffer in peak.buffers:
                part = self._backward_part(buffer, logits_shape) if phase == BACKWARD else buffer.part
                parts[part] = parts.get(part, 0) + buffer.num_bytes
            phases[phase] = parts
        batch = sum(batch.nbytes for batch in batches)
        return StepMemory({**phases, STEP: {**self._optimizer_step, BATCH: batch}})

    def generation(self, length: int) -> dict[str, int]:
        """Bytes by part of generating from one prompt, for `length` tokens with it, at the peak: reading the prompt."""
        counter = Allocations()
        # The cache looks at the positions' values, so they are real.
        positions = torch.arange(length)
        self.model.eval()
        with self._mode, torch.no_grad(), counter:
            counter.enter_phase(FORWARD, BATCH)
            ids = torch.zeros((1, length), dtype=torch.int64, device=self.fabric.device)
            counter.part = KV_CACHE
            self.model.set_kv_cache(1, length)
            counter.part = ACTIVATIONS
            last = self.model.hidden_states(ids, input_pos=positions)[:, -1]
            counter.part = LOSS_PART
            self.model.lm_head(last).float()
        self.model.clear_kv_cache()
        self.model.train()
        return {WEIGHTS: self._fixed[WEIGHTS], **counter.peak.by_part()}

    def _backward_part(self, buffer: Buffer, logits_shape: tuple[int, int]) -> str:
        """What a buffer is for that the backward pass made, by its shape: autograd does not say."""
        if buffer.part != ACTIVATIONS:
            return buffer.part
        if buffer.shape == logits_shape:
            return LOSS_PART
        # Gradients that are added to others and freed, such as one of the two of a tied weight.
        return GRADIENTS if buffer.shape in self._shapes else ACTIVATIONS

    def _step_optimizer(self, spec: OptimizerSpec) -> int:
        """Take steps to create the optimizer's state; returns the bytes that a further one allocates at once."""
        counter = Allocations()
        try:
            with self._mode:
                for parameter in self._trainable:
                    parameter.grad = torch.empty_like(parameter)
                optimizer = spec.build(self.model)
                for group in optimizer.param_groups:
                    # torch decides by the type of the parameters, which is another for fake ones.
                    if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                        group["foreach"] = self.fabric.device.type == "cuda"
                optimizer.step()
                with counter:
                    counter.enter_phase(STEP, TEMPORARIES)
                    optimizer.step()
        except Exception as error:  # each class has its own
            raise UsageError(
                f"--optimizer {spec.cls.__name__} cannot be planned for: it does not run without values "
                f"({' '.join(str(error).split())[:200]}); plan with AdamW or SGD"
            ) from error
        for parameter in self._trainable:
            parameter.grad = None
        tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
        self._fixed[OPTIMIZER] = storage_bytes(tensors)
        return counter.peak.num_bytes


def storage_bytes(tensors: list[Tensor] | list[nn.Parameter]) -> int:
    """Bytes of the storages of `tensors`, shared ones once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
