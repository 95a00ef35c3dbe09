"""The hyperparameters of one GPT-style model, and where they come from: a name, a YAML file or a constructor call."""

import difflib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from litce.args import UsageError
from litce.model_configs import MODEL_CONFIGS

Norm = Literal["layernorm", "rmsnorm"]
MLPType = Literal["gelu", "gelu_tanh", "swiglu"]
Positions = Literal["learned", "rope"]


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of the rotary wavelengths beyond the length the model was first trained on."""

    factor: float
    """How many times longer the slow wavelengths become."""
    low_freq_factor: float
    """Wavelengths above `original_max_seq_len / low_freq_factor` positions are stretched by the whole `factor`."""
    high_freq_factor: float
    """Wavelengths below `original_max_seq_len / high_freq_factor` positions stay as they are."""
    original_max_seq_len: int
    """Sequence length, in tokens, of the training before the stretch."""

    def __post_init__(self) -> None:
        for field, value in asdict(self).items():
            _check_number(f"rope_scaling.{field}", value)
        if min(self.factor, self.low_freq_factor, self.original_max_seq_len) <= 0:
            raise UsageError(f"rope_scaling: every value must be positive, got {asdict(self)}")
        if self.high_freq_factor <= self.low_freq_factor:
            raise UsageError(
                f"rope_scaling.high_freq_factor: must exceed low_freq_factor={self.low_freq_factor}, "
                f"got {self.high_freq_factor}"
            )


@dataclass
class Config:
    """Hyperparameters of a :class:`litce.model.GPT`. The defaults are GPT-2's style.

    Raises:
        UsageError: if the values contradict each other; the message names the field, its value and the way out.
    """

    name: str = ""
    """Name of the model; free text for models that are not in the table."""
    block_size: int = 1024
    """Longest sequence, in tokens, that the model is made for."""
    vocab_size: int = 50257
    """Number of token ids in use."""
    padded_vocab_size: int | None = None
    """Rows of the embedding and of the head; `vocab_size` when not given. The loss leaves out those after it."""
    n_layer: int = 12
    """Number of transformer blocks."""
    n_head: int = 12
    """Number of query heads."""
    n_embd: int = 768
    """Width of the residual stream."""
    n_query_groups: int | None = None
    """Number of key and value heads, each shared by `n_head / n_query_groups` query heads; `n_head` when not given."""
    intermediate_size: int | None = None
    """Hidden width of the MLP; `4 * n_embd` when not given."""
    bias: bool = True
    """Whether the linear layers of attention and MLP have a bias."""
    qkv_bias: bool | None = None
    """Whether the query, key and value projections have a bias; as `bias` when not given."""
    norm: Norm = "layernorm"
    """Normalisation before attention, before the MLP and before the head."""
    norm_eps: float = 1e-5
    """Added to the variance, or the mean square, before its root is taken."""
    mlp: MLPType = "gelu_tanh"
    """The MLP: two layers around an exact GELU or its tanh approximation, or the gated three-layer SwiGLU."""
    positions: Positions = "learned"
    """How positions enter: a learned embedding added to the tokens', or rotary embeddings of queries and keys."""
    rotary_percentage: float = 1.0
    """Share of each head's features that rotary embeddings turn."""
    rope_base: float = 10000.0
    """Base of the rotary wavelengths."""
    rope_scaling: RopeScaling | None = None
    """Llama 3's stretching of the rotary wavelengths, if any."""
    parallel_residual: bool = False
    """Whether attention and MLP both read the block's input (GPT-NeoX), instead of one after the other."""
    tie_embeddings: bool = True
    """Whether the head's weight is the token embedding itself."""
    fp32_head: bool = False
    """Whether the head multiplies in fp32 whatever the precision of the run."""

    def __post_init__(self) -> None:
        for field in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            _check_positive_int(field, getattr(self, field))
        # None stands for a value that follows from another field; after this everything is resolved.
        self.padded_vocab_size = self.vocab_size if self.padded_vocab_size is None else self.padded_vocab_size
        self.n_query_groups = self.n_head if self.n_query_groups is None else self.n_query_groups
        self.intermediate_size = 4 * self.n_embd if self.intermediate_size is None else self.intermediate_size
        self.qkv_bias = self.bias if self.qkv_bias is None else self.qkv_bias
        for field in ("padded_vocab_size", "n_query_groups", "intermediate_size"):
            _check_positive_int(field, getattr(self, field))
        for field in ("bias", "qkv_bias", "parallel_residual", "tie_embeddings", "fp32_head"):
            if not isinstance(getattr(self, field), bool):
                raise UsageError(f"{field}: must be true or false, got {getattr(self, field)!r}")
        for field in ("norm_eps", "rotary_percentage", "rope_base"):
            _check_number(field, getattr(self, field))
        for field, allowed in (("norm", Norm), ("mlp", MLPType), ("positions", Positions)):
            if getattr(self, field) not in get_args(allowed):
                raise UsageError(
                    f"{field}: must be one of {', '.join(get_args(allowed))}, got {getattr(self, field)!r}"
                )

        if self.padded_vocab_size < self.vocab_size:
            raise UsageError(
                f"padded_vocab_size: must be at least vocab_size={self.vocab_size}, got {self.padded_vocab_size}"
            )
        if self.n_embd % self.n_head:
            raise UsageError(f"n_embd: must be a multiple of n_head={self.n_head}, got {self.n_embd}")
        if self.n_head % self.n_query_groups:
            raise UsageError(f"n_query_groups: must divide n_head={self.n_head}, got {self.n_query_groups}")
        if self.norm_eps <= 0:
            raise UsageError(f"norm_eps: must be positive, got {self.norm_eps}")
        if self.positions == "rope":
            self._check_rope()
        elif self.rope_scaling is not None:
            raise UsageError("rope_scaling: needs positions='rope', got positions='learned'")

    def _check_rope(self) -> None:
        if not 0 < self.rotary_percentage <= 1:
            raise UsageError(f"rotary_percentage: must lie in (0, 1], got {self.rotary_percentage}")
        if self.rope_base <= 1:
            raise UsageError(f"rope_base: must be greater than 1, got {self.rope_base}")
        if self.rotary_size == 0 or self.rotary_size % 2:
            raise UsageError(
                f"rotary_percentage: must leave an even number of features to rotate, got {self.rotary_percentage} "
                f"of head size {self.head_size} = {self.rotary_size}; change n_embd, n_head or rotary_percentage"
            )

    @property
    def head_size(self) -> int:
        """Features per attention head."""
        return self.n_embd // self.n_head

    @property
    def rotary_size(self) -> int:
        """Features per attention head that rotary embeddings turn."""
        return int(self.head_size * self.rotary_percentage)

    @classmethod
    def from_name(cls, name: str, **overrides: Any) -> "Config":
        """The named model of `litce.model_configs`, with fields replaced by `overrides`.

        Raises:
            UsageError: if there is no such model, listing the near names, or no such field.
        """
        if name not in MODEL_CONFIGS:
            by_lower = {known.lower(): known for known in MODEL_CONFIGS}
            near = [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=3)]
            hint = f"did you mean {' or '.join(near)}?" if near else "it is not a known model;"
            raise UsageError(f"model name: got {name!r}, {hint} known names: {', '.join(MODEL_CONFIGS)}")
        return cls._from_dict({"name": name, **MODEL_CONFIGS[name], **overrides}, where=f"model {name}")

    @classmethod
    def from_file(cls, path: str | Path) -> "Config":
        """The model described by a YAML file, as :meth:`save` writes it.

        Raises:
            UsageError: if the file is missing, is not a YAML mapping, or holds unknown or contradictory fields.
        """
        try:
            data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())
            raise UsageError(f"{path}: cannot be read as a model configuration: {reason}") from error
        if not isinstance(data, dict):
            raise UsageError(f"{path}: must hold a mapping of model fields, got {type(data).__name__}")
        return cls._from_dict(data, where=str(path))

    @classmethod
    def _from_dict(cls, data: dict[str, Any], where: str) -> "Config":
        _check_fields(data, cls, where)
        scaling = data.get("rope_scaling")
        try:
            if scaling is not None and not isinstance(scaling, RopeScaling):
                if not isinstance(scaling, dict):
                    raise UsageError(f"rope_scaling: must be a mapping, got {scaling!r}")
                _check_fields(scaling, RopeScaling, "rope_scaling")
                data = {**data, "rope_scaling": RopeScaling(**scaling)}
            return cls(**data)
        except (TypeError, UsageError) as error:
            raise UsageError(f"{where}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write every field to the YAML file `path`, from which :meth:`from_file` gives an equal configuration."""
        Path(path).write_text(yaml.safe_dump(asdict(self), sort_keys=False), encoding="utf-8")


def _check_positive_int(field: str, value: Any) -> None:
    # bool is an int in Python, and `n_layer: true` in a YAML file is a slip.
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{field}: must be a positive whole number, got {value!r}")


def _check_number(field: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        # PyYAML reads 1e6, without a dot and a sign, as text.
        raise UsageError(f"{field}: must be a number such as 0.25 or 1.0e+6, got {value!r}")


def _check_fields(data: dict[str, Any], cls: type, where: str) -> None:
    known = [field.name for field in fields(cls)]
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known fields: {', '.join(known)}"
            raise UsageError(f"{where}: unknown field {key!r}; {hint}")
