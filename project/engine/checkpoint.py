"""Checkpoint files: when they are written, which is the best, and that each is complete or absent."""

import contextlib
import logging
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only

from project.engine import disk
from project.engine.sharding import own_shard

log = logging.getLogger("project")


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target, flushes to disk, renames: a file under its final name is always whole."""

    def __init__(self) -> None:
        self._folders: set[Path] = set()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        target = Path(path)
        unfinished = target.with_name(target.name + ".tmp")
        try:
            if target.parent not in self._folders:  # a second time it would hide that a disk has vanished
                target.parent.mkdir(parents=True, exist_ok=True)
                self._folders.add(target.parent)
            with open(unfinished, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, target)
        except BaseException as e:
            with contextlib.suppress(OSError):  # of a disk that is read-only now
                unfinished.unlink()
            raise disk.not_written(e, target, checkpoint)  # noqa: B904  it may be the same error


class Checkpoints(Checkpoint):
    """Keeps ``last.ckpt`` and the best ones: at every validation, every so often, and whenever training ends.

    Options bear the names they have in Lightning's ModelCheckpoint. Weights that are not finite never become ``last``,
    a score that is not finite is never the best.

    Args:
        monitor: Logged value that decides which checkpoints are the best.
        mode: Whether the best value is the smallest ("min") or the largest ("max"). [what the metric says of itself]
        save_top_k: How many of the best to keep beside ``last.ckpt``; 0 keeps none, -1 all.
        every_n_train_steps: Also save ``last.ckpt`` every so many optimizer steps.
        train_time_interval: Also save ``last.ckpt`` whenever this much time has passed.
    """

    def __init__(
        self,
        monitor: str = "val/loss",
        mode: Literal["min", "max"] | None = None,
        save_top_k: int = 1,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = timedelta(minutes=10),
    ) -> None:
        self.monitor, self.mode, self.save_top_k = monitor, mode, save_top_k
        self.every_n_train_steps, self.train_time_interval = every_n_train_steps, train_time_interval
        self.dirpath: Path | None = None
        self.best: dict[str, float] = {}  # file name → score, the best first
        self._saved_step, self._saved_time, self._ended = -1, 0.0, False

    # ---- where things are

    @property
    def last_path(self) -> str:
        """``last.ckpt``, or "" before the first save."""
        return str(self._path("last.ckpt")) if self._saved_step >= 0 else ""

    @property
    def saved_step(self) -> int:
        """The optimizer step of the latest save; -1 before the first."""
        return self._saved_step

    @property
    def best_path(self) -> str:
        """The best checkpoint, or "" if no score was seen."""
        return str(self._path(next(iter(self.best)))) if self.best else ""

    def _path(self, name: str) -> Path:
        assert self.dirpath is not None
        return self.dirpath / name

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            self.follow(pl_module)
            mine = self.dirpath or Path(trainer.default_root_dir, "checkpoints")
            self.dirpath = Path(trainer.strategy.broadcast(str(mine)))
            if trainer.is_global_zero:
                for name in ("last.ckpt.tmp", "best-step=*.ckpt.tmp"):  # of a run that was killed while it saved
                    for leftover in self.dirpath.glob(name):
                        leftover.unlink()

    def follow(self, module: L.LightningModule) -> None:
        """Settle ``mode`` where it was left open: less is better of a loss, and a metric of ours knows."""
        if self.mode is None:
            scores_of = getattr(module, "scores_of", None)  # of a Module
            metrics = {f"val/{name}": metric for name, metric in scores_of("val").metrics.items()} if scores_of else {}
            higher = getattr(metrics.get(self.monitor), "higher_is_better", None)
            if self.monitor.endswith("loss") or higher is not None:
                self.mode = "max" if higher else "min"

    # ---- when

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._saved_time = time.monotonic()
        self._saved_step = trainer.global_step if trainer.ckpt_path else -1
        self._first_step, self._ended = trainer.global_step, False
        self._every = (trainer.log_every_n_steps or 50) * trainer.accumulate_grad_batches  # type: ignore[attr-defined]
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            disk.say_room(trainer, self._path(""))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, every = trainer.global_step, self.every_n_train_steps
        if step == self._saved_step:
            return
        if every and step % every == 0 and step > self._first_step:
            self.save(trainer)
        elif self.train_time_interval is not None and (batch_idx + 1) % self._every == 0:
            # all ranks save or none: rank 0's clock decides, asked at every report only
            late = time.monotonic() - self._saved_time >= self.train_time_interval.total_seconds()
            if trainer.strategy.broadcast(late):
                self.save(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._check_monitor(trainer)  # the first time is the sanity check, before any training
            if not trainer.sanity_checking:
                self.save(trainer, scored=True)

    def _check_monitor(self, trainer: L.Trainer) -> None:
        if self.save_top_k and self.monitor not in trainer.callback_metrics:
            names = sorted(n for n in trainer.callback_metrics if n != "step")
            if trainer.sanity_checking and not names:  # a module may log nothing then
                return
            raise ValueError(
                f"--checkpoint.monitor {self.monitor}: no such value comes from validation, only {', '.join(names)}.\n"
                "Choose one of these, or keep last.ckpt alone with --checkpoint.save_top_k 0."
            )
        if self.save_top_k and self.mode is None:
            raise ValueError(
                f"--checkpoint.monitor {self.monitor}: nothing tells whether less or more of it is better.\n"
                "Say --checkpoint.mode min or --checkpoint.mode max."
            )

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        # Saving is something all ranks do together; an exception is not, so several ranks keep what was saved before.
        began = self._saved_step >= 0 or trainer.global_step > 0
        stand = getattr(exception, "keeps_checkpoints", False)
        if trainer.state.fn != TrainerFn.FITTING or not began or trainer.world_size > 1 or stand:
            return
        try:
            if trainer.global_step != self._saved_step:
                self.save(trainer)
        except OSError as e:  # must not hide the first cause
            log.error("Nothing could be saved after the failure: %s", e)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # should_stop: a callback has ended the run since the last save, and a resumed one must know
        if not self._ended and (trainer.global_step != self._saved_step or trainer.should_stop):
            self.save(trainer)
        self._ended = True

    # ---- what

    def save(self, trainer: L.Trainer, scored: bool = False) -> None:
        """Write ``last.ckpt``; with a score at hand, keep it among the best if it is one. All ranks take part."""
        if trainer.fast_dev_run or not self._finite(trainer):  # type: ignore[attr-defined]
            return
        dropped: list[str] = []
        name = ""
        if scored and self.save_top_k:
            name, dropped = self._rank(trainer)
        self._saved_step, self._saved_time = trainer.global_step, time.monotonic()
        last = self._path("last.ckpt")
        for logger in trainer.loggers:
            logger.save()  # what was logged up to this step must not die with the process if the step does not
        # In this order a kill leaves no best that last.ckpt does not know of: the same save is made again on resuming.
        trainer.save_checkpoint(self._path(name) if name else last)
        for old in dropped:
            trainer.strategy.remove_checkpoint(self._path(old))
        if name:
            self._also(trainer, self._path(name), last)

    def _finite(self, trainer: L.Trainer) -> bool:
        # buffers too: running statistics of a BatchNorm go wrong in the forward pass, before any update
        module = trainer.lightning_module
        weights = (t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point())
        fine = all(bool(torch.isfinite(own_shard(t)).all()) for t in weights)
        return trainer.strategy.reduce_boolean_decision(fine, all=True)

    def _rank(self, trainer: L.Trainer) -> tuple[str, list[str]]:
        """The name to keep the checkpoint under if its score is among the best, and the names that it displaces."""
        score = float(trainer.callback_metrics.get(self.monitor, torch.nan))
        if score != score or abs(score) == float("inf"):
            return "", []
        name = f"best-step={trainer.global_step}.ckpt"
        ranked = sorted({**self.best, name: score}.items(), key=lambda item: item[1], reverse=self.mode == "max")
        kept = ranked if self.save_top_k < 0 else ranked[: self.save_top_k]
        dropped = [n for n, _ in ranked if n not in dict(kept) and n != name]
        self.best = dict(kept)
        return (name if name in self.best else ""), dropped

    def _also(self, trainer: L.Trainer, written: Path, path: Path) -> None:
        """The file just written under a second name, without a second write where the disk can do that."""
        linked = False
        if trainer.is_global_zero and written.is_file():
            unfinished = path.with_name(path.name + ".tmp")
            with contextlib.suppress(OSError):  # no hard links on this disk: write again
                unfinished.unlink(missing_ok=True)
                os.link(written, unfinished)
                os.replace(unfinished, path)
                linked = True
        if not trainer.strategy.broadcast(linked):
            trainer.save_checkpoint(path)

    def state_dict(self) -> dict[str, Any]:
        return {"monitor": self.monitor, "mode": self.mode, "best": dict(self.best)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.dirpath is None:
            return
        there = {n: s for n, s in state_dict["best"].items() if self._path(n).exists()}
        if (state_dict["monitor"], state_dict["mode"]) == (self.monitor, self.mode):
            self.best = there
        else:
            self._set_aside(there, **state_dict)

    @rank_zero_only
    def _set_aside(self, names: dict[str, float], monitor: str, mode: str, best: dict[str, float]) -> None:
        """The best by another score compare with nothing that is to come: they are kept under a name that says so."""
        for name in names:
            kept = name.replace("best-", f"best-{monitor.replace('/', '-')}-", 1)
            os.replace(self._path(name), self._path(kept))
            print(f"checkpoints {name}, the best by {monitor} ({mode}), is kept as {kept}")
