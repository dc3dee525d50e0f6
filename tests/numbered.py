"""Rows that carry their own number, a callback that writes down who saw which, and a Trainer without trimmings."""

import gzip
import itertools
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from project.data.datamodule import StreamDataModule
from project.data.sources import ArraySource, Source, SyntheticSource
from project.data.tables import TableSource
from project.module import Module

COLUMNS = 5
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)


class Numbered(Source):
    """x = (row / rows, four normals), y linear in x with noise; any row by its number."""

    def __init__(self, rows: int, block: int | None = None) -> None:
        self.normals, self.in_features, self.block = SyntheticSource(rows, COLUMNS - 1), COLUMNS, block

    def __len__(self) -> int:
        return len(self.normals)

    def read(self, rows: Tensor) -> tuple[Tensor, ...]:
        x, y = self.normals.read(rows)
        return torch.cat([rows[:, None].float() / max(1, len(self)), x], dim=1), y


def numbers(x: Tensor, rows: int) -> list[int]:
    """The numbers of the rows x of ``Numbered``."""
    return [round(v) for v in (x[:, 0].double() * rows).tolist()]


def source_of(kind: str, rows: int, folder: Path) -> Source | TableSource:
    """The rows of ``Numbered`` as they stand, from .npy, CSV, gzipped CSV, or a Parquet file in row groups of 50."""
    source = Numbered(rows)
    if kind == "synthetic":
        return source
    x, y = source.read(torch.arange(rows))
    if kind == "npy":
        if not (folder / "x.npy").exists():
            np.save(folder / "x.npy", x.numpy())
            np.save(folder / "y.npy", y.numpy())
        return ArraySource(str(folder / "x.npy"), str(folder / "y.npy"))
    if kind.startswith("csv"):
        path = folder / f"rows.{kind}"
        if not path.exists():
            lines = [",".join([*(f"x{i}" for i in range(COLUMNS)), "y"])]
            lines += [",".join(map(repr, row)) for row in torch.cat([x, y], dim=1).tolist()]
            (gzip.open if kind == "csv.gz" else open)(path, "wt").write("\n".join(lines) + "\n")
        return TableSource(str(path), target="y")
    names = [*(f"x{i}" for i in range(COLUMNS)), "y"]
    if not (folder / "rows.parquet").exists():
        table = pa.table([*x.T.contiguous().numpy(), y[:, 0].numpy()], names=names)
        pq.write_table(table, folder / "rows.parquet", row_group_size=50)
    return TableSource(str(folder / "rows.parquet"), target="y")


class Seen(L.Callback):
    """The row numbers of each optimizer step of this rank, and of each evaluation and prediction."""

    def __init__(self, rows: int) -> None:
        self.rows, self.steps = rows, {}
        self.evaluated: dict[str, list[int]] = {"val": [], "test": [], "predict": []}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if getattr(trainer.datamodule, "loss_weight", 1.0):  # 0: a row of padding, on a rank without a share
            key = trainer.current_epoch, trainer.global_step
            self.steps.setdefault(key, []).extend(numbers(batch[0], self.rows))

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if not trainer.sanity_checking:
            self.evaluated["val"] += numbers(batch[0], self.rows)

    def on_test_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.evaluated["test"] += numbers(batch[0], self.rows)

    def on_predict_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.evaluated["predict"] += numbers(batch[0], self.rows)


def trainer_of(devices: int = 1, **settings: Any) -> L.Trainer:
    """A quiet Trainer on the CPU; with several ``devices``, called in each of the processes of ``on_ranks``."""
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "strategy": "ddp" if devices > 1 else "auto",
    }
    return L.Trainer(devices=devices, **{**quiet, **settings})


def fit(
    source: Any,
    module: L.LightningModule | None = None,
    devices: int = 1,
    callbacks: tuple[L.Callback, ...] = (),
    data: dict[str, Any] | None = None,
    seed: int = 1,
    **settings: Any,
) -> tuple[L.Trainer, L.LightningModule, Seen]:
    """Train on all rows but what ``data`` says; returns the Trainer, the module and the rows that this rank saw."""
    L.seed_everything(seed, verbose=False)
    module = module or Module(torch.nn.Linear(COLUMNS, 1))
    seen = Seen(len(source))
    trainer = trainer_of(devices, callbacks=[seen, *callbacks], **{"max_epochs": 1, **settings})
    trainer.fit(module, StreamDataModule(source, **{"split": (1.0, 0.0, 0.0), **(data or {})}))
    return trainer, module, seen


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    return [*itertools.chain.from_iterable(lists)]


def weights(module: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])
