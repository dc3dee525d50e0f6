"""What a person sees of training, and what the loggers get: gathered on the device, reported every so many steps."""

import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from project.engine.memory import Memory
from project.engine.screen import Screen
from project.engine.speed import most_rows_per_s, rows_of

MOST_HELD = 1 << 24  # numbers of predictions kept for the metrics of training, before these are brought up to date
NOT_OWN = ("val", "test/", "step", "epoch")  # what a name logged with ``self.log`` starts with that is told elsewhere


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
        self.memory = Memory(torch.device("cpu"))
        self._number = 0  # of the epoch; Lightning counts it up before it says that the epoch is over
        self._reported, self._reported_batch = time.monotonic(), 0
        self._losses: list[Tensor] = []  # of the steps since the last report, like the next two; all on the device
        self._rows: list[int] = []
        self._pairs: list[tuple[Tensor, Tensor]] = []  # predictions and targets
        self._held = 0  # numbers in them
        self._rows_before = self._rows_reported = 0  # ``rows_used`` when the epoch, or training in it, began; reported
        self._state: dict[str, Any] = {}  # when training ended, or of a checkpoint
        self._validated = False  # in this epoch
        self._most_rows_per_s: float | None = None  # that the devices could do, if FLOPs are known
        self._pending = torch.zeros(2, dtype=torch.float64)  # loss x rows and rows of all ranks: since the last report
        self._epoch = torch.zeros(2, dtype=torch.float64)  # … and since the epoch began
        self._measure: Callable[[str, Tensor, Tensor], None] | None = None
        self._trainer: L.Trainer | None = None  # while training
        self._screen = Screen(enabled=False)

    # ---- training

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._screen = Screen(self.draw and trainer.is_global_zero)
        if self.memory.device != trainer.strategy.root_device:
            self.memory = Memory(trainer.strategy.root_device)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._every = (trainer.log_every_n_steps or 50) * trainer.accumulate_grad_batches  # type: ignore[attr-defined]
        self._reported = self._epoch_started = time.monotonic()  # a resumed epoch has no start of its own
        self.first_step = trainer.global_step
        self._measure = getattr(pl_module, "measure", None)
        self._trainer = trainer
        self._most_rows_per_s = most_rows_per_s(trainer, pl_module)
        if (scores := self._state.get("scores")) and (scores_of := getattr(pl_module, "scores_of", None)):
            scores_of("train").restore(scores)
        self._reported_batch = done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        self._begin_epoch(trainer, done)  # Lightning leaves out on_train_epoch_start when it resumes inside an epoch

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin_epoch(trainer, 0)

    def _begin_epoch(self, trainer: L.Trainer, done: int) -> None:
        self._stream = getattr(trainer.datamodule, "train_stream", None)  # type: ignore[attr-defined]
        self._epoch_started, self._number = time.monotonic(), trainer.current_epoch
        self._rows_before, self._validated = self.rows_used, False
        of = f"/{trainer.max_epochs}" if (trainer.max_epochs or 0) > 0 else ""
        self._title = f"epoch {self._number + 1}{of}"
        self._screen.begin(self._title, done)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if outputs and "loss" in outputs:
            self._losses.append(outputs["loss"])
            target = outputs.get("target")
            if self._stream is not None and self._stream.weight == 0.0:
                self._rows.append(0)  # a row of padding, on a rank with no share of the last batch
            elif target is None:
                self._rows.append(rows_of(batch))
            else:
                self._rows.append(len(target))
                if self._measure is not None:
                    pred = outputs["pred"]
                    self._pairs.append((pred.detach() if pred.requires_grad else pred, target))
                    self._held += pred.numel()
                    if self._held > MOST_HELD:
                        self._measure_steps()
        if (batch_idx + 1) % self._every == 0:
            self._report(trainer, batch_idx + 1)
        if self._screen.due():
            self._screen.show(self._title, batch_idx + 1, trainer.num_training_batches, self._words(trainer))

    def _measure_steps(self, later: int = 0) -> None:
        """Hand the rows held to the metrics of training; the last ``later`` micro-batches wait."""
        whole = max(0, len(self._pairs) - later)
        for pred, target in self._pairs[:whole]:
            assert self._measure is not None
            self._measure("train", pred, target)
        self._pairs = self._pairs[whole:]
        self._held = sum(pred.numel() for pred, _ in self._pairs)

    def _unfinished(self, trainer: L.Trainer) -> int:
        """Micro-batches since the last optimizer step: a resumed run does them again, as the weights lack them."""
        done: int = getattr(trainer.fit_loop.epoch_loop.batch_progress.current, "processed", 0)
        return 0 if done >= trainer.num_training_batches else done % trainer.accumulate_grad_batches

    def _collect(self, trainer: L.Trainer, later: int = 0) -> float:
        """Bring what was left on the devices of all ranks to the host: one wait, one reduction. All ranks take part.

        The ``later`` last micro-batches stay where they are. Returns the most memory that any rank holds, in MB.
        """
        self._measure_steps(later)
        whole = max(0, len(self._losses) - later)
        rows = torch.tensor(self._rows[:whole], dtype=torch.float64)
        losses = torch.stack(self._losses[:whole]).cpu().double() if whole else rows
        memory = torch.zeros(trainer.world_size, dtype=torch.float64)  # a place for each rank: a sum brings them all
        memory[trainer.global_rank] = self.memory.read(trainer.global_step)
        # Lightning has divided each loss by the micro-batches of a step.
        total = torch.stack([(losses * rows).sum() * trainer.accumulate_grad_batches, rows.sum()])
        if trainer.world_size > 1:
            everything = torch.cat([total, memory]).to(trainer.strategy.root_device)
            everything = trainer.strategy.reduce(everything, reduce_op="sum").cpu()
            total, memory = everything[:2], everything[2:]
        self._pending += total
        self._epoch += total
        self.rows_used += int(total[1])
        self._losses, self._rows = self._losses[whole:], self._rows[whole:]
        self.memory.note(most := float(memory.max()), trainer.global_step, trainer.world_size)
        return most

    def _report(self, trainer: L.Trainer, batches: int) -> None:
        """Average what came since the last report and send it to every logger; ``batches`` of the epoch are done."""
        memory = self._collect(trainer)
        now, (loss, rows) = time.monotonic(), self._pending.tolist()
        seconds = max(1e-9, now - self._reported)
        values = {"train/loss": loss / rows} if rows > 0 else {}
        if used := self.rows_used - self._rows_reported:  # without those of before a resume
            values["rows_per_s"] = used / seconds
            values |= {"mfu": used / seconds / self._most_rows_per_s} if self._most_rows_per_s else {}
        steps = (batches - self._reported_batch) / trainer.accumulate_grad_batches
        values |= {"steps_per_s": steps / seconds, "memory_mb": memory}
        if (reserved := self.memory.reserved()) is not None:  # pragma: cuda
            values["memory_reserved_mb"] = reserved
        if trainer.optimizers:
            values["lr"] = float(trainer.optimizers[0].param_groups[0]["lr"])
        self._pending.zero_()
        self._reported, self._reported_batch, self._rows_reported = now, batches, self.rows_used
        self._send(trainer, values)

    def state_dict(self) -> dict[str, Any]:
        """What a report after a resume must know of the steps before it: losses, rows, the states of the metrics."""
        if self._trainer is not None:
            self._collect(self._trainer, self._unfinished(self._trainer))
            scores_of = getattr(self._trainer.lightning_module, "scores_of", None)
            scores = [] if scores_of is None else scores_of("train").state()
            self._state = {"pending": self._pending.tolist(), "epoch": self._epoch.tolist(), "scores": scores}
        return self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = state_dict
        self._pending, self._epoch = (torch.tensor(state_dict[n], dtype=torch.float64) for n in ("pending", "epoch"))

    def _send(self, trainer: L.Trainer, values: dict[str, float]) -> None:
        self.last |= values
        for logger in trainer.loggers:
            logger.log_metrics({**values, "epoch": self._number}, step=trainer.global_step)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        progress = trainer.fit_loop.epoch_loop.batch_progress
        cut = not progress.is_last_batch  # by a limit: reported when whole
        self._collect(trainer, self._unfinished(trainer))
        if self._pending[1] > 0 and not cut:
            self._report(trainer, progress.current.ready)
        self._reported_batch = progress.current.ready if cut else 0
        loss, rows = self._epoch.tolist()
        values = {"train/epoch_loss": loss / rows} if rows > 0 else {}
        if self._measure is not None and not cut:
            values |= {name: float(value) for name, value in pl_module.results("train").items()}  # type: ignore[operator]
        if not cut:
            self._send(trainer, values)
            self._epoch.zero_()
        words = [f"{n.replace('epoch_', '')} {v:.5g}" for n, v in values.items()]
        logged = trainer.callback_metrics.items()  # validation's, if there was one in this epoch, and the user's own
        words += [f"{n} {float(v):.5g}" for n, v in logged if n.startswith("val") and self._validated]
        words += [f"{n} {float(v):.5g}" for n, v in logged if not n.startswith(NOT_OWN) and not n.endswith("_step")]
        seconds, used = max(time.monotonic() - self._epoch_started, 1e-9), self.rows_used - self._rows_before
        words += [f"{used / seconds:,.0f} rows/s"] if used else []
        self._screen.line(f"{self._title}  " + "  ".join(words))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.state_dict()  # for those who save after this; the report below is theirs only
        self._trainer = None
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if self.first_step is None:  # a finished run that had no more to train
            self._reported_batch, self._number = batches, trainer.current_epoch
        if self._pending[1] > 0:  # after the last checkpoint, whose next report they will be part of
            self._report(trainer, batches)

    def _words(self, trainer: L.Trainer) -> str:
        words, last = [f"step {trainer.global_step:,}"], self.last
        if "train/loss" in last:
            words += [f"loss {last['train/loss']:.4g}", f"{last.get('rows_per_s', 0):,.0f} rows/s"]
        return "  ".join([*words, f"{self.memory.read(trainer.global_step):,.0f} MB"])

    # ---- evaluation and prediction

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._screen.begin(trainer.state.stage.value)  # type: ignore[union-attr]

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any) -> None:  # of args, [3] is batch_idx
        if self._screen.due() and not trainer.sanity_checking:
            stage: str = trainer.state.stage.value  # type: ignore[union-attr]
            totals = {"test": trainer.num_test_batches, "predict": trainer.num_predict_batches}
            words = f"{self.memory.read(trainer.global_step):,.0f} MB"
            self._screen.show(stage, args[3] + 1, sum(totals.get(stage, trainer.num_val_batches)), words)

    on_test_start = on_predict_start = on_validation_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end  # type: ignore[assignment]

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._screen.close()
        self.memory.release()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking:  # a few rows by weights that learned nothing
            return
        values = {n: float(v) for n, v in trainer.callback_metrics.items() if n.startswith("val/")}
        self.last |= values
        self._validated = True
        ends_epoch = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch  # whose line tells the same values
        if trainer.state.fn == TrainerFn.FITTING and not ends_epoch:
            self._screen.line(f"step {trainer.global_step:,}  " + "  ".join(f"{n} {v:.5g}" for n, v in values.items()))
