from typing import Any

import pytest

from litce.args import EvalArgs, TrainArgs, UsageError, parse_bytes


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (33554432, 33554432),
        ("33554432", 33554432),
        ("33_554_432", 33554432),
        ("256MiB", 256 * 2**20),
        ("256 mib", 256 * 2**20),
        ("2GB", 2 * 10**9),
        ("2GiB", 2**31),
        ("1.5GB", 15 * 10**8),
        ("7B", 7),
        ("1TiB", 2**40),
        ("3kB", 3000),
    ],
)
def test_parse_bytes(value: int | str, expected: int) -> None:
    assert parse_bytes(value) == expected
    assert TrainArgs(memory_budget_bytes=value).memory_budget_bytes == expected


@pytest.mark.parametrize("value", ["", "x", "MiB", "0", 0, -1, "-1MB", "1XB", "1e9", True, "1.2.3MB", None])
def test_parse_bytes_refuses(value: Any) -> None:
    with pytest.raises(UsageError, match=r"--train.memory_budget_bytes .*256MiB"):
        parse_bytes(value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        *[({name: 0}, f"--train.{name} 0: must be greater than 0") for name in ("save_interval", "log_interval")],
        *[({name: 0}, f"--train.{name} 0: must be") for name in ("global_batch_size", "micro_batch_size")],
        *[
            ({name: 0}, f"--train.{name} 0: must be")
            for name in ("epochs", "max_tokens", "max_steps", "max_seq_length")
        ],
        ({"max_time": 0.0}, "--train.max_time 0.0: must be greater than 0"),
        ({"max_norm": -1.0}, "--train.max_norm -1.0"),
        ({"max_norm": float("nan")}, "--train.max_norm nan"),
        ({"max_time": float("inf")}, "--train.max_time inf"),
        ({"lr_warmup_steps": -1}, "--train.lr_warmup_steps -1: must be 0 or greater"),
        ({"min_lr": -1e-5}, "--train.min_lr -1e-05"),
        ({"cross_entropy_chunk_size": -1}, "--train.cross_entropy_chunk_size -1"),
        ({"global_batch_size": 10, "micro_batch_size": 4}, "global_batch_size 10 is .*micro_batch_size 4"),
        ({"global_batch_size": 2, "micro_batch_size": 4}, "global_batch_size 2 is .*micro_batch_size 4"),
    ],
)
def test_train_args_refuse(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        TrainArgs(**values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["interval", "max_iters", "max_new_tokens"])
def test_eval_args_refuse(name: str) -> None:
    values: dict[str, Any] = {name: 0}
    with pytest.raises(UsageError, match=f"--eval.{name} 0: must be greater than 0"):
        EvalArgs(**values)
    EvalArgs(**{name: None})


def test_accumulation_iters() -> None:
    args = TrainArgs(global_batch_size=24, micro_batch_size=4)
    assert [args.accumulation_iters(world_size) for world_size in (1, 2, 3, 6)] == [6, 3, 2, 1]
    with pytest.raises(UsageError, match="24 is not a multiple of --train.micro_batch_size 4 x 4 devices = 16"):
        args.accumulation_iters(4)
