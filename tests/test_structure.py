import importlib.util
import re
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*(ROOT / "litce").rglob("*.py"), *ROOT.glob("*.py"), *(ROOT / "finetune").glob("*.py")])


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_the_training_loop_exists_once() -> None:
    calls = {path.relative_to(ROOT).as_posix(): path.read_text().count("fabric.backward(") for path in SOURCES}
    assert {name: count for name, count in calls.items() if count} == {"litce/training/loop.py": 1}


def test_files_are_short() -> None:
    assert [path.name for path in SOURCES if num_lines(path) > 500] == []
    lengths = [num_lines(path) for path in SOURCES if num_lines(path) > 0]
    assert median(lengths) < 150


def test_no_utils() -> None:
    assert [path for path in SOURCES if path.stem in ("utils", "util", "helpers", "common", "misc")] == []


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("test_*.py")), ids=lambda path: path.name)
def test_names_of_tests_are_unique(path: Path) -> None:
    """Without packages pytest imports test files by their bare name."""
    assert len(list((ROOT / "tests").rglob(path.name))) == 1


def test_only_the_head_reads_its_weight() -> None:
    readers = [
        path.name
        for path in SOURCES
        if re.search(r"\.lm_head\.weight(?!\.device)", path.read_text()) and path.name not in ("lm_head.py", "model.py")
    ]
    assert readers == []


def test_importable_without_optional_packages() -> None:
    """Names of the optional packages appear in no import at the top of a file."""
    optional = re.compile(
        r"^(?:from|import) (?:wandb|tensorboard|litdata|liger_kernel|cut_cross_entropy|lm_eval)\b", re.MULTILINE
    )
    assert [path.name for path in SOURCES if optional.search(path.read_text())] == []
    assert importlib.util.find_spec("litce") is not None


def test_recipes_are_declarations() -> None:
    """Together below 500 lines, and no six lines in a row (blank ones left out) stand in two places."""
    recipes = sorted((ROOT / "litce/recipes").glob("*.py"))
    assert sum(num_lines(path) for path in recipes) < 500
    blocks: dict[tuple[str, ...], str] = {}
    for path in (*recipes, ROOT / "litce/training/finetune.py", ROOT / "litce/training/run.py"):
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        for i in range(len(lines) - 5):
            block = tuple(lines[i : i + 6])
            assert blocks.setdefault(block, path.name) == path.name, f"{path.name} repeats {block}"
