"""What tells one way of finetuning from another: the parts it adds to a model, and the parameters it owns."""

from abc import ABCMeta, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import nn

from litce.args import UsageError
from litce.config import Config
from litce.model import GPT


@dataclass
class FinetuneMethod(metaclass=ABCMeta):  # not ABC: a command line spreads out the fields of pure dataclasses only
    """A way of finetuning; its fields are the options on the command line."""

    name: ClassVar[str]
    """On the command line and in file names."""

    @property
    @abstractmethod
    def trains_head(self) -> bool:
        """Whether the loss needs the gradient of the head's effective weight, which costs it time and memory."""

    def check(self, config: Config) -> None:  # noqa: B027  (not every method has something to refuse)
        """Refuse what cannot work with the model.

        Raises:
            UsageError: naming the option.
        """

    @abstractmethod
    def extend(self, model: GPT) -> None:
        """Add the method's parts to `model`, in place and such that they do not change what it computes.

        They lie on the device and in the dtype of the module that they belong to. Initial values come from torch's
        global generator.
        """

    @abstractmethod
    def owns(self, name: str) -> bool:
        """Whether the parameter `name` of an extended model is the method's own: trained, and saved."""

    def after_save(self, directory: Path) -> str | None:
        """A line for the user about the checkpoint that now lies in `directory`."""
        return None

    def prepare(self, model: GPT) -> None:
        """Extend `model` and freeze all that the method does not own."""
        self.extend(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self.owns(name))

    @property
    def weights_file(self) -> str:
        """Name of the file in a checkpoint that holds the method's own parameters."""
        return f"lit_model.{self.name}.safetensors"


@dataclass
class Full(FinetuneMethod):
    """All parameters train."""

    name: ClassVar[str] = "full"

    trains_head = True

    def extend(self, model: GPT) -> None:
        """Nothing is added."""

    def owns(self, name: str) -> bool:
        return True

    @property
    def weights_file(self) -> str:
        return "lit_model.safetensors"


def become(module: nn.Module, cls: type[nn.Module]) -> None:
    """Make `module` an instance of `cls`, a subclass of its type, with all it holds.

    In place, so that names, hooks, tied parameters and attributes that a constructor does not know stay as they are.
    """
    assert issubclass(cls, type(module)) and cls.__init__ is type(module).__init__
    module.__class__ = cls


def require_within(flag: str, value: float, low: float, high: float, wanted: str) -> None:
    """Raise `UsageError` unless low <= value < high; `wanted` says so in words."""
    if not low <= value < high:
        raise UsageError(f"--{flag} {value}: {wanted}")
