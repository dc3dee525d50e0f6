"""CSV → Parquet, once. CSV has no random access, so a file is converted in one streamed pass and the result is kept.

The result is a file named after a fingerprint of the source (its path, what it is like, blocks of its content) and the
options; it is written under another name and renamed, so two jobs may convert at once, and a run goes on with what it
has if the CSV changes. A copy with more columns than are asked for will do, unless rows were left out for them.
"""

import contextlib
import glob
import hashlib
import json
import logging
import os
import time
import uuid
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from project.data.csv_text import Conversion
from project.data.files import Table

log = logging.getLogger("project")

GROUP_ROWS = 4096  # rows of a row group: what the reader decodes at once
SKIPPED = b"project.skipped"  # in the result: numbers of the records left out
ROUNDED = b"project.rounded"  # columns with integers that float32 cannot hold
LEFTOVER_SECONDS = 3600.0  # a temporary file that nobody has written to for so long belongs to a job that died


def cached(table: Table, columns: list[str], whole: frozenset[str], skip: bool, folder: str | None) -> str:
    """The path of a Parquet file that holds these columns of a CSV file, converted first if need be."""
    if folder is None:
        raise ValueError(f"{table.name} must be converted; name a local folder for that: --data.source.cache_dir")
    before = table.fingerprint()
    where = os.path.abspath(table.path) if table.local else table.name
    source, options = (
        hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
        for key in ([2, where, before, skip], [columns, sorted(whole)])
    )
    prefix = os.path.join(folder, f"{os.path.basename(table.path)}-{source}")
    result, fields = f"{prefix}-{options}.parquet", _fields(columns, whole)
    for found in [result, *glob.glob(f"{glob.escape(prefix)}-*.parquet")]:
        if _holds(found, fields, found == result):
            return found
    temporary = f"{result}.{uuid.uuid4().hex}.tmp"
    try:
        os.makedirs(folder, exist_ok=True)
        _clean(folder)
        with open(temporary, "wb") as out:
            _write(table, Conversion(table, columns, whole, skip), pa.schema(fields), out)
        if table.fingerprint() != before:
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


def _fields(columns: list[str], whole: frozenset[str]) -> list[Any]:
    return [pa.field(name, pa.int64() if name in whole else pa.float32()) for name in columns]


def _holds(path: str, fields: list[Any], exact: bool) -> bool:
    """Whether a file is a whole copy with these columns; damaged ones are made again."""
    try:
        schema = pq.read_schema(path)
    except (pa.ArrowException, OSError):
        return False
    there = all(field.name in schema.names and schema.field(field.name).type == field.type for field in fields)
    return there and (exact or not (schema.metadata or {}).get(SKIPPED))


def _write(table: Table, conversion: Conversion, schema: pa.Schema, out: Any) -> None:
    began, rows = time.monotonic(), 0
    log.info("%s: converting to Parquet, once (%s)", table.name, os.path.dirname(out.name))
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


def _clean(folder: str) -> None:
    """Remove what jobs that died have left."""
    for entry in os.scandir(folder):
        if ".parquet." in entry.name and entry.name.endswith(".tmp"):
            with contextlib.suppress(OSError):  # another job was quicker
                if time.time() - entry.stat().st_mtime > LEFTOVER_SECONDS:
                    os.unlink(entry.path)
