"""A whole training step for `litce profile_memory`: predicted part by part, and run for real."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from litce.args import TrainArgs
from litce.model import GPT
from litce.peft import Full
from litce.recipes.pretrain import resolve_config
from litce.tools.planner import Planner
from litce.tools.step_memory import StepMemory
from litce.training.optim import resolve_optimizer
from litce.training.run import Task, resolve_plan
from litce.training.strategy import Precision, build_fabric


@dataclass(frozen=True)
class StepCase:
    """A model, a micro-batch and a way to compute the loss; the optimizer is AdamW."""

    model_name: str
    micro_batch_size: int
    max_seq_length: int
    cross_entropy: Literal["auto", "dense", "chunked", "cut"]
    budget: int
    precision: Precision = "32-true"
    model_config: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)

    @property
    def train(self) -> TrainArgs:
        """One micro-batch per step."""
        return TrainArgs(
            micro_batch_size=self.micro_batch_size,
            global_batch_size=self.micro_batch_size,
            max_seq_length=self.max_seq_length,
            cross_entropy=self.cross_entropy,
            cross_entropy_chunk_size="auto",
            memory_budget_bytes=self.budget,
        )

    @property
    def task(self) -> Task:
        """Training from scratch."""
        config = resolve_config(self.model_name, self.model_config, None)
        return Task(config, Full(), GPT.init_weights, tokenizer=None)

    def predicted(self) -> StepMemory:
        """What `litce plan` says."""
        return Planner(self.task, self.precision, self.train, "AdamW", 1).memory(self.train)


def real_step(case: StepCase) -> None:
    """Build the model and take two steps on random tokens, the second with the optimizer's state in place."""
    task = case.task
    fabric = build_fabric(precision=case.precision, devices=1, num_nodes=1, accelerator="cpu")
    with fabric.init_module(empty_init=True):
        model = GPT(task.config)
    task.initialize(model)
    model.lm_head.plan = resolve_plan(case.train, task, case.max_seq_length, case.precision, fabric.device)
    optimizer = resolve_optimizer("AdamW").build(model)
    for _ in range(2):
        shape = (2, case.micro_batch_size, case.max_seq_length)
        input_ids, targets = torch.randint(task.config.vocab_size, shape)
        with fabric.autocast():
            loss = model(input_ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
