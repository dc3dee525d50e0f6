"""Parts of a batch: when they give the gradient of the whole, how outputs are joined, how a gradient is handed on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torchmetrics import Metric

from project.engine.memory import MB, peak_memory
from project.scores import Scores
from project.usage import Failed


class DoesNotFit(Failed):
    """Not even one row fits, or parts would not add up to the whole."""


@dataclass(frozen=True)
class Before:
    """What ``State`` remembers of a moment."""

    random: list[Tensor]
    buffers: list[Tensor]
    updates: int


class State:
    """What a step changes beside gradients: random states, buffers, metrics."""

    def __init__(self, module: L.LightningModule, device: torch.device) -> None:
        self._module, self._constants_known = module, True
        self._generators = [torch.default_generator]
        if device.type == "cuda":  # pragma: cuda
            self._generators.append(torch.cuda.default_generators[device.index or 0])
        self._metrics = [m for m in module.modules() if isinstance(m, Metric | Scores)]
        self._buffers: list[tuple[nn.Module, str]] = []

    def watch_buffers(self) -> None:
        """Remember all buffers from now on."""
        self._buffers = [(m, n) for m in self._module.modules() for n, b in m._buffers.items() if b is not None]
        self._constants_known = not self._buffers

    def forget_constants(self, was: Before) -> None:
        """Watch only those buffers that have changed since ``was``: others need no copy at each step."""
        if not self._constants_known:
            pairs = zip(self._buffers, was.buffers, strict=True)
            self._buffers = [(m, name) for (m, name), old in pairs if not torch.equal(m.get_buffer(name), old)]
            self._constants_known = True

    def now(self, random: bool = True) -> Before:
        """All of that, now; the random states cost 3 µs and can be left out."""
        buffers = [m.get_buffer(name).clone() for m, name in self._buffers]
        return Before([g.get_state() for g in self._generators if random], buffers, self.updates())

    def updates(self) -> int:
        """Counts updates of metrics, begun ones too."""
        return sum(m.updates if isinstance(m, Scores) else m.update_count for m in self._metrics)

    def put_back(self, was: Before) -> None:
        """Random states, if remembered, and buffers as they were; metrics cannot be."""
        for generator, state in zip(self._generators, was.random, strict=False):
            generator.set_state(state)
        self.buffers_back(was)

    def buffers_back(self, was: Before) -> None:
        for (m, name), old in zip(self._buffers, was.buffers, strict=True):
            m.get_buffer(name).copy_(old)


class Handed(torch.autograd.Function):
    """A loss with the value ``total`` that hands on gradients found before, which are those of it times ``seed``."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, seed: Tensor, found: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.seed, ctx.found = seed, found
        return total.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        found, ctx.found = ctx.found, []
        return None, None, None, *(g.mul_((grad / ctx.seed).to(g.dtype)) for g in found)


def exchanges_weights(trainer: L.Trainer) -> str:
    """Whether ranks gather each layer's weights in each pass, so that none can make more passes than others."""
    simple = isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy)
    return "" if simple else f"{type(trainer.strategy).__name__} exchanges weights within a step"


def why_off(trainer: L.Trainer, pl_module: L.LightningModule) -> str:
    """Why parts of a batch would not give the gradient of the whole, if so."""
    strategy, loss = trainer.strategy, getattr(pl_module, "loss", None)
    if not pl_module.automatic_optimization:
        return "it optimises by hand"
    if why := exchanges_weights(trainer):
        return why
    for name in ("static_graph", "gradient_as_bucket_view"):
        if getattr(strategy.model, name, False):
            return f"parts would give wrong gradients with DDP's {name}"
    if any(isinstance(m, nn.SyncBatchNorm) for m in pl_module.modules()):
        return "SyncBatchNorm exchanges statistics within a step"
    weighted = isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and loss.weight is not None
    if weighted or getattr(loss, "reduction", "mean") != "mean":
        return f"{type(loss).__name__} is set to be no mean over rows"
    if any(p._backward_hooks for p in pl_module.parameters()):
        return "a parameter has a hook on its gradient"
    return ""


def is_memory(e: BaseException) -> bool:
    """Whether an error says that memory ran out: CUDA's, those of its libraries, the CPU's."""
    words = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
    plain = isinstance(e, torch.OutOfMemoryError | MemoryError)
    return plain or (isinstance(e, RuntimeError) and any(w in str(e) for w in words))


def must_be_memory(e: RuntimeError | MemoryError) -> None:
    """Raise an error again unless it says that memory ran out."""
    if not is_memory(e):
        raise e


def log_as(trainer: L.Trainer, batch: Any) -> None:
    """Lightning weighs what a step logs by the rows of ``batch``. Private: without it, all parts weigh alike."""
    results = getattr(trainer, "_results", None)
    if results is not None and hasattr(results, "batch_size"):
        results.batch, results.batch_size = batch, None


def check_mean(module: L.LightningModule, out: Any, total: Tensor) -> None:
    """Refuse a loss over all rows that is not what its parts add up to; where ``out`` has the predictions.

    Raises:
        DoesNotFit: With both.
    """
    compute = getattr(module, "compute_loss", None)
    if compute is None or not isinstance(out, dict) or not {"pred", "target"} <= out.keys():
        return
    with torch.no_grad():
        whole = compute(out["pred"], out["target"]).to(total.dtype)
    if not torch.allclose(whole, total, rtol=1e-2, atol=1e-6, equal_nan=True):
        raise DoesNotFit(
            "Out of memory, and parts of a micro-batch would not do: the loss is no mean over rows. It is "
            f"{float(whole):.6g} over all, {float(total):.6g} as the mean of the parts'.\n"
            "Use a smaller --data.batch_size with more --accumulate_grad_batches."
        )


def stamp(grad: Tensor | None) -> tuple[int, int]:
    """Changes when something is added to a gradient, in place or not."""
    return id(grad), 0 if grad is None else grad._version


def loss_of(out: Any) -> Tensor:
    """The loss in what a training step has returned."""
    loss: Tensor = out["loss"] if isinstance(out, dict) else out
    return loss


def rows_of(batch: Any) -> int | None:
    """Rows of a batch; None if it is not made of tensors with a row each."""
    sizes = {len(t) if isinstance(t, Tensor) and t.ndim else None for t in tree_leaves(batch)}
    return sizes.pop() if len(sizes) == 1 else None


def joined(outputs: Sequence[Any], rows: Sequence[int]) -> Any:
    """Outputs of parts as one: rows in order, single numbers as means over rows, the last of anything else."""

    def join(*each: Any) -> Any:
        if not all(isinstance(t, Tensor) for t in each):
            return each[-1]
        if all(t.ndim and len(t) == k for t, k in zip(each, rows, strict=True)):
            return torch.cat(each)
        return each[-1] if each[0].ndim else sum(t * (k / sum(rows)) for t, k in zip(each, rows, strict=True))

    return tree_map(join, *outputs)


def too_large(trainer: L.Trainer, stage: str, batch: Any, why: str, kept: str) -> str:
    """The words of a run that ends: why, what takes memory and the most there was, and what to try."""
    weights = sum(p.nbytes for p in trainer.lightning_module.parameters()) / MB
    states = tree_leaves([o.state_dict() for o in trainer.optimizers])
    state = sum(t.nbytes for t in states if isinstance(t, Tensor)) / MB
    shapes = ", ".join(str(list(t.shape)) for t in tree_leaves(batch) if isinstance(t, Tensor))
    flags = "batch_size 1 with more --accumulate_grad_batches" if stage == "train" else "eval_batch_size 1"
    return (
        f"Out of memory in {stage} after optimizer step {trainer.global_step:,}: {why}.\n"
        f"Peak {peak_memory(trainer.strategy.root_device)}; weights {weights:,.0f} MB, as much for gradients, "
        f"optimizer {state:,.0f} MB; tried rows of shape {shapes}.\n{kept}"
        f"Try --data.{flags}; --precision bf16-mixed; activation checkpointing in the net;\n"
        "its weights in shards, with --strategy model_parallel on several devices. See docs/memory.md."
    )
