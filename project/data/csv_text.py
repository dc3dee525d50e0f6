"""What a CSV file holds: lines, a header, and cells that must be numbers.

Cells are read as text and cast a block at a time; only a block whose cast fails is looked at closely, so clean files
are fast. Numbers as Python writes them count (also quoted, with a leading +, with spaces around), and columns of true /
false. All else is refused, or its row left out with `skip_bad_rows`: text, empty cells, NaN, infinities, thousands
separators, numbers that overflow float32, rows with too many or too few cells. In a table of one column a blank line is
an empty cell, except at the end. A quote that is not closed is refused in any case: it may hide any number of rows.

Lines are counted from 1, the header included, as an editor shows them: blank lines count, a row whose quoted cells hold
line breaks stands at its first line.
"""

import csv
import io
import itertools
import logging
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from project.data.files import Array, Table

log = logging.getLogger("project")

BLOCK_BYTES = 1 << 20  # text parsed at once; pyarrow reads some thirty blocks ahead
NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
IN_ROWS = NUMBER + r"|^([+-]?(nan|inf|infinity)|na|n/a|null|none)$"  # lower case; a line of these alone is no header
SKIP = "--data.source.skip_bad_rows true"
TORN = "Is a quote missing? Rows within it would be lost, so this is refused with skip_bad_rows as well."


def records(table: Table, strict: bool = False) -> Iterator[tuple[int, list[str]]]:
    """(line, cells) of each record, the header first; blank ones only in a table of one column. Slow: for messages.

    csv.Error for what cannot be cut into cells, with `strict` also for quotes that are not closed where a cell ends.
    """
    with table.text() as stream, io.TextIOWrapper(stream, "utf-8-sig", errors="replace", newline="") as text:
        reader, line, one_column = csv.reader(text, strict=strict), 1, False
        for cells in reader:
            if cells or one_column:
                yield line, cells
                one_column = one_column or (len(cells) == 1)
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
    if all(pc.match_substring_regex(pc.utf8_lower(pa.array(stripped)), IN_ROWS).to_pylist()):
        raise ValueError(f"{table.name} has no header: its first line is {','.join(names)!r:.80}; add column names")
    twice = next((name for name, count in Counter(stripped).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"{table.name} has two columns named {twice!r}; every name must be there once")
    return names


def names(table: Table) -> list[str]:
    """The columns of a table, without spaces around."""
    return table.names() if table.parquet else [name.strip() for name in header(table)]


def numbers(text: pa.StringArray, whole: bool) -> tuple[Array, Array, bool]:
    """Cells → (values float32, or int64 if `whole`; which are bad; whether integers were rounded)."""
    good = np.ones(len(text), bool)
    try:
        if whole and b"x" in pa.py_buffer(text.buffers()[2] or b"").to_pybytes().lower():
            raise pa.ArrowInvalid("pyarrow would take 0x10 for 16")
        exact = pc.cast(text, pa.int64() if whole else pa.float64()).to_numpy()
    except pa.ArrowInvalid:
        text = pc.utf8_trim_whitespace(text)
        lower = pc.utf8_lower(text)
        if pc.all(pc.is_in(lower, pa.array(["true", "false"]))).as_py():
            text = pc.if_else(pc.equal(lower, "true"), "1", "0")
        matches = pc.match_substring_regex(text, NUMBER)
        good = matches.to_numpy(zero_copy_only=False).copy()
        text = pc.if_else(matches, text, "0")
        exact = pc.cast(text, pa.float64()).to_numpy()
    with np.errstate(invalid="ignore", over="ignore"):
        values = exact.astype(np.int64 if whole else np.float32)
        large: Any = np.flatnonzero((np.abs(exact) >= 2**53) & np.isfinite(values)) if exact.dtype.kind == "f" else []
        if whole:
            good &= values == exact
            for i in large:  # beyond what float64 tells apart
                number = Decimal(text[i].as_py())
                good[i] = abs(exact[i]) <= 2.0**63 and number == int(number) and -(2**63) <= number < 2**63
                values[i] = int(number) if good[i] else 0
            return values, ~good, False
        integers = (np.abs(exact) > 2**24) & (np.abs(exact) < 2**53) & (exact == np.floor(exact))
        rounded = bool((integers & (values != exact)).any())
        written = text.take(pa.array(large, pa.int64())) if len(large) and not rounded else []  # 1e30 is no integer
        rounded = rounded or any(
            cell.strip("+-").isdigit() and int(cell) != int(values[i])
            for i, cell in zip(large, map(str, written), strict=False)
        )
        return values, ~(good & np.isfinite(values)), rounded


class _Quotes(io.RawIOBase):
    """A stream that counts the quotes in it: if they are odd, one is missing somewhere, or stands within a word."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.count = stream, 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data: bytes = self.stream.read(size)
        self.count += data.count(b'"')
        return data


class Conversion:
    """One pass over a CSV file: what is bad in it, and what it holds."""

    def __init__(self, table: Table, columns: list[str], whole: frozenset[str], skip: bool) -> None:
        self.table, self.columns, self.whole, self.skip = table, columns, whole, skip
        self.ragged: dict[int, str] = {}  # records with a wrong number of cells, which the reader drops → reason
        self.bad: dict[int, str] = {}  # records with a bad cell → reason; only the first ten reasons are kept
        self.rounded: set[str] = set()
        self.refused = ""  # what the reader was told to stop at
        self.torn = ""  # a pattern of cells that look like lines
        self.above = 0  # blank lines above the header that the reader counts

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The good rows, block by block."""
        raw = {name.strip(): name for name in header(self.table)}
        options = pyarrow.csv.ConvertOptions(
            column_types=dict.fromkeys(raw.values(), pa.string()),
            include_columns=[raw[c] for c in self.columns],
            strings_can_be_null=True,
            null_values=[""],
            quoted_strings_can_be_null=False,
        )
        one = len(raw) == 1  # then a blank line is a cell, but not above the header and at the end
        self.torn = r"\n" if one else r"(?s)\n.*,|,.*\n"
        self.above = next(line for line, _ in records(self.table)) - 1 if one else 0
        parse = pyarrow.csv.ParseOptions(
            newlines_in_values=True, invalid_row_handler=self._wrong_length, ignore_empty_lines=not one
        )
        longest = 64 * sum(len(name) + 1 for name in raw)  # a block must hold a row, however many columns it has
        read = pyarrow.csv.ReadOptions(block_size=max(BLOCK_BYTES, longest), use_threads=False, skip_rows=self.above)
        seen = blank = 0
        try:
            with self.table.text() as stream:
                quotes = _Quotes(stream)
                with pyarrow.csv.open_csv(quotes, read, parse, options) as reader:
                    for batch in reader:
                        cells = [column.fill_null("") for column in batch.columns]
                        if one:  # hold back the blank lines that may be the last
                            held = pa.array([""] * blank, pa.string())
                            filled = np.flatnonzero(batch.column(0).is_valid())
                            end = int(filled[-1]) + 1 if len(filled) else 0
                            blank = len(batch) - end + (0 if end else blank)
                            cells = [pa.concat_arrays([held, cells[0][:end]]) if end else cells[0][:0]]
                        yield self._checked(cells, seen)
                        seen += len(cells[0])
            self._check_quotes(quotes.count % 2 == 1)
        except (pa.ArrowInvalid, OSError, EOFError) as error:
            if self.refused:
                raise ValueError(self.refused) from None
            if not self.ragged and seen == 0 and "Empty CSV" in str(error):
                return  # a header alone
            self._check_quotes("straddling" in str(error))
            raise ValueError(f"{self.table.name} cannot be read; is it cut off or damaged? {error}") from None

    def _check_quotes(self, doubtful: bool) -> None:
        """ValueError if a quote is not closed where a cell ends; looked for only when there is a sign of it."""
        line = 1
        try:
            for line, cells in records(self.table, strict=True) if doubtful else ():
                line += sum(cell.count("\n") for cell in cells) + 1
        except csv.Error as error:
            raise ValueError(f"{self.table.name}, line {line} or below: {error}, in quotes\n{TORN}") from None

    def _wrong_length(self, row: Any) -> str:
        record = row.number - 2 - self.above  # numbered from 1, the header included, blank lines not
        reason = f"{row.actual_columns} cells found, {row.expected_columns} expected: {row.text!r:.60}"
        self.ragged[record] = reason
        torn = "\n" in row.text
        if torn or not self.skip:
            hint = TORN if torn else f"Correct it, or skip it with {SKIP}."
            self.refused = f"{place(self.table, record)}: {reason}\n{hint}"
            return "error"
        return "skip"

    def _checked(self, cells: list[pa.StringArray], seen: int) -> pa.RecordBatch:
        """A block as numbers, without its bad rows; ValueError for the first of them unless they are skipped."""
        values, bad = [], np.zeros(len(cells[0]), bool)
        wrong: list[tuple[int, int]] = []  # (row, column) of the first bad cells of each column
        torn: list[tuple[int, int]] = []  # ... and of the first one that seems to hold other rows
        for i, name in enumerate(self.columns):
            column, lost, rounded = numbers(cells[i], name in self.whole)
            values.append(column)
            if rounded:
                self.rounded.add(name)
            if lost.any():
                rows = np.flatnonzero(lost)
                breaks = pc.match_substring_regex(cells[i].take(pa.array(rows)), self.torn).to_numpy(False)
                wrong += [(int(row), i) for row in rows[:10]]
                torn += [(int(row), i) for row in rows[breaks][:1]]
                bad |= lost
        if wrong:
            ragged = np.array(sorted(self.ragged), dtype=np.int64)
            rows = np.flatnonzero(bad)
            found = rows + seen + np.searchsorted(ragged - np.arange(len(ragged)), rows + seen, side="right")
            number = dict(zip(rows.tolist(), found.tolist(), strict=True))  # row of the block → record of the file
            self.bad.update(dict.fromkeys(found.tolist(), ""))
            for row, i in sorted(wrong)[:10] + torn:
                expected = "a whole number" if self.columns[i] in self.whole else "a number"
                reason = f"column {self.columns[i]!r}: {cells[i][row].as_py()!r:.60} found, {expected} expected"
                if (row, i) in torn or not self.skip:
                    hint = f"Correct it, name the columns to use with --data.source.features, or skip it with {SKIP}."
                    hint = TORN if (row, i) in torn else hint
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
