"""A run from its arguments to its last checkpoint: what all recipes share."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from litce.args import EvalArgs, LogArgs, TrainArgs, UsageError, require_seed
from litce.config import Config
from litce.data import DataModule
from litce.data.base import make_dataloader, require_data
from litce.generate import encode_prompt, generate
from litce.loss import CrossEntropyPlan, plan_cross_entropy
from litce.model import GPT
from litce.peft.method import FinetuneMethod
from litce.tokenizer import Tokenizer
from litce.training import checkpoint
from litce.training.checkpoint import TrainState
from litce.training.finetuned import Base, require_same_method
from litce.training.hyperparameters import as_hyperparameters
from litce.training.loop import fit, total_steps
from litce.training.memory_limit import explained_out_of_memory, resolve_micro_batch
from litce.training.metrics import Metrics, Summary
from litce.training.optim import LearningRate, resolve_optimizer
from litce.training.ranks import on_every_rank, on_rank_zero, rank_by_rank
from litce.training.resume import finished, prepare_out_dir, require_position, require_resumable, resolve_resume
from litce.training.strategy import (
    LoggerName,
    Precision,
    build_fabric,
    build_logger,
    weight_dtype,
)


@dataclass(frozen=True)
class Task:
    """What a recipe trains."""

    config: Config
    method: FinetuneMethod
    initialize: Callable[[GPT], None]
    """Gives a model its first weights, before the method adds its parts."""
    tokenizer: Tokenizer | None
    """None takes the one that the data brings."""
    base: Base | None = None
    """The checkpoint that is finetuned."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """The recipe's own arguments, to be saved."""


def run(
    task: Task,
    out_dir: Path,
    precision: Precision | None = None,
    resume: bool | Literal["auto"] | Path = False,
    data: DataModule | None = None,
    train: TrainArgs = TrainArgs(),  # noqa: B008  (never written to, and the command line shows its values)
    eval: EvalArgs = EvalArgs(),  # noqa: B008
    log: LogArgs = LogArgs(),  # noqa: B008
    optimizer: str | dict[str, Any] = "AdamW",
    devices: int | Literal["auto"] = "auto",
    num_nodes: int = 1,
    logger_name: LoggerName = "csv",
    seed: int = 42,
) -> Summary:
    """Train, from the first look at the arguments to the last checkpoint.

    Args:
        task: What is trained.
        out_dir: Folder for checkpoints and logs. It has to be empty, unless the run in it is resumed.
        precision: Dtypes of weights and arithmetic; null takes bf16-mixed where the GPU supports it, else 32-true.
        resume: Checkpoint to continue; true takes the newest in out_dir. auto does too, or starts if there is none, and
            ends at once if the run is finished.
        data: Training and validation data.
        train: Batches, duration, learning rate and the loss.
        eval: Validation, and what to generate at the end.
        log: Names for the wandb logger.
        optimizer: Class of torch.optim or import path; --optimizer.lr and others set its arguments.
        devices: Processes on this machine, each with its GPU; auto takes all GPUs, or one process on the CPU.
        num_nodes: Number of machines.
        logger_name: Where to log the metrics.
        seed: Seed of the initial weights, the order of the data and dropout.

    Returns:
        What the run came to.

    Raises:
        UsageError: if the arguments cannot work, before the model is built.
    """
    arguments = {name: value for name, value in locals().items() if name != "task"}
    hyperparameters = as_hyperparameters({**task.arguments, **arguments})
    require_seed(seed)
    data = require_data(data)
    config, method = task.config, task.method
    max_seq_length = resolve_max_seq_length(train, task)
    spec = resolve_optimizer(optimizer)
    # Once without the size of the data, which can take minutes to prepare.
    LearningRate(spec.lr, train.min_lr, train.lr_warmup_steps, total_steps(train, None, max_seq_length))
    logger = build_logger(logger_name, out_dir, log, hyperparameters)
    fabric = build_fabric(precision=precision, devices=devices, num_nodes=num_nodes, loggers=[logger])
    train = resolve_micro_batch(train, task, precision, optimizer, fabric)
    train.accumulation_iters(fabric.world_size)
    plan = resolve_plan(train, task, max_seq_length, precision, fabric.device)

    fabric.launch()
    fabric.seed_everything(seed, verbose=False)
    spec.require_usable(fabric.device)
    source = on_rank_zero(fabric, lambda: resolve_resume(resume, out_dir))
    if source is not None:
        require_resumable(fabric, source, config, spec, hyperparameters)
        require_same_method(source, method, task.base)
        if nothing_left := finished(source, train, eval):
            if resume != "auto":
                raise UsageError(nothing_left)
            fabric.print(f"finished: {nothing_left}, or give another --out_dir")
            return Summary(0, 0, 0.0, 0.0, None, None, None, None, source)
    on_rank_zero(fabric, lambda: prepare_out_dir(out_dir))

    on_rank_zero(fabric, data.prepare)
    tokenizer = task.tokenizer or data.tokenizer
    prompt_ids = check_tokenizer(tokenizer, task, eval)
    rank_by_rank(fabric, lambda: data.connect(tokenizer, max_seq_length, seed))
    data.check_vocabulary(config.vocab_size)
    train_loader, val_loader = (
        make_dataloader(
            dataset,
            data,
            batch_size=train.num_sequences,
            shuffle=shuffle,
            seed=seed,
            rank=fabric.global_rank,
            world_size=fabric.world_size,
            vocab_size=config.vocab_size,
        )
        for dataset, shuffle in ((data.train_dataset(), True), (data.val_dataset(), False))
    )
    if source is not None:
        require_position(source, len(train_loader.sampler), fabric.world_size)  # type: ignore[arg-type]
    num_steps = total_steps(train, len(data.train_dataset()), max_seq_length)  # type: ignore[arg-type]
    learning_rate = LearningRate(spec.lr, train.min_lr, train.lr_warmup_steps, num_steps)

    with fabric.init_module(empty_init=True):
        gpt = GPT(config)
    gpt.max_seq_length = max_seq_length
    gpt.lm_head.plan = plan
    task.initialize(gpt)
    method.prepare(gpt)
    fabric.print(f"{config.name or 'model'}: {count_parameters(gpt)}, {fabric.world_size} device(s)")
    fabric.print(plan)

    state = TrainState(*fabric.setup(gpt, spec.build(gpt)))
    # All ranks have the same parameters by now, and drop other features.
    torch.manual_seed(seed + fabric.global_rank)
    if source is not None:
        on_every_rank(fabric, lambda: checkpoint.load_state(fabric, source, state, spec.init_args, method))
        fabric.print(f"resumed from {source} at step {state.step}")
    metrics = Metrics(fabric, total_steps=num_steps, first_step=state.step, first_tokens=state.num_tokens)

    def save(name: str) -> None:
        checkpoint.save_checkpoint(
            fabric,
            out_dir / name,
            state,
            config=config,
            hyperparameters=hyperparameters,
            tokenizer=tokenizer,
            method=method,
            base=task.base,
        )
        metrics.print(f"saved {out_dir / name}")
        if train.keep_last is not None and fabric.is_global_zero:
            checkpoint.remove_older(out_dir, train.keep_last)

    try:
        with explained_out_of_memory(train, task, precision, optimizer, fabric):
            fit(
                fabric,
                state,
                train_loader,
                val_loader,
                train,
                eval,
                learning_rate=learning_rate,
                save=save,
                metrics=metrics,
            )
    finally:
        metrics.close()
    unigram_loss = data.unigram_loss() if fabric.is_global_zero and metrics.val_loss is not None else None
    summary = metrics.summary(
        step=state.step, num_tokens=state.num_tokens, unigram_loss=unigram_loss, checkpoint_dir=out_dir / "final"
    )
    fabric.print(summary)
    if advice := method.after_save(out_dir / "final"):
        fabric.print(advice)
    if prompt_ids and fabric.is_global_zero:
        assert tokenizer is not None
        fabric.print(sample_text(state.model, tokenizer, prompt_ids, eval.max_new_tokens, seed))
    return summary


def folder_name(model_name: str) -> str:
    """The name of a model, which is free text, as that of a folder."""
    return re.sub(r"[^\w.-]+", "-", model_name).strip(".-") or "model"


def count_parameters(model: nn.Module) -> str:
    """Trainable and frozen parameters, in words."""
    counts = [sum(p.numel() for p in model.parameters() if p.requires_grad == trained) for trained in (True, False)]
    return f"{counts[0]:,} trainable parameters" + (f", {counts[1]:,} frozen" if counts[1] else "")


def resolve_max_seq_length(train: TrainArgs, task: Task) -> int:
    """Positions per training sequence.

    Raises:
        UsageError: if the model cannot take as many as asked for.
    """
    config = task.config
    if train.max_seq_length is not None and train.max_seq_length > config.block_size:
        raise UsageError(
            f"--train.max_seq_length {train.max_seq_length} is above the model's block_size {config.block_size}; "
            f"lower it{' or raise --model_config.block_size' if task.base is None else ''}"
        )
    return train.max_seq_length or config.block_size


def resolve_plan(
    train: TrainArgs, task: Task, max_seq_length: int, precision: Precision | None, device: torch.device
) -> CrossEntropyPlan:
    """How the head computes the loss of a micro-batch, in training and in validation.

    Raises:
        UsageError: if the options contradict each other.
    """
    config = task.config
    assert config.padded_vocab_size is not None and isinstance(train.memory_budget_bytes, int)
    try:
        return plan_cross_entropy(
            train.num_sequences * max_seq_length,
            config.padded_vocab_size,
            config.n_embd,
            dtype=weight_dtype(precision),
            device=device,
            weight_requires_grad=task.method.trains_head,
            chunk_size=train.cross_entropy_chunk_size,
            strategy=train.cross_entropy,
            memory_budget_bytes=train.memory_budget_bytes,
            filter_tolerance=train.cross_entropy_filter_tolerance,
        )
    except ValueError as error:
        raise UsageError(
            f"--train.cross_entropy {train.cross_entropy} with --train.cross_entropy_chunk_size "
            f"{train.cross_entropy_chunk_size} and --train.cross_entropy_filter_tolerance "
            f"{train.cross_entropy_filter_tolerance}: {error}"
        ) from error


def check_tokenizer(tokenizer: Tokenizer | None, task: Task, eval: EvalArgs) -> list[int]:
    """Token ids of the prompt for the end of the run, none without a prompt.

    Raises:
        UsageError: if the vocabulary is larger than the model's, or a prompt has no tokenizer.
    """
    config = task.config
    if tokenizer is not None and tokenizer.needed_vocab_size > config.vocab_size:
        size = tokenizer.needed_vocab_size
        raised = f"raise --model_config.vocab_size to {size} or " if task.base is None else ""
        raise UsageError(
            f"the tokenizer has {size} ids, more than the model's vocab_size {config.vocab_size}; "
            f"{raised}use another tokenizer"
        )
    if eval.prompt is None:
        return []
    if tokenizer is None:
        raise UsageError("--eval.prompt needs a tokenizer; give --tokenizer_dir, or --eval.prompt null")
    return encode_prompt(tokenizer, eval.prompt, flag="--eval.prompt")


def sample_text(
    model: nn.Module, tokenizer: Tokenizer, prompt_ids: list[int], max_new_tokens: int | None, seed: int
) -> str:
    """The prompt and its continuation; neither the model's mode nor a global random number generator changes."""
    gpt = checkpoint.unwrap(model)
    assert isinstance(gpt, GPT)
    (new_ids,) = generate(
        gpt,
        [prompt_ids],
        max_new_tokens=max_new_tokens or max(1, gpt.max_seq_length - len(prompt_ids)),
        stop_ids=tokenizer.stop_ids,
        vocab_size=min(tokenizer.vocab_size, gpt.config.vocab_size),
        generator=torch.Generator(gpt.lm_head.weight.device).manual_seed(seed),
    )
    return tokenizer.decode(prompt_ids + new_ids)
