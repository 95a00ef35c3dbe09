"""Checkpoints of Hugging Face to ours and back: `litce convert_from_hf` and `litce convert_to_hf`; and PEFT's LoRA.

Tensors are read one by one from memory-mapped files, and keep their bits.
"""

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from litce.args import UsageError, parse_bytes
from litce.config import Config
from litce.hf_lora import from_peft, to_peft
from litce.hf_weights import CONSTANTS, Source, sources
from litce.model import GPT
from litce.peft import LoRA
from litce.tokenizer import FILES as TOKENIZER_FILES
from litce.tokenizer import Tokenizer
from litce.training.checkpoint import MODEL_CONFIG, WEIGHTS, fsync, load_weights, publish, require_model
from litce.training.finetune import open_base
from litce.training.finetuned import FINETUNE, Base, read_method, write_method

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PEFT_CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
COPIED = (*TOKENIZER_FILES, "added_tokens.json", "merges.txt", "tokenizer.model", "vocab.json")

# As safetensors spells them.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# Names of the head's weight, which some files repeat although it is the embedding's.
HEADS = {f"{module}.weight" for module in ("lm_head", "embed_out")}

# transformers refuses files without it.
METADATA = {"format": "pt"}


def convert_from_hf(directory: Path, *, checkpoint_dir: Path | None = None, out_dir: Path | None = None) -> Path:
    """Make a litce checkpoint of a Hugging Face one.

    The folder holds config.json and safetensors, in one file or in shards with an index; the tokenizer's files and
    config.json are copied with them. Or it holds a LoRA of PEFT: adapter_config.json and adapter_model.safetensors,
    which add to --checkpoint_dir. Nothing that exists is overwritten.

    Args:
        directory: Folder with the model, as save_pretrained or a download leaves it.
        checkpoint_dir: For a LoRA of PEFT, the litce checkpoint of the model that it adds to.
        out_dir: Folder to write to; the same one when not given.

    Returns:
        The folder written to.

    Raises:
        UsageError: for a model that is not supported, or tensors that do not fit config.json, naming them.
    """
    out_dir = out_dir or directory
    if checkpoint_dir is not None:
        return _lora_from_peft(directory, checkpoint_dir, out_dir)
    if (directory / PEFT_CONFIG).is_file() and not (directory / CONFIG).is_file():
        base_model = _read_json(directory / PEFT_CONFIG).get("base_model_name_or_path") or "its model"
        raise UsageError(
            f"{directory} holds additions to {base_model} alone; convert that first, and give the result as "
            "--checkpoint_dir"
        )
    require_absent(out_dir)
    return convert(directory, out_dir, read_config(directory))


def convert(directory: Path, out_dir: Path, config: Config) -> Path:
    """Write the model `config` with the weights and the tokenizer of `directory` to `out_dir`, and return that.

    Raises:
        UsageError: as `convert_from_hf`.
    """
    expected = sources(config)
    files = weight_files(directory)
    names = _match(directory, files, config, expected)
    tensors: dict[str, Tensor] = {}
    for name, tensor in _read(files, names):
        source = expected[name]
        if tuple(tensor.shape) != source.shape:
            raise UsageError(
                f"{files[names[name]]}: {names[name]} has the shape {tuple(tensor.shape)}, which config.json says is "
                f"{source.shape}"
            )
        tensors.update({ours: part.contiguous() for ours, part in source.split(tensor).items()})
    with _added(out_dir, (MODEL_CONFIG, WEIGHTS)) as partial:
        config.save(partial / MODEL_CONFIG)
        save_file(tensors, partial / WEIGHTS, metadata=METADATA)
        if out_dir.resolve() != directory.resolve():
            _copy(directory, out_dir, (CONFIG, *COPIED))
    print(f"{out_dir} holds {config.name} for litce: {len(tensors)} tensors")
    return out_dir


def _lora_from_peft(directory: Path, checkpoint_dir: Path, out_dir: Path) -> Path:
    for name in (PEFT_CONFIG, PEFT_WEIGHTS):
        if not (directory / name).is_file():
            raise UsageError(
                f"{directory} holds no {name}, which --checkpoint_dir is for; give a folder of PEFT's LoRA"
            )
    written = (FINETUNE, MODEL_CONFIG, LoRA().weights_file)
    require_absent(out_dir, written)
    base = open_base(checkpoint_dir)
    config = _with_family(Config.from_file(checkpoint_dir / MODEL_CONFIG))
    with _open(directory / PEFT_WEIGHTS) as file, _open(checkpoint_dir / WEIGHTS) as base_file:
        tensors = {name: file.get_tensor(name) for name in list(file.keys())}
        tied = HEADS if config.tie_embeddings else set()
        try:
            lora, state = from_peft(
                config,
                _read_json(directory / PEFT_CONFIG),
                tensors,
                lambda name: base_file.get_tensor("transformer.wte.weight" if name in tied else name),
            )
        except UsageError as error:
            raise UsageError(f"{directory} with --checkpoint_dir {checkpoint_dir}: {error}") from error
    with _added(out_dir, written) as partial:
        write_method(partial, lora, base)
        shutil.copyfile(checkpoint_dir / MODEL_CONFIG, partial / MODEL_CONFIG)
        save_file(state, partial / lora.weights_file, metadata=METADATA)
        if not (out_dir / "tokenizer.json").is_file():
            has_own = (directory / "tokenizer.json").is_file()
            _copy(directory if has_own else checkpoint_dir, out_dir, COPIED)
    print(f"{out_dir} holds LoRA weights for litce, which add to {checkpoint_dir}: {len(state)} tensors")
    return out_dir


def convert_to_hf(directory: Path, *, out_dir: Path | None = None, max_shard_size: int | str = "5GB") -> Path:
    """Make a Hugging Face checkpoint, which transformers' from_pretrained reads, of a litce one.

    Of LoRA weights a folder for PEFT's from_pretrained.

    Args:
        directory: Folder with the model, as training or convert_from_hf writes it.
        out_dir: Folder to write to, which must not exist; `hf` in `directory` when not given.
        max_shard_size: Most bytes of one file, such as 5GB or 200MiB; more than that is split and gets an index. The
            weights of a LoRA are one file.

    Returns:
        The folder written to.

    Raises:
        UsageError: if no family of transformers has the model's parts, tensors do not fit the configuration, or the
            checkpoint's method has no counterpart.
    """
    limit = parse_bytes(max_shard_size, "--max_shard_size")
    out_dir = out_dir or directory / "hf"
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise UsageError(f"--out_dir {out_dir} exists; remove it, or give another")
    if (finetuned := read_method(directory)) is not None:
        method, base = finetuned
        if isinstance(method, LoRA):
            return _lora_to_peft(directory, method, base, out_dir)
        raise UsageError(
            f"{directory} holds weights of the method {method.name}, which have no form for transformers; litce "
            "generate reads them as they are, and what finetune_full and finetune_lora write can be converted"
        )
    for name in (WEIGHTS, MODEL_CONFIG):
        if not (directory / name).is_file():
            raise UsageError(f"{directory} holds no {name}; give a folder that training or convert_from_hf wrote")
    config = _with_family(Config.from_file(directory / MODEL_CONFIG))
    hf_config = config.to_hf()
    wanted = sources(config)
    with _published(out_dir) as partial:
        with _open(directory / WEIGHTS) as ours:
            names = list(ours.keys())
            _check_names(directory / WEIGHTS, set(names), {name for s in wanted.values() for name in s.names})
            dtype = max((ours.get_slice(name).get_dtype() for name in names), key=lambda name: DTYPES[name].itemsize)
            _write_shards(partial, ours, wanted, limit)
        _copy(directory, partial, COPIED)
        original = _original_config(directory, config)
        if original is None:
            hf_config |= _special_ids(directory)
            _name_tokenizer(partial)
        else:
            original.pop("torch_dtype", None)
            hf_config = {**original, "architectures": hf_config["architectures"]}
        hf_config["dtype"] = str(DTYPES[dtype]).removeprefix("torch.")
        _write_json(partial / CONFIG, hf_config)
    print(f"{out_dir} holds {config.name or 'the model'} for transformers: {hf_config['architectures'][0]}")
    return out_dir


def _lora_to_peft(directory: Path, lora: LoRA, base: Base, out_dir: Path) -> Path:
    require_model(directory)
    config = _with_family(Config.from_file(directory / MODEL_CONFIG))
    with torch.device("meta"):
        model = GPT(config)
        lora.extend(model)
    load_weights(model, directory / lora.weights_file, assign=True, owns=lora.owns)
    state = {name: parameter.detach() for name, parameter in model.named_parameters() if lora.owns(name)}
    folders = (folder for folder in (base.directory, base.directory / "hf") if (folder / CONFIG).is_file())
    model_dir = next((folder for folder in folders if (folder / SINGLE).is_file() or (folder / INDEX).is_file()), None)
    try:
        settings, tensors = to_peft(config, lora, state, None if model_dir is None else str(model_dir))
    except UsageError as error:
        raise UsageError(f"{directory}: {error}") from error
    with _published(out_dir) as partial:
        save_file(tensors, partial / PEFT_WEIGHTS, metadata=METADATA)
        _write_json(partial / PEFT_CONFIG, settings)
    hint = f"; litce convert_to_hf {base.directory} makes that model" if model_dir is None else ""
    print(f"{out_dir} holds LoRA weights for PEFT, which add to {model_dir or base.directory}{hint}")
    return out_dir


def _with_family(config: Config) -> Config:
    """`config` with the family of transformers that has its parts.

    Raises:
        UsageError: if there is none.
    """
    return dataclasses.replace(config, family=config.to_hf()["model_type"])


@contextmanager
def _published(out_dir: Path) -> Iterator[Path]:
    """A folder to fill, which then becomes `out_dir`; one that is there is empty."""
    partial = out_dir.with_name(f".{out_dir.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        if out_dir.exists():
            out_dir.rmdir()
        publish(partial, out_dir)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"--out_dir {out_dir} cannot be written ({error})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def require_absent(out_dir: Path, names: Iterable[str] = (WEIGHTS, MODEL_CONFIG)) -> None:
    """Refuse a folder that holds one of the files `names`, those of a model when not given.

    Raises:
        UsageError: naming the file.
    """
    for name in names:
        if (out_dir / name).exists():
            raise UsageError(f"{out_dir} holds {name} already; remove it, or give another --out_dir")


@contextmanager
def _added(out_dir: Path, names: tuple[str, ...]) -> Iterator[Path]:
    """A folder to write the files `names` to, which then are moved to `out_dir`, in that order."""
    partial = out_dir / ".litce.partial"
    try:
        partial.mkdir(parents=True, exist_ok=True)
        yield partial
        for name in names:
            fsync(partial / name)
        for name in names:
            os.replace(partial / name, out_dir / name)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"--out_dir {out_dir} cannot be written ({error})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_config(directory: Path) -> Config:
    """The model of a Hugging Face folder; its name is the folder's, its `vocab_size` the tokenizer's if there is one.

    Raises:
        UsageError: if config.json cannot be read or describes what litce lacks.
    """
    path = directory / CONFIG
    if not path.is_file():
        raise UsageError(f"{directory} holds no {CONFIG}; give a folder as save_pretrained or a download leaves it")
    config = Config.from_hf(_read_json(path), name=directory.resolve().name)
    if (directory / "tokenizer.json").is_file():
        # The embedding is often padded; and Gemma 3's tokenizer has a token for images that its text models lack.
        config.vocab_size = min(config.vocab_size, Tokenizer(directory).vocab_size)
    return config


def weight_files(directory: Path) -> dict[str, Path]:
    """The file of each tensor in a Hugging Face folder.

    Raises:
        UsageError: without safetensors, for an index that names a file outside the folder, and for files that cannot
            be read, are missing, or lack a tensor of the index.
    """
    if (directory / SINGLE).is_file():
        names, indexed = [SINGLE], set()
    elif (directory / INDEX).is_file():
        weight_map = _read_json(directory / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise UsageError(f"{directory / INDEX} holds no weight_map from tensors to files; download it again")
        names, indexed = sorted(set(weight_map.values())), set(weight_map)
        for name in names:
            if name in ("", ".", "..") or "/" in name or "\\" in name or ":" in name:
                raise UsageError(f"{directory / INDEX} names the file {name!r}, which is not in its folder")
    else:
        found = next((path.name for path in directory.glob("*.bin")), None)
        hint = f"save {found} as safetensors with save_pretrained" if found else "download its safetensors"
        raise UsageError(f"{directory} holds neither {SINGLE} nor {INDEX}; {hint}")
    files: dict[str, Path] = {}
    for name in names:
        with _open(directory / name) as file:
            for tensor_name in list(file.keys()):
                if tensor_name in files:
                    raise UsageError(f"{directory}: {tensor_name} is in {files[tensor_name].name} and in {name}")
                files[tensor_name] = directory / name
    if indexed - set(files):
        raise UsageError(f"{directory / INDEX} names tensors that are in no file: {_listed(indexed - set(files))}")
    return files


def _match(
    directory: Path, files: Mapping[str, Path], config: Config, expected: Mapping[str, Source]
) -> dict[str, str]:
    """For each name of `expected` its name in the files.

    Raises:
        UsageError: listing what is missing and what is not known, or for a tied head that is not the embedding.
    """
    names = {name: name for name in files if not CONSTANTS.search(name)}
    (prefix,) = {name.split(".")[0] for name in expected if name.count(".") > 1}
    if not any(name.startswith(f"{prefix}.") for name in names):
        # Saved from the model without its head, whose names lack the prefix.
        names = {name if name in expected else f"{prefix}.{name}": name for name in names}
    if config.tie_embeddings:
        embedding = next(name for name, source in expected.items() if source.names == ("transformer.wte.weight",))
        for head in HEADS & names.keys():
            pair = dict(_read(files, {name: names[name] for name in (head, embedding) if name in names}))
            if embedding in pair and not torch.equal(pair[head], pair[embedding]):
                raise UsageError(
                    f"{directory}: {head} differs from {embedding}, and tie_word_embeddings in config.json is true; "
                    "set it to false"
                )
            del names[head]
    _check_names(directory, set(names), set(expected))
    return names


def _check_names(where: Path, found: set[str], expected: set[str]) -> None:
    problems = [
        f"{kind} {_listed(names)}"
        for kind, names in (("missing", expected - found), ("not known", found - expected))
        if names
    ]
    if problems:
        raise UsageError(f"{where} does not fit the configuration: {'; '.join(problems)}")


def _read(files: Mapping[str, Path], names: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Each of `names` with its tensor, file by file, so that one file is open at a time."""
    for path in sorted(set(files.values())):
        with _open(path) as file:
            for name, stored in names.items():
                if files[stored] == path:
                    yield name, file.get_tensor(stored)


def _write_shards(directory: Path, ours: Any, wanted: Mapping[str, Source], limit: int) -> None:
    """Write the tensors of transformers to files of at most `limit` bytes, or of one tensor; memory holds one."""
    shards: list[list[str]] = [[]]
    sizes = [0]
    for name, source in wanted.items():
        size = sum(_num_bytes(ours.get_slice(part)) for part in source.names)
        if shards[-1] and sizes[-1] + size > limit:
            shards.append([])
            sizes.append(0)
        shards[-1].append(name)
        sizes[-1] += size
    weight_map = {}
    for i, names in enumerate(shards, start=1):
        file_name = SINGLE if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for name in names:
            parts = {part: ours.get_tensor(part) for part in wanted[name].names}
            tensors[name] = wanted[name].join(parts).contiguous()
            weight_map[name] = file_name
        save_file(tensors, directory / file_name, metadata=METADATA)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        _write_json(directory / INDEX, index)


def _num_bytes(stored: Any) -> int:
    """Bytes of a tensor in a safetensors file."""
    return math.prod(stored.get_shape()) * DTYPES[stored.get_dtype()].itemsize


def _original_config(directory: Path, config: Config) -> dict[str, Any] | None:
    """The config.json that came with the checkpoint, if it is still that of the model."""
    if not (directory / CONFIG).is_file():
        return None
    original = _read_json(directory / CONFIG)
    try:
        same = original["model_type"] == config.family and not config.differences_from_hf(original)
        return original if same else None
    except UsageError:
        return None


def _special_ids(directory: Path) -> dict[str, int | None]:
    """Keys for config.json, which without them would name the special tokens of the family's first models."""
    tokenizer = Tokenizer(directory) if (directory / "tokenizer.json").is_file() else None
    return {f"{kind}_token_id": getattr(tokenizer, f"{kind}_id", None) for kind in ("bos", "eos", "pad")}


def _name_tokenizer(directory: Path) -> None:
    """Have transformers take tokenizer.json as it is, where it would else take the tokenizer of the model's family."""
    path = directory / "tokenizer_config.json"
    config = _read_json(path) if path.is_file() else {}
    if (directory / "tokenizer.json").is_file() and "tokenizer_class" not in config:
        tokenizer = Tokenizer(directory)
        ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        tokens = {name: tokenizer.processor.id_to_token(i) for name, i in ids.items() if i is not None}
        _write_json(path, {"tokenizer_class": "PreTrainedTokenizerFast", **tokens, **config})


def _open(path: Path) -> Any:
    """A safetensors file, its tensors memory-mapped.

    Raises:
        UsageError: if it cannot be read, or holds tensors that are not floating point numbers of 16 bits or more.
    """
    try:
        file = safe_open(path, framework="pt")
        kinds = {name: file.get_slice(name).get_dtype() for name in list(file.keys())}
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path} cannot be read as safetensors ({error}); download or save it again") from error
    for name, kind in kinds.items():
        if kind not in DTYPES and not CONSTANTS.search(name):
            raise UsageError(f"{path}: {name} is {kind}; only {', '.join(DTYPES)} are supported")
    return file


def _copy(source: Path, target: Path, names: Iterable[str]) -> None:
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as JSON ({error}); download or save it again") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} holds no JSON object, but a {type(content).__name__}; download or save it again")
    return content


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
