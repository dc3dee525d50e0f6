"""Chunks are cut into views, whatever the sizes; workers read ahead, change nothing, and do not linger."""

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from project.data.order import Part, RowOrder
from project.data.stream import Chunks, Shares, Stream
from tests.numbered import COLUMNS, Numbered, numbers

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


def stream(
    rows: int = 100, batch: int = 4, chunk: int = 16, workers: int = 0, drop_last: bool = False, **kwargs
) -> Stream:
    """A training stream of one rank, in the order of the source unless asked otherwise."""
    full = rows // batch * batch
    shares = Shares(full, 0 if drop_last else rows - full, batch)
    source = kwargs.get("source") or Numbered(rows)
    order = RowOrder(rows, kwargs.get("seed", 0), kwargs.get("shuffle", False))
    chunks = Chunks(source, Part(rows, 0.0, 1.0), order, shares, pad=True)
    return Stream(chunks, CPU, chunk, workers, kwargs.get("position", lambda: (0, 0)))


def sizes(s: Stream) -> list[int]:
    return [len(x) for x, _ in s]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_the_number_of_workers_changes_neither_number_nor_size_of_batches(workers: int) -> None:
    assert sizes(stream(10, 4, 4, workers)) == [4, 4, 2]
    assert sizes(stream(10, 4, 4, workers, drop_last=True)) == [4, 4]


@pytest.mark.parametrize(
    ("rows", "batch", "chunk"),
    [(1000, 48, 64), (10, 4, 1000), (10, 64, 4), (7, 7, 7), (1, 1, 1), (101, 10, 33), (100, 1, 7)],
    ids=["batches span chunks", "chunk over data", "batch over chunk", "all one", "one row", "odd", "single rows"],
)
def test_sizes_that_do_not_divide_lose_and_repeat_nothing(rows: int, batch: int, chunk: int) -> None:
    s = stream(rows, batch, chunk)
    assert [i for x, _ in s for i in numbers(x, rows)] == list(range(rows))
    assert len(s) == -(-rows // batch)


def test_batches_are_views_into_one_chunk() -> None:
    batches = [x for x, _ in stream(64, 4, 32)]  # 4 rows x 5 columns x 4 bytes: every piece is aligned
    storages = [x.untyped_storage().data_ptr() for x in batches]
    assert storages[:8] == [storages[0]] * 8
    assert len(set(storages)) == 2
    assert batches[1].storage_offset() == 4 * COLUMNS


def test_a_piece_that_does_not_start_on_16_bytes_is_copied_so_the_chunk_size_changes_no_bit() -> None:
    """5 columns x 10 rows: 200 bytes a micro-batch, so every other one would start off the boundary."""
    net = nn.Linear(COLUMNS, 1)
    with torch.no_grad():
        found = [torch.cat([net(x) for x, _ in stream(1000, 10, chunk)]) for chunk in (10, 20, 70, 5000)]
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert all(x.data_ptr() % 16 == 0 for x, _ in stream(1000, 10, 5000))


@pytest.mark.parametrize("columns", [1, 2, 3, 5, 7, 8, 13])
@pytest.mark.parametrize("batch", [1, 3, 10, 33])
def test_no_chunk_size_changes_a_bit_of_loss_or_gradient(columns: int, batch: int) -> None:
    torch.manual_seed(0)
    data, net = torch.randn(200, columns), nn.Sequential(nn.Linear(columns, 4), nn.Tanh(), nn.Linear(4, 1))

    class Fixed(Numbered):
        def read(self, rows: Tensor) -> tuple[Tensor, ...]:
            return data[rows], data[rows, :1]

    def result(chunk: int) -> Tensor:
        net.zero_grad()
        for x, y in stream(200, batch, chunk, source=Fixed(200)):
            (net(x) - y).square().mean().backward()
        return torch.cat([p.grad.flatten() for p in net.parameters()])

    assert all(torch.equal(result(batch), result(chunk)) for chunk in (3 * batch, 57, 10_000))


def test_iteration_starts_where_the_position_says_in_the_order_of_its_epoch() -> None:
    at = [(3, 0)]
    s = stream(100, 10, 30, shuffle=True, position=lambda: at[0])
    whole = [numbers(x, 100) for x, _ in s]
    at[0] = (3, 4)
    assert [numbers(x, 100) for x, _ in s] == whole[4:]
    assert len(s) == 10  # always the whole epoch
    at[0] = (4, 0)
    assert [numbers(x, 100) for x, _ in s] != whole


def test_workers_kept_alive_follow_the_epoch_and_are_the_same_processes() -> None:
    epoch = [0]
    alone = stream(60, 6, 12, shuffle=True, position=lambda: (epoch[0], 0))
    helped = stream(60, 6, 12, 2, shuffle=True, position=lambda: (epoch[0], 0))
    seen = set()
    for epoch[0] in range(3):
        assert all(torch.equal(a, b) for (a, _), (b, _) in zip(alone, helped, strict=True))
        seen |= {p.pid for p in multiprocessing.active_children()}
    assert len(seen) == 2


def test_workers_end_when_lightning_lets_go_of_the_iterator() -> None:
    before = set(multiprocessing.active_children())
    s = stream(60, 6, 12, 2)
    next(iter(s))
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    s._iterator._shutdown_workers()  # what Lightning does at the end of a loop, and after an error
    s._iterator = None
    end = time.monotonic() + 5
    while any(w.is_alive() for w in workers) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(w.is_alive() for w in workers)


def test_a_stream_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for workers in (0, 2):
        list(stream(20, 4, 8, workers))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_worker_that_dies_of_too_little_shared_memory_is_explained() -> None:
    class Dies(Numbered):
        def read(self, rows: Tensor) -> tuple[Tensor, ...]:
            if len(rows) > 1:
                raise RuntimeError("DataLoader worker (pid 5) is killed by signal: Bus error. It is possible that")
            return super().read(rows)

    with pytest.raises(ValueError, match=r"chunks of 0.00 MB.*shared memory .*Bus error.*\n.*--data.num_workers 0"):
        list(stream(100, source=Dies(100)))


LIMITED = [sys.executable, str(ROOT / "train.py"), "--data.num_workers", "2", "--max_epochs", "1", "--run_dir", "run"]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize(("chunk", "works"), [(512, True), (65536, False)])
def test_a_megabyte_of_shared_memory_works_or_is_named_with_the_remedy(chunk: int, works: bool, tmp_path: Path) -> None:
    mount = 'mount -t tmpfs -o size=1m none /dev/shm || exit 77; exec "$@"'
    command = ["unshare", "-m", "sh", "-c", mount, "sh", *LIMITED]
    command += ["--data.chunk_size", str(chunk), "--data.eval_batch_size", str(chunk)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("no mount namespace here")
    assert (done.returncode == 0) == works, done.stderr
    if not works:
        assert done.returncode in (1, 2)
        assert "/dev/shm has 1.0 MB" in done.stderr
        assert "Use --data.num_workers 0, a smaller chunk_size" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_workers_need_few_open_files_and_a_program_that_drops_its_stream_ends(tmp_path: Path) -> None:
    command = ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh"]
    done = subprocess.run([*command, *LIMITED], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    code = "from tests.data.test_stream import *; s = stream(60, 6, 12, 2); print(len(list(s)))"
    alone = [*command, sys.executable, "-c", code]
    done = subprocess.run(alone, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "10\n"), done.stderr


@pytest.mark.slow
def test_the_benchmark_prints_its_ratios(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/stream.py", "--rows", "8192", "--rounds", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for words in (
        "synthetic / per sample:",
        "cost of synthetic rows / torch.randn:",
        "4 ranks: rows read / rows needed",
    ):
        assert words in done.stdout


@pytest.mark.slow
def test_spawned_workers_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [x for x, _ in stream(60, 6, 12, shuffle=True)]
    s = stream(60, 6, 12, 2, shuffle=True)
    s._loader.multiprocessing_context = "spawn"
    assert all(torch.equal(a, x) for a, (x, _) in zip(expected, s, strict=True))


def test_a_rank_without_a_row_of_the_tail_gets_one_of_no_weight() -> None:
    ranks = []
    for rank in range(3):
        shares = Shares(6, 1, 2, 3, rank)
        chunks = Chunks(Numbered(7), Part(7, 0.0, 1.0), RowOrder(7, 0, False), shares, pad=True)
        s = Stream(chunks, CPU, 100, 0, lambda: (0, 0))
        ranks.append([(numbers(x, 7), s.weight) for x, _ in s])
    assert ranks == [[([0, 1], 1.0), ([6], 0.0)], [([2, 3], 1.0), ([6], 0.0)], [([4, 5], 1.0), ([6], 3.0)]]


def test_evaluation_shares_are_near_equal_and_may_be_empty() -> None:
    def share(rows: int, world: int, batch: int = 4) -> list[list[int]]:
        ranks = [Shares(0, rows, batch, world, r) for r in range(world)]
        return [[high - low for low, high in map(s.span, range(len(s)))] for s in ranks]

    assert share(11, 2) == [[2, 3], [3, 3]]
    assert share(2, 3) == [[0], [1], [1]]
    assert share(0, 2) == [[], []]
