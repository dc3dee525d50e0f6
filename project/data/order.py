"""Which row comes when: a pure function of (seed, epoch, position).

Nothing here knows of devices, workers, batches or chunks, so none of them can change the order, and nothing is kept
between calls, so a run can start at any position. Two shapes of order:

* *full*: one keyed permutation of all rows, for sources that read any row cheaply;
* *mixed*: for sources that read stretches of neighbouring rows (``source.block``). The rows are cut into cells of about
  one block; a mixture takes one cell from each of up to 64 equal stretches of the source, in keyed order, and its rows
  are permuted together. Even a file that is sorted by class gives well-mixed batches.
"""

from functools import lru_cache

import torch
from torch import Tensor

from project.data.normals import splitmix64

_MASK = (1 << 64) - 1
_SMALL = 4096  # up to here a permutation is sorted out in full; above, it is computed and needs no memory
_BLOCK = 1 << 14  # numbers worked on at a time: within the processor's cache
_MIXED_ROWS = 1 << 18  # rows of a mixture: small enough to hold, large enough that batches look like draws


def key(*parts: int) -> int:
    """One unsigned 64-bit key from several numbers (splitmix64, folded over the parts)."""
    h = 0
    for part in parts:
        h = splitmix64(h ^ (part & _MASK))
    return h


def _keys(k: int, mask: int) -> list[tuple[int, int]]:
    return [(key(k, 2 * r) & mask, key(k, 2 * r + 1) & mask | 1) for r in range(4)]


def _scramble(x: Tensor, mask: int, keys: list[tuple[int, int]]) -> Tensor:
    """A keyed bijection of range(mask + 1), a power of two, in place.

    Each step (add, multiply by an odd number, fold the high half of the bits onto the low half) can be undone, so the
    whole is one to one; four rounds with keys of their own mix well.
    """
    half = (mask.bit_length() + 1) // 2
    for block in torch.split(x, _BLOCK):
        for plus, times in keys:
            block.add_(plus).mul_(times).bitwise_and_(mask)  # overflow drops only bits that the mask drops
            block.bitwise_xor_(block >> half)
    return x


@lru_cache(maxsize=256)
def _sorted_permutation(n: int, k: int) -> Tensor:
    mask = (1 << 62) - 1
    return torch.argsort(_scramble(torch.arange(n), mask, _keys(k, mask)))


def permute(positions: Tensor, n: int, k: int) -> Tensor:
    """Images of ``positions`` (int64, each in range(n)) under the permutation of range(n) that the key ``k`` names.

    The next power of two is permuted; what falls outside is sent round again, which keeps it one to one ("cycle
    walking": Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).
    """
    if n <= _SMALL:
        return _sorted_permutation(n, k)[positions]
    mask = (1 << (n - 1).bit_length()) - 1
    keys = _keys(k, mask)
    x = _scramble(positions.to(torch.int32 if mask < 1 << 31 else torch.int64, copy=True), mask, keys)
    outside = torch.nonzero(x >= n).flatten()
    while len(outside):
        again = _scramble(x.index_select(0, outside), mask, keys)
        x.scatter_(0, outside, again)
        outside = outside.masked_select(again >= n)
    return x.long()


class RowOrder:
    """The order of ``n`` rows in every epoch.

    Args:
        n: Number of rows.
        seed: Seed of the order; equal seeds give equal orders.
        shuffle: False keeps the order of the source.
        block: Rows of a stretch that the source reads cheaply together; None shuffles fully.
    """

    def __init__(self, n: int, seed: int = 0, shuffle: bool = True, block: int | None = None) -> None:
        self.n, self.seed, self.shuffle = n, seed, shuffle
        per_mixture = max(4, min(64, _MIXED_ROWS // max(1, block or 1)))
        self.stretches = per_mixture if block else 1
        # A cell (s, c) holds rows [bound(s * cells + c), bound(s * cells + c + 1)): near-equal parts of about a block.
        self.cells = -(-n // (block * self.stretches)) if block else 1
        self._epoch: tuple[int, Tensor, Tensor] | None = None

    def rows(self, epoch: int, positions: Tensor) -> Tensor:
        """Row numbers (int64) at ``positions`` (int64, each in range(n)) of an epoch, counted from 0."""
        if not self.shuffle:
            return positions
        if self.cells == 1:
            return permute(positions, self.n, key(self.seed, epoch))
        starts, ends = self._mixtures(epoch)
        mixture_ends = ends[:, -1].cumsum(0)
        mixture = torch.searchsorted(mixture_ends, positions, right=True)
        out = torch.empty_like(positions)
        for m in torch.unique(mixture).tolist():
            here = mixture == m
            size = int(ends[m, -1])
            at = permute(positions[here] - (int(mixture_ends[m]) - size), size, key(self.seed, epoch, 1, m))
            cell = torch.searchsorted(ends[m], at, right=True)
            offset = at - torch.where(cell > 0, ends[m][cell - 1], 0)
            out[here] = starts[m, cell] + offset
        return out

    def _mixtures(self, epoch: int) -> tuple[Tensor, Tensor]:
        """For each mixture and stretch: the first row of the cell, and the running number of rows of the mixture."""
        if self._epoch is None or self._epoch[0] != epoch:
            total, cells = self.stretches * self.cells, torch.arange(self.cells)
            chosen = torch.stack(
                [
                    s * self.cells + permute(cells, self.cells, key(self.seed, epoch, 2, s))
                    for s in range(self.stretches)
                ],
                dim=1,
            )
            starts = chosen * self.n // total
            ends = ((chosen + 1) * self.n // total - starts).cumsum(1)
            self._epoch = (epoch, starts, ends)
        return self._epoch[1], self._epoch[2]


@lru_cache(maxsize=64)
def _cut(n: int, low: float, high: float, k: int) -> Tensor:
    return permute(torch.arange(round(low * n), round(high * n)), n, k).sort().values


class Part:
    """One part of a source cut by fractions: a fixed pseudo-random subset of its rows, in the order of the source.

    The same cut is made in every run of ``RUN`` rows, so each part is spread evenly over the source (sorted or not),
    neighbours stay neighbours, memory does not grow with the source, and the parts of one seed never overlap.

    Args:
        n: Rows of the source.
        low, high: The part's place between 0 and 1, e.g. (0.8, 0.9) for the tenth after the first four fifths.
        seed: Seed of the cut.
    """

    RUN = 60_000  # divisible by much, so that usual shares of it are whole numbers

    def __init__(self, n: int, low: float, high: float, seed: int = 0) -> None:
        self.n = n
        self.runs, rest = divmod(n, self.RUN)
        cut, self.last = _cut(self.RUN, low, high, key(seed, 0)), _cut(rest, low, high, key(seed, 1))
        self.each = len(cut)
        self.rows_of_run = torch.cat([cut, self.last])
        self.size = self.runs * self.each + len(self.last)

    def __len__(self) -> int:
        return self.size

    def rows(self, index: Tensor) -> Tensor:
        """Row numbers in the source (int64) of the part's rows ``index`` (int64, each in range(len(self)))."""
        if self.size == self.n:
            return index
        run = index.div(max(1, self.each), rounding_mode="trunc").clamp_(max=self.runs)
        place = index - run * self.each
        place[run == self.runs] += self.each  # the rows of the last, shorter run come after those of a whole one
        return self.rows_of_run.take(place).add_(run.mul_(self.RUN))
