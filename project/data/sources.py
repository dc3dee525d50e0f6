"""What rows are. A source is any class with a length and one method, `read(rows)`; users add theirs here or elsewhere.

The streaming code asks nothing else of a source. It looks up these further names with `getattr`, all optional:

* `in_features: int`: number of input columns; without it, row 0 is read to find out.
* `on_device: bool = False`: True if `read` may be given rows on an accelerator and creates the result there.
* `block: int | None = None`: None if any row costs the same (shuffled fully); a number if stretches of so many
  neighbouring rows are cheap to read together (row groups): then many stretches are mixed, and asked for at once.
* `prepare() -> None`: called in one process per machine before others ask for rows (say, to convert a file).
* `where(row) -> str`: the place of a row in words ("data/a.csv, line 71"), for error messages.
* `skipped: int`: rows left out as bad; `numbers(rows) -> Tensor`: what rows are called in predictions if some are.

Sources are pickled to worker processes: they keep no open handle in their state, and open files where they are used.
"""

import logging
import math
import os
from abc import ABC, abstractmethod
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from project.data.normals import ALIGN, CPU_BLOCK, CPU_ROWS, DEVICE_BLOCK, GOLDEN, Normals, signed, splitmix64

log = logging.getLogger("project")
Array = np.ndarray[Any, Any]
Kind = Literal["linear", "binary"]
SORTED_BYTES = 16 << 30  # larger arrays may not fit in memory: rows in order spare the disk, and cost less than it does


class Source(ABC):
    """Numbered rows, 0 … len−1."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Rows by number (int64), any order, repeats allowed → fresh contiguous tensors; their row i is `rows[i]`."""


def check_rows(rows: Tensor, length: int) -> None:
    """IndexError if a row lies outside 0 … length−1. Not checked on an accelerator: that would wait for it."""
    if rows.device.type == "cpu" and len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < length:
        raise IndexError(f"rows {rows.min()} to {rows.max()} were asked of a source of {length} rows")


def inexact(held: Array, integers: Array) -> Array:
    """Which integers float32 `held` differs from; compared as integers, since float64 would round them alike."""
    with np.errstate(invalid="ignore"):
        lost: Array = (held >= 2.0**63) | (held.astype(np.int64) != integers.astype(np.int64))
        return lost


class SyntheticSource(Source):
    """Rows made on the spot, on any device: row i is a pure function of (seed, i), the same bits in any company.

    x is float32 [n, features] of independent N(0, 1). "linear": y = x·w + b + noise · N(0, 1), float32 [n, 1].
    "binary": y is 1 with probability sigmoid(3 (x·w + b)), else 0, float32 [n, 1]. `weight` (list of floats) and
    `bias` are drawn from the seed, scaled so that x·w has a variance of about 1. ValueError for impossible arguments.
    """

    on_device = True

    def __init__(
        self, rows: int = 100_000, features: int = 10, kind: Kind = "linear", noise: float = 0.1, seed: int = 0
    ) -> None:
        for name, value, least in (("rows", rows, 0), ("features", features, 1), ("noise", noise, 0)):
            if not value >= least:
                raise ValueError(f"--data.source.{name} is {value}; at least {least} is needed")
        if kind not in get_args(Kind):
            raise ValueError(f"--data.source.kind is {kind!r}; it can be 'linear' or 'binary'")
        self.rows, self.in_features, self.kind, self.noise, self.seed = rows, features, kind, noise, seed
        self._key = splitmix64(seed)
        self._work: Normals | None = None
        start = splitmix64(self._key ^ GOLDEN)  # another stream than the rows'
        states = torch.tensor([signed(start + GOLDEN * (i + 1)) for i in range(features + 1)])
        *weight, self.bias = Normals(1, features + 1, states.device).draw(states, states[:1, None] * 0, 1)[0].tolist()
        self.weight = [w / math.sqrt(features) for w in weight]

    def __len__(self) -> int:
        return self.rows

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_work": None}

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(x [n, features], y [n, 1]), float32, on the device of `rows`."""
        check_rows(rows, self.rows)
        n, pairs, device = len(rows), self.in_features // 2 + 1, rows.device  # one normal more than features: the noise
        x, y = torch.empty(n, self.in_features, device=device), torch.empty(n, 1, device=device)
        most = min(CPU_BLOCK // pairs, CPU_ROWS) if device.type == "cpu" else DEVICE_BLOCK // pairs
        blocks = max(-(-n // max(most // ALIGN * ALIGN, ALIGN)), 1)
        size = max(-(-n // (blocks * ALIGN)), 1) * ALIGN  # blocks of one size; the last is filled up
        work = self._work
        if work is None or device.type != "cpu" or len(work.base) < size:
            work = Normals(pairs, size, device)
            self._work = work if device.type == "cpu" else None  # an accelerator's allocator keeps freed memory itself
        base = work.base[:size]
        steps = torch.arange(pairs, device=device).mul_(signed(GOLDEN))[:, None]
        with torch.inference_mode():  # operations cost less; x and y are made outside, so they are ordinary tensors
            for first in range(0, n, size):
                part = rows[first : first + size]
                torch.mul(part, signed(pairs * GOLDEN), out=base[: len(part)]).add_(signed(self._key + GOLDEN))
                drawn = work.draw(base, steps, self.in_features + 1)
                columns, to = drawn[: self.in_features, : len(part)], x[first : first + size].t()
                np.copyto(to.numpy(), columns.numpy()) if device.type == "cpu" else to.copy_(columns)  # twice as fast
                y[first : first + size, 0] = self._target(drawn)[: len(part)]
        return x, y

    def _target(self, drawn: Tensor) -> Tensor:
        """float32 [n] from normals [features + 1 or 2, n]. The sum is spelt out: its order must not depend on n."""
        total, extra = torch.full_like(drawn[0], self.bias), drawn[self.in_features]
        for column, weight in zip(drawn, self.weight, strict=False):
            total.add_(column, alpha=weight)
        if self.kind == "linear":
            return total.add_(extra, alpha=self.noise)
        uniform = extra.mul(math.sqrt(0.5)).erf_().add_(1.0).mul_(0.5)  # a normal through its distribution function
        odds = total.mul_(-3.0).exp_().add_(1.0)  # 1 / sigmoid; the same bits at any length, unlike torch.sigmoid
        return (uniform.mul_(odds) < 1.0).to(torch.float32)


class ArraySource(Source):
    """Two .npy files, memory-mapped: x [N, C] or [N], y [N], [N, 1] or [N, K]; nothing in them is ever run.

    Any real dtype, byte order and layout is converted to float32 as it is read, announced once. `read` gives x float32
    [n, C] and y: float32 [n, 1] (or [n, K]), or with `target_dtype` "int64" int64 [n] (or [n, K]) for class numbers;
    without a file for y, x alone. ValueError for files, shapes, dtypes and values (NaN, infinity) that cannot be used.
    """

    def __init__(self, x: str, y: str | None = None, target_dtype: Literal["float32", "int64"] = "float32") -> None:
        self._paths = [str(path) for path in (x, y) if path is not None]
        self._dtypes = ["float32", target_dtype][: len(self._paths)]
        self._stamps = [_stamp(path) for path in self._paths]
        self._maps: list[Array] | None = None
        self._warned: set[str] = set()
        shapes = [array.shape for array in self._open()]
        if any(len(shape) not in (1, 2) for shape in shapes) or len({shape[0] for shape in shapes}) > 1:
            listed = ", ".join(f"{path}: {list(shape)}" for path, shape in zip(self._paths, shapes, strict=True))
            raise ValueError(f"{listed}\nExpected: x [rows, columns] and y [rows] or [rows, 1], of as many rows")
        for path, array, dtype in zip(self._paths, self._open(), self._dtypes, strict=True):
            if array.dtype != dtype:
                log.info("%s: %s is converted to %s as it is read", path, array.dtype, dtype)
        self.in_features = math.prod(shapes[0][1:])
        self._sort = sum(array.nbytes for array in self._open()) > SORTED_BYTES

    def __len__(self) -> int:
        return len(self._open()[0])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": None}

    def where(self, row: int) -> str:
        return f"{self._paths[0]}, row {row} (counted from 0)"

    def read(self, rows: Tensor) -> tuple[Tensor, ...]:
        """(x, y), or (x,) without y. ValueError if a value is not finite, or a file has changed since it was opened."""
        check_rows(rows, len(self))
        if [_stamp(path) for path in self._paths] != self._stamps:
            raise ValueError(f"{' or '.join(self._paths)} has changed since this run opened it; start again")
        index = rows.numpy()
        order = np.argsort(index, kind="stable") if self._sort else None
        return tuple(self._read(which, index, order) for which in range(len(self._paths)))

    def _open(self) -> list[Array]:
        if self._maps is None:  # once in each process
            self._maps = [_load(path) for path in self._paths]
        return self._maps

    def _read(self, which: int, rows: Array, order: Array | None) -> Tensor:
        path, array, whole = self._paths[which], self._open()[which], self._dtypes[which] == "int64"
        out = torch.empty(len(rows), *array.shape[1:], dtype=torch.int64 if whole else torch.float32)
        values = out.numpy()
        raw = values if array.dtype == values.dtype else np.empty(values.shape, array.dtype)
        if order is None:
            np.take(array, rows, axis=0, out=raw, mode="clip")  # rows are checked; "raise" would copy once more
        else:
            raw[order] = np.take(array, rows[order], axis=0, mode="clip")
        with np.errstate(invalid="ignore", over="ignore"):
            np.copyto(values, raw, casting="unsafe")
        changed = values != raw if whole else inexact(values, raw) if raw.dtype.kind in "iu" else ~np.isfinite(values)
        if changed.any():
            first = tuple(np.argwhere(changed)[0])
            found, at = raw[first], f"{path}, row {rows[first[0]]}, column {sum(first[1:])} (counted from 0)"
            if whole or raw.dtype.kind == "f":
                wanted = "a whole number (target_dtype is int64)" if whole else "a finite float32 number"
                raise ValueError(f"{at}: {found} found, {wanted} expected")
            if path not in self._warned:
                log.warning("%s: float32 rounds the integer %s (all above 2^24 are at risk)", at, found)
                self._warned.add(path)
        if whole:
            return out.reshape(len(rows)) if array.shape[1:] == (1,) else out
        return out[:, None] if array.ndim == 1 else out


def _stamp(path: str) -> tuple[int, int]:
    """Size and time of last change of a file."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror} (--data.source.x and --data.source.y name .npy files)") from None
    return found.st_size, found.st_mtime_ns


def _load(path: str) -> Array:
    """Map a .npy file of real numbers. ValueError in one line for anything else; pickled objects are never loaded."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        objects = "pickle" in str(error) or "objects" in str(error)
        reason = "it holds Python objects, which could run code; save plain numbers" if objects else error
        raise ValueError(f"{path} cannot be read as an array of numbers: {reason}") from None
    if getattr(array, "dtype", np.dtype(object)).kind not in "biuf":
        found = array.dtype if isinstance(array, np.ndarray) else "an archive of arrays"
        raise ValueError(f"{path} holds {found}; one array of real numbers is expected (float, int or bool)")
    return np.asarray(array)
