"""Predictions to one file: row number first, input order, each row once, whatever the number of processes."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pyarrow as pa
import torch
from pyarrow import csv, parquet
from torch import Tensor

from project.data.datamodule import StreamDataModule

ENDINGS = (".csv", ".parquet", ".npy")
ROWS = 1 << 16  # rows written at a time, so that the file does not show how large a batch was
Array = np.ndarray[Any, Any]


class PredictionWriter(L.Callback):
    """Writes what ``predict_step`` returns, one tensor [rows, ...] a batch, to a .csv, .parquet or .npy file.

    Columns are ``row`` (its number in the source; in tables rows left out as bad count) and ``prediction``, or
    ``prediction_0``, ``prediction_1``, … ; a .npy file holds them as one float64 array. Ranks send their share of each
    batch to rank 0, so memory holds a few batches and the order is that of the source. The file gets its name when it
    is complete.

    Args:
        path: The file to write, by its ending.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.unfinished = path, path.with_name(f".{os.getpid()}-{path.name}.tmp")
        self.written = 0
        self._waiting: list[Array] = []
        self._file: Any = None

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]  # there, but not in Lightning's annotations
        source = data.part("predict")[0] if isinstance(data, StreamDataModule) else None
        self._numbers: Callable[[Tensor], Tensor] = getattr(source, "numbers", lambda rows: rows)

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
            found = type(outputs).__name__
            raise TypeError(f"predict_step must return one tensor [rows, ...] to be written; found {found}.")
        values = outputs.detach()
        values = values.flatten(1) if values.ndim > 1 else values[:, None]
        if values.dtype in (torch.float16, torch.bfloat16):
            values = values.float()
        if trainer.world_size > 1:
            values = _of_all_ranks(trainer, values, batch_idx)
        if trainer.is_global_zero:
            self._waiting.append(values.cpu().numpy())
            if sum(map(len, self._waiting)) >= ROWS:
                self._write(whole_only=True)

    def _write(self, whole_only: bool) -> None:
        """Write what waits, ``ROWS`` rows at a time; the rest of it too unless ``whole_only``."""
        values = np.concatenate(self._waiting)
        count = len(values) // ROWS * ROWS if whole_only else len(values)
        for first in range(0, count, ROWS):
            part = values[first : min(first + ROWS, count)]
            rows = self._numbers(torch.arange(self.written, self.written + len(part))).numpy()
            if self._file is None:
                self._file = (_NpyFile if self.path.suffix == ".npy" else _Table)(self.unfinished, part)
            self._file.write(rows, part)
            self.written += len(part)
        self._waiting = [values[count:].copy()]

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._waiting:
            self._write(whole_only=False)
            self._waiting = []
        if self._file is not None:
            self._file.close()
            self._file = None
            if self.path.exists():
                raise FileExistsError(f"{self.path} has appeared meanwhile; the predictions are in {self.unfinished}.")
            os.replace(self.unfinished, self.path)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # of a full disk, which is what ended the run
                self._file.close()
            self._file = None
            self.unfinished.unlink(missing_ok=True)


def _of_all_ranks(trainer: L.Trainer, mine: Tensor, batch_idx: int) -> Tensor:
    """All ranks' rows of a batch, in the order of the ranks' shares."""
    data = trainer.datamodule  # type: ignore[attr-defined]  # there, but not in Lightning's annotations
    if not isinstance(data, StreamDataModule):
        raise TypeError("Predicting on several devices needs the StreamDataModule, which knows whose rows are whose.")
    low, high = data.shares("predict").bounds(batch_idx)
    size, world = high - low, trainer.world_size
    counts = [(r + 1) * size // world - r * size // world for r in range(world)]
    padded = mine.new_zeros(max(counts), mine.shape[1])
    padded[: len(mine)] = mine
    gathered = trainer.strategy.all_gather(padded)
    return torch.cat([part[:n] for part, n in zip(gathered, counts, strict=True)])


class _Table:
    """A CSV or Parquet file, written a table at a time."""

    def __init__(self, path: Path, values: Array) -> None:
        columns = [f"prediction_{i}" for i in range(values.shape[1])] if values.shape[1] != 1 else ["prediction"]
        types = [("row", pa.int64()), *((name, pa.from_numpy_dtype(values.dtype)) for name in columns)]
        self._schema = pa.schema(types)
        plain: Any = csv.WriteOptions(quoting_style="none")
        to_csv = path.suffixes[-2] == ".csv"
        self._file: Any = (
            csv.CSVWriter(path, self._schema, write_options=plain)
            if to_csv
            else parquet.ParquetWriter(path, self._schema)
        )

    def write(self, rows: Array, values: Array) -> None:
        self._file.write_table(pa.table([rows, *np.ascontiguousarray(values.T)], schema=self._schema))

    def close(self) -> None:
        self._file.close()


class _NpyFile:
    """A float64 array [rows, 1 + columns]; its length is put into the header, which has room for it, at the end."""

    def __init__(self, path: Path, values: Array) -> None:
        self._file = open(path, "wb")  # noqa: SIM115  closed by close()
        self._rows, self._columns = 0, 1 + values.shape[1]
        self._header()

    def _header(self) -> None:
        form = {"descr": "<f8", "fortran_order": False, "shape": (self._rows, self._columns)}
        np.lib.format.write_array_header_1_0(self._file, form)

    def write(self, rows: Array, values: Array) -> None:
        self._file.write(np.column_stack([rows, values]).astype("<f8").tobytes())
        self._rows += len(rows)

    def close(self) -> None:
        self._file.seek(0)
        self._header()
        self._file.close()
