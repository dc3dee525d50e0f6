"""Reading in processes of their own: signals, shared memory that is too small, and an end that is not waited for."""

import math
import os
import shutil
import signal
from typing import Any

from torch import Tensor
from torch.utils.data import get_worker_info


def leave_signals_to_the_main_process(_: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def shared(read: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """In a worker: what was read, in shared memory. ValueError if it does not fit.

    A worker would do so by itself, but in a thread whose failure the main process waits for in vain.
    """
    if (worker := get_worker_info()) is not None:
        try:
            for tensor in read:
                tensor.share_memory_()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise ValueError(too_small(worker.num_workers, sum(t.nbytes for t in read), error)) from None
    return read


def too_small(workers: int, size: int, error: object) -> str:
    """Why `workers` could not hand over chunks of `size` bytes, and what helps."""
    room = shutil.disk_usage("/dev/shm").total / 1e6 if os.path.isdir("/dev/shm") else math.nan
    return (
        f"--data.num_workers {workers}: chunks of {size / 1e6:.2f} MB, two for each worker, do not fit into the shared "
        f"memory (/dev/shm has {room:.1f} MB) or the limit of open files: {error}\n"
        "Use --data.num_workers 0, a smaller chunk_size and eval_batch_size, or a larger limit (--shm-size, ulimit)."
    )


def let_go(loader: Any) -> None:
    """End the workers of a DataLoader (a weak reference to it), if nobody has.

    At the end of Python multiprocessing sends them SIGTERM, which they ignore, and waits for them.
    """
    iterator = getattr(loader(), "_iterator", None)
    if iterator is not None:
        iterator._shutdown_workers()
