"""Predictions to one file: row number first, input order, each row once, whatever the number of processes."""

import os
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import torch
from torch import Tensor

from project.data.datamodule import StreamDataModule

ENDINGS = (".csv", ".parquet", ".npy")


class PredictionWriter(L.Callback):
    """Writes what ``predict_step`` returns, one tensor [N, ...] a batch, to a .csv, .parquet or .npy file.

    Columns are ``row`` (its number in the source) and ``prediction``, or ``prediction_0``, ``prediction_1``, … . Ranks send
    their share of each batch to rank 0, so memory holds one batch of all ranks and order is that of the source. The file
    gets its name when it is complete.

    Args:
        path: The file to write, by its ending.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written = 0
        self._file: Any = None

    @property
    def _unfinished(self) -> Path:
        return self.path.with_name(self.path.name + ".tmp")

    def on_predict_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not isinstance(outputs, Tensor):
            raise TypeError(
                f"predict_step must return one tensor [rows, ...] to be written; found {type(outputs).__name__}."
            )
        table = self._of_all_ranks(trainer, outputs.detach().reshape(len(outputs), -1), batch_idx)
        if trainer.is_global_zero:
            rows = np.arange(self.written, self.written + len(table))
            self.written += len(table)
            self._write(trainer, rows, table.float().cpu().numpy())

    def _of_all_ranks(self, trainer: L.Trainer, mine: Tensor, batch_idx: int) -> Tensor:
        if trainer.world_size == 1:
            return mine
        data = trainer.datamodule  # type: ignore[attr-defined]  # there, but not in Lightning's annotations
        if not isinstance(data, StreamDataModule):
            raise TypeError(
                "Predicting on several devices needs the StreamDataModule, which knows whose rows are whose."
            )
        low, high = data.shares("predict").bounds(batch_idx)
        size, world = high - low, trainer.world_size
        counts = [(r + 1) * size // world - r * size // world for r in range(world)]
        padded = mine.new_zeros(max(counts), mine.shape[1])
        padded[: len(mine)] = mine
        gathered = trainer.strategy.all_gather(padded)
        return torch.cat([part[:n] for part, n in zip(gathered, counts, strict=True)])

    def _write(self, trainer: L.Trainer, rows: np.ndarray, values: np.ndarray) -> None:
        if self.path.suffix == ".npy":
            if self._file is None:
                data = trainer.datamodule  # type: ignore[attr-defined]
                if not isinstance(data, StreamDataModule):
                    raise TypeError(
                        "A .npy file needs to know its length: use the StreamDataModule, or write .csv or .parquet."
                    )
                shape = (data.shares("predict").tail, 1 + values.shape[1])
                self._file = np.lib.format.open_memmap(self._unfinished, "w+", np.float64, shape)
            self._file[rows, 0], self._file[rows, 1:] = rows, values
            return
        names = [f"prediction_{i}" for i in range(values.shape[1])] if values.shape[1] > 1 else ["prediction"]
        batch = pa.table([rows, *np.ascontiguousarray(values.T)], names=["row", *names])
        if self._file is None:
            if self.path.suffix == ".csv":
                self._file = pyarrow.csv.CSVWriter(
                    self._unfinished, batch.schema, write_options=pyarrow.csv.WriteOptions(quoting_style="none")
                )
            else:
                self._file = pyarrow.parquet.ParquetWriter(self._unfinished, batch.schema)
        self._file.write_table(batch)

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._file is not None:
            self._close()
            os.replace(self._unfinished, self.path)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self._file is not None:
            self._close()
            self._unfinished.unlink(missing_ok=True)

    def _close(self) -> None:
        if isinstance(self._file, np.memmap):
            self._file.flush()
        else:
            self._file.close()
        self._file = None
