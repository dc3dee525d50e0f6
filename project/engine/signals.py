"""Ctrl-C and the schedulers' signals: finish the optimizer step, save, leave – all ranks after the same step."""

import signal
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.trainer.states import TrainerFn

from project.engine.checkpoint import Checkpoints
from project.engine.watch import Stopped, Watch


class Signals(L.Callback):
    """Stops in good order when a signal comes: exit code 143 for SIGTERM, 130 for SIGINT, 138 for SIGUSR1.

    Several ranks agree by a small all-reduce between CPUs that runs beside the next step and is read after it, so no
    step waits for a device. The signals themselves are caught by ``Watch``; without one around the command nothing here
    changes what they do.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self._vote = torch.zeros((), dtype=torch.int64)
        self._work: Any = None
        if Watch.current is not None:
            # Lightning's observer kills this process too, with SIGKILL, before anyone can say why; Watch does its work.
            subprocess_script._launch_process_observer = _observe  # type: ignore[attr-defined]

    # ---- when to look

    def _begin(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if Watch.current is None:
            return
        Watch.current.listen()
        Watch.current.graceful = True
        if trainer.world_size > 1 and self._group is None:
            self._group = dist.new_group(backend="gloo")
            # Lightning's own agreement copies to the device and waits for it, at every batch.
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        if trainer.state.fn != TrainerFn.FITTING:
            self._look_now(trainer)

    on_sanity_check_start = on_train_start = on_validation_start = on_test_start = on_predict_start = _begin

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch:
            self._look(trainer)

    def _after_batch(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        self._look(trainer)

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _after_batch

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._look_now(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if Watch.current is not None and not isinstance(exception, Stopped):
            Watch.current.graceful = False  # nobody will look any more

    # ---- what to do

    def _look(self, trainer: L.Trainer) -> None:
        if Watch.current is None:
            return
        number = Watch.current.received
        if trainer.world_size > 1:
            number = self._agreed(number)
        if number:
            self._stop(trainer, signal.Signals(number))

    def _look_now(self, trainer: L.Trainer) -> None:
        self._look(trainer)
        if trainer.world_size > 1:
            self._look(trainer)  # the second time tells the result of the first

    def _agreed(self, mine: int) -> int:
        """The signal that some rank had received at the last call; all ranks get the same answer."""
        if self._work is not None:
            self._work.wait()
            if found := int(self._vote):
                return found
        self._vote.fill_(mine)
        self._work = dist.all_reduce(self._vote, dist.ReduceOp.MAX, self._group, async_op=True)
        return 0

    def _stop(self, trainer: L.Trainer, number: signal.Signals) -> None:
        name = "Ctrl-C" if number == signal.SIGINT else number.name
        words = f"stopped     by {name}"
        if trainer.state.fn == TrainerFn.FITTING:
            words += f" after optimizer step {trainer.global_step:,}; " + self._saved(trainer)
        else:
            words += f" in {trainer.state.fn.value if trainer.state.fn else 'the run'}: nothing is complete"
        if trainer.is_global_zero:
            print(words, flush=True)
        strategy = trainer.strategy
        launched = trainer.local_rank > 0 and not strategy.cluster_environment.creates_processes_externally  # type: ignore[attr-defined]
        raise Stopped(0 if launched else 128 + number)  # the command's exit code is that of rank 0

    def _saved(self, trainer: L.Trainer) -> str:
        checkpoints = [c for c in trainer.callbacks if isinstance(c, Checkpoints)]  # type: ignore[attr-defined]
        if not checkpoints or trainer.sanity_checking or not trainer.global_step:
            return "nothing was saved"
        if checkpoints[0].saved_step != trainer.global_step:
            checkpoints[0].save(trainer)
        last = checkpoints[0].last_path
        if not last or not Path(last).exists():
            return "nothing was saved"
        folder = checkpoints[0].dirpath.parent if checkpoints[0].dirpath else ""
        return f"saved {last}\nto go on    python train.py --resume {folder}"


def _observe(child_processes: list[Any]) -> None:
    if Watch.current is not None:
        Watch.current.children = child_processes
