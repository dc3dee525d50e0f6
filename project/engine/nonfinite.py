"""A loss or gradient that is not finite never reaches the weights: the run stops and says which rows did it."""

import math
from collections.abc import Iterator
from typing import Any, Literal

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.optim import Optimizer

from project.data.datamodule import StreamDataModule
from project.engine import parts
from project.engine.checkpoint import Checkpoints
from project.engine.sharding import own_shard
from project.engine.watch import Stopped
from project.usage import Failed

SHOWN = 5  # rows named at most
PIECE = 4096  # rows looked at together


class NotFinite(Failed):
    """A run was stopped by what ``NonFinite`` found."""

    keeps_checkpoints = True  # the last one is the last good one: nothing is saved after it


class NonFinite(Callback):
    """Looks at the gradients before each optimizer step.

    On the CPU, and with ``skip``, the answer is known before the step, which is then not made. On an accelerator
    nothing waits for it: bad gradients become zero on the device, and the run stops at the next report or save. A loss
    that is not finite makes every gradient so, on all ranks once they are summed: all ranks see the same. In 16-bit
    training the scaler leaves out such steps itself, most often since its scale is too large; it would for ever. So
    there the loss tells, which the scale does not change; and a scale below 1, for gradients bad at any scale.

    Args:
        mode: "stop" ends the run; "skip" leaves such steps out, and what they did to buffers, and counts them.

    Raises:
        NotFinite: Naming the step, what was not finite, the rows, and the last good checkpoint.
    """

    def __init__(self, mode: Literal["stop", "skip"] = "stop") -> None:
        self.mode = mode
        self.skipped = 0
        self._largest: list[Tensor] = []  # per step since the last report: the largest gradient, still on the device
        self._steps: list[tuple[int, int, int]] = []  # … and which it is: step, epoch, its last micro-batch
        self._last_good = -1  # the step of the last checkpoint before them
        self._losses: list[Tensor] = []  # of the micro-batches since the last step, with a scaler
        self._before: parts.Before | None = None  # the buffers at the beginning of the step

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._scaler: Any = getattr(trainer.precision_plugin, "scaler", None)
        self._on_cpu = trainer.strategy.root_device.type == "cpu"
        self._at_once = self._scaler is None and (self._on_cpu or self.mode == "skip")
        self._sharded = isinstance(trainer.strategy, (FSDPStrategy, ModelParallelStrategy))
        self._parameters = [p for optimizer in trainer.optimizers for g in optimizer.param_groups for p in g["params"]]
        if self._at_once:  # nothing is left for later
            self.__dict__["on_train_batch_end"] = None
        if not self._at_once or self.mode == "stop":
            self.__dict__["on_train_batch_start"] = None
        self._state = parts.State(pl_module, trainer.strategy.root_device)
        self._state.watch_buffers()

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0:
            self._before = self._state.now()

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        if self._scaler is not None:
            if loss.dtype != torch.float16:  # the scale may be what it cannot hold
                self._losses.append(loss.detach().reshape(()))
            return
        if self._on_cpu and math.isfinite(loss.item()):
            return
        if loss.requires_grad:
            # 1 times the gradient, but nan if the loss is nan or infinite; on an accelerator without waiting to know.
            loss.register_hook(lambda gradient: gradient * (loss.detach() * 0 + 1))  # type: ignore[no-untyped-call]

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        gradients = [g for p in self._parameters if (g := p.grad) is not None]
        if self._sharded:
            gradients = [shard for g in gradients if (shard := own_shard(g)).numel()]
        if self._scaler is not None:
            losses, self._losses = self._losses, []
            self._note(trainer, torch.stack([torch.zeros((), device=pl_module.device), *losses]).abs().max())
            return
        if not (gradients or self._sharded):
            return
        if not self._at_once:
            self._mask(trainer, gradients)
            return
        bad = _any_bad(gradients)
        if (self.mode == "skip" or self._sharded) and trainer.world_size > 1:  # shards of a gradient differ
            bad = trainer.strategy.reduce_boolean_decision(bad, all=False)
        if bad and self.mode == "stop":
            self._stop(trainer, pl_module, _step(trainer), self._bad_names(pl_module))
        elif bad:
            self.skipped += 1
            for p in self._parameters:
                p.grad = None  # an optimizer passes over such parameters, momentum and all
            if self._before is not None:
                self._state.buffers_back(self._before)

    # ---- on an accelerator

    def _mask(self, trainer: L.Trainer, gradients: list[Tensor]) -> None:
        zero = torch.zeros((), device=trainer.strategy.root_device)  # for a rank that holds no part of any gradient
        largest = torch.stack([zero, *torch._foreach_norm(gradients, float("inf"))] if gradients else [zero]).max()
        if self._sharded:  # what is bad in one shard is so for all; a maximum need not hand on a nan
            largest = largest.nan_to_num(nan=float("inf"), posinf=float("inf"))
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        bad = ~torch.isfinite(largest)
        for gradient in gradients:
            gradient.masked_fill_(bad, 0.0)
        self._note(trainer, largest)

    def _note(self, trainer: L.Trainer, largest: Tensor) -> None:
        if not self._largest:
            saved = _checkpoints(trainer)
            self._last_good = saved.saved_step if saved else -1
        self._largest.append(largest)
        self._steps.append(_step(trainer))

    def _report(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Read what the steps since the last report have left on the device."""
        if self._largest:
            bad = (~torch.isfinite(torch.stack(self._largest))).float()
            if self._scaler is not None and trainer.world_size > 1:  # each rank knows its own losses
                bad = trainer.strategy.reduce(bad, reduce_op="sum")
            found, steps, self._largest, self._steps = bad.tolist(), self._steps, [], []
            wrong = [step for step, n in zip(steps, found, strict=True) if n]
            if self.mode == "skip":
                self.skipped, wrong = self.skipped + len(wrong), []
            if self._scaler is not None and self._scaler.get_scale() < 1:
                wrong.append(steps[-1])
            if wrong:
                self._stop(trainer, pl_module, wrong[0], "")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if len(self._largest) >= (trainer.log_every_n_steps or 50):  # type: ignore[attr-defined]
            self._report(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._report(trainer, pl_module)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._report(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._report(trainer, pl_module)
        if self.skipped and trainer.is_global_zero:
            print(f"skipped     {self.skipped:,} optimizer steps whose loss or gradient was not finite", flush=True)

    # ---- words

    def _bad_names(self, pl_module: L.LightningModule) -> str:
        named = [n for n, p in pl_module.named_parameters() if p.grad is not None and not torch.isfinite(p.grad).all()]
        return (f" of {named[0]}" if named else "") + (f" and {len(named) - 1} more" if len(named) > 1 else "")

    def _stop(self, trainer: L.Trainer, pl_module: L.LightningModule, at: tuple[int, int, int], names: str) -> None:
        step, epoch, _ = at
        saved = _checkpoints(trainer)
        if self._at_once and saved is not None:
            if step and saved.saved_step != step:
                saved.save(trainer)  # the weights are still those of the last good step
            self._last_good = saved.saved_step
        if not trainer.is_global_zero:
            launched = not trainer.strategy.cluster_environment.creates_processes_externally  # type: ignore[attr-defined]
            raise Stopped(0 if launched else 1)  # rank 0 tells
        kept = saved is not None and self._last_good > 0 and saved.last_path
        rows = "\n".join(f"  {line}" for line in self._rows(trainer, pl_module, at))
        raise NotFinite(
            f"Not finite: the loss or the gradient{names}, at optimizer step {step + 1} in epoch {epoch + 1}. "
            f"The weights are kept from it.\n{rows}\n"
            + (f"The last good checkpoint: {kept}, after step {self._last_good}.\n" if kept else "No checkpoint yet.\n")
            + "To leave such steps out and count them: --nonfinite skip"
        )

    def _rows(self, trainer: L.Trainer, pl_module: L.LightningModule, at: tuple[int, int, int]) -> Iterator[str]:
        """Which of the rows of a step, over all ranks, are to blame."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, StreamDataModule):
            yield f"Its rows are not known: {type(data).__name__} does not number them."
            return
        (_, epoch, last), chunks = at, data.chunks("train")
        first = last // trainer.accumulate_grad_batches * trainer.accumulate_grad_batches
        low, high = chunks.shares.bounds(first)[0], chunks.shares.bounds(last)[1]
        rows = chunks.part.rows(chunks.order.rows(epoch, torch.arange(low, high)))
        found = 0
        for piece in torch.split(rows.sort().values, PIECE):
            for row, what in _suspects(data.part("train")[0], piece, None if self._sharded else pl_module):
                found += 1
                if found <= SHOWN:
                    yield f"{_place(data, row)}: {what}"
        if found > SHOWN:
            yield f"and {found - SHOWN} more rows"
        if not found:
            few = ", ".join(map(str, rows[:SHOWN].tolist()))
            yield f"Its {len(rows)} rows ({few}, …) and their predictions are finite one by one: too high a rate?"


def _any_bad(gradients: list[Tensor]) -> bool:
    """Whether a gradient is not finite: a sum is quick, and finite only if all is; but it can also overflow."""
    total = 0.0
    for g in gradients:
        total += g.item() if g.numel() == 1 else g.sum().item()
    return not math.isfinite(total) and not all(bool(torch.isfinite(g).all()) for g in gradients)


def _step(trainer: L.Trainer) -> tuple[int, int, int]:
    """(optimizer step, epoch, micro-batch) of the update about to be made."""
    return trainer.global_step, trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1


def _suspects(source: Any, rows: Tensor, pl_module: L.LightningModule | None) -> Iterator[tuple[int, str]]:
    """Rows that are not finite, and what of them. No ``pl_module``: a shard alone predicts nothing."""
    batch = source.read(rows)
    seen = torch.zeros(len(rows), dtype=torch.bool)
    looked_at = [*zip(("its input", "its target"), batch, strict=False)]
    if pl_module is not None:
        training = pl_module.training
        with torch.no_grad():
            looked_at.append(("its prediction", pl_module.eval()(batch[0].to(pl_module.device))))
        pl_module.train(training)
    for what, values in looked_at:
        if not torch.is_tensor(values) or not values.is_floating_point():
            continue
        bad = ~torch.isfinite(values.flatten(1) if values.ndim > 1 else values[:, None]).cpu()
        for i in (bad.any(1) & ~seen).nonzero().flatten().tolist():
            column = int(bad[i].nonzero()[0])
            value = float(values.flatten(1)[i, column] if values.ndim > 1 else values[i])
            yield int(rows[i]), f"{what} {f'column {column} ' if bad.shape[1] > 1 else ''}is {value}"
        seen |= bad.any(1)


def _place(data: StreamDataModule, row: int) -> str:
    where = getattr(data.part("train")[0], "where", None)
    return f"row {row}" + (f" ({where(row)})" if where is not None else "")


def _checkpoints(trainer: L.Trainer) -> Checkpoints | None:
    return next((c for c in trainer.callbacks if isinstance(c, Checkpoints)), None)  # type: ignore[attr-defined]
