"""How fast rows come, as a multiple of a per-sample dataset with the default collate.

    python benchmarks/stream.py [--rows 1048576] [--rounds 5]

Shuffled rows of 10 columns and a target, one thread, one process unless said; million rows a second. "chunks" reads
them whole; "batches" slices them into the 64-row views that training gets. Every round measures everything once, in
turn; medians are printed, ratios are taken within a round. Reading from a disk is not measured: files are in memory's
cache. The last lines are ``name: ratio``.
"""

import argparse
import os
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from project.data.order import Part, RowOrder
from project.data.sources import ArraySource, Source, SyntheticSource
from project.data.stream import Chunks, Shares, Stream
from project.data.tables import TableSource

BATCH, COLUMNS, CHUNKS = 64, 10, {"4 k": 1 << 12, "16 k": 1 << 14, "64 k": 1 << 16, "1 M": 1 << 20}


def stream(source: Source, chunk: int, workers: int = 0, world: int = 1, rank: int = 0) -> Stream:
    rows = len(source)
    order = RowOrder(rows, 0, True, getattr(source, "block", None))
    shares = Shares(rows // (BATCH * world) * BATCH * world, 0, BATCH, world, rank)
    chunks = Chunks(source, Part(rows, 0.0, 1.0), order, shares, False)
    return Stream(chunks, torch.device("cpu"), chunk, workers, lambda: (0, 0))


def chunks_of(source: Source, chunk: int) -> Callable[[], int]:
    def read() -> int:
        chunks, step = stream(source, chunk).chunks, chunk // BATCH
        return sum(
            len(chunks[(0, m, min(m + step, len(chunks.shares)))][0]) for m in range(0, len(chunks.shares), step)
        )

    return read


def batches_of(loader: Any, most: int = 1 << 30) -> Callable[[], int]:
    def read() -> int:
        rows = 0
        for x, _ in loader:
            rows += len(x)
            if rows >= most:
                break
        return rows

    return read


def sources(folder: Path, rows: int) -> dict[str, Source]:
    x, y = SyntheticSource(rows, COLUMNS).read(torch.arange(rows))
    np.save(folder / "x.npy", x.numpy())
    np.save(folder / "y.npy", y.numpy())
    table = pa.table({**{f"c{i}": x[:, i].numpy() for i in range(COLUMNS)}, "y": y[:, 0].numpy()})
    pq.write_table(table, folder / "t.parquet", row_group_size=1 << 16)
    pyarrow.csv.write_csv(table, folder / "t.csv")
    began = time.perf_counter()
    converted = TableSource(str(folder / "t.csv"), target="y")
    converted.prepare()
    seconds, megabytes = time.perf_counter() - began, (folder / "t.csv").stat().st_size / 1e6
    print(f"CSV converted: {megabytes:.0f} MB in {seconds:.1f} s, {rows / seconds / 1e6:.2f} M rows/s")
    return {
        "synthetic": SyntheticSource(rows, COLUMNS),
        ".npy": ArraySource(str(folder / "x.npy"), str(folder / "y.npy")),
        "Parquet": TableSource(str(folder / "t.parquet"), target="y"),
        "CSV, converted": converted,
    }


def yardsticks(rows: int) -> dict[str, Callable[[], int]]:
    x, y, few = torch.randn(rows, COLUMNS), torch.randn(rows, 1), 20_000
    samples = TensorDataset(x, y)
    chunk, copy = torch.randn(1 << 16, COLUMNS), torch.empty(1 << 16, COLUMNS)
    net, loss = nn.Linear(COLUMNS, 1), nn.MSELoss()
    step = torch.optim.SGD(net.parameters(), 1e-3)

    def copies() -> int:
        for _ in range(20):
            copy.copy_(chunk)
        return 20 << 16

    def draws() -> int:
        for _ in range(4):
            torch.randn(1 << 16, COLUMNS)
        return 4 << 16

    def trains() -> int:
        for x_part, y_part in zip(x[: few // 64 * 64].split(64), y[: few // 64 * 64].split(64), strict=True):
            step.zero_grad()
            loss(net(x_part), y_part).backward()
            step.step()
        return few // 64 * 64

    workers = DataLoader(samples, BATCH, shuffle=True, num_workers=2, persistent_workers=True)
    return {
        "memory copy": copies,
        "torch.randn": draws,
        "64-row step of LinearModel": trains,
        "per sample, 0 workers": batches_of(DataLoader(samples, BATCH, shuffle=True), few),
        "per sample, 2 workers": batches_of(workers, few),
    }


def read_by_ranks(source: TableSource, world: int, chunk: int) -> float:
    """Rows decoded by all ranks in an epoch, as a multiple of the rows that they use."""
    decoded = used = 0
    for rank in range(world):
        own = pickle.loads(pickle.dumps(source))
        decode = own._decode

        def counted(number: int, refuse: bool, decode: Any = decode) -> Any:
            nonlocal decoded
            tensors, bad = decode(number, refuse)
            decoded += len(tensors[0])
            return tensors, bad

        own._decode = counted
        used += batches_of(stream(own, chunk, world=world, rank=rank))()
    return decoded / used


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--rows", type=int, default=1 << 20)
    options.add_argument("--rounds", type=int, default=5)
    asked = options.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        measured = yardsticks(asked.rows)
        made = sources(Path(folder), asked.rows)
        for name, source in made.items():
            for words, chunk in CHUNKS.items():
                measured[f"{name}, chunks of {words}"] = chunks_of(source, chunk)
            measured[f"{name}, batches, chunks of 64 k"] = batches_of(stream(source, 1 << 16))
            measured[f"{name}, batches, 2 workers"] = batches_of(stream(source, 1 << 16, workers=2))
        whole = torch.arange(1 << 16) % asked.rows
        synthetic = made["synthetic"]
        measured["synthetic values, rows in order"] = lambda: len(synthetic.read(whole)[0])
        rates: dict[str, list[float]] = {name: [] for name in measured}
        for _ in range(asked.rounds + 1):
            for name, read in measured.items():
                began = time.perf_counter()
                rows = read()
                rates[name].append(rows / (time.perf_counter() - began) / 1e6)
        rates = {name: found[1:] for name, found in rates.items()}  # the first round starts workers and fills caches
        for name, found in rates.items():
            print(f"{name:42} {statistics.median(found):9.2f} M rows/s")
        for name in ("Parquet", "CSV, converted"):
            for world in (1, 2, 4):
                table = made[name]
                assert isinstance(table, TableSource)
                print(f"{name}, {world} ranks: rows read / rows needed {read_by_ranks(table, world, 1 << 16):.2f}")

        def ratio(name: str, top: str, bottom: str) -> None:
            print(f"{name}: {statistics.median(a / b for a, b in zip(rates[top], rates[bottom], strict=True)):.2f}")

        for name in made:
            ratio(f"{name} / per sample", f"{name}, chunks of 64 k", "per sample, 0 workers")
            ratio(f"{name} / per sample with 2 workers", f"{name}, chunks of 64 k", "per sample, 2 workers")
            ratio(f"{name}, batches / 64-row step", f"{name}, batches, chunks of 64 k", "64-row step of LinearModel")
            ratio(f"{name}, 16 k / 1 M", f"{name}, chunks of 16 k", f"{name}, chunks of 1 M")
        ratio("cost of synthetic rows / torch.randn", "torch.randn", "synthetic values, rows in order")


if __name__ == "__main__":
    main()
