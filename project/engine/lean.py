"""What Lightning does at every step and a small model feels: each saving with its measured gain.

Only what is done differs, never what comes out: weights are bit-equal to those of the plain Trainer
(``tests/engine/test_lean.py``). Gains in µs of a step of LinearModel(10, 1) on 64 rows, by ``benchmarks/step_tax.py``.
"""

import contextlib
import inspect
from typing import Any

import lightning as L
import torch
from lightning.pytorch.profilers import PassThroughProfiler
from torch.optim import Optimizer

_NOTHING = contextlib.nullcontext()


class NoProfiler(PassThroughProfiler):
    """Stands in where no profiler was asked for: one shared empty context instead of a generator for each action."""

    def profile(self, action_name: str) -> Any:
        return _NOTHING


class LeanModule(L.LightningModule):
    """A LightningModule with a short way through three things that the Trainer does many times a step."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Lightning asks for the signature of training_step at every step; inspect takes a stored one as it is.
        super().__init_subclass__(**kwargs)
        step = cls.__dict__.get("training_step")
        if inspect.isfunction(step):
            step.__signature__ = inspect.signature(step)  # type: ignore[attr-defined]

    def __setattr__(self, name: str, value: Any) -> None:
        # The Trainer sets this one string some forty times a step; nn.Module would search parameters and buffers for it.
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        # What zero_grad(set_to_none=True) does, without its profiler range and hooks; a wrapped optimizer keeps its own.
        if type(optimizer).zero_grad is not Optimizer.zero_grad:
            optimizer.zero_grad()
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        # The stream hands out batches that are there already.
        if type(batch) is tuple and all(type(t) is torch.Tensor and t.device == device for t in batch):
            return batch
        return super().transfer_batch_to_device(batch, device, dataloader_idx)
