"""Real gloo processes for tests: ``on_ranks(2, function, ...)`` runs a function in each and returns what each returned.

Processes are forked from this one, which has imported everything, so a pair costs a tenth of a second, not six. Still,
a function should run many cases in a row.
"""

import contextlib
import os
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def on_ranks(world: int, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
    """[function(*args) on rank 0, on rank 1, …]. Within it, a Trainer with ``devices=world`` uses these processes.

    Raises:
        AssertionError: With a rank's traceback, or if the ranks are not done in ``timeout`` seconds; none is left over.
    """
    with socket.socket() as probe, TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        ranks = [
            mp.get_context("fork").Process(target=_rank, args=(r, world, port, folder, function, args), daemon=False)
            for r in range(world)
        ]
        for process in ranks:
            process.start()
        end = time.monotonic() + timeout
        try:
            for process in ranks:
                process.join(max(0.0, end - time.monotonic()))
            late = [r for r, process in enumerate(ranks) if process.is_alive()]
        finally:
            for process in ranks:
                process.kill()
                process.join()
        errors = [p.read_text() for p in sorted(Path(folder).glob("*.error"))]
        assert not errors, "\n".join(errors)
        assert not late, f"ranks {late} of {world} were not done after {timeout} s"
        return [torch.load(Path(folder, f"{r}.pt"), weights_only=False) for r in range(world)]


def _rank(rank: int, world: int, port: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NODE_RANK="0", LOCAL_RANK=str(rank))
        if world > 1:
            dist.init_process_group("gloo", rank=rank, world_size=world)
        torch.save(function(*args), Path(folder, f"{rank}.pt"))
        if world > 1:
            dist.barrier()
    except BaseException:
        Path(folder, f"{rank}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
