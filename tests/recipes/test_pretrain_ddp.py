from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from litce.args import EvalArgs, UsageError
from litce.tokenizer import Tokenizer
from litce.training import loop, run
from litce.training.checkpoint import TrainState
from litce.training.metrics import Summary
from tests.gloo import run_ranks
from tests.tiny import Numbers, assert_equal_weights, logged, pretrain, train_args, weights

# 13 samples do not divide by 2 ranks, nor by the batch of 4. With "odd" half of the micro-batches of one sample have
# no token: on one rank, or on both.
CASES: dict[str, dict[str, Any]] = {
    "uneven": {"data": Numbers(13, num_val_samples=3), "train": {"micro_batch_size": 1, "max_norm": 0.1}},
    "odd": {"data": Numbers(13, masking="odd"), "train": {"micro_batch_size": 1, "global_batch_size": 2}},
    "all": {"data": Numbers(5, masking="all"), "train": {"micro_batch_size": 2}},
}


# Adam would blow the rounding of gradients that are 0 in exact arithmetic (the keys' biases) up to whole steps.
SGD = {"class_path": "SGD", "lr": 0.3, "momentum": 0.9}


def run_case(out_dir: Path, name: str, **changes: Any) -> Summary:
    case = CASES[name]
    args = train_args(**{"max_steps": None, "epochs": 2, "save_interval": 3, **case["train"]})
    return pretrain(out_dir, case["data"], train=args, eval=EvalArgs(interval=2, max_iters=2), optimizer=SGD, **changes)


@dataclass
class BrokenOnRankOne(Numbers):
    """As where one machine lacks a file."""

    def connect(self, tokenizer: Tokenizer | None, max_seq_length: int, seed: int = 42) -> None:
        if torch.distributed.get_rank() == 1:
            raise UsageError("no such file")


def count_syncs(out_dir: Path) -> int:
    """How often the gradients of 6 micro-batches in 3 steps are averaged over the ranks."""
    count = 0

    def counting(state: None, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        nonlocal count
        count += bucket.is_last()
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]

    def fit(fabric: Fabric, state: TrainState, *args: Any, **options: Any) -> None:
        state.model._forward_module.register_comm_hook(None, counting)
        loop.fit(fabric, state, *args, **options)

    with pytest.MonkeyPatch.context() as context:
        context.setattr(run, "fit", fit)
        pretrain(out_dir, train=train_args(micro_batch_size=1, max_steps=3))
    return count


def run_all(root: Path) -> dict[str, Any]:
    results: dict[str, Any] = {name: run_case(root / name, name) for name in CASES}
    results["syncs"] = count_syncs(root / "syncs")
    results["from one"] = run_case(root / "from one", "uneven", resume=root / "one/step-00000003")
    for name, data in (("broken", BrokenOnRankOne()), ("indivisible", Numbers(13))):
        try:
            resume = root / "indivisible checkpoint" if name == "indivisible" else False
            pretrain(root / name, data, resume=resume, train=train_args(max_steps=9))
        except UsageError as error:
            results[name] = str(error)
    results["resumed"] = run_case(root / "resumed", "uneven", resume=root / "uneven/step-00000003")
    try:
        run_case(root / "uneven", "uneven")
    except UsageError as error:
        results["error"] = str(error)
    return results


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("ddp")
    run_case(root / "one", "uneven")
    pretrain(root / "three", Numbers(13), train=train_args(global_batch_size=3, micro_batch_size=1, max_steps=1))
    (root / "three/final").rename(root / "indivisible checkpoint")
    return root, run_ranks(run_all, root)


@pytest.mark.parametrize("name", list(CASES))
def test_two_ranks_train_as_one(two_ranks: tuple[Path, list[dict[str, Any]]], tmp_path: Path, name: str) -> None:
    root, results = two_ranks
    single = run_case(tmp_path, name)
    for rank in results:
        # 13 samples in steps of 4, the last of 1, twice.
        assert (rank[name].steps, rank[name].num_tokens) == (single.steps, single.num_tokens)
        assert rank[name].train_loss == pytest.approx(single.train_loss, rel=1e-5)
    assert logged(root / name) == pytest.approx(logged(tmp_path), rel=1e-5)
    first, second = weights(root / name / "final"), weights(tmp_path / "final")
    for key in first:
        torch.testing.assert_close(first[key], second[key], rtol=1e-4, atol=1e-6, msg=key)


def test_two_ranks_validate_as_one(two_ranks: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    """3 validation samples: rank 0 has two, rank 1 one and a masked one; all are within `max_iters` batches."""
    root, _ = two_ranks
    case = CASES["uneven"]
    args = train_args(**{"max_steps": None, "epochs": 2, **case["train"]})
    pretrain(tmp_path, case["data"], train=args, eval=EvalArgs(interval=2, max_iters=None), optimizer=SGD)
    assert logged(root / "uneven", "val_loss") == pytest.approx(logged(tmp_path, "val_loss"), rel=1e-5)


def test_two_ranks_resume_bit_for_bit(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    root, results = two_ranks
    assert results[0]["resumed"].steps == results[0]["uneven"].steps - 3
    assert_equal_weights(root / "resumed/final", root / "uneven/final")


def test_gradients_are_averaged_once_a_step(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    _, results = two_ranks
    assert [rank["syncs"] for rank in results] == [3, 3]


def test_two_ranks_go_on_where_one_was(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    """With the same samples in each step."""
    root, results = two_ranks
    assert results[0]["from one"].steps == results[0]["uneven"].steps - 3
    losses = {step: loss for step, loss in logged(root / "one").items() if step > 3}
    assert logged(root / "from one") == pytest.approx(losses, rel=1e-5)
    first, second = weights(root / "from one/final"), weights(root / "one/final")
    for key in first:
        torch.testing.assert_close(first[key], second[key], rtol=1e-4, atol=1e-6, msg=key)


def test_a_position_that_two_ranks_cannot_share_is_refused(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    _, results = two_ranks
    assert all("3 samples of the epoch are consumed, which 2 devices cannot share" in r["indivisible"] for r in results)


def test_an_error_on_one_rank_alone_reaches_every_rank(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    _, results = two_ranks
    assert [rank["broken"] for rank in results] == ["no such file (on rank 1)"] * 2


def test_an_error_on_rank_0_reaches_every_rank(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    _, results = two_ranks
    assert all("--resume auto" in rank["error"] for rank in results)
