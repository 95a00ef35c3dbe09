"""Runs a function on several ranks, as torchrun would start them, on gloo."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.queues import Queue
from typing import Any


def run_ranks(function: Callable[..., Any], *args: Any, world_size: int = 2, timeout: float = 120) -> list[Any]:
    """What `function(*args)` returns on each rank; both have to be picklable. Fails with the first rank's traceback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [
        context.Process(target=_rank, args=(rank, world_size, port, queue, function, args))
        for rank in range(world_size)
    ]
    try:
        for process in processes:
            process.start()
        results = {}
        for _ in processes:
            rank, result, error = queue.get(timeout=timeout)
            assert error is None, f"rank {rank}: {error}"
            results[rank] = result
        for process in processes:
            process.join(timeout)
    finally:
        for process in processes:
            process.kill()
    return [results[rank] for rank in range(world_size)]


def _rank(
    rank: int, world_size: int, port: int, queue: "Queue[Any]", function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="test",
        CUDA_VISIBLE_DEVICES="",
    )
    try:
        queue.put((rank, function(*args), None))
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))
