"""On one rank; what several do is in tests/recipes/test_pretrain_ddp.py."""

import pytest
from lightning.fabric import Fabric

from litce.args import UsageError
from litce.training.ranks import on_every_rank, on_rank_zero, rank_by_rank


def test_one_rank_calls_once_and_raises() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    assert on_rank_zero(fabric, lambda: 3) == 3
    for call in (on_rank_zero, on_every_rank, rank_by_rank):
        calls = []
        call(fabric, lambda calls=calls: calls.append(1))
        assert calls == [1]

        def failing() -> None:
            raise UsageError("wrong")

        with pytest.raises(UsageError, match="^wrong$"):
            call(fabric, failing)
