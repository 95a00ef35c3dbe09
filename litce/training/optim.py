"""The optimizer that a run names, and the learning rate of each of its steps."""

import importlib
import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from litce.args import UsageError, as_written
from litce.cli_messages import suggest

# GPT-3's values (Brown et al. 2020, appendix B); torch's own defaults hardly decay and forget slowly.
ADAMW_DEFAULTS = {"lr": 6e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer class and the arguments to call it with."""

    cls: type[Optimizer]
    init_args: dict[str, Any]

    @property
    def lr(self) -> float:
        """The peak learning rate: as given, or the class's default.

        Raises:
            UsageError: if there is neither.
        """
        default = inspect.signature(self.cls).parameters.get("lr")
        lr = self.init_args.get("lr", default.default if default is not None else None)
        if not isinstance(lr, (int, float)):
            raise UsageError(f"--optimizer {self.cls.__name__}: give its learning rate as --optimizer.lr")
        return float(lr)

    def require_usable(self, device: torch.device) -> None:
        """Take a step on a tiny model: some classes need a closure, sparse gradients, or matrices alone.

        Raises:
            UsageError: if it cannot be taken.
        """
        # Made without random numbers, whose order is the run's.
        model = nn.ParameterList([torch.ones(2, 2, device=device), torch.ones(2, device=device)])
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        try:
            self.build(model).step()
        except Exception as error:  # each class has its own
            raise UsageError(
                f"--optimizer {self.cls.__name__} cannot train a model with matrices and vectors "
                f"({' '.join(str(error).split())}); use another such as AdamW"
            ) from error

    def build(self, model: nn.Module) -> Optimizer:
        """The optimizer of the model's trainable parameters; 1-D ones (norms, biases) get no weight decay."""
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        groups: list[dict[str, Any]] = [{"params": trainable}]
        if "weight_decay" in inspect.signature(self.cls).parameters:
            matrices = [parameter for parameter in trainable if parameter.ndim >= 2]
            vectors = [parameter for parameter in trainable if parameter.ndim < 2]
            groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        return self.cls([group for group in groups if group["params"]], **self.init_args)


def resolve_optimizer(spec: str | dict[str, Any]) -> OptimizerSpec:
    """The optimizer that `spec` names.

    `spec` is a class of `torch.optim`, an import path such as `bitsandbytes.optim.PagedAdamW`, or a dict of
    `class_path` (AdamW when missing) and `init_args`. Other keys of the dict count as `init_args` and win over them,
    so that `--optimizer.lr 1e-3` changes one value of a configuration file.

    Raises:
        UsageError: if the class cannot be found or refuses the arguments.
    """
    given: dict[str, Any] = {"class_path": spec} if isinstance(spec, str) else dict(spec)
    class_path, nested = given.pop("class_path", "AdamW"), given.pop("init_args", None) or {}
    if not isinstance(class_path, str):
        raise UsageError(f"--optimizer.class_path {as_written(class_path)}: give a class of torch.optim such as AdamW")
    if not isinstance(nested, dict):
        raise UsageError(f"--optimizer.init_args {as_written(nested)}: give arguments such as --optimizer.lr 0.001")
    init_args = {**nested, **given}
    cls = _find_class(class_path)
    if cls is torch.optim.AdamW:
        init_args = {**ADAMW_DEFAULTS, **init_args}
    init_args = {name: tuple(value) if isinstance(value, list) else value for name, value in init_args.items()}
    for name, value in init_args.items():
        _check_argument(cls, name, value)
    try:
        cls([nn.Parameter(torch.zeros(1, 1))], **init_args)
    except Exception as error:  # each class has its own
        written = ", ".join(f"{name}={as_written(value)}" for name, value in init_args.items())
        raise UsageError(f"--optimizer {cls.__name__} does not take {written}: {error}") from error
    return OptimizerSpec(cls, init_args)


def _check_argument(cls: type[Optimizer], name: str, value: Any) -> None:
    """Refuse what the class would take and stumble over later, or refuse in its own words without the name."""
    parameters = inspect.signature(cls).parameters
    flag = f"--optimizer.{name} {as_written(value)}"
    if name not in parameters:
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            return
        known = [f"--optimizer.{known}" for known in parameters if known != "params"]
        raise UsageError(
            f"unknown option --optimizer.{name} of {cls.__name__}; {suggest(f'--optimizer.{name}', known)}"
        )
    default = parameters[name].default
    if name == "lr" or type(default) in (int, float):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise UsageError(f"{flag}: expected a finite number such as 0.001")
    elif isinstance(default, tuple) and not (
        isinstance(value, tuple) and all(type(item) in (int, float, *map(type, default)) for item in value)
    ):
        raise UsageError(f"{flag}: expected numbers such as {as_written(default)}")
    elif isinstance(default, bool) and not isinstance(value, bool):
        raise UsageError(f"{flag}: expected true or false")


def _find_class(class_path: str) -> type[Optimizer]:
    module_name, _, name = class_path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name or "torch.optim"), name)
    except Exception as error:  # importing a package can fail in any way
        raise UsageError(
            f"--optimizer {class_path}: {error}; give a class of torch.optim such as AdamW, or an installed import path"
        ) from error
    if not (inspect.isclass(found) and issubclass(found, Optimizer)) or found is Optimizer:
        raise UsageError(f"--optimizer {class_path} is not an optimizer; give a class of torch.optim such as AdamW")
    return found


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up to `peak`, then a cosine down to `minimum` (Loshchilov and Hutter 2017), by the step.

    `total_steps` None keeps the peak after the warm-up: the length of a run that only time limits is not known.
    """

    peak: float
    minimum: float
    warmup_steps: int
    total_steps: int | None

    def __post_init__(self) -> None:
        if self.peak <= 0:
            raise UsageError(f"--optimizer.lr {self.peak}: must be greater than 0")
        if self.minimum > self.peak:
            raise UsageError(
                f"--train.min_lr {self.minimum} is above the optimizer's learning rate {self.peak}; "
                "lower it or raise --optimizer.lr"
            )
        if self.total_steps is not None and self.warmup_steps >= self.total_steps:
            raise UsageError(
                f"--train.lr_warmup_steps {self.warmup_steps} is not below the run's number of steps, "
                f"{self.total_steps}; lower it to at most {self.total_steps - 1} or train for longer"
            )

    def __call__(self, step: int) -> float:
        """Learning rate of the optimizer step that `step` steps precede: above 0 from the first, `peak` once warm."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.total_steps is None:
            return self.peak
        progress = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        return self.minimum + (self.peak - self.minimum) * 0.5 * (1 + math.cos(math.pi * progress))
