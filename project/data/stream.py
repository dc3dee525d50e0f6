"""Chunks of rows → device → micro-batches.

A chunk is many micro-batches read at once, moved to the device once, and sliced there. Which rows a micro-batch holds
is arithmetic on positions (``Shares``), so neither the chunk nor the workers that read it can change a batch.
"""

import atexit
import weakref
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from project.data.order import Part, RowOrder, key
from project.data.sources import Source
from project.data.workers import leave_signals_to_the_main_process, let_go, shared, too_small

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Shares:
    """Which positions of an epoch belong to which micro-batch and rank.

    The first ``full`` positions are cut into whole micro-batches of ``batch`` rows a rank. The rest, the *tail*, is cut
    near-equally over as few micro-batches as hold it and then over the ranks, so every rank takes part in every
    micro-batch and nobody is empty unless a micro-batch has fewer rows than there are ranks. Training keeps whole
    effective batches in ``full``; evaluation is all tail: each row once, at any number of ranks.

    Args:
        full: Positions in whole micro-batches; a multiple of ``batch * world``.
        tail: Positions after them.
        batch: Rows per rank and micro-batch.
        world, rank: Number of processes, and this one's number.
        window: Micro-batches of one accumulation window, for the weight of the tail's rows.
    """

    full: int
    tail: int
    batch: int
    world: int = 1
    rank: int = 0
    window: int = 1

    @property
    def micro(self) -> int:
        """Rows of one micro-batch over all ranks."""
        return self.batch * self.world

    def __len__(self) -> int:
        return self.full // self.micro + -(-self.tail // self.micro)

    def bounds(self, m: int) -> tuple[int, int]:
        """Positions [first, end) of micro-batch ``m`` over all ranks."""
        whole = self.full // self.micro
        if m < whole:
            return m * self.micro, (m + 1) * self.micro
        parts, m = len(self) - whole, m - whole
        return self.full + m * self.tail // parts, self.full + (m + 1) * self.tail // parts

    def span(self, m: int) -> tuple[int, int]:
        """This rank's positions [first, end) of micro-batch ``m``."""
        low, high = self.bounds(m)
        size = high - low
        return low + self.rank * size // self.world, low + (self.rank + 1) * size // self.world

    def weight(self, m: int) -> float:
        """What this rank's mean loss is multiplied by so that every row of an optimizer step counts alike.

        Lightning divides a loss by the micro-batches of a window and averages gradients over the ranks. That is right
        for whole windows (weight 1); in the tail a rank's n rows must count n / tail.
        """
        if m < self.full // self.micro:
            return 1.0
        low, high = self.span(m)
        return (high - low) * self.window * self.world / self.tail


class Chunks(Dataset[Batch]):
    """Item ``(epoch, first, end)`` is this rank's rows of micro-batches [first, end), in one read. Keeps no state.

    Args:
        source: Where rows come from.
        part: The rows of the source in use.
        order: Their order in each epoch.
        shares: Which positions are this rank's.
        pad: Give an empty share one row (of weight 0), so that a training step has a loss to call backward on.
        device: Where rows are created, for a source that can; otherwise rows are read on the CPU.
    """

    def __init__(
        self, source: Source, part: Part, order: RowOrder, shares: Shares, pad: bool, device: torch.device | None = None
    ) -> None:
        self.source, self.part, self.order, self.shares = source, part, order, shares
        self.pad, self.device = pad, device

    def span(self, m: int) -> tuple[int, int]:
        low, high = self.shares.span(m)
        if low == high and self.pad:
            low = min(low, self.order.n - 1)
            return low, low + 1
        return low, high

    def rows(self, epoch: int, first: int, end: int) -> Tensor:
        """Row numbers in the source (int64, CPU) of this rank's micro-batches [first, end)."""
        positions = torch.cat([torch.arange(*self.span(m)) for m in range(first, end)])
        return self.part.rows(self.order.rows(epoch, positions))

    def __getitem__(self, item: tuple[int, int, int]) -> Batch:
        rows = self.rows(*item)
        if self.device is not None:
            rows = rows.to(self.device, non_blocking=True)
        return shared(tuple(self.source.read(rows)))


class _Items(Sized, Iterable[tuple[int, int, int]]):
    """A sampler: the chunks of one pass. One object for the life of a loader, so that workers can be kept alive."""

    epoch, end, firsts = 0, 0, range(0)

    def __len__(self) -> int:
        return len(self.firsts)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return ((self.epoch, m, min(m + self.firsts.step, self.end)) for m in self.firsts)


class Stream:
    """What Lightning iterates: micro-batches as views into chunks on the device.

    ``len()`` is always the whole epoch; iteration starts at the position asked for at the first ``next()``, which is
    after every restore.

    Args:
        chunks: The reader of chunks.
        device: Where batches live.
        chunk_size: Rows this rank reads and moves at once, rounded up to whole micro-batches.
        num_workers: Processes that read ahead; 0 reads in this one.
        position: Gives (epoch, first micro-batch) at the start of a pass.
        seed: Seeds the workers' own generators, each rank's differently; no source of ours draws from them.
    """

    def __init__(
        self,
        chunks: Chunks,
        device: torch.device,
        chunk_size: int,
        num_workers: int,
        position: Callable[[], tuple[int, int]],
        seed: int = 0,
    ) -> None:
        self.chunks, self.device, self.position = chunks, device, position
        self.per_chunk = max(1, -(-chunk_size // chunks.shares.batch))
        self.weight = 1.0
        self._items = _Items()
        self._loader: DataLoader[Batch] = DataLoader(
            chunks,
            batch_size=None,
            sampler=self._items,
            num_workers=num_workers,
            worker_init_fn=leave_signals_to_the_main_process,
            pin_memory=device.type == "cuda" and chunks.device is None,
            persistent_workers=num_workers > 0,
            # A loader draws seeds for its workers: not from the generator that dropout uses, and not another rank's.
            generator=torch.Generator().manual_seed(key(seed, chunks.shares.rank)),
        )

        if num_workers:
            atexit.register(let_go, weakref.ref(self._loader))

    def __len__(self) -> int:
        return len(self.chunks.shares)

    # Lightning warns about resuming in mid-epoch unless a loader has these; the position is the DataModule's to keep.
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass

    @property
    def _iterator(self) -> object:
        """Lightning shuts the workers of a DataLoader down through this attribute."""
        return self._loader._iterator

    @_iterator.setter
    def _iterator(self, value: None) -> None:
        self._loader._iterator = value

    def __iter__(self) -> Iterator[Batch]:
        (self._items.epoch, start), shares = self.position(), self.chunks.shares
        self._items.end = len(self)
        self._items.firsts = range(start, len(self), self.per_chunk)
        for (_, first, last), chunk in zip(self._items, self._on_device(), strict=True):
            whole = min(last, shares.full // shares.micro)
            sizes = [shares.batch] * max(0, whole - first)
            sizes += [high - low for low, high in map(self.chunks.span, range(max(first, whole), last))]
            for m, batch in enumerate(zip(*(_views(t, sizes) for t in chunk), strict=True), first):
                self.weight = 1.0 if m < whole else shares.weight(m)
                yield batch

    def _read(self) -> Iterator[Batch]:
        try:
            yield from self._loader
        except RuntimeError as error:
            if "Bus error" not in str(error) and "Too many open files" not in str(error):
                raise
            row = sum(t.nbytes for t in self.chunks.source.read(torch.tensor([0])))
            size = row * self.per_chunk * self.chunks.shares.batch
            raise ValueError(too_small(self._loader.num_workers, size, str(error).splitlines()[0])) from error

    def _on_device(self) -> Iterator[Batch]:
        if self.device.type == "cpu" or self.chunks.device is not None:
            yield from self._read()
            return
        ahead: Batch | None = None
        for chunk in self._read():  # from pinned memory the copy is asynchronous; one chunk is always on its way
            moved = tuple(t.to(self.device, non_blocking=True) for t in chunk)
            if ahead is not None:
                yield ahead
            ahead = moved
        if ahead is not None:
            yield ahead


def _views(chunk: Tensor, sizes: list[int]) -> list[Tensor]:
    """The chunk in pieces, as views; copied where a piece does not start on a 16-byte boundary.

    ``nn.Linear`` gives other last bits for unaligned rows, so with unaligned views the chunk size would change results.
    """
    return [t if t.data_ptr() % 16 == 0 else t.clone() for t in torch.split(chunk, sizes)]
