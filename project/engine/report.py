"""What a person sees of training, and what the loggers get: gathered on the device, reported every so many steps."""

import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from tqdm import tqdm

REDRAW_SECONDS = 0.2
FIRST_LINE_SECONDS, LINE_SECONDS = 2.0, 10.0


def peak_memory(device: torch.device) -> str:
    """The most memory this process has held: allocated on an accelerator, resident on the CPU."""
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / 2**20:,.0f} MB on {device}"
    try:
        import resource  # not on Windows
    except ImportError:
        return "unknown"
    unit = 1 if sys.platform == "darwin" else 1024
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20:,.0f} MB"


class Report(L.Callback):
    """Losses and metrics of training, a progress display, and a line for each epoch.

    Between two reports nothing is computed, copied to the host or sent to another rank: each step leaves its loss,
    predictions and targets on the device. A report averages the loss over all rows and ranks since the last one.

    Args:
        draw: Show progress: a bar at a terminal, otherwise plain lines at a steady pace.
    """

    def __init__(self, draw: bool = True) -> None:
        self.draw = draw
        self.last: dict[str, float] = {}  # the latest value of everything reported
        self.first_step: int | None = None  # the optimizer step that training began at; None before it does
        self.rows_used = 0  # by training, since it began
        self._losses: list[Tensor] = []
        self._rows: list[int] = []
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._pending = torch.zeros(2, dtype=torch.float64)  # loss x rows and rows of all ranks: since the last report
        self._epoch = torch.zeros(2, dtype=torch.float64)  # … and since the epoch began
        self._measure: Callable[[str, Tensor, Tensor], None] | None = None
        self._trainer: L.Trainer | None = None  # while training
        self._screen = _Screen(enabled=False)

    # ---- training

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._screen = _Screen(self.draw and trainer.is_global_zero)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._every = (trainer.log_every_n_steps or 50) * trainer.accumulate_grad_batches  # type: ignore[attr-defined]
        self._reported = self._epoch_started = time.monotonic()  # a resumed epoch has no start of its own
        self.first_step = trainer.global_step
        self._measure = getattr(pl_module, "measure", None)
        self._trainer = trainer

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._epoch_started = time.monotonic()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if outputs and "loss" in outputs:
            self._losses.append(outputs["loss"])
            target = outputs.get("target")
            rows = 1 if target is None else len(target)
            if target is not None and getattr(trainer.datamodule, "loss_weight", 1.0) == 0.0:  # type: ignore[attr-defined]
                rows = 0  # a row of padding, on a rank with no share of the last batch
            elif target is not None and self._measure is not None:
                self._pairs.append((outputs["pred"], target))
            self._rows.append(rows)
        if (batch_idx + 1) % self._every == 0:
            self._report(trainer)
        if self._screen.due():
            done, total = batch_idx + 1, trainer.num_training_batches
            self._screen.show(
                f"epoch {trainer.current_epoch + 1}{_of(trainer.max_epochs)}", done, total, self._words(trainer)
            )

    def _collect(self, trainer: L.Trainer) -> None:
        """Bring what was left on the devices of all ranks to the host: one wait, one reduction. All ranks take part."""
        if self._pairs and self._measure is not None:
            pred, target = (torch.cat(side) for side in zip(*self._pairs, strict=True))
            self._measure("train", pred, target)
        rows = torch.tensor(self._rows, dtype=torch.float64)
        losses = torch.stack(self._losses).double().cpu() if self._losses else rows
        # Lightning has divided each loss by the micro-batches of a step.
        total = torch.stack([(losses * rows).sum() * trainer.accumulate_grad_batches, rows.sum()])
        if trainer.world_size > 1:
            total = trainer.strategy.reduce(total.to(trainer.strategy.root_device), reduce_op="sum").cpu()
        self._pending += total
        self._epoch += total
        self.rows_used += int(total[1])
        self._losses, self._rows, self._pairs = [], [], []

    def _report(self, trainer: L.Trainer) -> None:
        """Average what came since the last report and send it to every logger."""
        self._collect(trainer)
        now, (loss, rows) = time.monotonic(), self._pending.tolist()
        values = {}
        if rows > 0:
            values = {"train/loss": loss / rows, "rows_per_s": rows / max(1e-9, now - self._reported)}
        for optimizer in trainer.optimizers[:1]:
            values["lr"] = float(optimizer.param_groups[0]["lr"])
        self._pending.zero_()
        self._reported = now
        self._send(trainer, values)

    def state_dict(self) -> dict[str, Any]:
        """What a report after a resume must know of the steps before it: sums of losses and rows."""
        if self._trainer is not None:
            self._collect(self._trainer)
        return {"pending": self._pending.tolist(), "epoch": self._epoch.tolist()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._pending = torch.tensor(state_dict["pending"], dtype=torch.float64)
        self._epoch = torch.tensor(state_dict["epoch"], dtype=torch.float64)

    def _send(self, trainer: L.Trainer, values: dict[str, float]) -> None:
        self.last |= values
        for logger in trainer.loggers:
            logger.log_metrics({**values, "epoch": trainer.current_epoch}, step=trainer.global_step)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        cut = not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch  # by a limit: reported when whole
        self._collect(trainer)
        if self._pending[1] > 0 and not cut:
            self._report(trainer)
        values, (loss, rows) = {}, self._epoch.tolist()
        if rows > 0:
            values["train/epoch_loss"] = loss / rows
        if self._measure is not None and not cut:
            values |= {name: float(value) for name, value in pl_module.results("train").items()}  # type: ignore[operator]
        if not cut:
            self._send(trainer, values)
            self._epoch.zero_()
        words = [f"{n.replace('epoch_', '')} {v:.5g}" for n, v in values.items()]
        words += [f"{n} {float(v):.5g}" for n, v in trainer.callback_metrics.items() if n.startswith("val/")]
        words += [f"{rows / max(time.monotonic() - self._epoch_started, 1e-9):,.0f} rows/s"] if rows else []
        self._screen.line(f"epoch {trainer.current_epoch + 1}{_of(trainer.max_epochs)}  " + "  ".join(words))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._trainer = None
        if self._pending[1] > 0:  # after the last checkpoint, whose next report they will be part of
            self._report(trainer)

    def _words(self, trainer: L.Trainer) -> str:
        words = [f"step {trainer.global_step:,}"]
        if "train/loss" in self.last:
            words += [f"loss {self.last['train/loss']:.4g}", f"{self.last['rows_per_s']:,.0f} rows/s"]
        return "  ".join([*words, peak_memory(trainer.strategy.root_device)])

    # ---- evaluation and prediction

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if not trainer.sanity_checking:
            self._progress("validate", args, trainer.num_val_batches)

    def on_test_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._progress("test", args, trainer.num_test_batches)

    def on_predict_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._progress("predict", args, trainer.num_predict_batches)

    def _progress(self, stage: str, args: tuple[Any, ...], totals: list[int | float]) -> None:
        if self._screen.due():
            batch_idx = args[3]  # pl_module, outputs, batch, batch_idx, dataloader_idx
            self._screen.show(stage, batch_idx + 1, sum(totals), "")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._screen.close()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking:  # a few rows by weights that learned nothing
            return
        values = {n: float(v) for n, v in trainer.callback_metrics.items() if n.startswith("val/")}
        self.last |= values
        if trainer.state.fn == TrainerFn.FITTING and not self._ends_epoch(trainer):
            self._screen.line(f"step {trainer.global_step:,}  " + "  ".join(f"{n} {v:.5g}" for n, v in values.items()))

    def _ends_epoch(self, trainer: L.Trainer) -> bool:
        """The line of the epoch is about to tell the same values."""
        return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)


def _of(total: int | None) -> str:
    return f"/{total}" if total and total > 0 else ""


class _Screen:
    """A bar redrawn by time at a terminal; elsewhere whole lines, the first soon and then at a steady pace."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._next = time.monotonic() + (0.0 if self.terminal else FIRST_LINE_SECONDS)
        self._bar: tqdm[Any] | None = None

    def due(self) -> bool:
        return self.enabled and time.monotonic() >= self._next

    def show(self, title: str, done: int, total: float, words: str) -> None:
        self._next = time.monotonic() + (REDRAW_SECONDS if self.terminal else LINE_SECONDS)
        known = int(total) if 0 < total < float("inf") else None
        if not self.terminal:
            share = f"{done / known:.0%} of {known:,} batches" if known else f"{done:,} batches"
            print("  ".join(filter(None, [title, share, words])), flush=True)
            return
        if self._bar is None or self._bar.desc != f"{title}: " or self._bar.total != known:
            self.close()
            width = shutil.get_terminal_size().columns
            self._bar = tqdm(
                desc=title, total=known, file=sys.stdout, leave=False, ncols=width, miniters=0, mininterval=0
            )
        self._bar.n = done
        self._bar.set_postfix_str(words, refresh=False)
        self._bar.refresh()

    def line(self, text: str) -> None:
        """A line that stays."""
        if self.enabled:
            self.close()
            print(text, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
