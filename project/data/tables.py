"""Tables in files: Parquet as it stands, CSV through a cached Parquet copy (csv_cache.py). Needs pyarrow, nothing else.

Rows are numbered through the files in the order given (patterns and folders: by name). A file is read one row group at
a time; a few decoded groups are kept, so memory depends on the size of a group, never on the length of a file. Files
are opened for each group and closed, which costs little and leaves no handle open, in any process.
"""

import json
import logging
import os
from collections import OrderedDict
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyarrow import fs
from torch import Tensor

from project.data.csv_cache import ROUNDED, SKIPPED, cached
from project.data.csv_text import SKIP, names, place
from project.data.files import Array, Ready, Table, among, check_names, fill, find, tensors
from project.data.sources import Source, check_rows

log = logging.getLogger("project")

KEPT_GROUPS = 160  # decoded row groups kept: a mixture of 64 stretches may touch two groups each
KEPT_BYTES = 512 << 20  # ... but no more than this, or the one group in use


class TableSource(Source):
    """Rows of CSV, gzipped CSV or Parquet files with columns of numbers: one schema, any number of files.

    Args:
        files: A file, a folder (its tables), a pattern like `data/*.csv`, an address that pyarrow opens
            (`s3://…`), or a list of these.
        features: Columns of x, found by name in each file; none given: all but the target.
        target: Column or columns of y; none: `read` gives x alone.
        target_dtype: "int64" for class numbers.
        skip_bad_rows: Leave out rows with text, empty cells, NaN and the like, instead of refusing the file.
        cache_dir: Where converted CSV files are kept; default: `.cache` beside the first file.

    `read` gives x float32 [n, features] and y float32 [n, targets], or int64 [n] for one int64 target. ValueError for
    whatever is wrong with a file, naming it, the column and the row. Files are looked at in `prepare`, or at first use.
    """

    def __init__(
        self,
        files: str | list[str],
        features: list[str] | None = None,
        target: str | list[str] | None = None,
        target_dtype: Literal["float32", "int64"] = "float32",
        skip_bad_rows: bool = False,
        cache_dir: str | None = None,
    ) -> None:
        self._files = [files] if isinstance(files, str) else files
        self._tables: list[Table] = []
        self._like: TableSource | None = None
        self._features, self._targets = features, [target] if isinstance(target, str) else target or []
        columns = [*(features or []), *self._targets]
        if len(set(columns)) < len(columns) or features == []:
            raise ValueError(f"--data.source.features {features} and --data.source.target {target}: name a column once")
        self._whole = frozenset(self._targets if target_dtype == "int64" else [])
        self._skip, self._cache_dir = skip_bad_rows, cache_dir
        self._parts: list[Ready] = []
        self._kept: OrderedDict[int, tuple[Tensor, ...]] = OrderedDict()  # decoded groups, the latest used last
        self._footers: dict[int, Any] = {}
        self._warned: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": OrderedDict(), "_footers": {}}

    # -- what there is

    def take_columns_of(self, source: object) -> None:
        """Read the feature columns of another table, by name and in its order, unless some were named here."""
        self._like = source if isinstance(source, TableSource) and source is not self else None

    def tables(self) -> list[Table]:
        """The files, looked for at first use: what is named but not needed need not be there."""
        if not self._tables:
            tables = [table for pattern in self._files for table in find(pattern)]
            seen = [table.name for table in tables]
            if len(set(seen)) < max(len(seen), 1):
                twice = next((f"{n} is there twice" for i, n in enumerate(seen) if n in seen[:i]), "no file is given")
                raise ValueError(f"--data.source.files: {twice}")
            self._tables = tables
        return self._tables

    def feature_names(self) -> list[str]:
        """The feature columns, in the order of ``read``; if none are named, those of the first file."""
        if self._parts:
            return self._columns[: len(self._columns) - len(self._targets)]
        asked = self._features or (self._like.feature_names() if self._like is not None else None)
        return asked or [name for name in names(self.tables()[0]) if name not in self._targets]

    def prepare(self) -> None:
        """Check every file's columns, convert CSV files that have no copy yet, find the rows to skip."""
        if self._parts:
            return
        features, tables = self.feature_names(), self.tables()
        self._columns = columns = [*features, *self._targets]
        for table in tables:
            check_names(table, names(table), columns, exact=self._features is None and self._like is None)
        parts = [self._part(table, columns) for table in tables]
        self._groups = [(i, group) for i, part in enumerate(parts) for group in range(len(part.sizes))]
        sizes = [size for part in parts for size in part.sizes]
        self._starts = torch.tensor([0, *sizes]).cumsum(0)  # the first row of each group, then the number of rows
        lengths = torch.tensor([0, *(sum(part.sizes) + len(part.skipped) for part in parts)])
        self._firsts = lengths.cumsum(0)  # the first row of each file as it stands there
        left_out = [torch.tensor(part.skipped).long() + at for part, at in zip(parts, self._firsts, strict=False)]
        self._left_out = torch.cat(left_out)  # of CSV files, in their copies already; numbers among all rows
        self._block, self._parts = max([1, *sizes]), parts
        self._bad = self._left_out[:0]  # rows of Parquet files left out, by their number in the groups
        if self._skip and any(part.table.parquet for part in parts):
            bad = [self._decode(group, refuse=False)[1] + self._starts[group] for group in range(len(sizes))]
            self._bad = torch.cat([self._bad, *bad])
            if len(self._bad):
                listed = "".join(f"\n  {self._where(row)}" for row in self._bad[:10].tolist())
                log.warning("%d bad rows are left out of Parquet files, the first:%s", len(self._bad), listed)

    def _part(self, table: Table, columns: list[str]) -> Ready:
        """A file made ready: its row groups, and for CSV its converted copy."""
        if table.parquet:
            data = table
            for name, kind in table.numeric(columns).items():
                wanted = "int64" if name in self._whole else "float"
                if kind != wanted and f"{kind} {wanted}" not in self._warned:
                    self._warned.add(f"{kind} {wanted}")
                    log.info("%s: %s (column %r, …) is converted to %s as it is read", table.name, kind, name, wanted)
        else:
            first = self.tables()[0]
            beside = os.path.join(os.path.dirname(first.path), ".cache") if first.local else None
            copy = cached(table, columns, self._whole, self._skip, self._cache_dir or beside)
            data = Table(table.name, fs.LocalFileSystem(), copy)
        footer = data.footer()
        notes = footer.metadata or {}
        for name in json.loads(notes.get(ROUNDED, b"[]")):
            if name in columns:
                self._warn_rounded(table, name)
        skipped = [int(record) for record in notes.get(SKIPPED, b"").split(b",") if record]
        sizes = [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
        return Ready(table, data, table.stamp(), sizes, skipped)

    @property
    def in_features(self) -> int:
        return len(self.feature_names())

    @property
    def block(self) -> int:
        """Rows of the largest row group."""
        self.prepare()
        return self._block

    @property
    def skipped(self) -> int:
        """Rows left out as bad."""
        self.prepare()
        return len(self._bad) + len(self._left_out)

    def __len__(self) -> int:
        self.prepare()
        return int(self._starts[-1]) - len(self._bad)

    def where(self, row: int) -> str:
        """The place of a row: `data/a.csv, line 71`, or for Parquet `data/a.parquet, row 69 (counted from 0)`."""
        self.prepare()
        return self._where(int(among(torch.tensor([row]), self._bad)[0]))

    def numbers(self, rows: Tensor) -> Tensor:
        """Numbers of rows (int64) as they stand in the files, one after the other, with the rows that are left out."""
        self.prepare()
        return among(among(rows, self._bad), self._left_out)

    def _where(self, row: int) -> str:
        number = int(among(torch.tensor([row]), self._left_out)[0])
        file = int(torch.searchsorted(self._firsts, number, right=True)) - 1
        table, inside = self._parts[file].table, number - int(self._firsts[file])
        return f"{table.name}, row {inside} (counted from 0)" if table.parquet else place(table, inside)

    # -- reading

    def read(self, rows: Tensor) -> tuple[Tensor, ...]:
        """(x, y), or (x,) without a target. ValueError for a value that is no finite number, or a file that changed."""
        check_rows(rows, len(self))
        rows = among(rows, self._bad)
        group = torch.searchsorted(self._starts, rows, right=True) - 1
        order = group.argsort(stable=True)  # by group, so that each is taken up once
        inside = (rows - self._starts[group])[order]
        used, counts = torch.unique_consecutive(group[order], return_counts=True)
        sorted_rows, first = tensors(self._blank(len(rows))), 0
        for number, count in zip(used.tolist(), counts.tolist(), strict=True):
            for whole, part in zip(sorted_rows, self._group(number), strict=True):
                torch.index_select(part, 0, inside[first : first + count], out=whole[first : first + count])
            first += count
        return tuple(torch.empty_like(whole).index_copy_(0, order, whole) for whole in sorted_rows)

    def _group(self, number: int) -> tuple[Tensor, ...]:
        """A row group as tensors, of those kept or decoded now."""
        if number not in self._kept:
            self._kept[number] = self._decode(number, refuse=not self._skip)[0]
            size = sum(part.nbytes for part in self._kept[number])
            while len(self._kept) > max(1, min(KEPT_GROUPS, KEPT_BYTES // max(size, 1))):
                self._kept.popitem(last=False)
        self._kept.move_to_end(number)
        return self._kept[number]

    def _blank(self, n: int) -> list[Array]:
        """Room for n rows: x, and y if there is a target."""
        targets = len(self._targets)
        x = np.empty((n, len(self._columns) - targets), np.float32)
        y = np.empty((n, targets), np.int64 if self._whole else np.float32)
        return [x, y] if targets else [x]

    def _decode(self, number: int, refuse: bool) -> tuple[tuple[Tensor, ...], Tensor]:
        """A row group as tensors, and which of its rows are bad: refused, or left for the caller to leave out."""
        index, inside = self._groups[number]
        part = self._parts[index]
        if part.table.parquet and part.table.stamp() != part.stamp:  # the copy of a CSV file stays as it is
            raise ValueError(f"{part.table.name} has changed since this run opened it; start again with a file at rest")
        if index not in self._footers:
            self._footers[index] = part.data.footer()
        try:
            with part.data.files.open_input_file(part.data.path) as file:
                opened = pq.ParquetFile(file, metadata=self._footers[index])
                table = opened.read_row_group(inside, columns=self._columns, use_threads=False)
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(f"{part.table.name} cannot be read; is it cut off or damaged? {error}") from None
        out, bad = self._blank(len(table)), np.zeros(len(table), bool)
        cells = [column for array in out for column in array.T]
        for name, values in zip(self._columns, cells, strict=True):
            column = table.column(name)
            lost, rounded = fill(column, values)
            bad |= lost
            if rounded:
                self._warn_rounded(part.table, name)
            if refuse and lost.any():
                row = int(lost.argmax())
                wanted = "a whole number" if name in self._whole else "a finite float32 number"
                raise ValueError(
                    f"{self._where(int(self._starts[number]) + row)}, column {name!r}: "
                    f"{column[row].as_py()} found, {wanted} expected\nCorrect it, or skip such rows with {SKIP}."
                )
        return tensors(out), torch.from_numpy(np.flatnonzero(bad))

    def _warn_rounded(self, table: Table, name: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            log.warning("%s, column %r: float32 rounds some of its integers (those above 2^24)", table.name, name)
