"""What is found to fit a memory, against trying everything."""

from typing import Any

import pytest

from litce.args import TrainArgs
from litce.config import Config
from litce.peft import Full
from litce.tools.planner import Planner, largest_fitting, usable_bytes
from litce.training.run import Task

MODEL = {"name": "small", "block_size": 1000, "vocab_size": 3000, "n_layer": 2, "n_head": 4, "n_embd": 128}


def test_the_largest_that_fits_are_the_largest() -> None:
    train = TrainArgs(global_batch_size=48, micro_batch_size=4)
    planner = Planner(Task(Config(**MODEL), Full(), lambda gpt: None, None), "32-true", train, "AdamW", 2)

    def peak(**changes: int) -> int:
        return planner.memory(TrainArgs(**{"global_batch_size": 48, "micro_batch_size": 4, **changes})).peak_bytes

    usable = peak(micro_batch_size=6)
    assert planner.largest_micro_batch(train, usable) == 6
    assert planner.largest_micro_batch(train, usable - 1) == 4
    assert planner.largest_micro_batch(train, 10**12) == 24
    assert planner.largest_micro_batch(train, 10) is None
    usable = peak(max_seq_length=640)
    assert planner.longest_sequence(train, usable) == 640
    assert planner.longest_sequence(train, usable - 1) == 576
    assert planner.longest_sequence(train, 10**12) == 1000
    assert planner.longest_sequence(train, 10) is None


@pytest.mark.parametrize("size", [1, 2, 7, 500])
@pytest.mark.parametrize("curve", [lambda n: 3 * n + 50, lambda n: n**2, lambda n: 10 * (n // 37)])
def test_largest_fitting_agrees_with_trying_all(size: int, curve: Any) -> None:
    candidates = list(range(5, 5 + size))
    for limit in range(0, 600, 7):
        calls: list[int] = []

        def peak(n: int) -> int:
            calls.append(n)  # noqa: B023
            return curve(n)

        want = max((n for n in candidates if curve(n) <= limit), default=None)
        assert largest_fitting(candidates, peak, limit) == want
        assert len(calls) == len(set(calls)) <= 16


def test_memory_that_is_no_tensors() -> None:
    assert usable_bytes(24 * 10**9) == 23 * 10**9 and usable_bytes(10**9) == 9 * 10**8
