"""``fit`` for notebooks and scripts: what ``python train.py`` does, from objects instead of flags."""

import inspect
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from torch import nn

from project.building import build, saves, settle
from project.data.datamodule import StreamDataModule
from project.data.sources import Source
from project.devices import device_words, is_rank_zero
from project.engine.checkpoint import Checkpoints
from project.module import Module
from project.run import Run, environment
from project.settings import check_objects
from project.summary import quiet, say_start


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

    Under ``strategy="ddp_spawn"`` or ``"ddp_notebook"`` weights and metrics come back, not ``trainer.global_step``.

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
        ValueError: If the run folder has something in it, the Trainer refuses the settings (both UsageError), or data,
            limits and net do not fit together.
    """
    quiet()
    L.seed_everything(seed)
    module = model if isinstance(model, L.LightningModule) else Module(model, loss, metrics, standardise)
    for name, given in (("optimizer", optimizer), ("lr_scheduler", lr_scheduler)):
        if given is not None:
            setattr(module, name, given)
    datamodule = data if isinstance(data, L.LightningDataModule) else StreamDataModule(data)
    plain = {name: p.default for name, p in inspect.signature(L.Trainer).parameters.items()}
    config = plain | {"devices": 1, "max_epochs": 10} | trainer
    checkpoints = Checkpoints() if saves(config) else None
    run = Run(run_dir, "notebook") if is_rank_zero() else None
    made, _ = build(config, module, datamodule, run, checkpoints)
    if run is not None:
        try:
            check_objects("fit", module, datamodule, made)
        except ValueError:
            run.discard()
            raise
        settle(run, module, made, checkpoints)
        devices = device_words(made)
        objects: dict[str, Any] = {
            "model": model,
            "data": data,
            "loss": loss,
            "metrics": metrics,
            "standardise": standardise,
        }
        objects |= {"optimizer": optimizer, "lr_scheduler": lr_scheduler, "seed": seed, "trainer": trainer}
        text = yaml.safe_dump({name: _plain(value) for name, value in objects.items()}, sort_keys=False)
        run.record(f"# What fit() was called with; not a config for train.py\n{text}", environment(devices, "notebook"))
        say_start(run.folder, devices, module, datamodule, made, "fit", checkpoints)
    made.fit(module, datamodule=datamodule)
    if run is not None:
        run.ended()
    return made


def _plain(value: Any) -> Any:
    """A value as YAML can hold it: an object in words."""
    if isinstance(value, dict):
        return {str(name): _plain(v) for name, v in value.items()}
    return value if isinstance(value, str | int | float | None) else repr(value)
