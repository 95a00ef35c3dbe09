import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml

from litce.args import EvalArgs, UsageError
from litce.config import Config
from litce.data import TokenFile
from litce.model import GPT
from litce.recipes import pretrain as recipe
from litce.training import run
from litce.training.checkpoint import find_latest, load_model
from tests.tiny import (
    MODEL,
    Numbers,
    assert_equal_weights,
    logged,
    pretrain,
    save_byte_tokenizer,
    save_tokenizer,
    train_args,
    weights,
)

ROOT = Path(__file__).parents[2]
EIGHT = {"global_batch_size": 8, "max_steps": 1}


def checkpoints(out_dir: Path) -> set[str]:
    return {path.name for path in out_dir.iterdir() if path.name != "logs"}


def optimizer_state(checkpoint: Path) -> Any:
    return torch.load(checkpoint / "state/optimizer.pt", weights_only=True)["optimizer"]


@pytest.mark.parametrize("micro_batch_size", [8, 4, 2, 1])
def test_one_step_is_that_of_the_mean_over_all_tokens(tmp_path: Path, micro_batch_size: int) -> None:
    """Samples have 1 to 8 supervised tokens, so that a mean of micro-batch means would differ."""
    args = train_args(**EIGHT, micro_batch_size=micro_batch_size, min_lr=0.0)
    summary = pretrain(tmp_path, Numbers(8), train=args, optimizer={"class_path": "SGD", "lr": 0.5})

    torch.manual_seed(42)
    model = GPT(Config(**MODEL))
    torch.manual_seed(42)
    model.init_weights()
    samples = [Numbers(8).train_dataset()[i] for i in range(8)]
    logits = model(torch.stack([sample["input_ids"] for sample in samples]))
    loss = F.cross_entropy(logits.flatten(0, 1), torch.stack([sample["targets"] for sample in samples]).flatten())
    loss.backward()
    assert summary.train_loss == pytest.approx(loss.item(), rel=1e-6)
    assert summary.num_tokens == sum(8 - i % 8 for i in range(8))
    trained = load_model(tmp_path / "final")
    for (name, before), after in zip(model.named_parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(after.detach(), before.detach() - 0.5 * before.grad, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("max_norm", [None, 0.05, 1e9])
def test_steps_are_those_of_a_plain_torch_loop(tmp_path: Path, max_norm: float | None) -> None:
    """Every step with the rate that the schedule gives it, from clipped gradients of the whole batch."""
    args = train_args(global_batch_size=8, micro_batch_size=2, max_steps=5, lr_warmup_steps=2, max_norm=max_norm)
    optimizer = {"class_path": "SGD", "lr": 0.5, "momentum": 0.9, "weight_decay": 0.1}
    pretrain(tmp_path, Numbers(8), train=args, optimizer=optimizer)

    torch.manual_seed(42)
    model = GPT(Config(**MODEL))
    torch.manual_seed(42)
    model.init_weights()
    vectors, matrices = ([p for p in model.parameters() if (p.ndim >= 2) == matrix] for matrix in (False, True))
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    sgd = torch.optim.SGD(groups, lr=0.5, momentum=0.9, weight_decay=0.1)
    samples = [Numbers(8).train_dataset()[i] for i in range(8)]
    inputs, targets = (torch.stack([sample[name] for sample in samples]) for name in ("input_ids", "targets"))
    # Two steps of warm-up, then a cosine over the other three.
    rates = [0.25, 0.5, *[6e-5 + (0.5 - 6e-5) * 0.5 * (1 + math.cos(math.pi * i / 3)) for i in range(3)]]
    losses, norms = {}, []
    for step, rate in enumerate(rates, start=1):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        sgd.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm or math.inf))
        for group in sgd.param_groups:
            group["lr"] = rate
        sgd.step()
        losses[step] = loss.item()
    assert min(norms) > 0.05, "the smallest limit clips nothing"
    assert logged(tmp_path) == pytest.approx(losses, rel=1e-5)
    assert logged(tmp_path, "learning_rate") == pytest.approx(dict(enumerate(rates, start=1)))
    for (name, expected), actual in zip(
        model.named_parameters(), load_model(tmp_path / "final").parameters(), strict=True
    ):
        torch.testing.assert_close(actual.detach(), expected.detach(), rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(tmp_path: Path, num_workers: int) -> None:
    """12 samples in batches of 4: step 5 lies in the second epoch. Clipping and decay take part."""
    args = train_args(max_steps=10, save_interval=5, max_norm=0.5, lr_warmup_steps=3)
    changes: dict[str, Any] = {"train": args, "eval": EvalArgs(interval=2)}
    data = Numbers(12, num_workers=num_workers)
    pretrain(tmp_path / "whole", data, **changes)
    resumed = pretrain(tmp_path / "resumed", data, **changes, resume=tmp_path / "whole/step-00000005")
    assert resumed.steps == 5
    assert_equal_weights(tmp_path / "whole/final", tmp_path / "resumed/final")
    whole, second = (optimizer_state(tmp_path / name / "final") for name in ("whole", "resumed"))
    assert whole["param_groups"] == second["param_groups"]
    for index, values in whole["state"].items():
        assert all(torch.equal(value, second["state"][index][name]) for name, value in values.items())
    losses = logged(tmp_path / "whole")
    assert logged(tmp_path / "resumed") == {step: losses[step] for step in range(6, 11)}


@pytest.mark.parametrize("save_step", [1, 2, 3, 4, 5, 7])
def test_no_sample_is_skipped_or_repeated_by_a_resume(
    tmp_path: Path, save_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    monkeypatch.setattr(GPT, "forward", _recording(GPT.forward, seen))
    data = Numbers(10)
    changes: dict[str, Any] = {"train": train_args(max_steps=8, save_interval=save_step)}
    pretrain(tmp_path / "whole", data, **changes)
    whole = [sample for batch in seen for sample in batch]
    assert sorted(whole[:10]) == sorted(whole[10:20]) == list(range(10))
    assert whole[:10] != whole[10:20]
    seen.clear()
    pretrain(tmp_path / "resumed", data, **changes, resume=tmp_path / f"whole/step-{save_step:08d}")
    rest = [sample for batch in seen for sample in batch]
    assert rest == whole[len(whole) - len(rest) :]
    # 10 samples in batches of 4: steps of 4, 4 and 2.
    assert len(whole) - len(rest) == save_step // 3 * 10 + save_step % 3 * 4


def _recording(forward: Any, seen: list[list[int]]) -> Any:
    def recorded(self: GPT, idx: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        seen.append(idx[:, 0].tolist())
        return forward(self, idx, *args, **options)

    return recorded


def test_killed_while_saving_the_folder_stays_loadable_and_resumable(tmp_path: Path) -> None:
    """The process kills itself when the second checkpoint is about to reach the disk."""
    script = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from litce.training import checkpoint
from tests.tiny import Numbers, pretrain, train_args

fsync = os.fsync
def killing_fsync(descriptor):
    if Path({str(tmp_path)!r}, "run/.final.partial/state/optimizer.pt").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(descriptor)
os.fsync = killing_fsync
pretrain(Path({str(tmp_path)!r}, "run"), Numbers(12), train=train_args(max_steps=10, save_interval=5))
"""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    killed = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    run = tmp_path / "run"
    # What is complete is named; the killed save is there under a name that nothing reads.
    assert (run / ".final.partial").is_dir() and not (run / "final").exists()
    assert find_latest(run) == run / "step-00000005"
    load_model(run / "step-00000005")

    args = train_args(max_steps=10, save_interval=5)
    assert pretrain(run, Numbers(12), train=args, resume="auto").steps == 5
    assert checkpoints(run) == {"step-00000005", "final"}
    pretrain(tmp_path / "whole", Numbers(12), train=args)
    assert_equal_weights(run / "final", tmp_path / "whole/final")


def test_every_strategy_and_chunk_size_gives_the_same_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curves = {}
    # 600 columns, above the smallest vocabulary tile, so that "cut" has several.
    model = {**MODEL, "vocab_size": 600}
    cases = [("dense", 0), ("chunked", 1), ("chunked", 5), ("chunked", "auto"), ("cut", 3), ("cut", "auto")]
    for strategy, chunk_size in [*cases, ("auto", 128)]:
        name = f"{strategy}-{chunk_size}"
        args = train_args(
            max_steps=20,
            cross_entropy=strategy,
            cross_entropy_chunk_size=chunk_size,
            memory_budget_bytes=100_000,
        )
        pretrain(tmp_path / name, train=args, model_config=model, eval=EvalArgs(interval=10))
        printed = capsys.readouterr().out
        assert f"cross-entropy: {strategy if strategy != 'auto' else 'chunked'}" in printed
        curves[name] = [*logged(tmp_path / name).values(), *logged(tmp_path / name, "val_loss").values()]
    reference = curves["dense-0"]
    assert len(reference) == 22 and reference[19] < reference[0] - 0.5
    for name, curve in curves.items():
        assert curve == pytest.approx(reference, abs=1e-4), name


@pytest.mark.parametrize(
    ("num_samples", "changes", "steps"),
    [
        (4, {"global_batch_size": 2, "epochs": 1}, 2),
        (5, {"global_batch_size": 2, "epochs": 1}, 3),
        (5, {"global_batch_size": 2, "epochs": 2}, 6),
        (3, {"global_batch_size": 8, "epochs": 2}, 2),
        (16, {"max_tokens": 1}, 1),
        (16, {"max_steps": 3, "epochs": 5}, 3),
        (16, {"max_time": 1e-9, "epochs": 5}, 1),
        (16, {"max_time": 1e-9}, 1),
    ],
)
def test_number_of_steps(tmp_path: Path, num_samples: int, changes: dict[str, Any], steps: int) -> None:
    summary = pretrain(tmp_path, Numbers(num_samples), train=train_args(**{"max_steps": None, **changes}))
    assert summary.steps == steps == len(logged(tmp_path))
    assert json.loads((tmp_path / "final/state/progress.json").read_text())["step"] == steps


def test_the_tail_of_an_epoch_counts_its_own_tokens(tmp_path: Path) -> None:
    """Three samples in batches of two: the second step's loss is that of one sample, not half of it."""
    args = train_args(global_batch_size=2, epochs=1, max_steps=None, min_lr=0.0)
    pretrain(tmp_path, Numbers(3, masking="none"), train=args, optimizer={"lr": 1e-9})
    assert all(
        loss == pytest.approx(torch.log(torch.tensor(64.0)).item(), abs=0.2) for loss in logged(tmp_path).values()
    )


def test_intervals(tmp_path: Path) -> None:
    args = train_args(max_steps=7, save_interval=2, log_interval=3)
    pretrain(tmp_path / "a", train=args, eval=EvalArgs(interval=3, initial_validation=True))
    # The last step is logged, saved and validated whatever the intervals are.
    assert list(logged(tmp_path / "a")) == [3, 6, 7]
    assert checkpoints(tmp_path / "a") == {"step-00000002", "step-00000004", "step-00000006", "final"}
    assert list(logged(tmp_path / "a", "val_loss")) == [0, 3, 6, 7]

    args = train_args(max_steps=2, save_interval=None, log_interval=100)
    pretrain(tmp_path / "b", train=args, eval=EvalArgs(interval=None, final_validation=False))
    assert list(logged(tmp_path / "b")) == [2]
    assert checkpoints(tmp_path / "b") == {"final"}


def test_the_last_step_is_saved_once(tmp_path: Path) -> None:
    pretrain(tmp_path, train=train_args(max_steps=4, save_interval=2))
    assert checkpoints(tmp_path) == {"step-00000002", "final"}


def test_final_checkpoint_is_written_before_a_failing_final_validation(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="a broken sample"):
        pretrain(tmp_path, Numbers(masking="broken"), eval=EvalArgs())
    load_model(tmp_path / "final")


def test_validation_changes_nothing(tmp_path: Path) -> None:
    args = train_args(max_steps=5)
    pretrain(tmp_path / "with", train=args, eval=EvalArgs(interval=1, initial_validation=True))
    pretrain(tmp_path / "without", train=args, eval=EvalArgs(interval=None, final_validation=False))
    assert_equal_weights(tmp_path / "with/final", tmp_path / "without/final")


def test_without_supervised_tokens_the_loss_is_0_and_so_are_the_gradients(tmp_path: Path) -> None:
    args = train_args(max_norm=1.0)
    optimizer = {"class_path": "SGD", "lr": 1.0}
    summary = pretrain(tmp_path, Numbers(masking="all"), train=args, optimizer=optimizer, eval=EvalArgs())
    assert summary.train_loss == 0 and summary.num_tokens == 0
    torch.manual_seed(42)
    model = GPT(Config(**MODEL))
    torch.manual_seed(42)
    model.init_weights()
    trained = weights(tmp_path / "final")
    assert all(torch.equal(trained[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("log_interval", [1, 100])
def test_a_diverging_run_stops_and_keeps_its_checkpoints_finite(tmp_path: Path, log_interval: int) -> None:
    args = train_args(max_steps=50, save_interval=1, log_interval=log_interval)
    with pytest.raises(UsageError, match=r"at step \d+ with learning rate .*--optimizer.lr"):
        pretrain(tmp_path, train=args, optimizer={"class_path": "SGD", "lr": 1e25})
    assert "final" not in checkpoints(tmp_path)
    for name in checkpoints(tmp_path):
        assert all(tensor.isfinite().all() for tensor in weights(tmp_path / name).values())


def test_a_loss_that_is_not_finite_ends_the_run_at_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a checkpoint at that step, for which the weights would be looked at."""
    forward = GPT.forward

    def overflowing(self: GPT, *args: Any, **options: Any) -> torch.Tensor:
        return forward(self, *args, **options) * math.inf

    monkeypatch.setattr(GPT, "forward", overflowing)
    with pytest.raises(UsageError, match=r"the loss is \w+ at step 1 with learning rate .*--optimizer.lr"):
        pretrain(tmp_path, train=train_args(max_steps=50, save_interval=None))
    assert checkpoints(tmp_path) == set()


def test_a_run_is_repeated_by_its_own_hyperparameters(tmp_path: Path) -> None:
    from litce.cli_parser import build_parser, parse

    pretrain(tmp_path / "first", Numbers(12), train=train_args(memory_budget_bytes="1MiB"))
    path = tmp_path / "first/final/hyperparameters.yaml"
    arguments = parse(build_parser("pretrain", recipe.setup), ["--config", str(path), "--out_dir", str(tmp_path / "2")])
    recipe.setup(**arguments)
    assert_equal_weights(tmp_path / "first/final", tmp_path / "2/final")
    first, second = (
        yaml.safe_load((run / "final/hyperparameters.yaml").read_text()) for run in (path.parents[1], tmp_path / "2")
    )
    assert {**first, "out_dir": ""} == {**second, "out_dir": ""}
    assert first["train"]["memory_budget_bytes"] == 2**20
    assert first["data"] == {
        "class_path": "tests.tiny.Numbers",
        "init_args": {
            "num_samples": 12,
            "num_val_samples": 5,
            "masking": "uneven",
            "num_workers": 0,
            "tokenizer_folder": None,
        },
    }


def test_summary_and_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer")
    prompt = EvalArgs(prompt="w1 w2", max_new_tokens=4, max_iters=2)
    summary = pretrain(tmp_path / "run", Numbers(tokenizer_folder=folder), eval=prompt)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("tiny: ") and "trainable parameters" in line for line in lines)
    assert str(summary) in lines
    assert summary.val_loss == logged(tmp_path / "run", "val_loss")[2]
    assert summary.unigram_loss == 4.0 and summary.checkpoint_dir == tmp_path / "run/final"
    assert lines[lines.index(str(summary)) + 1].startswith("w1 w2")
    assert (tmp_path / "run/final/tokenizer.json").is_file()


def test_sample_text_leaves_mode_and_random_numbers_alone(tmp_path: Path) -> None:
    from litce.tokenizer import Tokenizer

    tokenizer = Tokenizer(save_tokenizer(tmp_path))
    model = GPT(Config(**MODEL))
    before = torch.get_rng_state()
    texts = {run.sample_text(model, tokenizer, [1, 2], 5, seed=1) for _ in range(2)}
    assert len(texts) == 1 and model.training
    assert torch.equal(torch.get_rng_state(), before)
    run.sample_text(model, tokenizer, [1, 2], None, seed=1)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)])
def test_precisions(tmp_path: Path, precision: Any, dtype: torch.dtype) -> None:
    changes: dict[str, Any] = {"precision": precision, "eval": EvalArgs()}
    summary = pretrain(tmp_path, **changes)
    assert summary.val_loss == pytest.approx(pretrain(tmp_path / "32", eval=EvalArgs()).val_loss, abs=0.05)
    assert {tensor.dtype for tensor in weights(tmp_path / "final").values()} == {dtype}
    assert pretrain(tmp_path, **changes, resume=tmp_path / "final", train=train_args(max_steps=3)).steps == 1


def test_initial_checkpoint(tmp_path: Path) -> None:
    pretrain(tmp_path / "first")
    # A learning rate that changes no fp32 weight.
    changes = {"model_config": None, "optimizer": {"class_path": "SGD", "lr": 1e-30}, "train": train_args(min_lr=0.0)}
    pretrain(tmp_path / "second", initial_checkpoint_dir=tmp_path / "first/final", **changes)
    assert_equal_weights(tmp_path / "first/final", tmp_path / "second/final")


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*args: Any) -> None:
        pytest.fail("the model was built")

    monkeypatch.setattr(run, "GPT", build)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": None}, "--data: give"),
        ({"model_config": None}, "--model_name: give"),
        (
            {"model_config": {"n_leyer": 2}},
            "unknown option --model_config.n_leyer; did you mean --model_config.n_layer",
        ),
        ({"model_config": {"foo": 2}}, "unknown option --model_config.foo; choose name, block_size"),
        ({"model_name": "demo", "model_config": {"foo": 2}}, "unknown option --model_config.foo"),
        ({"model_config": {**MODEL, "n_embd": 15}}, "--model_config.n_embd: must be a multiple of n_head=2, got 15"),
        (
            {"model_name": "demo", "model_config": {"n_embd": 15}},
            "--model_config.n_embd: must be a multiple of n_head=4",
        ),
        ({"model_config": {**MODEL, "rope_scaling": {"facto": 1}}}, "--model_config.rope_scaling: .*factor"),
        ({"model_name": "gpt3", "model_config": None}, "--model_name gpt3 is not known; did you mean gpt2"),
        ({"model_name": "gpt-2", "model_config": None}, "--model_name gpt-2 is not known; did you mean gpt2"),
        ({"model_name": "zzz", "model_config": None}, "--model_name zzz is not known; choose demo, gpt2"),
        *[({"seed": seed}, f"--seed {seed}: must be from 0 to 4294967295") for seed in (-1, 2**32, 10**30)],
        ({"data": Numbers(num_workers=-1)}, "--data.num_workers -1: must be 0"),
        *[({"optimizer": name}, f"--optimizer {name} cannot train") for name in ("LBFGS", "SparseAdam")],
        ({"optimizer": {"lr": "abc"}}, "--optimizer.lr abc: expected a finite number"),
        ({"train": train_args(global_batch_size=3, micro_batch_size=1), "devices": 2}, "3 is not .* 1 x 2 devices = 2"),
        ({"train": train_args(max_steps=None)}, "--train.max_steps, --train.max_tokens, --train.epochs or"),
        (
            {"train": train_args(lr_warmup_steps=2)},
            "--train.lr_warmup_steps 2 is not below .* 2; .* at most 1",
        ),
        ({"train": train_args(lr_warmup_steps=9)}, "--train.lr_warmup_steps 9 is not below .* 2; lower"),
        (
            {"train": train_args(lr_warmup_steps=4, max_steps=None, epochs=1)},
            "_steps 4 is not below .* 4; lower",
        ),
        (
            {"train": train_args(lr_warmup_steps=1, max_steps=None, max_tokens=32)},
            "_steps 1 is not .* at most 0",
        ),
        ({"train": train_args(max_seq_length=9)}, "--train.max_seq_length 9 is above .* 8"),
        ({"train": train_args(cross_entropy_filter_tolerance=1.5)}, "filter_tolerance 1.5"),
        ({"train": train_args(cross_entropy="cut", cross_entropy_chunk_size=0)}, "--train.cross_entropy cut with"),
        ({"train": train_args(min_lr=1.0)}, "--train.min_lr 1.0 is above"),
        ({"optimizer": "Adamm"}, "--optimizer Adamm"),
        ({"logger_name": "wandb"}, "pip install wandb"),
        ({"devices": 0}, "--devices 0"),
        ({"num_nodes": 0}, "--num_nodes 0"),
        ({"initial_checkpoint_dir": Path("nowhere")}, "--initial_checkpoint_dir nowhere"),
        ({"tokenizer_dir": Path("nowhere")}, "--tokenizer_dir"),
        ({"eval": EvalArgs(prompt="x")}, "--eval.prompt needs a tokenizer"),
        ({"resume": True}, "--resume true: no checkpoint in"),
        ({"resume": Path("nowhere")}, "--resume nowhere: no checkpoint in nowhere"),
    ],
)
def test_refused_before_the_model_is_built(
    tmp_path: Path, no_model: None, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=message) as caught:
        if changes.get("data", 1) is None:
            recipe.setup(model_config=MODEL)
        else:
            pretrain(tmp_path, **changes)
    assert "\n" not in str(caught.value)


class Unprepared(Numbers):
    """Preparing it would take an hour."""

    def prepare(self) -> None:
        pytest.fail("the data was prepared")


@pytest.mark.parametrize("out_dir", ["file", "file/below", "/proc/x"])
def test_a_folder_that_cannot_be_written_is_refused_first(tmp_path: Path, no_model: None, out_dir: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="--out_dir .* cannot be written"):
        pretrain(tmp_path / out_dir, Unprepared())
    assert (tmp_path / "file").read_text() == "mine"


def test_ids_that_the_model_does_not_have_are_refused(tmp_path: Path, no_model: None) -> None:
    ids = np.zeros(100, dtype=np.uint16)
    ids[7] = 64
    ids.tofile(tmp_path / "ids.bin")
    with pytest.raises(UsageError, match="ids.bin holds id 64 at position 7, .* model's 64; .*vocab_size to 65"):
        pretrain(tmp_path / "run", TokenFile(tmp_path / "ids.bin"))


def test_a_prompt_without_tokens_is_refused(tmp_path: Path, no_model: None) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(UsageError, match="--eval.prompt: got ''"):
        pretrain(tmp_path / "run", Numbers(tokenizer_folder=folder), eval=EvalArgs(prompt=""))


def test_a_damaged_initial_checkpoint_is_refused(tmp_path: Path, no_model: None) -> None:
    (tmp_path / "lit_model.safetensors").write_bytes(b"garbage")
    with pytest.raises(UsageError, match="lit_model.safetensors is damaged"):
        pretrain(tmp_path / "run", initial_checkpoint_dir=tmp_path)


@pytest.mark.parametrize(
    ("config", "folder"),
    [
        ({"model_name": "demo"}, "demo"),
        ({"model_name": "Qwen2.5-0.5B"}, "Qwen2.5-0.5B"),
        ({"model_config": {**MODEL, "name": "../a b/c"}}, "a-b-c"),
        ({"model_config": {**MODEL, "name": ""}}, "model"),
    ],
)
def test_the_folder_is_named_after_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], folder: str
) -> None:
    monkeypatch.chdir(tmp_path)
    seen = []

    def prepared(out_dir: Path) -> None:
        seen.append(str(out_dir))
        raise UsageError("that will do")

    monkeypatch.setattr(run, "prepare_out_dir", prepared)
    with pytest.raises(UsageError, match="that will do"):
        pretrain(None, **{"model_config": None, **config})  # type: ignore[arg-type]
    assert seen == [f"out/pretrain/{folder}"]


def test_a_vocabulary_larger_than_the_model_is_refused(tmp_path: Path, no_model: None) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer", num_words=63)
    with pytest.raises(UsageError, match="65 ids, more than the model's vocab_size 64.*_config.vocab_size to 65"):
        pretrain(tmp_path / "run", Numbers(tokenizer_folder=folder))


def test_special_tokens_that_no_text_has_may_be_missing(tmp_path: Path) -> None:
    """The id of <end> is one too many for the model, as that for images is in Gemma 3's tokenizer."""
    folder = save_byte_tokenizer(tmp_path / "tokenizer", bos="<bos>")
    data = Numbers(tokenizer_folder=folder)
    with pytest.raises(UsageError, match="258 ids, more than the model's vocab_size 257"):
        pretrain(tmp_path / "refused", data, model_config={**MODEL, "vocab_size": 257})
    eval = EvalArgs(prompt="a", max_new_tokens=30, final_validation=False)
    model = {**MODEL, "vocab_size": 258, "padded_vocab_size": 264}
    pretrain(tmp_path / "run", data, model_config=model, eval=eval)


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    pretrain(tmp_path)
    with pytest.raises(
        UsageError, match="is not empty: it holds a run up to step 2 .*--resume auto.*another --out_dir"
    ):
        pretrain(tmp_path)


def test_a_finished_run_has_nothing_to_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Said as an error, except with auto: there the same command brings a run to its end and keeps it there."""
    pretrain(tmp_path)
    for resume in (True, tmp_path, tmp_path / "final"):
        with pytest.raises(UsageError, match="final is at step 2.*raise --train.max_steps"):
            pretrain(tmp_path, resume=resume)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    capsys.readouterr()
    summary = pretrain(tmp_path, resume="auto")
    assert (summary.steps, summary.checkpoint_dir) == (0, tmp_path / "final")
    assert "finished: " in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_resume_auto_starts_where_there_is_nothing(tmp_path: Path) -> None:
    assert pretrain(tmp_path / "new", resume="auto").steps == 2


def test_changed_arguments_are_named_and_act(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pretrain(tmp_path, optimizer={"lr": 0.01, "weight_decay": 0.1})
    capsys.readouterr()
    args = train_args(max_steps=3)
    pretrain(tmp_path, resume=True, train=args, optimizer={"lr": 0.01, "weight_decay": 0.3})
    printed = capsys.readouterr().out
    assert "--train.max_steps was 2, is 3" in printed and "--optimizer.weight_decay was 0.1, is 0.3" in printed
    assert "out_dir" not in printed.split("trained")[0].replace(str(tmp_path), "")
    groups = optimizer_state(tmp_path / "final")["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "SGD"}, "--optimizer SGD: .*final holds the state of AdamW"),
        ({"data": Numbers(3)}, "--resume .*: 8 samples of the epoch are consumed, .* has 3"),
    ],
)
def test_what_does_not_fit_the_checkpoint_is_refused_before_the_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_model: None, changes: dict[str, Any], message: str
) -> None:
    with monkeypatch.context() as context:
        context.setattr(run, "GPT", GPT)
        pretrain(tmp_path)
    with pytest.raises(UsageError, match=message):
        pretrain(tmp_path, resume=True, train=train_args(max_steps=3), **changes)


def test_another_model_is_not_resumed(tmp_path: Path, no_model: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as context:
        context.setattr(run, "GPT", GPT)
        pretrain(tmp_path)
    with pytest.raises(UsageError, match="n_layer is 1 there and 2 here"):
        pretrain(tmp_path, resume=True, model_config={**MODEL, "n_layer": 2}, train=train_args(max_steps=3))
