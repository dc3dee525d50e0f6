"""What is refused before training starts: too little data, and limits that cut an optimizer step."""

import logging
from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import GradientAccumulationScheduler

if TYPE_CHECKING:
    from project.data.datamodule import StreamDataModule

log = logging.getLogger("project")
PART_OF = {"fit": "val", "validate": "val", "test": "test", "predict": "predict"}


def check_rows(data: "StreamDataModule", stage: str) -> None:
    """Refuse a part without the rows that ``stage`` needs.

    Raises:
        ValueError: Naming the rows found, the sizes, and the flag that helps.
    """
    trainer, name = data.trainer_in_use, PART_OF[stage]
    if stage == "fit":
        source, part = data.part("train")
        rows, world, window = len(part), trainer.world_size, trainer.accumulate_grad_batches
        found = f"Too little data: {rows} training rows of {len(source)}"
        if not len(source):
            raise ValueError(f"{found}: the source has none.\nSee --data.source, and what was said of rows left out.")
        if rows < world:
            raise ValueError(
                f"{found} for {world} device{'s' * (world > 1)}.\n"
                "Give more rows (--data.source, --data.split) or fewer --devices."
            )
        if rows < data.effective_batch and data.drop_last:
            raise ValueError(
                f"{found} are fewer than one effective batch of {data.effective_batch} = "
                f"{data.batch_size} rows x {world} devices x {window}.\n"
                "Use --data.drop_last false to train on an incomplete batch, or a smaller --data.batch_size."
            )
    source, part = data.part(name)
    unasked = stage == "fit" and data.split[1] == 0 and data.own_sources["val"] is None  # no validation is fine
    if not len(part) and not unasked:
        verb = "validate on" if stage == "fit" else stage
        flags = "--data.source" if name == "predict" else f"--data.split {list(data.split)} and --data.{name}_source"
        raise ValueError(f"No rows to {verb}: 0 of {len(source)} rows.\nSee {flags}.")


def check_windows(data: "StreamDataModule") -> None:
    """A limit or a validation inside an accumulation window: whole numbers are refused, fractions rounded, with a line.

    Raises:
        ValueError: With the nearest number that does not cut a window; for a callback that changes the window.
    """
    trainer = data.trainer_in_use
    window = trainer.accumulate_grad_batches
    if any(isinstance(c, GradientAccumulationScheduler) for c in trainer.callbacks):
        raise ValueError(
            "GradientAccumulationScheduler changes the effective batch during a run, so that it cannot be resumed.\n"
            "Leave it out of --trainer.callbacks; --accumulate_grad_batches holds for the whole run."
        )
    if window == 1 or trainer.fast_dev_run:
        return
    length, limit = len(data.shares("train")), trainer.limit_train_batches
    batches = limit if isinstance(limit, int) else int(length * (1.0 if limit is None else limit))
    if batches < length and batches % window:
        flag = f"--{'overfit' if trainer.overfit_batches else 'limit_train'}_batches {limit}"
        trainer.limit_train_batches = batches = _whole(flag, isinstance(limit, int), batches, window)
    interval = trainer.val_check_interval
    if interval == 1.0 and isinstance(interval, float):
        return
    batches = min(batches, length)
    micro = interval if isinstance(interval, int) else int(batches * interval)
    if micro % window:
        trainer.val_check_interval = _whole(
            f"--val_check_interval {interval}", isinstance(interval, int), micro, window
        )
    if trainer.check_val_every_n_epoch is None and batches % window:
        raise ValueError(
            f"An epoch of {batches} micro-batches ends in an incomplete accumulation window of {window}, so optimizer "
            "steps cannot be counted across epochs.\n"
            "Use --data.drop_last true, or validate with --check_val_every_n_epoch."
        )


def _whole(flag: str, exact: bool, batches: int, window: int) -> int:
    whole = max(window, batches // window * window)
    if exact:
        raise ValueError(
            f"{flag}: {batches} micro-batches cut an accumulation window of {window}.\n"
            f"Use a multiple of {window}, such as {whole}."
        )
    log.info("%s: rounded to %d micro-batches, %d whole optimizer steps", flag, whole, whole // window)
    return whole
