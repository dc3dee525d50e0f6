"""CSV → Parquet, once. CSV has no random access, so a file is converted in one streamed pass and the result is kept.

Every cell is checked on the way. Cells are read as text and cast a block at a time; only a block whose cast fails is
looked at closely, so clean files are fast. Numbers as Python writes them count (also quoted, with a leading +, with
spaces around), and columns of true / false. All else is refused, or its row left out with `skip_bad_rows`: text, empty
cells, NaN, infinities, thousands separators, numbers that overflow float32, rows with too many or too few cells.

Lines are counted from 1, the header included, as an editor shows them: blank lines count, a row whose quoted cells hold
line breaks stands at its first line.

The result is a file named after a fingerprint of the source (path, size, time of change) and the options; it is written
under another name and renamed, so two jobs may convert at once, and a run goes on with what it has if the CSV changes.
"""

import contextlib
import csv
import hashlib
import io
import itertools
import json
import logging
import os
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from project.data.files import Array, Table

log = logging.getLogger("project")

GROUP_ROWS = 4096  # rows of a row group: what the reader decodes at once
BLOCK_BYTES = 1 << 20  # text parsed at once; pyarrow reads some thirty blocks ahead
NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
SKIPPED = b"project.skipped"  # in the result: numbers of the records left out
ROUNDED = b"project.rounded"  # columns with integers that float32 cannot hold
LEFTOVER_SECONDS = 3600.0  # a temporary file that nobody has written to for so long belongs to a job that died
SKIP = "--data.source.skip_bad_rows true"


def records(table: Table) -> Iterator[tuple[int, list[str]]]:
    """(line, cells) of each record that is not blank, the header first. Slow: for the header and for messages."""
    with table.text() as stream, io.TextIOWrapper(stream, "utf-8-sig", errors="replace", newline="") as text:
        reader, line = csv.reader(text), 1
        for cells in reader:
            if cells:
                yield line, cells
            line = reader.line_num + 1


def place(table: Table, record: int) -> str:
    """Words for where a record stands; the one below the header is record 0."""
    line = next((line for line, _ in itertools.islice(records(table), record + 1, None)), None)
    return f"{table.name}, line {line}"


def header(table: Table) -> list[str]:
    """The names in the first line, as they stand there. ValueError if it cannot be a header."""
    try:
        names = next((cells for _, cells in records(table)), [])
    except (OSError, csv.Error) as error:
        raise ValueError(f"{table.name} cannot be read: {error}") from None
    stripped = [name.strip() for name in names]
    if not names:
        raise ValueError(f"{table.name} is empty; a line of column names is expected")
    if any("\x00" in name or "\ufffd" in name for name in names):
        raise ValueError(f"{table.name} is not UTF-8 text; save it as UTF-8")
    if all(pc.match_substring_regex(pa.array(stripped), NUMBER).to_pylist()):
        raise ValueError(f"{table.name} has no header: its first line is {','.join(names)!r:.80}; add column names")
    twice = next((name for name, count in Counter(stripped).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"{table.name} has two columns named {twice!r}; every name must be there once")
    return names


def numbers(text: pa.StringArray, whole: bool) -> tuple[Array, Array, bool]:
    """Cells → (values float32, or int64 if `whole`; which are bad; whether integers were rounded)."""
    good: Array | bool = True
    try:
        exact = pc.cast(text, pa.int64() if whole else pa.float64()).to_numpy()
    except pa.ArrowInvalid:
        text = pc.utf8_trim_whitespace(text)
        lower = pc.utf8_lower(text)
        if pc.all(pc.is_in(lower, pa.array(["true", "false"]))).as_py():
            text = pc.if_else(pc.equal(lower, "true"), "1", "0")
        matches = pc.match_substring_regex(text, NUMBER)
        good = matches.to_numpy(zero_copy_only=False)
        exact = pc.cast(pc.if_else(matches, text, "0"), pa.float64()).to_numpy()
    with np.errstate(invalid="ignore", over="ignore"):
        values = exact.astype(np.int64 if whole else np.float32)
        if whole:
            return values, ~(good & (values == exact)), False
        integers = (np.abs(exact) > 2**24) & (np.abs(exact) < 2**53) & (exact == np.floor(exact))
        return values, ~(good & np.isfinite(values)), bool((integers & (values != exact)).any())


class _Conversion:
    """One pass over a CSV file: what is bad in it, and what it holds."""

    def __init__(self, table: Table, columns: list[str], whole: frozenset[str], skip: bool) -> None:
        self.table, self.columns, self.whole, self.skip = table, columns, whole, skip
        self.ragged: dict[int, str] = {}  # records with a wrong number of cells, which the reader drops → reason
        self.bad: dict[int, str] = {}  # records with a bad cell → reason; only the first ten reasons are kept
        self.rounded: set[str] = set()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The good rows, block by block."""
        raw = {name.strip(): name for name in header(self.table)}
        options = pyarrow.csv.ConvertOptions(
            column_types=dict.fromkeys(raw.values(), pa.string()), include_columns=[raw[c] for c in self.columns]
        )
        parse = pyarrow.csv.ParseOptions(newlines_in_values=True, invalid_row_handler=self._wrong_length)
        longest = 64 * sum(len(name) + 1 for name in raw)  # a block must hold a row, however many columns it has
        read = pyarrow.csv.ReadOptions(block_size=max(BLOCK_BYTES, longest), use_threads=False)
        seen = 0
        try:
            with self.table.text() as stream, pyarrow.csv.open_csv(stream, read, parse, options) as reader:
                for batch in reader:
                    yield self._checked(batch, seen)
                    seen += batch.num_rows
        except (pa.ArrowInvalid, OSError, EOFError) as error:
            if self.ragged and not self.skip:
                record, reason = next(iter(self.ragged.items()))
                raise ValueError(
                    f"{place(self.table, record)}: {reason}\nCorrect it, or skip it with {SKIP}."
                ) from None
            if not self.ragged and seen == 0 and "Empty CSV" in str(error):
                return  # a header alone
            raise ValueError(f"{self.table.name} cannot be read; is it cut off or damaged? {error}") from None

    def _wrong_length(self, row: Any) -> str:
        reason = f"{row.actual_columns} cells found, {row.expected_columns} expected: {row.text!r:.60}"
        self.ragged[row.number - 2] = reason  # numbered from 1, the header included, blank lines not
        return "skip" if self.skip else "error"

    def _checked(self, batch: pa.RecordBatch, seen: int) -> pa.RecordBatch:
        """A block as numbers, without its bad rows; ValueError for the first of them unless they are skipped."""
        values, bad = [], np.zeros(batch.num_rows, bool)
        wrong: list[tuple[int, int]] = []  # (row, column) of the first bad cell of each column
        for i, name in enumerate(self.columns):
            column, lost, rounded = numbers(batch.column(i), name in self.whole)
            values.append(column)
            if rounded:
                self.rounded.add(name)
            if lost.any():
                wrong += [(int(row), i) for row in np.flatnonzero(lost)[:10]]
                bad |= lost
        if wrong:
            ragged = np.array(sorted(self.ragged), dtype=np.int64)
            rows = np.flatnonzero(bad)
            found = rows + seen + np.searchsorted(ragged - np.arange(len(ragged)), rows + seen, side="right")
            number = dict(zip(rows.tolist(), found.tolist(), strict=True))  # row of the block → record of the file
            self.bad.update(dict.fromkeys(found.tolist(), ""))
            for row, i in sorted(wrong)[:10]:
                expected = "a whole number" if self.columns[i] in self.whole else "a number"
                reason = f"column {self.columns[i]!r}: {batch.column(i)[row].as_py()!r:.60} found, {expected} expected"
                if not self.skip:
                    hint = f"Correct it, name the columns to use with --data.source.features, or skip it with {SKIP}."
                    raise ValueError(f"{place(self.table, number[row])}, {reason}\n{hint}")
                self.bad[number[row]] = self.bad[number[row]] or reason
            values = [column[~bad] for column in values]
        return pa.RecordBatch.from_arrays([pa.array(column) for column in values], names=self.columns)

    def report(self) -> list[int]:
        """Name the first ten rows left out; the numbers of all."""
        reasons = {**self.bad, **self.ragged}
        skipped = sorted(reasons)
        if skipped:
            first = skipped[:10]
            lines = dict(zip(range(first[-1] + 1), itertools.islice(records(self.table), 1, None), strict=False))
            listed = "".join(f"\n  line {lines[record][0]}: {reasons[record]}" for record in first)
            more = f"\n  and {len(skipped) - 10} more" if len(skipped) > 10 else ""
            log.warning("%s: %d bad rows are left out\n%s%s", self.table.name, len(skipped), listed[1:], more)
        return skipped


def cached(table: Table, columns: list[str], whole: frozenset[str], skip: bool, folder: str | None) -> str:
    """The path of the Parquet file that holds these columns of a CSV file, converted first if need be."""
    stamp = table.stamp()
    if folder is None:
        raise ValueError(f"{table.name} must be converted; name a local folder for that: --data.source.cache_dir")
    where = os.path.abspath(table.path) if table.local else table.name
    key = json.dumps([1, where, stamp, columns, sorted(whole), skip])
    result = os.path.join(
        folder, f"{os.path.basename(table.path)}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.parquet"
    )
    if not _usable(result):
        temporary = f"{result}.{uuid.uuid4().hex}.tmp"
        try:
            os.makedirs(folder, exist_ok=True)
            _clean(folder)
            with open(temporary, "wb") as out:
                _write(table, _Conversion(table, columns, whole, skip), out)
            if table.stamp() != stamp:
                raise ValueError(f"{table.name} changed while it was read; start again when nothing writes to it")
            os.replace(temporary, result)
        except OSError as error:
            raise ValueError(
                f"{table.name} cannot be converted into {folder}: {error.strerror or error}\n"
                "Name a folder that can be written, with enough space: --data.source.cache_dir"
            ) from None
        finally:
            if os.path.exists(temporary):
                os.unlink(temporary)
    return result


def _write(table: Table, conversion: _Conversion, out: Any) -> None:
    began, rows = time.monotonic(), 0
    log.info("%s: converting to Parquet, once (%s)", table.name, os.path.dirname(out.name))
    types = [pa.int64() if c in conversion.whole else pa.float32() for c in conversion.columns]
    schema = pa.schema(list(zip(conversion.columns, types, strict=True)))
    plain: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    with pq.ParquetWriter(out, schema, **plain) as writer:
        rest = schema.empty_table()
        for batch in conversion.batches():
            rest = pa.concat_tables([rest, pa.Table.from_batches([batch], schema)])
            ready = len(rest) // GROUP_ROWS * GROUP_ROWS
            if ready:
                writer.write_table(rest.slice(0, ready), row_group_size=GROUP_ROWS)
                rest, rows = rest.slice(ready), rows + ready
        if len(rest):
            writer.write_table(rest, row_group_size=GROUP_ROWS)
        skipped = ",".join(map(str, conversion.report()))
        writer.add_key_value_metadata({SKIPPED: skipped, ROUNDED: json.dumps(sorted(conversion.rounded))})
    log.info("%s: %d rows in %.1f s", table.name, rows + len(rest), time.monotonic() - began)


def _usable(path: str) -> bool:
    try:
        return os.path.exists(path) and pq.read_metadata(path) is not None
    except (pa.ArrowException, OSError):
        return False  # damaged; made again


def _clean(folder: str) -> None:
    """Remove what jobs that died have left."""
    for entry in os.scandir(folder):
        if ".parquet." in entry.name and entry.name.endswith(".tmp"):
            with contextlib.suppress(OSError):  # another job was quicker
                if time.time() - entry.stat().st_mtime > LEFTOVER_SECONDS:
                    os.unlink(entry.path)
