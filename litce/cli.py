"""`litce COMMAND ...`: a function's signature is its command line."""

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from litce import __version__
from litce.args import UsageError
from litce.cli_config import locate, read_configs, with_config
from litce.cli_messages import require_groups, suggest
from litce.cli_parser import build_parser, parse


@dataclass(frozen=True)
class Command:
    """A function to run, named so that it is imported only when asked for."""

    function: str
    help: str
    default_config: str | None = None
    positional: tuple[str, ...] = ()


COMMANDS = {
    "pretrain": Command("litce.recipes.pretrain:setup", "train a model from scratch", "pretrain/demo"),
    "finetune": Command("litce.recipes.lora:setup", "short for finetune_lora", "finetune/demo/lora"),
    "finetune_full": Command("litce.recipes.full:setup", "finetune all of a model", "finetune/demo/full"),
    "finetune_lora": Command("litce.recipes.lora:setup", "finetune low-rank additions", "finetune/demo/lora"),
    "finetune_adapter": Command("litce.recipes.adapter:setup", "finetune LLaMA-Adapter", "finetune/demo/adapter"),
    "finetune_adapter_v2": Command(
        "litce.recipes.adapter_v2:setup", "finetune LLaMA-Adapter V2", "finetune/demo/adapter_v2"
    ),
    "generate": Command("litce.generate:setup", "continue a prompt", positional=("checkpoint_dir",)),
    "chat": Command("litce.chat:setup", "talk to a finetuned model", positional=("checkpoint_dir",)),
    "evaluate": Command(
        "litce.tools.evaluate:setup", "loss, perplexity and accuracy on any data", positional=("checkpoint_dir",)
    ),
    "merge_lora": Command("litce.tools.merge_lora:setup", "merge LoRA weights", positional=("checkpoint_dir",)),
    "download": Command("litce.tools.download:setup", "get a model from Hugging Face", positional=("repo_id",)),
    "convert_from_hf": Command(
        "litce.tools.convert_hf:convert_from_hf", "use a model from Hugging Face", positional=("directory",)
    ),
    "convert_to_hf": Command(
        "litce.tools.convert_hf:convert_to_hf", "use a model with transformers", positional=("directory",)
    ),
    "plan": Command("litce.tools.plan:setup", "predict the memory of a training run"),
    "profile_memory": Command("litce.tools.profile_memory:setup", "measure what the loss holds, setting by setting"),
    "bench loss": Command("litce.tools.bench:loss", "measure time and memory of the loss strategies"),
    "bench accuracy": Command("litce.tools.bench_accuracy:accuracy", "measure errors of the loss's gradients"),
    "bench operands": Command(
        "litce.tools.operands:setup", "save a head's operands for the benchmarks", positional=("checkpoint_dir",)
    ),
    "bench parity": Command("litce.tools.model_parity:parity", "compare the models with those of transformers"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command in `argv` (`sys.argv[1:]` when not given).

    Exits with code 2 and one line on the standard error stream for whatever the user has to correct.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(overview())
        return
    if words[0] == "--version":
        print(f"litce {__version__}")
        return
    try:
        name, rest = split_command(words)
    except UsageError as error:
        _exit("litce", error)
    try:
        run(name, rest)
    except UsageError as error:
        _exit(f"litce {name}", error)


def overview() -> str:
    """The commands, a line each."""
    lines = [f"  {name:<20} {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: litce COMMAND [options]", "", *lines, "", "litce COMMAND --help shows the options of a command."]
    )


def split_command(words: list[str]) -> tuple[str, list[str]]:
    """The command that `words` starts with, and the words after it.

    Raises:
        UsageError: if there is no such command.
    """
    for length in (2, 1):
        name = " ".join(words[:length])
        if name in COMMANDS:
            return name, words[length:]
    group = [name for name in COMMANDS if name.split()[0] == words[0]]
    if group:
        raise UsageError(f"{words[0]!r} needs one more word; choose {', '.join(group)}")
    raise UsageError(f"unknown command {words[0]!r}; {suggest(words[0], list(COMMANDS))}")


def run(name: str, words: list[str]) -> None:
    """Parse the options in `words` and call the function of the command `name`.

    Raises:
        UsageError: if they cannot be parsed, or the function raises it.
    """
    command = COMMANDS[name]
    module_name, _, function_name = command.function.partition(":")
    function = getattr(importlib.import_module(module_name), function_name)
    parser = build_parser(name, function, command.positional)
    words = with_config(words, command.default_config)
    configs = read_configs(words)
    try:
        for content in configs.values():
            require_groups(parser, content)
        function(**parse(parser, words))
    except UsageError as error:
        raise UsageError(locate(str(error), words, configs)) from error


def _exit(prog: str, error: UsageError) -> NoReturn:
    # Every process of a run comes here with the same error; one on each machine tells it.
    if os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0":
        print(f"{prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
    sys.exit(2)
