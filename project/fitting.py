"""``fit`` for notebooks and scripts: what ``python train.py`` does, from objects instead of flags."""

from pathlib import Path
from typing import Any

import lightning as L
from torch import nn

from project.data.datamodule import StreamDataModule
from project.data.sources import Source
from project.devices import is_rank_zero
from project.engine.checkpoint import AtomicCheckpointIO, Checkpoints
from project.engine.nonfinite import NonFinite
from project.engine.report import Report
from project.engine.resume import Resume
from project.engine.signals import Signals
from project.module import Module
from project.run import Run, loggers
from project.summary import quiet


def fit(
    model: nn.Module,
    data: Source | L.LightningDataModule,
    *,
    loss: nn.Module | None = None,
    metrics: dict[str, Any] | None = None,
    standardise: bool = False,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    run_dir: str | Path | None = None,
    seed: int = 0,
    **trainer: Any,
) -> L.Trainer:
    """Train; the trained module is ``trainer.lightning_module`` and the checkpoints are in the run folder.

    Args:
        model: A net, or a LightningModule; for the latter leave loss, metrics and standardise out.
        data: A source, split and batched as by default, or a DataModule, as ``StreamDataModule(source, batch_size=8)``.
        loss: Mean loss over the rows; default MSELoss.
        metrics: Torchmetrics by name.
        standardise: Standardise the inputs by the training rows.
        optimizer: From parameters to an optimizer, as ``functools.partial(torch.optim.Adam, lr=0.01)``; default SGD.
        lr_scheduler: From an optimizer to a scheduler, which moves once an optimizer step.
        run_dir: The run folder; default ``runs/notebook/<time>``.
        seed: Of weights that are still to be drawn, order and dropout.
        trainer: Any argument of Lightning's Trainer; ``max_epochs`` is 10 and ``devices`` 1 by default.

    Raises:
        UsageError: If the run folder has something in it.
        ValueError: If data, limits and net do not fit together.
    """
    quiet()
    L.seed_everything(seed)
    module = model if isinstance(model, L.LightningModule) else Module(model, loss, metrics, standardise)
    for name, given in (("optimizer", optimizer), ("lr_scheduler", lr_scheduler)):
        if given is not None:
            setattr(module, name, given)
    datamodule = data if isinstance(data, L.LightningDataModule) else StreamDataModule(data)
    run = Run(run_dir, "notebook") if is_rank_zero() else None
    parts: list[L.Callback] = [Report(), Resume(), Signals(), NonFinite(), Checkpoints()]
    settings = {"devices": 1, "max_epochs": 10, "enable_progress_bar": False, "enable_model_summary": False} | trainer
    settings["callbacks"] = [*parts, *(trainer.get("callbacks") or [])]
    if run is not None:
        settings["default_root_dir"] = str(run.folder)
    if trainer.get("logger") is not False:
        settings["logger"] = loggers(run, None, trainer.get("logger"))
    made = L.Trainer(**settings)
    made.strategy.checkpoint_io = AtomicCheckpointIO()
    made.fit(module, datamodule=datamodule)
    return made
