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

_MASK = (1 << 64) - 1
_SMALL = 4096  # up to here a permutation is sorted out in full; above, a Feistel network needs no memory
_MIXED_ROWS = 1 << 18  # rows of a mixture: small enough to hold, large enough that batches look like draws
_ODD = (-0x61C8864680B583EB, -0x3B314601E57A13AD)  # odd 64-bit constants, as signed


def key(*parts: int) -> int:
    """One signed 64-bit key from several numbers (splitmix64 finaliser, folded over the parts)."""
    h = 0
    for part in parts:
        h = ((h ^ (part & _MASK)) + 0x9E3779B97F4A7C15) & _MASK
        h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & _MASK
        h ^= h >> 31
    return h - (1 << 64) if h >= 1 << 63 else h


def _mix(x: Tensor) -> Tensor:
    """A hash of int64 numbers in place, for its low 32 bits: multiplications wrap and the good high bits fold down."""
    x.mul_(_ODD[0])
    x.bitwise_xor_(x >> 32)
    x.mul_(_ODD[1])
    return x.bitwise_xor_(x >> 29)


@lru_cache(maxsize=256)
def _sorted_permutation(n: int, k: int) -> Tensor:
    return torch.argsort(_mix(_mix(torch.arange(n) + k) ^ k), stable=True)


def _feistel(x: Tensor, bits: int, k: Tensor) -> Tensor:
    """A keyed bijection of range(2 ** bits): eight rounds, in turn on the low and the high half of the bits."""
    low_bits = bits // 2
    high_bits = bits - low_bits
    low, high = x & ((1 << low_bits) - 1), x >> low_bits
    for turn in range(8):
        half, other, width = (low, high, low_bits) if turn % 2 == 0 else (high, low, high_bits)
        half.bitwise_xor_(_mix(other + _mix(k + turn)).bitwise_and_((1 << width) - 1))
    return high.bitwise_left_shift_(low_bits).bitwise_or_(low)


def _walk(x: Tensor, n: int, k: Tensor) -> Tensor:
    """A keyed bijection of range(n), with one key for all of ``x`` or one each.

    A Feistel network permutes the next power of two; what falls outside is sent round again ("cycle walking": Black and
    Rogaway, Ciphers with Arbitrary Finite Domains, 2002), which keeps it a bijection.
    """
    bits = max(2, (n - 1).bit_length())
    out = _feistel(x, bits, k)
    while len(outside := torch.nonzero(out >= n).flatten()):
        out[outside] = _feistel(out[outside], bits, k[outside] if k.ndim else k)
    return out


def permute(positions: Tensor, n: int, k: int) -> Tensor:
    """Images of ``positions`` (int64, each in range(n)) under the permutation of range(n) that the key ``k`` names."""
    return _sorted_permutation(n, k)[positions] if n <= _SMALL else _walk(positions, n, torch.tensor(k))


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
        for m in mixture.unique().tolist():
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


class Part:
    """One part of a source cut by fractions: a fixed pseudo-random subset of its rows.

    The cut is made inside every run of 1,000 rows, so each part is spread evenly over the source (a sorted file too),
    neighbours stay near each other, no table of rows is kept, and the parts of one seed never overlap.

    Args:
        n: Rows of the source.
        low, high: The part's place between 0 and 1, e.g. (0.8, 0.9) for the tenth after the first four fifths.
        seed: Seed of the cut.
    """

    RUN = 1000

    def __init__(self, n: int, low: float, high: float, seed: int = 0) -> None:
        self.n, self.seed = n, seed
        self.runs, self.rest = divmod(n, self.RUN)
        self.first, end = round(low * self.RUN), round(high * self.RUN)
        self.each = end - self.first
        self.rest_first, rest_end = round(low * self.rest), round(high * self.rest)
        self.size = self.runs * self.each + rest_end - self.rest_first

    def __len__(self) -> int:
        return self.size

    def rows(self, index: Tensor) -> Tensor:
        """Row numbers in the source (int64) of the part's rows ``index`` (int64, each in range(len(self)))."""
        if self.size == self.n:
            return index
        out = torch.empty_like(index)
        full = index < self.runs * self.each
        if self.each:
            run = index[full] // self.each
            place = index[full] - run * self.each + self.first
            keys = _mix(_mix(run + key(self.seed, 3)))
            out[full] = run * self.RUN + _walk(place, self.RUN, keys)
        rest = index[~full] - self.runs * self.each + self.rest_first
        if len(rest):
            out[~full] = self.runs * self.RUN + permute(rest, self.rest, key(self.seed, 4))
        return out
