import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from litce import __version__, cli, cli_parser
from litce.args import TrainArgs, UsageError
from litce.cli_config import with_config
from litce.data import PythonStdlib, TextFiles
from litce.recipes import pretrain as recipe
from litce.training.optim import resolve_optimizer
from tests.tiny import logged

ROOT = Path(__file__).parents[1]


def parsed(*words: str) -> dict[str, Any]:
    """What `litce pretrain WORDS` calls the recipe with."""
    parser = cli_parser.build_parser("pretrain", recipe.setup)
    return cli_parser.parse(parser, with_config(list(words), cli.COMMANDS["pretrain"].default_config))


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The single line that `litce WORDS` ends with."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and "Traceback" not in captured.err
    return captured.err.strip()


def test_no_arguments_are_the_demo() -> None:
    arguments = parsed()
    assert arguments["model_name"] == "demo"
    assert arguments["data"] == PythonStdlib()
    assert arguments["out_dir"] is None
    assert arguments["train"].cross_entropy_chunk_size == "auto"


def test_flags_override_the_configuration_wherever_they_stand(tmp_path: Path) -> None:
    arguments = parsed("--model_name", "gpt2", "--train.max_steps", "2")
    assert (arguments["model_name"], arguments["train"].max_steps) == ("gpt2", 2)
    assert arguments["train"].micro_batch_size == parsed()["train"].micro_batch_size
    path = tmp_path / "own.yaml"
    path.write_text("model_name: gpt2-xl\ntrain:\n  max_steps: 7\n")
    for words in (["--train.max_steps=3", "--config", str(path)], [f"--config={path}", "--train.max_steps", "3"]):
        arguments = parsed(*words)
        assert arguments["train"] == TrainArgs(max_steps=3)
        assert (arguments["model_name"], arguments["data"]) == ("gpt2-xl", None)


@pytest.mark.parametrize("name", ["pretrain/gpt2", "pretrain/gpt2.yaml", str(ROOT / "config_hub/pretrain/gpt2.yaml")])
def test_config_takes_a_hub_name_or_a_path(name: str) -> None:
    assert parsed("--config", name)["model_name"] == "gpt2"


def test_data_and_its_arguments() -> None:
    words = ["--data", "PythonStdlib", "--data.vocab_size", "300"]
    assert parsed(*words)["data"] == parsed("--data.vocab_size", "300")["data"] == PythonStdlib(vocab_size=300)
    assert parsed("--data", "TextFiles", "--data.path", "x")["data"] == TextFiles(path=Path("x"))


def test_dotted_dicts_and_unions() -> None:
    arguments = parsed("--optimizer.lr", "0.5", "--model_config.n_layer", "2", "--resume", "auto")
    assert resolve_optimizer(arguments["optimizer"]).lr == 0.5
    assert arguments["model_config"] == {"n_layer": 2} and arguments["resume"] == "auto"
    assert parsed("--resume", "true")["resume"] is True
    assert parsed("--resume", "a/b")["resume"] == Path("a/b")
    assert resolve_optimizer(parsed("--optimizer", "SGD")["optimizer"]).cls.__name__ == "SGD"
    assert parsed("--train.memory_budget_bytes", "256MiB")["train"].memory_budget_bytes == 2**28


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pretrian"], "litce: error: unknown command 'pretrian'; did you mean pretrain?"),
        (["bench"], "litce: error: 'bench' needs one more word; choose bench loss"),
        (["pretrain", "--train.max_step", "3"], "unknown option --train.max_step; did you mean --train.max_steps"),
        (["pretrain", "--traain.max_steps=3"], "unknown option --traain.max_steps; did you mean --train.max_steps"),
        (["pretrain", "surplus"], "unknown option surplus; see litce pretrain --help"),
        (["pretrain", "--train.max_steps", "x"], "--train.max_steps x: expected a whole number or null"),
        (["pretrain", "--train.max_steps", "1e3"], "--train.max_steps 1e3: expected a whole number or null"),
        (["pretrain", "--train.micro_batch_size", "0"], "--train.micro_batch_size 0: must be greater than 0"),
        (["pretrain", "--train.cross_entropy", "ct"], "expected auto, dense, chunked, cut"),
        (["pretrain", "--precision", "8"], "--precision 8: expected 32-true, bf16-mixed, bf16-true, 16-mixed or null"),
        (["pretrain", "--config", "pretrain/dmeo"], "neither a file nor in the hub; did you mean pretrain/demo"),
        (["pretrain", "--config", "../pyproject"], "--config ../pyproject is neither a file nor in the hub"),
        (["pretrain", "--config"], "--config: give a YAML file or a hub name"),
        (["pretrain", "--data", "Nope"], "--data Nope: expected "),
        (["pretrain", "--data.vocab_sie", "3"], "--data.vocab_sie of PythonStdlib; did you mean --data.vocab_size?"),
        (["pretrain", "--data.vocab_size", "x"], "--data.vocab_size x: expected a whole number"),
        (["pretrain", "--data.vocab_size", "3"], "--data.vocab_size must be at least 257"),
        (["pretrain", "--data", "TextFiles"], "--data.path is required"),
        (["pretrain", "--model_name", "gpt3"], "did you mean gpt2?"),
        (["pretrain", "--seed"], "argument --seed: expected one argument"),
        *[
            (["pretrain", f"--{group}", value], f"--{group} {value}: expected its options one by one, such as --{flag}")
            for group, flag in [("train", "train.save_interval"), ("eval", "eval.interval"), ("log", "log.project")]
            for value in ("3", "nowhere.yaml")
        ],
        (["pretrain", "--data", "LitData"], "--data.path and --data.val_path are required; see litce pretrain --help"),
        (["pretrain", "--data", "LitData", "--data.path", "x"], "error: --data.val_path is required"),
        (
            ["pretrain", "--data", "TokenFile", "--data.path", "x", "--data.dtype", "float32"],
            "--data.dtype float32: expected uint16, uint32, int32, int64",
        ),
        (
            ["pretrain", "--data", "TokenFile", "--data.path", "x", "--data.val_fraction", "abc"],
            "--data.val_fraction abc: expected a number or null",
        ),
        (["pretrain", "--data.vocab_size", "null"], "--data.vocab_size null: expected a whole number"),
        (["pretrain", "--data.num_workers", "null"], "--data.num_workers null: expected a whole number"),
        (
            ["pretrain", "--data", "TokenFile", "--data.path", "x", "--data.dtype", "null"],
            "--data.dtype null: expected uint16, uint32, int32, int64",
        ),
        (["pretrain", "--data.class_path", "3"], "--data.class_path 3: expected "),
        (["pretrain", "--train.min_lr", "null"], "--train.min_lr null: expected a number"),
        (["pretrain", "--train.min_lr", "abc"], "--train.min_lr abc: expected a number"),
        (["pretrain", "--model_config", "3"], "--model_config 3: expected a mapping or null"),
        (["pretrain", "--model_config.foo", "1"], "unknown option --model_config.foo; choose name, block_size"),
        (["pretrain", "--model_config.n_embd", "15"], "--model_config.n_embd: must be a multiple of n_head=4, got 15"),
        (["pretrain", "--model_name", "gpt-2"], "--model_name gpt-2 is not known; did you mean gpt2"),
        *[
            (["pretrain", "--optimizer.lr", value], f"--optimizer.lr {value}: expected a finite number")
            for value in ("abc", "nan", "inf", "null", "true")
        ],
        (["pretrain", "--optimizer.class_path", "3"], "--optimizer.class_path 3: give a class of torch.optim"),
        (["pretrain", "--seed", "-1"], "--seed -1: must be from 0 to 4294967295"),
        (["pretrain", "--data.num_workers", "-1"], "--data.num_workers -1: must be 0"),
        (["generate", "nowhere"], "nowhere is not a folder; give a folder that training wrote, such as RUN/final"),
        (["generate", "nowhere", "--seed", "-1"], "--seed -1: must be from 0 to 4294967295"),
    ],
)
def test_mistakes_end_in_one_line(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert message in refused(capsys, *words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train:\n  max_stepz: 3\n", "FILE: unknown option --train.max_stepz; did you mean --train.max_steps"),
        ("model_nam: gpt2\n", "FILE: unknown option --model_nam; did you mean --model_name"),
        ("train:\n  micro_batch_size: 0\n", "FILE: --train.micro_batch_size 0: must be greater than 0"),
        ("train:\n  max_steps: x\n", "FILE: --train.max_steps x: expected a whole number or null"),
        ("train: null\n", "FILE: --train null: expected its options one by one, such as --train.save_interval"),
        ("eval: 3\n", "FILE: --eval 3: expected its options one by one, such as --eval.interval"),
        ("model_name: demo\ndata: PythonStdlib\n", "error: nothing ends the run"),
        (
            "data:\n  class_path: PythonStdlib\n  init_args:\n    vocab_size: 3\n",
            "FILE: --data.vocab_size must be at least 257",
        ),
        (
            "model_name: demo\ndata: PythonStdlib\ntrain:\n  max_steps: 1\noptimizer:\n  lr: abc\n",
            "FILE: --optimizer.lr abc: expected",
        ),
        ("model_name: gpt-2\ndata: PythonStdlib\n", "FILE: --model_name gpt-2 is not known"),
        ("train: [\n", "--config FILE, line 2, column 1 is not YAML: "),
        ("a: b: c\n", "--config FILE, line 1, column 5 is not YAML: "),
        ("\x00", "--config FILE is not YAML: "),
        ("", "--config FILE is empty; give options such as model_name: demo"),
        ("# nothing\n", "--config FILE is empty"),
        ("- a\n- b\n", "--config FILE holds a list; give options such as"),
        ("hello\n", "--config FILE holds a str; give options such as"),
        ("1: 2\n", "--config FILE: unknown option 1; give options such as"),
        (b"model_name: caf\xe9\n", "--config FILE is not UTF-8 (byte 15); save it as UTF-8"),
    ],
)
def test_mistakes_in_a_file_name_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | bytes, message: str
) -> None:
    path = tmp_path / "own.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    assert message.replace("FILE", str(path)) in refused(capsys, "pretrain", "--config", str(path))


def test_the_file_that_holds_the_mistake_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("train:\n  max_steps: x\n")
    second.write_text("seed: 3\n")
    files = ["--config", str(first), "--config", str(second)]
    assert f"error: {first}: --train.max_steps x" in refused(capsys, "pretrain", *files)
    # A flag overrides the file, and is the mistake then.
    first.write_text("train:\n  max_steps: 3\n")
    assert "error: --train.max_steps y" in refused(capsys, "pretrain", *files, "--train.max_steps", "y")
    assert "error: --train.max_steps y" in refused(capsys, "pretrain", *files, "--train.max_steps=y")
    # The hub's file, which nobody typed.
    words = ["pretrain", "--data", "TextFiles", "--data.path", str(tmp_path), "--out_dir", str(tmp_path / "run")]
    assert "error: config_hub/pretrain/demo.yaml: --eval.prompt needs a tokenizer" in refused(capsys, *words)
    words = ["pretrain", "--config", "pretrain/gpt2", "--train.max_steps", "10"]
    assert "error: config_hub/pretrain/gpt2.yaml: --train.lr_warmup_steps 700 is not below" in refused(capsys, *words)


def test_one_process_of_a_machine_tells_the_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, rank, lines in (("LOCAL_RANK", "0", 1), ("LOCAL_RANK", "1", 0), ("SLURM_LOCALID", "3", 0)):
        with monkeypatch.context() as context, pytest.raises(SystemExit) as caught:
            context.setenv(name, rank)
            cli.main(["pretrain", "--model_name", "gpt3"])
        assert caught.value.code == 2 and capsys.readouterr().err.count("\n") == lines


def test_the_printed_configuration_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--print_config`, as other command lines of jsonargparse have it."""
    words = ["--train.max_steps", "3", "--optimizer.lr", "0.5", "--data.vocab_size", "300"]
    with pytest.raises(SystemExit) as caught:
        cli.main(["pretrain", *words, "--print_config"])
    assert caught.value.code == 0
    path = tmp_path / "printed.yaml"
    path.write_text(capsys.readouterr().out)
    assert parsed("--config", str(path)) == parsed(*words)


def test_usage_errors_of_a_command_are_one_line_and_others_keep_their_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def setup(error: str = "usage") -> None:
        raise UsageError("line one\nline two") if error == "usage" else KeyError("inner")

    monkeypatch.setattr(recipe, "setup", setup)
    monkeypatch.setitem(cli.COMMANDS, "pretrain", cli.Command("litce.recipes.pretrain:setup", "help"))
    assert refused(capsys, "pretrain") == "litce pretrain: error: line one line two"
    with pytest.raises(KeyError, match="inner"):
        cli.main(["pretrain", "--error", "key"])


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["-h"]):
        cli.main(words)
        printed = capsys.readouterr().out
        assert all(name in printed for name in cli.COMMANDS)
    cli.main(["--version"])
    assert capsys.readouterr().out == f"litce {__version__}\n"
    with pytest.raises(SystemExit) as caught:
        cli.main(["pretrain", "--help"])
    assert caught.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Train a language model from scratch, or go on pretraining one." in printed
    # From the docstring under the field, and from the Args of the function.
    assert "Optimizer steps between checkpoints; null saves at the end only" in printed
    assert "Named model to train." in printed
    for flag in ("--train.max_steps", "--optimizer.lr", "--data.help", "--resume", "--print_config"):
        assert flag in printed


def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    words = "--data tests.tiny.Numbers --train.max_steps 2 --train.max_seq_length 8 --eval.prompt null"
    model = "--model_config.block_size 8 --model_config.n_embd 16 --model_config.n_layer 1 --train.log_interval 1"
    cli.main(["pretrain", "--out_dir", str(tmp_path), *words.split(), *model.split()])
    assert "trained 2 steps" in capsys.readouterr().out
    assert list(logged(tmp_path)) == [1, 2]


def test_a_command_imports_only_what_it_needs() -> None:
    """The overview does without torch, training without the benchmark."""
    script = (
        "import sys; from litce.cli import main; main([]); assert 'torch' not in sys.modules;"
        "import litce.recipes.pretrain; assert not any(name.startswith('litce.tools') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True)


def test_launcher(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "pretrain.py"), "--model_name", "gpt3"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 2 and result.stderr.startswith("litce pretrain: error: ")
