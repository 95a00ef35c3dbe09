"""`litce plan`: the memory of a training run before it starts, and what fits a given memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.status import Status

from litce.args import TrainArgs, UsageError, parse_bytes
from litce.config import Config
from litce.peft import Adapter, AdapterV2, Full, LoRA
from litce.recipes.pretrain import resolve_config
from litce.tools.plan_report import advice, draw, fits_line, generation_line, print_table
from litce.tools.planner import Planner, usable_bytes
from litce.tools.step_memory import StepMemory
from litce.training.checkpoint import MODEL_CONFIG
from litce.training.run import Task
from litce.training.strategy import Precision


def setup(
    model_name: str | None = None,
    model_config: dict[str, Any] | None = None,
    checkpoint_dir: Path | None = None,
    method: Literal["pretrain", "full", "lora", "adapter", "adapter_v2"] = "pretrain",
    lora: LoRA = LoRA(),  # noqa: B008  (never written to, and the command line shows its values)
    adapter: Adapter = Adapter(),  # noqa: B008
    precision: Precision | None = None,
    train: TrainArgs = TrainArgs(),  # noqa: B008
    optimizer: str | dict[str, Any] = "AdamW",
    devices: int = 1,
    memory: int | str | None = None,
    png: Path | None = None,
) -> StepMemory:
    """Predict the memory of a training run, part by part, without loading weights or allocating any of it.

    Counts what tensors hold on one device, by running the model's operators for this machine's kind of device on
    tensors without memory. With --memory also the largest micro-batch and the longest sequence that fit.

    Args:
        model_name: Named model.
        model_config: Fields of the model, such as --model_config.n_layer 4.
        checkpoint_dir: Checkpoint whose model to plan for; its model_config.yaml is enough.
        method: What trains: everything, or what the method of the finetune command of that name adds.
        lora: For --method lora, as for finetuning.
        adapter: For --method adapter, as for finetuning.
        precision: Dtypes of weights and arithmetic, as for training.
        train: Batches, sequence length and the loss, as for training.
        optimizer: Class of torch.optim or import path, as for training.
        devices: Number of devices that share the global batch.
        memory: Memory of a device, such as 24GB or 80GiB.
        png: Draw the parts to this file.

    Returns:
        The prediction.

    Raises:
        UsageError: if the arguments cannot work.
    """
    limit = train.memory_limit if memory is None else parse_bytes(memory, "--memory")
    assert not isinstance(limit, str)
    if train.micro_batch_size == "auto" and limit is None:
        raise UsageError("--train.micro_batch_size auto needs --memory; give the memory of a device, such as 24GB")
    if png is not None and not png.parent.is_dir():
        raise UsageError(f"--png {png}: the folder {png.parent} does not exist")
    if devices < 1:
        raise UsageError(f"--devices {devices}: give a number from 1 on")
    methods = {"lora": lora, "adapter": adapter, "adapter_v2": AdapterV2()}
    config = _model(model_name, model_config, checkpoint_dir)
    task = Task(config, methods.get(method, Full()), lambda gpt: None, tokenizer=None)
    first = replace(train, micro_batch_size=1) if train.micro_batch_size == "auto" else train
    planner = Planner(task, precision, first, optimizer, devices)
    console = Console(width=None if Console().is_terminal else 120)
    with Status("running the model on tensors without memory", console=Console(stderr=True)):
        if train.micro_batch_size == "auto" and limit is not None:
            first = replace(train, micro_batch_size=planner.largest_micro_batch(first, usable_bytes(limit)) or 1)
        train = first
        memory_of_run = planner.memory(train)
        fitting = None if limit is None else planner.fitting(train, usable_bytes(limit))
    title = (
        f"{config.name or 'model'}, {method}, {planner.fabric_precision}, {optimizer_name(optimizer)}: "
        f"micro-batch {train.micro_batch_size} x {planner.max_seq_length} tokens, {devices} device(s)"
    )
    print_table(console, title, memory_of_run)
    console.print(generation_line(planner.generation(), planner.max_seq_length), highlight=False)
    console.print(str(planner.loss_plan(train)), highlight=False)
    if limit is not None and fitting is not None:
        console.print(fits_line(memory_of_run, limit, usable_bytes(limit)))
        for line in fitting:
            console.print(line)
        if memory_of_run.peak_bytes > usable_bytes(limit):
            console.print(advice(memory_of_run.parts, train, planner.max_seq_length))
    if png is not None:
        draw(memory_of_run, title, png, limit)
    return memory_of_run


def optimizer_name(optimizer: str | dict[str, Any]) -> str:
    """The class in an --optimizer."""
    return optimizer if isinstance(optimizer, str) else str(optimizer.get("class_path", "AdamW"))


def _model(model_name: str | None, model_config: dict[str, Any] | None, checkpoint_dir: Path | None) -> Config:
    if checkpoint_dir is None:
        return resolve_config(model_name, model_config, None)
    if model_name is not None or model_config is not None:
        raise UsageError(f"--checkpoint_dir {checkpoint_dir} says which model; leave out --model_name, --model_config")
    return Config.from_file(checkpoint_dir if checkpoint_dir.is_file() else checkpoint_dir / MODEL_CONFIG)
