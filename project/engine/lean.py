"""What Lightning does at every step and a small model feels: each saving with its measured gain.

Only what is done differs, never what comes out: weights are bit-equal to those of the plain Trainer
(``tests/engine/test_lean.py``). Gains in µs of a step of LinearModel(10, 1) on 64 rows where a bare loop takes 299, by
``benchmarks/anatomy.py``; docs/performance.md has the latest.
"""

import contextlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer.states import RunningStage
from torch.optim import Optimizer

_NOTHING = contextlib.nullcontext()
_STEP_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
_EVALUATION_HOOKS = tuple(
    f"on_{stage}_batch_{end}" for stage in ("validation", "test", "predict") for end in ("start", "end")
)


class NoProfiler(PassThroughProfiler):
    """Stands in where no profiler was asked for: one shared empty context, no generator for each action: −35."""

    def profile(self, action_name: str) -> Any:
        return _NOTHING


def skip_empty_hooks(owner: L.Callback | L.LightningModule) -> None:
    """Let the Trainer pass over the hooks of a step that ``owner`` leaves empty: it calls only what can be called: −32.

    Set on the object, not on its class, so that a subclass can override any of them and call ``super()``.
    """
    # Of a module's evaluation hooks Lightning wants to know the signatures.
    base, more = (L.Callback, _EVALUATION_HOOKS) if isinstance(owner, L.Callback) else (L.LightningModule, ())
    for name in (*_STEP_HOOKS, *more):
        if getattr(type(owner), name) is getattr(base, name):
            owner.__dict__.setdefault(name, None)


def skip_empty_logs(trainer: L.Trainer) -> None:
    """Where a training step has logged nothing with ``self.log``, spare the Trainer going through it: −20.

    Private: should Lightning rename what is looked at here, only the saving is lost.
    """
    connector = getattr(trainer, "_logger_connector", None)
    update, log = (getattr(connector, name, None) for name in ("on_batch_end", "update_eval_step_metrics"))
    if update is None or log is None or not hasattr(trainer.fit_loop.epoch_loop, "_results"):
        return

    # partial: a Trainer is pickled to be sent to spawned processes
    connector.on_batch_end = partial(_on_batch_end, trainer, update)  # type: ignore[union-attr]
    connector.update_eval_step_metrics = partial(_update_eval_step_metrics, trainer, log)  # type: ignore[union-attr]


def _on_batch_end(trainer: L.Trainer, update: Callable[[], None]) -> None:
    training = trainer.state.stage is RunningStage.TRAINING
    results: Any = trainer.fit_loop.epoch_loop._results if training else trainer._results
    if results:
        update()
    else:
        results.batch = results.batch_size = None  # as Lightning does: the batch is not kept alive


def _update_eval_step_metrics(trainer: L.Trainer, log: Callable[[int], None], step: int) -> None:
    if trainer._results:
        log(step)


def spare(trainer: L.Trainer) -> None:
    """Both of these for a Trainer and its callbacks, before it runs."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        skip_empty_hooks(callback)
    skip_empty_logs(trainer)


class LeanModule(L.LightningModule):
    """A LightningModule with a short way through what the Trainer does many times a step."""

    def __init__(self) -> None:
        super().__init__()
        skip_empty_hooks(self)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Lightning asks for the signature of training_step at every step; inspect takes a stored one as it is: −22.
        super().__init_subclass__(**kwargs)
        for stage in ("training", "validation", "test", "predict"):
            step = cls.__dict__.get(f"{stage}_step")
            if inspect.isfunction(step):
                step.__signature__ = inspect.signature(step)  # type: ignore[attr-defined]

    def __setattr__(self, name: str, value: Any) -> None:
        # The Trainer sets this string some forty times a step; nn.Module would look for parameters of that name: −66.
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        # What zero_grad(set_to_none=True) does, without its profiler range; an optimizer's own is used: −42.
        if type(optimizer).zero_grad is not Optimizer.zero_grad:
            optimizer.zero_grad()
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        # Without a value there is nothing to clip: −7.
        if gradient_clip_val:
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def _call_batch_hook(self, hook_name: str, *args: Any) -> Any:
        # Three hooks prepare a batch; where neither module nor data has one of its own and the batch is on its device,
        # as the stream's are, they do nothing: −39. Private: should Lightning rename it, only the saving is lost.
        data = getattr(self._trainer, "datamodule", None)
        own = getattr(type(self), hook_name) is not getattr(L.LightningModule, hook_name)
        if own or (
            data is not None and getattr(type(data), hook_name) is not getattr(L.LightningDataModule, hook_name)
        ):
            return super()._call_batch_hook(hook_name, *args)
        if hook_name == "transfer_batch_to_device" and not _is_on(args[1], args[0]):
            return super()._call_batch_hook(hook_name, *args)
        return args[0]


def _is_on(device: torch.device, batch: Any) -> bool:
    return type(batch) is tuple and all(type(t) is torch.Tensor and t.device == device for t in batch)
