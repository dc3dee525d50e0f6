"""Scores of one stage: over all its rows and all ranks, whatever the batches were."""

import logging
import warnings
from typing import Any, cast

import torch
import torch.distributed as dist
import torchmetrics
from torch import Tensor, nn

log = logging.getLogger("project")
HELD = 1 << 18  # numbers of predictions kept on the device before metrics are updated: at once, for the sake of time


class Scores(nn.Module):
    """Metrics of all rows since the last ``take``; states are float64, and nothing of them is saved with the weights.

    Args:
        metrics: Torchmetrics by name; copied.
    """

    def __init__(self, metrics: dict[str, torchmetrics.Metric]) -> None:
        super().__init__()
        if taken := {"loss", "epoch_loss", "rows"} & metrics.keys():
            raise ValueError(f"--model.metrics.{taken.pop()}: this name is taken; choose another for the metric.")
        # The loss is a mean over rows, not over batches, so neither batch size nor devices show. A NaN stays a NaN.
        # Two sums, since MeanMetric of torchmetrics 1.9 ignores weights if NaNs are to stay.
        self.loss = torchmetrics.SumMetric(nan_strategy="disable")
        self.rows = torchmetrics.SumMetric()
        self.metrics = nn.ModuleDict({name: metric.clone() for name, metric in metrics.items()})
        self._held: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self._numbers = 0
        self._restored: set[str] = set()  # what came from a checkpoint since the last ``take``
        self.updates = 0  # begun, ever

    def prepare(self, device: torch.device) -> None:
        """Set the type of all states: float64 where the device has it. To be called before the first update."""
        for module in self.modules():
            if isinstance(module, torchmetrics.Metric):
                module.set_dtype(_exact(device))

    def update(self, pred: Tensor, target: Tensor, loss: Tensor | None = None) -> None:
        """Rows: predictions [N, ...], their targets, and the mean loss over them if that is wanted too."""
        match(pred, target)  # refuses what cannot be matched
        self.updates += 1
        if self._held and not _alike(self._held[0], (pred, target, loss)):
            self.settle()
        self._held.append((pred, target, loss))
        self._numbers += pred.numel()
        if self._numbers >= HELD:
            self.settle()

    def settle(self) -> None:
        """Bring the metrics up to date with the rows held."""
        if not self._held:
            return
        rows, exact = [len(pred) for pred, _, _ in self._held], _exact(self._held[0][0].device)
        pred, target = (torch.cat(side) for side in list(zip(*self._held, strict=True))[:2])
        losses = [loss for _, _, loss in self._held if loss is not None]
        self._held, self._numbers = [], 0
        pred = pred.to(exact) if pred.is_floating_point() else pred
        target = match(pred, target)
        if pred.ndim == 2 and pred.shape[1] == 1:
            pred, target = pred.flatten(), target.flatten()
        for metric in self.metrics.values():
            classes = type(metric).__module__.startswith("torchmetrics.classification")
            cast(torchmetrics.Metric, metric).update(pred, target.long() if classes else target)
        if losses:
            weight = torch.tensor(rows, dtype=exact).to(pred.device, non_blocking=True)
            self.loss.update((torch.stack(losses).to(exact) * weight).sum())
        self.rows.update(sum(rows))

    def reset(self) -> None:
        """Forget all rows."""
        self._held, self._numbers, self._restored = [], 0, set()
        for metric in (self.loss, self.rows, *self.metrics.values()):
            cast(torchmetrics.Metric, metric).reset()

    def take(self) -> tuple[dict[str, Tensor], int]:
        """(scores by name, rows), over all ranks; then all starts anew. All ranks call this together."""
        self.settle()
        metrics = {
            "rows": self.rows,
            "loss": self.loss,
            **cast(dict[str, torchmetrics.Metric], dict(self.metrics.items())),
        }
        restored = {name.removeprefix("metrics.") for name in self._restored}
        used = {name for name, shapes in _adopt_shapes(metrics, restored).items() if shapes}
        with warnings.catch_warnings():  # "compute was called before update": on a rank without rows it is
            warnings.simplefilter("ignore", UserWarning)
            scores = {name: _compute(name, metric) for name, metric in metrics.items() if name in used}
        self.reset()
        rows = scores.pop("rows", torch.tensor(0))
        if "loss" in scores:
            scores["loss"] = scores["loss"] / rows
        return scores, int(rows)

    def state(self) -> list[dict[str, Any]]:
        """What is held of the rows since the last ``take``, of each rank, as plain tensors. All ranks call this."""
        self.settle()
        mine = {
            name: {n: _copy(value) for n, value in metric.metric_state.items()}
            for name, metric in self.named_modules()
            if isinstance(metric, torchmetrics.Metric) and (metric.update_called or name in self._restored)
        }
        if not _several():
            return [mine]
        everyone: list[dict[str, Any]] = [{}] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        return everyone

    def restore(self, ranks: list[dict[str, Any]]) -> None:
        """Go on from a ``state``: as many ranks take one each, fewer merge several, more leave some without."""
        world, rank = (dist.get_world_size(), dist.get_rank()) if _several() else (1, 0)
        for name, metric in self.named_modules():
            for state in (saved[name] for saved in ranks[rank::world] if name in saved):
                assert isinstance(metric, torchmetrics.Metric)
                try:
                    held = {n: _copy(value, metric.device) for n, value in state.items()}
                    if name in self._restored:
                        metric.merge_state(held)
                    else:
                        self._restored.add(name)
                        for n, value in held.items():
                            setattr(metric, n, value)
                except (RuntimeError, TypeError, ZeroDivisionError):  # some have no way to merge what two ranks hold
                    log.warning(
                        "train/%s cannot go on with fewer devices: its value misses rows of this epoch",
                        name.rpartition(".")[2],
                    )


def _alike(a: tuple[Tensor, Tensor, Tensor | None], b: tuple[Tensor, Tensor, Tensor | None]) -> bool:
    """Whether two batches can be put together: rows of one shape and type, both with a loss or both without."""
    same = all(x.shape[1:] == y.shape[1:] and x.dtype == y.dtype for x, y in zip(a[:2], b[:2], strict=True))
    return same and (a[2] is None) == (b[2] is None)


def _compute(name: str, metric: torchmetrics.Metric) -> Tensor:
    try:
        return cast(Tensor, metric.compute())
    except ValueError as e:  # R² of one row, say; alike on all ranks, since all hold the same states by now
        log.warning("%s is not defined on these rows: %s", name, e)
        return torch.tensor(torch.nan, device=metric.device)


def _copy(value: Any, device: Any = "cpu") -> Any:
    return [_copy(v, device) for v in value] if isinstance(value, list) else value.detach().to(device, copy=True)


def _several() -> bool:
    return dist.is_available() and dist.is_initialized()


def _adopt_shapes(metrics: dict[str, torchmetrics.Metric], restored: set[str]) -> dict[str, Any]:
    """Make the states of metrics that saw no row here gatherable; returns what metrics that saw rows anywhere hold.

    Gathering needs states of equal dimensions and types on all ranks, but what a metric keeps in lists, or widens to
    the number of outputs, is known only to ranks that have updated it.
    """
    mine = {
        name: {state: _form(value) for state, value in metric.metric_state.items()}
        if metric.update_called or name in restored
        else None
        for name, metric in metrics.items()
    }
    if not _several():
        return mine
    everyone: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    known = {name: next((forms[name] for forms in everyone if forms[name]), None) for name in metrics}
    for name, metric in metrics.items():
        if mine[name] is None:
            for state, (shape, dtype) in (known[name] or {}).items():
                value = getattr(metric, state)
                empty = isinstance(value, list)
                setattr(
                    metric,
                    state,
                    [torch.empty(0, *shape[1:], dtype=dtype, device=metric.device)]
                    if empty
                    else value.expand(shape).clone(),
                )
    return known


def _form(value: Tensor | list[Tensor]) -> tuple[list[int], torch.dtype]:
    first = value if isinstance(value, Tensor) else value[0] if value else torch.empty(0)
    return list(first.shape), first.dtype


def match(pred: Tensor, target: Tensor) -> Tensor:
    """The target in the shape and type of the predictions: [N] and [N, 1] are the same. Class numbers stay as they are:
    integers [N, ...] against predictions [N, classes, ...].

    Raises:
        ValueError: If they differ otherwise. Broadcasting would compare all with all.
    """
    if target.shape == pred.shape and target.dtype == pred.dtype:
        return target
    if not target.is_floating_point() and target.shape == pred.shape[:1] + pred.shape[2:] and pred[:1].numel() > 1:
        return target
    flat_or_column = {target.ndim, pred.ndim} == {1, 2} and len(target) == len(pred) and target.numel() == pred.numel()
    if target.shape == pred.shape or flat_or_column:
        return target.view_as(pred).to(pred.dtype)
    raise ValueError(
        f"Predictions of shape {list(pred.shape)} cannot be matched to targets of shape {list(target.shape)} "
        f"({str(target.dtype).removeprefix('torch.')}). Class numbers must be integers (target_dtype int64)."
    )


def _exact(device: torch.device) -> torch.dtype:
    """The widest float of a device: float64, which Apple's GPUs lack."""
    return torch.float32 if device.type == "mps" else torch.float64
