"""Every method of finetuning through its recipe."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from litce.args import EvalArgs, UsageError
from litce.cli import main
from litce.cli_parser import build_parser, parse
from litce.peft import Adapter, AdapterV2, FinetuneMethod, Full, LoRA
from litce.recipes import lora as lora_recipe
from litce.training import run
from litce.training.checkpoint import WEIGHTS, load_model
from litce.training.finetuned import FINETUNE
from tests.tiny import MODEL, Numbers, finetune, logged, pretrain, save_tokenizer, train_args

TINY = {**MODEL, "n_layer": 2}
EVERYWHERE: dict[str, Any] = {"key": True, "projection": True, "mlp": True}
METHODS: dict[str, FinetuneMethod] = {
    "full": Full(),
    "lora": LoRA(r=4, dropout=0.3, **EVERYWHERE),
    "lora-head": LoRA(r=4, dropout=0.0, head=True, **EVERYWHERE),
    "dora": LoRA(r=4, dropout=0.3, dora=True, rslora=True),
    "adapter": Adapter(prompt_length=3, start_layer=1),
    "adapter_v2": AdapterV2(prompt_length=3, start_layer=0),
}
on_all_methods = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
LR = {"class_path": "AdamW", "lr": 0.03}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer, of a model that has learned other samples."""
    folder = tmp_path_factory.mktemp("base")
    data = Numbers(8, tokenizer_folder=save_tokenizer(folder / "tokenizer"))
    changes: dict[str, Any] = {"train": train_args(max_steps=40), "optimizer": LR}
    return pretrain(folder / "run", data, model_config=TINY, **changes).checkpoint_dir


def own_weights(directory: Path, method: FinetuneMethod) -> dict[str, torch.Tensor]:
    return load_file(directory / method.weights_file)


@on_all_methods
def test_every_strategy_gives_the_same_curve(
    method: FinetuneMethod, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curves = {}
    for strategy, chunk_size in (("dense", 0), ("chunked", 3), ("cut", 5), ("auto", "auto")):
        args = train_args(max_steps=12, cross_entropy=strategy, cross_entropy_chunk_size=chunk_size, min_lr=0.03)
        changes: dict[str, Any] = {"train": args, "optimizer": LR, "eval": EvalArgs(interval=6)}
        # One batch over and over.
        finetune(method, base, tmp_path / strategy, Numbers(4), **changes)
        assert strategy == "auto" or f"cross-entropy: {strategy}" in capsys.readouterr().out
        curves[strategy] = [
            *logged(tmp_path / strategy).values(),
            *logged(tmp_path / strategy, "val_loss").values(),
        ]
    assert len(curves["dense"]) == 14 and curves["dense"][11] < curves["dense"][0] - 0.005
    for strategy, curve in curves.items():
        assert curve == pytest.approx(curves["dense"], abs=1e-4), strategy


@pytest.mark.parametrize("num_workers", [0, 2])
@on_all_methods
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(
    method: FinetuneMethod, num_workers: int, base: Path, tmp_path: Path
) -> None:
    """6 samples in batches of 4: step 3 starts the second epoch, step 4 is the one after it. Dropout takes part."""
    changes: dict[str, Any] = {
        "train": train_args(max_steps=6, save_interval=3, max_norm=0.5, lr_warmup_steps=2, min_lr=0.001),
        "eval": EvalArgs(interval=2),
        "optimizer": LR,
    }
    whole, second = tmp_path / "whole", tmp_path / "second"
    finetune(method, base, whole, Numbers(6), **changes)
    data = Numbers(6, num_workers=num_workers)
    resumed = finetune(method, base, second, data, **changes, resume=whole / "step-00000003")
    assert resumed.steps == 3
    first, then = own_weights(whole / "final", method), own_weights(second / "final", method)
    assert first.keys() == then.keys() and all(torch.equal(value, then[name]) for name, value in first.items())
    states = [torch.load(run / "final/state/optimizer.pt", weights_only=True) for run in (whole, second)]
    assert_same(*states)
    losses = logged(whole)
    assert logged(second) == {step: losses[step] for step in (4, 5, 6)}
    assert (whole / "final/state/progress.json").read_text() == (second / "final/state/progress.json").read_text()


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


@on_all_methods
def test_a_checkpoint_holds_what_the_method_owns_and_nothing_else_changed(
    method: FinetuneMethod, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {name: value.clone() for name, value in load_model(base).state_dict().items()}
    summary = finetune(method, base, tmp_path, optimizer=LR, eval=EvalArgs(max_iters=None))
    saved = own_weights(tmp_path / "final", method)
    model = load_model(tmp_path / "final")
    assert not model.training
    state = model.state_dict()
    assert saved.keys() == {name for name in state if method.owns(name)}
    for name, value in before.items():
        if method.name != "full":
            assert torch.equal(state[name], value) != method.owns(name), name
    trained = sum(p.numel() for name, p in model.named_parameters() if method.owns(name))
    frozen = model.num_parameters - trained
    printed = capsys.readouterr().out
    assert f"tiny: {trained:,} trainable parameters{f', {frozen:,} frozen' if frozen else ''}, 1 device" in printed
    optimizer = torch.load(tmp_path / "final/state/optimizer.pt", weights_only=True)["optimizer"]
    moments = sum(value["exp_avg"].numel() for value in optimizer["state"].values())
    assert moments == trained

    # What is loaded computes what was trained.
    samples = [Numbers().val_dataset()[i] for i in range(5)]
    ids, targets = (torch.stack([sample[key] for sample in samples]) for key in ("input_ids", "targets"))
    loss = model(ids, targets) / (targets != -100).sum()
    assert float(loss) == pytest.approx(summary.val_loss, rel=1e-5)


@on_all_methods
def test_frozen_parameters_get_no_gradient_buffers(
    method: FinetuneMethod, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_grad: set[str] = set()
    step = torch.optim.AdamW.step

    def recording(self: Any, *args: Any, **kwargs: Any) -> Any:
        if models:
            with_grad.update(name for name, p in models[0].named_parameters() if p.grad is not None)
        return step(self, *args, **kwargs)

    models: list[torch.nn.Module] = []
    prepare = type(method).prepare
    monkeypatch.setattr(torch.optim.AdamW, "step", recording)
    monkeypatch.setattr(type(method), "prepare", lambda self, model: (prepare(self, model), models.append(model))[0])
    finetune(method, base, tmp_path)
    assert with_grad and with_grad == {name for name, _ in models[0].named_parameters() if method.owns(name)}


@on_all_methods
def test_generate_reads_the_checkpoint(
    method: FinetuneMethod, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finetune(method, base, tmp_path, optimizer=LR)
    capsys.readouterr()
    main(["generate", str(tmp_path / "final"), "--prompt", "w1 w2", "--max_new_tokens", "3"])
    assert capsys.readouterr().out.startswith("w1 w2")


def test_a_run_is_repeated_by_its_own_hyperparameters(base: Path, tmp_path: Path) -> None:
    method = METHODS["dora"]
    finetune(method, base, tmp_path / "first")
    path = tmp_path / "first/final/hyperparameters.yaml"
    values = yaml.safe_load(path.read_text())
    assert values["checkpoint_dir"] == str(base) and values["lora"]["r"] == 4 and values["lora"]["dora"] is True
    words = ["--config", str(path), "--out_dir", str(tmp_path / "second")]
    lora_recipe.setup(**parse(build_parser("finetune", lora_recipe.setup), words))
    assert_same(own_weights(tmp_path / "first/final", method), own_weights(tmp_path / "second/final", method))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@on_all_methods
def test_precisions(method: FinetuneMethod, precision: str, base: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"precision": precision, "eval": EvalArgs(), "optimizer": LR}
    summary = finetune(method, base, tmp_path / "16", **changes)
    expected = finetune(method, base, tmp_path / "32", **{**changes, "precision": "32-true"})
    assert summary.val_loss == pytest.approx(expected.val_loss, abs=0.1)
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert {value.dtype for value in own_weights(tmp_path / "16/final", method).values()} == {dtype}
    load_model(tmp_path / "16/final")(torch.zeros(1, 4, dtype=torch.long))


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "GPT", lambda *args: pytest.fail("the model was built"))


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        (Full(), {"checkpoint_dir": Path("nowhere")}, "--checkpoint_dir: nowhere is not a folder"),
        (Adapter(start_layer=2), {}, "--adapter.start_layer 2: the model has layers 0 to 1"),
        (LoRA(), {"train": train_args(max_seq_length=9)}, "--train.max_seq_length 9 is above .* 8; lower it$"),
        (LoRA(), {"train": train_args(cross_entropy="cut", cross_entropy_chunk_size=0)}, "--train.cross_entropy cut"),
        (LoRA(), {"resume": True}, "--resume true: no checkpoint in"),
    ],
)
def test_refused_before_the_model_is_built(
    method: FinetuneMethod, changes: dict[str, Any], message: str, base: Path, tmp_path: Path, no_model: None
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        finetune(method, changes.pop("checkpoint_dir", base), tmp_path / "run", **copy.copy(changes))
    assert "\n" not in str(caught.value)


def test_what_does_not_go_on_from_a_checkpoint(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finetune(LoRA(r=4), base, tmp_path / "lora")
    finetune(Full(), base, tmp_path / "full")
    monkeypatch.setattr(run, "GPT", lambda *args: pytest.fail("the model was built"))
    more: dict[str, Any] = {"train": train_args(max_steps=4)}
    for method, source, message in (
        (LoRA(r=8), "lora", "--lora.r 8: .*final was made with 4; resume with that, or give another --out_dir"),
        (LoRA(r=4, dora=True), "lora", "--lora.dora true: .*final was made with false"),
        (LoRA(r=4), "full", "final was made by the method full, not lora"),
        (Full(), "lora", "final was made by the method lora, not full"),
        (Adapter(start_layer=0), "lora", "final was made by the method lora, not adapter"),
    ):
        with pytest.raises(UsageError, match=message):
            finetune(method, base, tmp_path / source, resume=True, **more)
    other = tmp_path / "full/final"
    with pytest.raises(UsageError, match=f"--checkpoint_dir {other} holds other weights than those that .*lora/final"):
        finetune(LoRA(r=4), other, tmp_path / "lora", resume=True, **more)
    with pytest.raises(
        UsageError, match="--checkpoint_dir: .* holds the weights of lora alone; give .*litce merge_lora"
    ):
        finetune(Full(), tmp_path / "lora/final", tmp_path / "new")


def test_a_base_that_moved_or_changed(base: Path, tmp_path: Path) -> None:
    moved = tmp_path / "base"
    shutil.copytree(base, moved)
    finetune(LoRA(), moved, tmp_path / "run")
    final = tmp_path / "run/final"
    load_model(final)
    moved.rename(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=f"adds to the checkpoint {moved}, which is not there; .*{FINETUNE}"):
        load_model(final)
    text = (final / FINETUNE).read_text()
    (final / FINETUNE).write_text(text.replace(str(moved), str(tmp_path / "elsewhere")))
    load_model(final)
    data = bytearray((tmp_path / "elsewhere" / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (tmp_path / "elsewhere" / WEIGHTS).write_bytes(data)
    with pytest.raises(UsageError, match="adds to other weights than those that .*elsewhere holds now"):
        load_model(final)
    for damaged in ("[]", "method: magic", "method: lora\noptions: {x: 1}", "\t", "method: lora\noptions: {r: 0}"):
        (final / FINETUNE).write_text(damaged)
        with pytest.raises(UsageError, match=f"{FINETUNE} is damaged") as caught:
            load_model(final)
        assert "\n" not in str(caught.value)
