"""The LightningModule: any ``nn.Module`` with a loss and metrics. Subclass it to change a step; keep the rest."""

import functools
import itertools
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from project.engine.lean import LeanModule
from project.models import Standardise
from project.scores import Scores, match

STAGES = ("train", "val", "test")
Batch = tuple[Tensor, ...]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
MakeScheduler = Callable[[Optimizer], Any]


class Module(LeanModule):
    """Trains ``net`` on batches ``(x, y)``.

    A subclass may override ``training_step`` alone, or set ``automatic_optimization = False`` and step by hand. Weights
    of the net are saved under ``net.*``, so they also load into the plain class.

    Args:
        net: Any ``nn.Module`` from x [N, ...] to predictions. An ``in_features`` of its own follows from the data.
        loss: Mean loss over the rows of (predictions, targets).
        metrics: Torchmetrics by name, computed over all rows of training, validation and test.
        standardise: In front of the net, shift and scale the inputs to mean 0 and variance 1 over the training rows.
        compile: Have torch.compile speed the net up, in place: weights keep their names, so checkpoints fit both ways.
    """

    def __init__(
        self,
        net: nn.Module,
        loss: nn.Module | None = None,
        metrics: dict[str, torchmetrics.Metric] | None = None,
        standardise: bool = False,
        compile: bool = False,
    ) -> None:
        super().__init__()
        self.compiled = compile
        self.net = net
        self.loss = nn.MSELoss() if loss is None else loss
        self.standardise = Standardise() if standardise else None
        self._scores = nn.ModuleDict({f"{stage}_scores": Scores(metrics or {}) for stage in STAGES})
        self.rows_scored: dict[str, int] = {}  # by stage, when it has ended
        # Set by the command from --optimizer and --lr_scheduler; in Python, assign any two such functions.
        self.optimizer: MakeOptimizer = functools.partial(torch.optim.SGD, lr=0.01)  # travels to spawned processes
        self.lr_scheduler: MakeScheduler | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Inputs [N, ...] → predictions."""
        out: Tensor = self.net(x if self.standardise is None else self.standardise(x))
        return out

    # ---- the three steps

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Returns the loss for the optimizer, and detached predictions and targets for the report."""
        x, y = batch
        pred = self(x)
        return {"loss": self.compute_loss(pred, y), "pred": pred.detach(), "target": y}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("test", batch)

    def predict_step(self, batch: Batch | Tensor, batch_idx: int) -> Tensor:
        """Predictions for the inputs of a batch; targets, if any, are not looked at."""
        pred: Tensor = self(batch if isinstance(batch, Tensor) else batch[0])
        return pred

    # ---- loss and scores

    def compute_loss(self, pred: Tensor, target: Tensor) -> Tensor:
        """The loss, a scalar, in float32 at least: outside autocast, under which BCELoss refuses to run.

        Raises:
            ValueError: If predictions and targets cannot be matched row by row.
        """
        if pred.dtype in (torch.bfloat16, torch.float16):
            pred = pred.float()
        target = match(pred, target)
        if torch.is_autocast_enabled(pred.device.type):
            with torch.autocast(pred.device.type, enabled=False):
                return cast(Tensor, self.loss(pred, target))
        return cast(Tensor, self.loss(pred, target))

    def scores_of(self, stage: str) -> Scores:
        """The metrics and sums of "train", "val" or "test"."""
        return cast(Scores, self._scores[f"{stage}_scores"])

    def measure(self, stage: str, pred: Tensor, target: Tensor, loss: Tensor | None = None) -> None:
        """Update the scores of "train", "val" or "test" with rows: predictions [N, ...] and targets."""
        # Torchmetrics would guess from each batch whether predictions are logits: the loss knows.
        if isinstance(self.loss, nn.BCEWithLogitsLoss):
            pred = pred.sigmoid()
        elif isinstance(self.loss, nn.CrossEntropyLoss):
            pred = pred.softmax(1)
        self.scores_of(stage).update(pred, target, loss)

    def results(self, stage: str) -> dict[str, Tensor]:
        """The scores over all rows seen on all ranks since the last call, as "stage/name"; then they start anew."""
        scores, self.rows_scored[stage] = self.scores_of(stage).take()
        return {f"{stage}/{name}": value for name, value in scores.items()}

    def _evaluate(self, stage: str, batch: Batch) -> None:
        x, y = batch
        if len(x):  # a rank's share of very little data can be empty
            pred = self(x)
            self.measure(stage, pred, y, self.compute_loss(pred, y))

    def on_validation_epoch_end(self) -> None:
        self._log_results("val")

    def on_test_epoch_end(self) -> None:
        self._log_results("test")

    def _log_results(self, stage: str) -> None:
        # "step" is where loggers put the values; left to itself, Lightning counts one step too few during fit.
        # The scores are already those of all ranks; sync_dist only tells Lightning so.
        self.log_dict({**self.results(stage), "step": float(self.trainer.global_step)}, sync_dist=True)

    # ---- optimizer, start, gradients

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer over all trainable parameters; a schedule moves once an optimizer step."""
        optimizer = self.optimizer([p for p in self.parameters() if p.requires_grad])
        if self.lr_scheduler is None:
            return optimizer
        scheduler = self.lr_scheduler(optimizer)
        if isinstance(scheduler, ReduceLROnPlateau):  # torch's own, or Lightning's, which names a monitor
            monitor = getattr(scheduler, "monitor", "val/loss")
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": monitor}}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def configure_model(self) -> None:
        """Under ``--strategy model_parallel``: let the net shard itself, once."""
        if self.device_mesh is not None and not any(isinstance(p, DTensor) for p in self.net.parameters()):
            cast(Any, self.net).shard(self.device_mesh["data_parallel"])

    @property
    def _data(self) -> Any:
        trainer: Any = self.trainer
        return trainer.datamodule  # None with plain DataLoaders

    def setup(self, stage: str) -> None:
        for name in STAGES:
            self.scores_of(name).prepare(self.trainer.strategy.root_device)
        if self.compiled:
            # what torch.compile builds its kernels for the CPU with
            compiler = os.environ.get("CXX", {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++"))
            if self.trainer.strategy.root_device.type == "cpu" and not shutil.which(compiler):
                raise ValueError(
                    f"--model.compile true: torch.compile needs a C++ compiler, and there is no {compiler}.\n"
                    "Install it, name another one in the variable CXX, or leave --model.compile out."
                )
            self.net.compile()

    def on_fit_start(self) -> None:
        if (
            self.standardise is not None and not self.standardise.fitted
        ):  # a checkpoint may have brought what was fitted
            self._fit_standardise(self.standardise)

    def _fit_standardise(self, standardise: Standardise) -> None:
        inputs: Callable[[str], Iterator[Tensor]] | None = getattr(self._data, "inputs", None)
        if inputs is None:
            raise ValueError("--model.standardise true needs the StreamDataModule, to read the training rows once.")
        moments = Standardise.moments(inputs("train"))
        if self.trainer.world_size > 1:
            everyone: list[Any] = [None] * self.trainer.world_size
            dist.all_gather_object(everyone, moments)  # in rank order, so that the sum is the same everywhere
            moments = [*itertools.chain(*everyone)]
        standardise.fit(Standardise.merge(moments))

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        stream = getattr(self._data, "train_stream", None)
        if stream is not None and stream.weight != 1.0:
            loss = loss * stream.weight
        super().backward(loss, *args, **kwargs)
