"""The hyperparameters of one GPT-style model, and where they come from: a name, a YAML file or a constructor call."""

import difflib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from litce import hf_config
from litce.args import UsageError
from litce.model_configs import MODEL_CONFIGS

Norm = Literal["layernorm", "rmsnorm", "rmsnorm_unit_offset"]
MLPType = Literal["gelu", "gelu_tanh", "swiglu", "geglu_tanh"]
Positions = Literal["learned", "rope"]
RopeType = Literal["llama3", "linear"]


@dataclass(frozen=True)
class RopeScaling:
    """Stretching of the rotary wavelengths beyond the length the model was first trained on.

    "linear" stretches them all (Chen et al. 2023), "llama3" the slow ones only and needs the other three fields.
    """

    factor: float
    """How many times longer the stretched wavelengths become."""
    low_freq_factor: float | None = None
    """Wavelengths above `original_max_seq_len / low_freq_factor` positions are stretched by the whole `factor`."""
    high_freq_factor: float | None = None
    """Wavelengths below `original_max_seq_len / high_freq_factor` positions stay as they are."""
    original_max_seq_len: int | None = None
    """Sequence length, in tokens, of the training before the stretch."""
    rope_type: RopeType = "llama3"
    """Which wavelengths are stretched."""

    def __post_init__(self) -> None:
        if self.rope_type not in get_args(RopeType):
            raise UsageError(
                f"rope_scaling.rope_type: must be one of {', '.join(get_args(RopeType))}, got {self.rope_type!r}"
            )
        of_llama3 = ("low_freq_factor", "high_freq_factor", "original_max_seq_len")
        for field in of_llama3:
            if (getattr(self, field) is None) != (self.rope_type == "linear"):
                problem = "goes with rope_type 'llama3' only" if self.rope_type == "linear" else "is missing"
                raise UsageError(f"rope_scaling.{field}: {problem}; llama3 needs {', '.join(of_llama3)}, linear none")
        values = {key: value for key, value in asdict(self).items() if key != "rope_type" and value is not None}
        for field, value in values.items():
            _check_number(f"rope_scaling.{field}", value)
        if min(values.values()) <= 0:
            raise UsageError(f"rope_scaling: every value must be positive, got {values}")
        if self.rope_type == "llama3" and values["high_freq_factor"] <= values["low_freq_factor"]:
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
    head_size: int | None = None
    """Features per attention head; `n_embd / n_head` when not given."""
    n_query_groups: int | None = None
    """Number of key and value heads, each shared by `n_head / n_query_groups` query heads; `n_head` when not given."""
    intermediate_size: int | None = None
    """Hidden width of the MLP; `4 * n_embd` when not given."""
    bias: bool = True
    """Whether the linear layers of attention and MLP have a bias."""
    qkv_bias: bool | None = None
    """Whether the query, key and value projections have a bias; as `bias` when not given."""
    mlp_bias: bool | None = None
    """Whether the linear layers of the MLP have a bias; as `bias` when not given."""
    norm: Norm = "layernorm"
    """Normalisation before attention, before the MLP and before the head; "unit offset" multiplies by 1 + weight."""
    norm_eps: float = 1e-5
    """Added to the variance, or the mean square, before its root is taken."""
    mlp: MLPType = "gelu_tanh"
    """The MLP: two layers around an exact GELU or its tanh approximation, or three, gated by SiLU or that GELU."""
    post_norms: bool = False
    """Whether what attention and MLP add to the residual stream is normalised too (Gemma 2)."""
    qk_norm: bool = False
    """Whether each head's queries and keys are normalised before they are rotated (Qwen3)."""
    scale_embeddings: bool = False
    """Whether embedded tokens are multiplied by the root of `n_embd`."""
    positions: Positions = "learned"
    """How positions enter: a learned embedding added to the tokens', or rotary embeddings of queries and keys."""
    rotary_percentage: float = 1.0
    """Share of each head's features that rotary embeddings turn."""
    rope_base: float = 10000.0
    """Base of the rotary wavelengths."""
    rope_scaling: RopeScaling | None = None
    """Stretching of the rotary wavelengths, if any."""
    rope_local_base: float | None = None
    """Base of the rotary wavelengths, then never stretched, of layers with a sliding window (Gemma 3); those of the
    other layers when not given."""
    sliding_window: int | None = None
    """Tokens, itself included, that a token sees in layers with a sliding window; without a number no layer has one."""
    sliding_window_pattern: list[bool] | None = None
    """Which layers have the sliding window, from the first on and repeated over all; every layer when not given."""
    query_pre_attn_scalar: float | None = None
    """Attention scores are divided by its root; `head_size` when not given."""
    attention_softcap: float | None = None
    """Attention scores are `cap * tanh(scores / cap)`, if given (Gemma 2)."""
    logit_softcap: float | None = None
    """The head's logits are `cap * tanh(logits / cap)`, if given."""
    logit_scale: float = 1.0
    """Factor of the head's logits, before the softcap."""
    parallel_residual: bool = False
    """Whether attention and MLP both read the block's input (GPT-NeoX), instead of one after the other."""
    tie_embeddings: bool = True
    """Whether the head's weight is the token embedding itself."""
    fp32_head: bool = False
    """Whether the head multiplies in fp32 whatever the precision of the run."""
    family: str | None = None
    """`model_type` of the model at Hugging Face, whose layout `litce convert_to_hf` writes; without one it takes the
    first that has this model's parts."""

    def __post_init__(self) -> None:
        for field in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            _check_positive_int(field, getattr(self, field))
        # None stands for a value that follows from another field; after this everything is resolved.
        self.padded_vocab_size = self.vocab_size if self.padded_vocab_size is None else self.padded_vocab_size
        self.n_query_groups = self.n_head if self.n_query_groups is None else self.n_query_groups
        self.intermediate_size = 4 * self.n_embd if self.intermediate_size is None else self.intermediate_size
        self.qkv_bias = self.bias if self.qkv_bias is None else self.qkv_bias
        self.mlp_bias = self.bias if self.mlp_bias is None else self.mlp_bias
        if self.head_size is None:
            if self.n_embd % self.n_head:
                raise UsageError(
                    f"n_embd: must be a multiple of n_head={self.n_head}, got {self.n_embd}; or give head_size"
                )
            self.head_size = self.n_embd // self.n_head
        if self.query_pre_attn_scalar is None:
            self.query_pre_attn_scalar = self.head_size
        for field in ("padded_vocab_size", "n_query_groups", "intermediate_size", "head_size"):
            _check_positive_int(field, getattr(self, field))
        for flag in (each.name for each in fields(self) if each.type in (bool, bool | None)):
            if not isinstance(getattr(self, flag), bool):
                raise UsageError(f"{flag}: must be true or false, got {getattr(self, flag)!r}")
        for field in ("norm_eps", "rotary_percentage", "rope_base", "query_pre_attn_scalar", "logit_scale"):
            _check_number(field, getattr(self, field))
        for field in ("norm_eps", "query_pre_attn_scalar", "attention_softcap", "logit_softcap"):
            value = getattr(self, field)
            if value is not None and _check_number(field, value) <= 0:
                raise UsageError(f"{field}: must be positive, got {value}")
        for field, allowed in (
            ("norm", get_args(Norm)),
            ("mlp", get_args(MLPType)),
            ("positions", get_args(Positions)),
            ("family", (None, *hf_config.FAMILIES)),
        ):
            if getattr(self, field) not in allowed:
                known = ", ".join(name for name in allowed if name is not None)
                raise UsageError(f"{field}: must be one of {known}, got {getattr(self, field)!r}")

        if self.padded_vocab_size < self.vocab_size:
            raise UsageError(
                f"padded_vocab_size: must be at least vocab_size={self.vocab_size}, got {self.padded_vocab_size}"
            )
        if self.n_head % self.n_query_groups:
            raise UsageError(f"n_query_groups: must divide n_head={self.n_head}, got {self.n_query_groups}")
        self._check_window()
        if self.positions == "rope":
            self._check_rope()
        else:
            for field in ("rope_scaling", "rope_local_base"):
                if getattr(self, field) is not None:
                    raise UsageError(f"{field}: needs positions='rope', got positions='learned'")

    def _check_window(self) -> None:
        pattern = self.sliding_window_pattern
        if self.sliding_window is None:
            for field in ("sliding_window_pattern", "rope_local_base"):
                if getattr(self, field) is not None:
                    raise UsageError(f"{field}: needs sliding_window, the tokens that those layers see")
            return
        _check_positive_int("sliding_window", self.sliding_window)
        if pattern is not None and (
            not isinstance(pattern, list) or not pattern or not all(isinstance(slides, bool) for slides in pattern)
        ):
            raise UsageError(f"sliding_window_pattern: must be a list such as [true, false], got {pattern!r}")

    def _check_rope(self) -> None:
        if not 0 < self.rotary_percentage <= 1:
            raise UsageError(f"rotary_percentage: must lie in (0, 1], got {self.rotary_percentage}")
        for field in ("rope_base", "rope_local_base"):
            base = getattr(self, field)
            if base is not None and _check_number(field, base) <= 1:
                raise UsageError(f"{field}: must be greater than 1, got {base}")
        if self.rotary_size == 0 or self.rotary_size % 2:
            raise UsageError(
                f"rotary_percentage: must leave an even number of features to rotate, got {self.rotary_percentage} "
                f"of head size {self.head_size} = {self.rotary_size}; change n_embd, n_head or rotary_percentage"
            )

    def has_window(self, layer: int) -> bool:
        """Whether the layer of this index, from 0 on, sees the sliding window only."""
        if self.sliding_window is None:
            return False
        return (
            self.sliding_window_pattern is None or self.sliding_window_pattern[layer % len(self.sliding_window_pattern)]
        )

    @property
    def rotary_size(self) -> int:
        """Features per attention head that rotary embeddings turn."""
        assert self.head_size is not None
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

    @classmethod
    def from_hf(cls, config: dict[str, Any], **overrides: Any) -> "Config":
        """The model that a Hugging Face `config.json` describes, with fields replaced by `overrides`.

        The file's `vocab_size` is the number of rows, `padded_vocab_size`; a tokenizer that uses fewer ids is told
        with `vocab_size`. Dropout rates have no counterpart and are left out.

        Raises:
            UsageError: if the family or one of its features is not supported, naming it.
        """
        return cls._from_dict({**hf_config.read(config), **overrides}, where="config.json")

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` from which :meth:`from_hf` gives this model, in the layout of `family`.

        Raises:
            UsageError: if the family, or without one every family, lacks a part of this model, naming it.
        """
        problems = []
        for family in [self.family] if self.family else hf_config.FAMILIES:
            written = hf_config.write(asdict(self), family)
            try:
                differing = self.differences_from_hf(written)
            except UsageError as error:
                problems.append(f"{family}: {error}")
                continue
            if not differing:
                return written
            problems.append(f"{family} has no {', '.join(f'{field}={getattr(self, field)!r}' for field in differing)}")
        raise UsageError(f"no model of transformers has these parts: {'; '.join(problems)}")

    def differences_from_hf(self, config: dict[str, Any]) -> list[str]:
        """The fields with another value in the model that a `config.json` describes, of those it has a word for.

        Raises:
            UsageError: as :meth:`from_hf`.
        """
        ours = asdict(self)
        theirs = asdict(self.from_hf(config, **{field: ours[field] for field in hf_config.UNSAID}))
        return [field for field in ours if ours[field] != theirs[field]]

    def save(self, path: str | Path) -> None:
        """Write every field to the YAML file `path`, from which :meth:`from_file` gives an equal configuration."""
        Path(path).write_text(yaml.safe_dump(asdict(self), sort_keys=False), encoding="utf-8")


def _check_positive_int(field: str, value: Any) -> None:
    # bool is an int in Python, and `n_layer: true` in a YAML file is a slip.
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{field}: must be a positive whole number, got {value!r}")


def _check_number(field: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        # PyYAML reads 1e6, without a dot and a sign, as text.
        raise UsageError(f"{field}: must be a number such as 0.25 or 1.0e+6, got {value!r}")
    return value


def _check_fields(data: dict[str, Any], cls: type, where: str) -> None:
    known = [field.name for field in fields(cls)]
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known fields: {', '.join(known)}"
            raise UsageError(f"{where}: unknown field {key!r}; {hint}")
