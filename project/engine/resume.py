"""Exact resume: from a checkpoint saved at any moment, training goes on as if it had never stopped.

What the weights contain is a position, (epoch, rows up to the last optimizer step). ``StreamDataModule`` starts a pass
there; this callback stores it, makes Lightning's own counters agree with it on loading, and seeds each micro-batch from
(seed, epoch, micro-batch, rank), so that dropout and the like need no stored state.

The loop counters in a checkpoint (``checkpoint["loops"]["fit_loop"]``) are Lightning's private format. Everything that
knows it stands in ``_rewrite_counters``; ``tests/test_resume.py`` sweeps every hook at which a checkpoint can be saved.
"""

import random
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.trainer.states import TrainerFn

from project.data.datamodule import StreamDataModule
from project.data.order import key

KEY = "progress"
ODD = 0x9E3779B97F4A7C15  # spreads the numbers of micro-batches over all bits of a seed


class Resume(L.Callback):
    """Stores where training stands, and continues there exactly.

    Another number of devices, micro-batch or accumulation is fine while the effective batch stays; anything that would
    change which rows are learned from is refused.

    Args:
        allow_changed: Resume even so; rows may then repeat or be missed in the epoch that was cut.
        optimizer_values: Values of the optimizer to use instead of the restored ones, e.g. {"lr": 0.1}.

    Raises:
        ValueError: When loading a checkpoint whose effective batch, data or seed differ, with a list saved → now.
    """

    def __init__(self, allow_changed: bool = False, optimizer_values: dict[str, Any] | None = None) -> None:
        self.allow_changed, self.optimizer_values = allow_changed, optimizer_values or {}
        self._last_step: int | None = None
        self._again: tuple[dict[str, float], int] = ({}, 0)  # what the loggers knew of the step resumed from, and that
        self._scores: dict[str, float] = {}  # of the last validation before the stop, for callbacks that look at them
        self._cut_epoch = False
        self._before_validation: dict[str, float] | None = (
            None  # while one runs, what was logged of this step before it
        )

    # ---- random numbers

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._generators = [torch.default_generator]
        device = trainer.strategy.root_device
        if device.type == "cuda":  # pragma: cuda
            self._generators.append(torch.cuda.default_generators[device.index or 0])
        self.on_train_epoch_start(trainer, pl_module)  # which Lightning leaves out when it resumes inside an epoch

        for name, value in self.optimizer_values.items():
            _replace(trainer, name, value)
        trainer.callback_metrics.update({n: torch.tensor(v) for n, v in self._scores.items()})

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        seed = getattr(trainer.datamodule, "seed", 0)  # type: ignore[attr-defined]
        self._epoch_seed = key(seed, 5, trainer.current_epoch, trainer.global_rank)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        seed = (self._epoch_seed + batch_idx * ODD) % (1 << 63)
        for generator in self._generators:
            generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed >> 31)

    # ---- saving

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        if trainer.state.fn != TrainerFn.FITTING or not isinstance(data, StreamDataModule):
            return
        epoch, rows = data.position()
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        done = _batch_progress(trainer).processed
        checkpoint[KEY] = {
            "epoch": epoch,
            "rows": rows,
            "epoch_done": done >= trainer.num_training_batches,
            "validation_due": self._validation_due(trainer),
            "scores": {n: float(v) for n, v in trainer.callback_metrics.items() if v.numel() == 1},
            "row": self._row(trainer) if self._before_validation is None else self._before_validation,
            "stopped_early": any(isinstance(c, EarlyStopping) and c.stopped_epoch for c in callbacks),
            **_identity(data),
        }

    def _row(self, trainer: L.Trainer) -> dict[str, float]:
        """What was logged of this step up to now: an attempt that ends here may still log more, which is not kept."""
        row: dict[str, Any] = next((logger.row for logger in trainer.loggers if hasattr(logger, "row")), {})
        return (
            {n: v if isinstance(v, int) else float(v) for n, v in row.items() if n != "step"}
            if row.get("step") == trainer.global_step
            else {}
        )

    def _validation_due(self, trainer: L.Trainer) -> bool:
        """Whether a validation belongs to the last optimizer step that has not finished yet."""
        loop = trainer.fit_loop.epoch_loop
        progress = _batch_progress(trainer)
        if progress.processed % trainer.accumulate_grad_batches and progress.processed < trainer.num_training_batches:
            return False
        if trainer.validating:
            return self._before_validation is not None
        # In on_train_batch_end a batch is processed but not completed, and its validation is still to come.
        fetcher = trainer.fit_loop._data_fetcher
        return progress.processed > progress.completed and fetcher is not None and loop._should_check_val_fx(fetcher)

    # ---- loading

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        data, saved = trainer.datamodule, checkpoint.get(KEY)  # type: ignore[attr-defined]
        if trainer.state.fn != TrainerFn.FITTING or not isinstance(data, StreamDataModule) or saved is None:
            return
        if not self.allow_changed:
            check_same(data, checkpoint)
        _rewrite_counters(trainer, data, checkpoint, saved)
        self._scores, self._cut_epoch = saved.get("scores", {}), saved["rows"] > 0
        self._again = saved.get("row", {}), checkpoint["global_step"]
        if saved["validation_due"] and 0 <= trainer.max_steps <= checkpoint["global_step"]:
            # The validation after the very last step is still to come, but Lightning would not even enter its loop.
            self._last_step = trainer.max_steps
            trainer.fit_loop.epoch_loop.max_steps = trainer.max_steps + 1

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._cut_epoch:  # Lightning leaves out the step of a plateau schedule at the end of an epoch it resumed
            for config in trainer.lr_scheduler_configs:
                if config.reduce_on_plateau and config.interval == "epoch":
                    pl_module.lr_scheduler_step(config.scheduler, trainer.callback_metrics[str(config.monitor)])
            self._cut_epoch = False

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # TensorBoard drops what was logged from the step of the checkpoint on: what the checkpoint knows of it is back.
        (row, step), self._again = self._again, ({}, 0)
        for logger in trainer.loggers if row else ():
            logger.log_metrics(row, step)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._before_validation = self._row(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._before_validation = None  # by now its scores are logged; whoever saves does so in this hook, after us
        if self._last_step is not None:
            trainer.fit_loop.epoch_loop.max_steps = self._last_step
            self._last_step = None


def _replace(trainer: L.Trainer, name: str, value: Any) -> None:
    """Put a typed value of the optimizer in place of the restored one; a rate is also the base of its schedule."""
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            was = group.get("initial_lr", group[name]) if name == "lr" else group[name]
            if trainer.is_global_zero:
                print(f"optimizer   {name} {was} → {value}: what was typed, in place of the checkpoint's")
            if name == "lr" and "initial_lr" in group:
                group["lr"], group["initial_lr"] = group["lr"] * value / was, value
            else:
                group[name] = value
    for config in trainer.lr_scheduler_configs if name == "lr" else ():
        scheduler = config.scheduler
        if hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs = [value] * len(scheduler.base_lrs)


def check_same(data: StreamDataModule, checkpoint: dict[str, Any]) -> None:
    """Refuse to resume with another effective batch, data or seed than the checkpoint's.

    Raises:
        ValueError: With a list saved → now, and the flag that forces it.
    """
    saved = checkpoint.get(KEY, {})
    changed = {n: (saved[n], now) for n, now in _identity(data).items() if n in saved and saved[n] != now}
    if changed:
        raise ValueError(
            "This run cannot be resumed exactly. Saved → now:\n"
            + "\n".join(f"  {name.replace('_', ' ')}: {was} → {now}" for name, (was, now) in changed.items())
            + "\nRestore these settings, or force it with --resume_changed true."
        )


def _identity(data: StreamDataModule) -> dict[str, Any]:
    """What must stay for the rows of each optimizer step to stay."""
    (source, part), shares = data.part("train"), data.shares("train")
    return {
        "effective_batch": data.effective_batch,
        "training_rows": len(part),
        "source_rows": len(source),
        "source": type(source).__name__,
        "checksum_of_rows": data.fingerprint(),
        "rows_an_epoch": _limited(len(shares), data.trainer_in_use.limit_train_batches) * data.micro_rows,
        "seed": data.seed,
        "split_seed": data.split_seed,
        "shuffle": data.shuffle,
        "drop_last": data.drop_last,
    }


def _batch_progress(trainer: L.Trainer) -> Any:
    return trainer.fit_loop.epoch_loop.batch_progress.current


def _limited(length: int, limit: int | float | None) -> int:
    """Batches that Lightning runs of ``length``: a limit is a number of batches or a fraction."""
    if limit is None:
        return length
    return min(length, limit) if isinstance(limit, int) else int(length * limit)


def _rewrite_counters(
    trainer: L.Trainer, data: StreamDataModule, checkpoint: dict[str, Any], saved: dict[str, Any]
) -> None:
    """Make Lightning's counters say: ``rows`` of ``epoch`` are done, in micro-batches of the size in use now.

    Left alone they count micro-batches of the old size, include those of an unfinished accumulation window (whose
    gradients died with the process), and forget a validation that was due.
    """

    def all_at(n: int) -> dict[str, int]:
        return {"ready": n, "started": n, "processed": n, "completed": n}

    loops = checkpoint["loops"]["fit_loop"]
    per_epoch = _limited(len(data.shares("train")), trainer.limit_train_batches)
    done = per_epoch if saved["epoch_done"] else min(per_epoch, saved["rows"] // data.micro_rows)
    epoch = loops["epoch_progress"]
    inside = saved["rows"] > 0 or epoch["current"]["started"] > epoch["current"]["processed"]
    at = all_at(saved["epoch"])
    if inside:
        at["ready"] = at["started"] = saved["epoch"] + 1
    else:
        done = 0
    epoch["current"], epoch["total"] = at, dict(at)
    batch = loops["epoch_loop.batch_progress"]
    batch["current"], batch["total"] = all_at(done), all_at(saved["epoch"] * per_epoch + done)
    batch["is_last_batch"] = inside and done == per_epoch
    val = loops["epoch_loop.val_loop.batch_progress"]
    val_batches = _limited(len(data.shares("val")), trainer.limit_val_batches)
    due = saved["validation_due"]
    val["current"] = {"ready": 1, "started": 1, "processed": 0, "completed": 0} if due else all_at(val_batches)
    val["total"], val["is_last_batch"] = dict(val["current"]), not due
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] = checkpoint["global_step"]
