"""Which files a setting means (a name, a folder, a pattern, an address like `s3://bucket/key`), and what they hold."""

import difflib
import fnmatch
import hashlib
import os
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyarrow import fs
from torch import Tensor

from project.data.sources import inexact

Array = np.ndarray[Any, Any]
KINDS = (".csv", ".csv.gz", ".parquet")
FLAG = "--data.source.files"
COLUMNS = "List the columns to use with --data.source.features and --data.source.target."
SAMPLES, SAMPLE_BYTES = 16, 1 << 16  # parts of a file that its fingerprint is made of: all of it up to a megabyte
REAL = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal)


@dataclass(frozen=True)
class Table:
    """One file: its name for messages, and where pyarrow finds it."""

    name: str
    files: Any  # pyarrow's file system
    path: str

    @property
    def parquet(self) -> bool:
        return self.path.lower().endswith(".parquet")

    @property
    def local(self) -> bool:
        return isinstance(self.files, fs.LocalFileSystem)

    def stamp(self) -> tuple[int, int]:
        """Size and time of last change; ValueError if the file is gone."""
        info = self.files.get_file_info(self.path)
        if not info.is_file:
            raise ValueError(f"{self.name} is not there any more")
        return info.size, info.mtime_ns or 0

    def fingerprint(self) -> list[Any]:
        """What changes with the content, also if size and time are as before: more of its state, and parts of it."""
        size, changed = self.stamp()
        digest, found = hashlib.sha256(), os.stat(self.path) if self.local else None
        with self.files.open_input_file(self.path) as file:
            for i in range(SAMPLES):
                file.seek(max(size - SAMPLE_BYTES, 0) * i // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
        return [size, changed, digest.hexdigest(), *([found.st_ino, found.st_ctime_ns] if found else [])]

    def text(self) -> Any:
        """A stream of a CSV file's bytes, unpacked."""
        packed = self.path.lower().endswith(".gz")
        return self.files.open_input_stream(self.path, compression="gzip" if packed else None)

    def footer(self) -> Any:
        """What a Parquet file says of itself (pyarrow's FileMetaData); ValueError if it is none."""
        try:
            with self.files.open_input_file(self.path) as file:
                return pq.read_metadata(file)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{self.name} cannot be read as Parquet; is it cut off or damaged? {error}") from None

    def names(self) -> list[str]:
        """The columns of a Parquet file."""
        return list(self.footer().schema.to_arrow_schema().names)

    def numeric(self, columns: list[str]) -> dict[str, str]:
        """The types of these columns of a Parquet file; ValueError if one holds no real numbers."""
        schema = self.footer().schema.to_arrow_schema()
        for name in columns:
            if not any(real(schema.field(name).type) for real in REAL):
                found = schema.field(name).type
                raise ValueError(f"{self.name}, column {name!r} holds {found}; numbers are expected\n{COLUMNS}")
        return {name: str(schema.field(name).type) for name in columns}


def check_names(table: Table, found: list[str], columns: list[str], exact: bool) -> None:
    """ValueError unless a table with columns `found` has all of `columns`, and no others if `exact`."""
    there, wanted = set(found), set(columns)
    missing = next((name for name in columns if name not in there), None)
    if missing is not None:
        near = difflib.get_close_matches(missing, found, 1)
        raise ValueError(
            f"{table.name} has no column {missing!r}{f'; did you mean {near[0]!r}?' if near else ''}\n"
            f"Its columns: {', '.join(map(repr, found)):.500}\n{COLUMNS}"
        )
    odd = next((name for name in found if name not in wanted or not name), None)
    if exact and odd is not None:
        why = "is not in the first file" if odd else "has no name (a saved index?)"
        raise ValueError(f"{table.name}: column {found.index(odd) + 1}, {odd!r}, {why}\n{COLUMNS}")


def fill(column: Any, out: Array) -> tuple[Array, bool]:
    """Copy a column into `out`, float32 or int64: which of its numbers are lost, and whether integers were rounded."""
    lost = column.is_null().to_numpy() if column.null_count else np.zeros(len(column), bool)
    if column.null_count:
        column = column.fill_null(pa.scalar(0).cast(column.type))
    values = (column.cast(pa.float64()) if pa.types.is_decimal(column.type) else column).to_numpy()
    with np.errstate(invalid="ignore", over="ignore"):
        out[:] = values
        if out.dtype.kind == "i":
            return lost | (out != values), False
        if values.dtype.kind == "f":
            return lost | ~np.isfinite(out), False
        return lost, values.dtype.itemsize > 2 and bool(inexact(out, values).any())


def among(rows: Tensor, left_out: Tensor) -> Tensor:
    """Numbers among the rows that remain → numbers among all; `left_out` in rising order."""
    if not len(left_out):
        return rows
    return rows + torch.searchsorted(left_out - torch.arange(len(left_out)), rows, right=True)


def tensors(arrays: list[Array]) -> tuple[Tensor, ...]:
    """x [n, features] and y [n, targets], or [n] for one target of class numbers."""
    tensors = [torch.from_numpy(array) for array in arrays]
    return tuple(t.squeeze(1) if t.dtype == torch.int64 and t.shape[1] == 1 else t for t in tensors)


def find(pattern: str) -> list[Table]:
    """The tables that one entry of `files` stands for, by name. ValueError if there are none, telling what is there.

    A folder means the tables in it; in a pattern `*`, `?` and `[…]` stay within a folder and `**` goes down. Hidden
    files and folders (a leading dot) are never meant, unless named.
    """
    pattern = os.path.expanduser(pattern)
    magic = None if os.path.exists(pattern) else re.search(r"[*?[]", pattern)
    base = pattern[: pattern.rfind("/", 0, magic.start()) + 1] if magic else pattern  # where to look, or the file
    wanted = pattern[len(base) :].split("/") if magic else ["*"]
    try:
        if "://" in base:
            files, root = fs.FileSystem.from_uri(base)
        else:
            files, root = fs.LocalFileSystem(), base or "."
        scheme = base[: base.index("://") + 3] if "://" in base else ""
        info = files.get_file_info(root)
        if info.is_file:
            if not root.lower().endswith(KINDS):
                raise ValueError(f"{FLAG}: {pattern} is none of {', '.join(KINDS)}")
            return [Table(scheme + root, files, root)]
        exists = info.type == fs.FileType.Directory
        entries = files.get_file_info(fs.FileSelector(root, recursive=len(wanted) > 1)) if exists else []
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{FLAG}: {pattern} cannot be opened: {error}") from None
    start = len(root.rstrip("/")) + 1
    inside = {entry.path[start:]: entry for entry in entries}
    tables = [
        Table(scheme + (entry.path[2:] if not base else entry.path), files, entry.path)
        for name, entry in sorted(inside.items())
        if entry.is_file and name.lower().endswith(KINDS) and _matches(name.split("/"), wanted)
    ]
    if not tables:
        shown = ", ".join(sorted(inside)[:6]) + (", …" if len(inside) > 6 else "")
        place = os.path.abspath(root) if not scheme else scheme + root
        found = f"which holds {shown or 'nothing'}" if exists else "which does not exist"
        raise ValueError(f"{FLAG}: {pattern} stands for no table ({', '.join(KINDS)})\nLooked at {place}, {found}")
    return tables


def _matches(parts: list[str], wanted: list[str]) -> bool:
    """Whether a path matches a pattern, folder by folder."""
    if not wanted or not parts:
        return parts == wanted
    if wanted[0] == "**":
        return _matches(parts, wanted[1:]) or (not parts[0].startswith(".") and _matches(parts[1:], wanted))
    hidden = parts[0].startswith(".") and not wanted[0].startswith(".")
    return not hidden and fnmatch.fnmatchcase(parts[0], wanted[0]) and _matches(parts[1:], wanted[1:])


@dataclass(frozen=True)
class Ready:
    """A file made ready."""

    table: Table  # as the user names it
    data: Table  # what is read: the same, or the converted copy
    stamp: tuple[int, int]
    sizes: list[int]  # rows of each row group
    skipped: list[int]  # CSV: numbers of the records left out
