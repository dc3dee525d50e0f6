"""Out of memory is survived: the same rows go through in smaller parts, and the gradient is that of the whole.

The mean loss over n rows is the sum of k/n x the mean loss over each part of k rows, and so is its gradient. A micro-
batch that does not fit is halved until it does, down to one row; the size found is kept, and stored in the checkpoint.

The parts' gradients come from ``torch.autograd.grad``, which touches neither ``.grad`` nor the hooks of DDP, and are
handed on by one backward pass through ``Handed``: scaling, accumulation, clipping and the exchange between ranks go on
as ever. So ranks need not agree: one that fails keeps what it has exchanged and hands on only what is still missing.
"""

import functools
import gc
from collections.abc import Callable
from typing import Any, Literal, NoReturn

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from project.engine import parts
from project.engine.checkpoint import Checkpoints
from project.engine.resume import Resume

STAGES = ("train", "eval")
EVALUATION = ("validation_step", "test_step", "predict_step")
Step = Callable[..., Any]


class OutOfMemory(L.Callback):
    """Does steps of training, evaluation and prediction that run out of memory again, in parts.

    Before that, the random states and the buffers that a step changes (running statistics of a BatchNorm) are put back;
    a BatchNorm then sees each part as a batch, as with a smaller ``batch_size`` and more accumulation. Training is
    protected where parts give the gradient of the whole; elsewhere a line says why not (``why_off``), and a step that
    does not fit ends the run in words. In steps that fit nothing is freed, flushed or waited for.

    Args:
        mode: "stop" leaves everything as it is.

    Raises:
        DoesNotFit: With the reason, the peak, the sizes, the last checkpoint and the flags to try.
    """

    def __init__(self, mode: Literal["split", "stop"] = "split") -> None:
        self.mode = mode
        self.rows: dict[str, int] = {}  # for "train" and "eval", the most rows that go through at once, if known
        self._told: dict[str, int] = {}
        self._before: parts.Before | None = None  # the training step
        self._args: tuple[Any, ...] | None = None  # of a whole training step whose backward pass is to come
        self._checked = False  # that the loss is a mean over rows

    # ---- on and off

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._trainer, self._module = trainer, pl_module
        self._state = parts.State(pl_module, trainer.strategy.root_device)
        self._why = {"eval": parts.exchanges_weights(trainer)}  # parts are not tried, if so
        self._resume: Resume | None = next((c for c in trainer.callbacks if isinstance(c, Resume)), None)  # type: ignore[attr-defined]
        for name in EVALUATION if self.mode == "split" else ():
            self._wrap(pl_module, name, self._evaluate)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._parameters = [p for p in pl_module.parameters() if p.requires_grad]
        self._why["train"] = why = parts.why_off(trainer, pl_module)
        if self.mode == "stop":
            return
        if why and trainer.is_global_zero:
            print(f"oom         a training step that runs out of memory ends the run: {why}", flush=True)
        self._wrap(pl_module, "training_step", self._train)
        self._wrap(trainer.strategy, "backward", self._backward)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._before = None
        self._state.watch_buffers()  # anew: layers may have been frozen or thawed

    on_train_start = on_train_epoch_start  # which Lightning leaves out when it resumes inside an epoch

    def _wrap(self, owner: Any, name: str, around: Step) -> None:
        inner = getattr(owner, name)
        inner = getattr(inner, "unprotected", inner)  # left by a phase that ended in an exception

        @functools.wraps(inner)
        def protected(*args: Any, **kwargs: Any) -> Any:
            return around(inner, *args, **kwargs)

        protected.unprotected = inner  # type: ignore[attr-defined]
        owner.__dict__[name] = protected

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for owner, names in ((pl_module, ("training_step", *EVALUATION)), (trainer.strategy, ("backward",))):
            for name in names:
                if hasattr(owner.__dict__.get(name), "unprotected"):
                    del owner.__dict__[name]

    # ---- training

    def _train(self, step: Step, *args: Any) -> Any:
        """Around ``training_step``: all rows at once if they fit, otherwise in parts."""
        if self._before is not None:
            self._state.forget_constants(self._before)
        self._before = self._state.now(random=self._resume is None)  # which seeds each step, and can do so again
        most = self.rows.get("train")
        if most is None or (parts.rows_of(args[0]) or 0) <= most:
            self._args = args
            try:
                return step(*args)
            except (RuntimeError, MemoryError) as e:
                parts.must_be_memory(e)
            # Outside of the except block: the traceback, and all activations with it, is gone.
            self._shrink("train", args[0], self._before)
        return self._in_parts(step, args, self._parameters)

    def _backward(self, backward: Step, loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Around ``Strategy.backward``: what is missing when it fails comes from parts. A loss of parts just passes."""
        whole, self._args, trainer = self._args, None, self._trainer
        if whole is None:
            return backward(loss, *args, **kwargs)
        first = trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0
        # Autograd adds to each .grad once, so its stamp tells whether it has.
        old = {} if first else {p: parts.stamp(p.grad) for p in self._parameters}
        try:
            return backward(loss, *args, **kwargs)
        except (RuntimeError, MemoryError) as e:
            parts.must_be_memory(e)
        loss.detach_()  # Lightning holds it: so its graph goes
        if first and not getattr(trainer.strategy.model, "require_backward_grad_sync", False):
            for p in self._parameters:
                p.grad = None
        assert self._before is not None
        missing = [p for p in self._parameters if parts.stamp(p.grad) == old.get(p, parts.stamp(None))]
        self._shrink("train", whole[0], self._before)
        with trainer.precision_plugin.train_step_context():
            out = self._in_parts(self._module.training_step.unprotected, whole, missing)  # type: ignore[attr-defined]
        return backward(parts.loss_of(out) / trainer.accumulate_grad_batches, *args, **kwargs) if missing else loss

    def _in_parts(self, step: Step, args: tuple[Any, ...], parameters: list[nn.Parameter]) -> Any:
        """The output of a step on all rows; its loss will give ``parameters`` their gradients of all rows."""
        self._args, trainer = None, self._trainer
        scaler, seed = getattr(trainer.precision_plugin, "scaler", None), torch.ones((), device=self._module.device)
        seed = (seed if scaler is None else scaler.scale(seed)) / trainer.accumulate_grad_batches
        total, sums = torch.zeros_like(seed), dict.fromkeys(parameters)

        def run(part: Any, share: float) -> Any:
            torch.clear_autocast_cache()
            out = step(part, *args[1:])
            loss = parts.loss_of(out)
            with torch.autocast(loss.device.type, enabled=False):
                weight = (seed * share).to(loss.dtype)
                grads = torch.autograd.grad(loss, parameters, weight, allow_unused=True) if parameters else ()
            for p, grad in zip(parameters, grads, strict=True):
                if grad is not None:
                    sums[p] = grad if (known := sums[p]) is None else known.add_(grad)
            total.add_(loss.detach() * share)
            return tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, out)

        out = self._parts("train", args[0], run)
        if not self._checked:
            parts.check_mean(self._module, out, total)
            self._checked = True
        found = {p: g for p, g in sums.items() if g is not None}
        loss = parts.Handed.apply(total, seed, [*found.values()], *found)  # type: ignore[no-untyped-call]
        return {**out, "loss": loss} if isinstance(out, dict) else loss

    # ---- evaluation and prediction

    def _evaluate(self, step: Step, batch: Any, *args: Any) -> Any:
        if "eval" not in self.rows or (parts.rows_of(batch) or 0) <= self.rows["eval"]:
            before = self._state.now()
            try:
                return step(batch, *args)
            except (RuntimeError, MemoryError) as e:
                parts.must_be_memory(e)
            self._shrink("eval", batch, before)
        return self._parts("eval", batch, lambda part, share: step(part, *args))

    # ---- in the checkpoint

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        known = torch.zeros(trainer.world_size, 2, dtype=torch.int64, device=trainer.strategy.root_device)  # 0: all fit
        known[trainer.global_rank] = torch.tensor([self.rows.get(s, 0) for s in STAGES])
        if trainer.world_size > 1:
            known = trainer.strategy.reduce(known, reduce_op="sum")
        return {"rows": [[int(n) for n in ranks] for ranks in known.tolist()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        ranks, trainer = state_dict["rows"], self._trainer
        mine = [ranks[trainer.global_rank]] if len(ranks) == trainer.world_size else ranks
        for stage, *known in zip(STAGES, *mine, strict=True):
            if found := [n for n in (*known, self.rows.get(stage, 0)) if n]:
                self.rows[stage] = min(found)

    # ---- parts

    def _parts(self, stage: str, batch: Any, run: Callable[[Any, float], Any]) -> Any:
        """The outputs of ``run(part, share of the rows)`` put together; a part that does not fit is halved."""
        at, n, outputs, rows = 0, parts.rows_of(batch) or 1, [], []
        while at < n:
            before, end = self._state.now(), min(n, at + self.rows[stage])
            part = tree_map(lambda t, at=at, end=end: t[at:end], batch)
            parts.log_as(self._trainer, part)
            try:
                outputs.append(run(part, (end - at) / n))
                rows.append(end - at)
                at = end
                continue
            except (RuntimeError, MemoryError) as e:
                parts.must_be_memory(e)
            self._shrink(stage, part, before)
        parts.log_as(self._trainer, batch)
        if self._told.get(stage) != self.rows[stage]:
            self._told[stage] = self.rows[stage]
            rank = f"rank {self._trainer.global_rank}: " if self._trainer.world_size > 1 else ""
            print(f"oom         {rank}{stage} batches of {n:,} rows go in parts of {self.rows[stage]:,}", flush=True)
        return parts.joined(outputs, rows)

    def _shrink(self, stage: str, batch: Any, before: parts.Before) -> None:
        """After ``batch`` did not fit: put back what it changed, free what it left, halve the rows."""
        trainer, rows = self._trainer, parts.rows_of(batch)
        if stage == "train" and self._resume is not None:  # the seeds of Python and NumPy too
            self._resume.on_train_batch_start(trainer, self._module, batch, trainer.fit_loop.epoch_loop.batch_idx)
        self._state.put_back(before)
        gc.collect(1)  # what the step has left is young; to go through all objects takes a second
        if torch.cuda.is_available():  # pragma: cuda
            torch.cuda.empty_cache()
        if why := self._why[stage]:
            self._stop(stage, batch, why)
        if rows is None:
            self._stop(stage, batch, "its batches cannot be cut: expected tensors with a row each, in a tuple or dict")
        if rows <= 1:
            self._stop(stage, batch, "not even one row fits")
        if before.updates != self._state.updates():
            self._stop(stage, batch, "metrics were updated before it, and would count its rows twice")
        self.rows[stage] = -(-rows // 2)

    def _stop(self, stage: str, batch: Any, why: str) -> NoReturn:
        trainer, step, kept = self._trainer, self._trainer.global_step, ""
        if stage == "train" and self._before is not None:
            self._state.put_back(self._before)  # nothing of the step that failed is in the checkpoint
        for saved in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(saved, Checkpoints):
                if stage == "train" and step and saved.saved_step != step and trainer.world_size == 1:
                    saved.save(trainer)  # several ranks would have to do that together
                if saved.last_path:
                    kept = f"The last checkpoint: {saved.last_path}, after step {saved.saved_step:,}.\n"
        raise parts.DoesNotFit(parts.too_large(trainer, stage, batch, why, kept))
