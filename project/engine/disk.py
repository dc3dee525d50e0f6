"""A disk that is full, read-only or gone: what is said of it, before a run and at its end."""

import errno
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import torch

from project.usage import Failed

log = logging.getLogger("project")
ENDS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.EFBIG}


class NotWritten(OSError):
    """A checkpoint that could not be written; the one before it is untouched."""

    keeps_checkpoints = True  # a second try would fail like the first


def size(value: Any) -> int:
    """Bytes of the tensors in a checkpoint, about those of its file."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(map(size, parts))


def free(path: Path) -> int:
    """Bytes that may still be written beside ``path``, which need not exist."""
    return shutil.disk_usage(next(p for p in (path, *path.absolute().parents) if p.exists())).free


def say_room(trainer: L.Trainer, folder: Path) -> None:
    """Warn at the start if ``folder`` cannot hold what a save needs: the checkpoint before it, and the new one."""
    needed = size(trainer.lightning_module.state_dict())
    for group in (g for optimizer in trainer.optimizers for g in optimizer.param_groups):  # what it will come to keep
        needed += size(group["params"]) * (2 if "betas" in group else 1 if group.get("momentum") else 0)
    if (room := free(folder)) < 2 * needed:
        log.warning(
            "%s has room for %s bytes, but two checkpoints, the last and one being written, need about %s.",
            *(folder, f"{room:,}", f"{2 * needed:,}"),
        )


def not_written(error: BaseException, path: Path, checkpoint: dict[str, Any]) -> BaseException:
    """The error to raise when ``checkpoint`` could not be written; torch hides the disk's own behind one of its own."""
    cause = error if isinstance(error, OSError) else error.__context__
    if not isinstance(cause, OSError):  # something else, as Ctrl-C
        return error
    words = f"{cause.strerror or cause} (about {size(checkpoint):,} bytes needed, {free(path):,} free)"
    found = NotWritten(cause.errno or errno.EIO, words)
    found.filename = str(path)
    return found


def refused(error: BaseException | None, folder: Path) -> Failed | None:
    """What to tell of a run that a disk has ended; None if it was something else that did.

    Args:
        error: What ended it. Closing the logs fails too and hides the first error: that one counts.
        folder: The run folder.
    """
    first: OSError | None = None
    while error is not None:
        gone = isinstance(error, FileNotFoundError) and not folder.exists()
        if isinstance(error, OSError) and (isinstance(error, NotWritten) or error.errno in ENDS or gone):
            first = error
        if isinstance(error, NotWritten):
            break
        error = error.__context__
    if first is None:
        return None
    what = first.filename or f"A file in {folder}"
    why = first.strerror or str(first)
    if not isinstance(first, NotWritten):
        why += f" ({free(folder):,} bytes free)"
    if not folder.exists():
        why += f"; the folder {folder} has vanished"
    last = folder / "checkpoints" / "last.ckpt"
    kept = f"{last} is whole; go on with --resume {folder}" if os.path.exists(last) else "No checkpoint is there"
    return Failed(f"{what} could not be written: {why}.\n{kept}.")
