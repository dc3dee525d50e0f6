"""``metrics.csv``: one row a step, one header, rising steps, whenever a column first appears."""

import csv
import os
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

FLUSH_SECONDS = 1.0


class MetricsCSV(Logger):
    """A Lightning logger that appends to ``metrics.csv`` in the run folder; on disk at least once a second.

    Values logged at the same step share a row. A column that first appears late is added to the header once; rows that
    are there stay as they are. On resuming, rows after the step resumed from belong to the attempt that died and go.

    Args:
        folder: The run folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path = folder / "metrics.csv"
        self._columns = ["step"]
        self._row: dict[str, Any] = {}
        self._lines: list[dict[str, Any]] = []
        self._flushed = 0.0
        self._closed = -1
        if self.path.exists():
            with open(self.path, newline="") as file:
                self._columns = next(csv.reader(file), self._columns)

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the run folder holds the whole config."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        step = int(step or 0)
        if self._row and self._row["step"] != step:
            self._lines.append(self._row)
            self._row = {}
        elif not self._row and step == self._closed:  # a test after the fit that closed the row of this step
            self.rewind(step)
        self._row |= {"step": step} | metrics
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.save()

    @rank_zero_only
    def save(self) -> None:
        """Bring finished rows to the disk; the row of the current step follows when the step is over."""
        new = {name: None for row in self._lines for name in row if name not in self._columns}
        if new:
            self._columns += new
            self._rewrite(self._read())
        if self._lines:
            fresh = not self.path.exists()
            with open(self.path, "a", newline="") as file:
                writer = csv.DictWriter(file, self._columns)
                if fresh:
                    writer.writeheader()
                writer.writerows(self._lines)
            self._lines = []
        self._flushed = time.monotonic()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._row:
            self._closed = self._row["step"]
            self._lines.append(self._row)
            self._row = {}
        self.save()

    @rank_zero_only
    def rewind(self, step: int) -> None:
        """Drop the rows after ``step``, the one resumed from, and a last line that was cut short."""
        if self.path.exists():
            rows = self._read()
            self._rewrite([row for row in rows if int(row["step"]) < step])
            for row in rows:
                if int(row["step"]) == step:  # what is logged again at this step goes into the same row
                    self._row = {**{name: value for name, value in row.items() if value}, "step": step}

    def _read(self) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        whole_lines = self.path.read_text().rpartition("\n")[0]
        return list(csv.DictReader(whole_lines.splitlines()))

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        unfinished = self.path.with_name(self.path.name + ".tmp")
        with open(unfinished, "w", newline="") as file:
            writer = csv.DictWriter(file, self._columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(unfinished, self.path)
