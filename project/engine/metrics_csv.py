"""``metrics.csv``: one row a step, one header, rising steps, whenever a column first appears."""

import csv
import os
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

SAVE_SECONDS = 1.0


class MetricsCSV(Logger):
    """A Lightning logger that appends to ``metrics.csv`` in the run folder; on disk at least once a second.

    Values logged at the same step share a row. A column that first appears late is added to the header once; rows that
    are there stay as they are. On resuming, what was logged after the checkpoint is of the attempt that died and goes.

    Args:
        folder: The run folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path = folder / "metrics.csv"
        self._columns = ["step"]
        self._row: dict[str, Any] = {}  # the row of the current step, which may still grow
        self._finished: list[dict[str, Any]] = []  # rows before it that are not on the disk yet
        self._end = 0  # where the finished rows end in the file
        self._saved = 0.0
        self._opened = False

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

    def _open(self) -> None:
        """Go on after the rows of an earlier attempt; nothing is looked at before something is logged."""
        if not self._opened and self.path.exists():
            self._columns = next(csv.reader(self.path.read_text().splitlines()), self._columns)
            self._end = self.path.stat().st_size
        self._opened = True

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        step = int(step or 0)
        if (
            self._row
        ):  # what a module logs itself at the end of a step bears, in Lightning, the number of the one before
            step = max(step, self._row["step"])
        if self._row and self._row["step"] != step:
            self._finished.append(self._row)
            self._row = {}
        self._row |= {"step": step} | metrics
        if time.monotonic() - self._saved > SAVE_SECONDS:
            self.save()

    @rank_zero_only
    def save(self) -> None:
        """Bring all rows to the disk, that of the current step as it is so far."""
        self._open()
        rows = [*self._finished, *([self._row] if self._row else [])]
        new = list({name: None for row in rows for name in row if name not in self._columns})
        if new or not self.path.exists():
            finished = self._read(self._end) if self.path.exists() else []
            self._columns += new
            self._rewrite(finished)
        with open(self.path, "r+", newline="") as file:
            file.seek(self._end)
            file.truncate()
            writer = csv.DictWriter(file, self._columns)
            writer.writerows(self._finished)
            file.flush()
            self._end = file.tell()
            if self._row:
                writer.writerow(self._row)
        self._finished = []
        self._saved = time.monotonic()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.save()

    @property
    def row(self) -> dict[str, Any]:
        """What is logged of the current step so far; ``Resume`` stores it and logs it again."""
        return dict(self._row)

    @rank_zero_only
    def rewind(self, step: int, row: dict[str, Any] | None = None) -> None:
        """Drop the rows after ``step``, the one resumed from; what is logged again at it goes into its row.

        Args:
            step: The optimizer step of the checkpoint.
            row: What its row held when it was saved, in place of what the end of that attempt made of it. The test
                scores stay: no run repeats them.
        """
        self._open()
        if not self.path.exists():
            return
        rows = self._read()
        self._rewrite([r for r in rows if int(r["step"]) < step])
        held = next(({n: value for n, value in r.items() if value} for r in rows if int(r["step"]) == step), {})
        if row is not None:
            held = row | {n: value for n, value in held.items() if n.startswith("test/")}
        self._row = {**held, "step": step} if held else {}

    def _read(self, end: int | None = None) -> list[dict[str, str]]:
        """The rows on the disk (up to a byte), without a last line that was cut short by a kill."""
        whole_lines = self.path.read_bytes()[:end].decode().rpartition("\n")[0]
        return list(csv.DictReader(whole_lines.splitlines()))

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        unfinished = self.path.with_name(self.path.name + ".tmp")
        try:
            with open(unfinished, "w", newline="") as file:
                writer = csv.DictWriter(file, self._columns, extrasaction="ignore")
                writer.writeheader()
                writer.writerows(rows)
                file.flush()
                self._end = file.tell()
            os.replace(unfinished, self.path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
