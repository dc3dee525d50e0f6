"""The order of rows is a permutation, looks like a random one, and is a pure function of (seed, epoch, position)."""

import pickle
import time

import pytest
import torch

from project.data.order import Part, RowOrder, key, permute

SIZES = [1, 2, 3, 5, 101, 1000, 4096, 4097, 8191, 8192, 8193, 100_000, 1_000_003]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("block", [None, 1, 10, 1000, 65_536])
def test_every_row_comes_once_in_an_epoch(n: int, block: int | None) -> None:
    if block and n // block > 100_000:
        pytest.skip("one row a block: covered by the smaller sizes")
    order = RowOrder(n, seed=3, block=block)
    rows = torch.cat([order.rows(2, positions) for positions in torch.arange(n).split(70_001)])
    assert torch.equal(rows.sort().values, torch.arange(n))


@pytest.mark.parametrize("block", [None, 100])
def test_order_depends_on_seed_and_epoch_and_on_nothing_asked_before(block: int | None) -> None:
    everything = torch.arange(50_000)
    first = RowOrder(50_000, 0, block=block).rows(0, everything)
    for seed, epoch in ((0, 1), (1, 0), (1, 1)):
        assert (RowOrder(50_000, seed, block=block).rows(epoch, everything) == first).float().mean() < 0.01
    used = RowOrder(50_000, 0, block=block)
    used.rows(7, everything[:10])
    backwards = torch.cat([used.rows(0, everything[at : at + 97]) for at in range(0, 50_000, 97)][::-1])
    assert torch.equal(backwards.sort().values, everything)
    assert torch.equal(used.rows(0, everything.flip(0)), first.flip(0))


def test_without_shuffling_rows_keep_the_order_of_the_source() -> None:
    assert RowOrder(1000, shuffle=False).rows(5, torch.tensor([0, 999, 3])).tolist() == [0, 999, 3]


@pytest.mark.parametrize("n", [10**9, 10**9 + 7, 2**33])
def test_a_billion_rows_need_no_table(n: int) -> None:
    positions = torch.randint(n, (100_000,), generator=torch.Generator().manual_seed(0)).unique()
    rows = permute(positions, n, key(1))
    assert rows.min() >= 0
    assert rows.max() < n
    assert len(rows.unique()) == len(positions)
    assert len(pickle.dumps(RowOrder(n))) < 500


def z_score(counts: torch.Tensor) -> float:
    """How far a chi-square statistic lies from its mean, in standard deviations."""
    expected = counts.sum() / counts.numel()
    freedom = counts.numel() - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5)


@pytest.mark.parametrize("n", [100, 5000, 2**20 + 1, 10**9])
def test_over_many_epochs_any_row_is_equally_likely_to_follow_any_other(n: int) -> None:
    place, pairs, parity = torch.zeros(50), torch.zeros(10, 10), torch.zeros(2, 2)
    for epoch in range(2000):
        a, b = permute(torch.tensor([n // 3, n // 3 + 1]), n, key(5, epoch)).tolist()
        place[a * 50 // n] += 1
        pairs[a * 10 // n, b * 10 // n] += 1
        parity[a & 1, b & 1] += 1
    assert max(z_score(place), z_score(pairs), z_score(parity)) < 5


@pytest.mark.parametrize("block", [None, 100, 4096])
def test_a_file_sorted_by_class_gives_batches_with_binomial_class_shares(block: int | None) -> None:
    n, batch, classes = 1_000_000, 64, 10
    order = RowOrder(n, seed=1, block=block)
    rows = order.rows(0, torch.arange(n))
    shares = torch.nn.functional.one_hot(rows.view(-1, batch) * classes // n, classes).sum(1).double()
    variance = float((shares - batch / classes).square().mean())
    binomial = batch * (1 / classes) * (1 - 1 / classes)
    assert 0.9 < variance / binomial < 1.1  # batches of one class: 64; perfectly even ones: 0


@pytest.mark.parametrize("n", [1, 10, 101, 60_000, 200_003])
@pytest.mark.parametrize("cuts", [(0.8, 0.9, 1.0), (1 / 3, 2 / 3, 1.0), (0.0, 0.5, 1.0), (0.0005, 0.001, 1.0)])
def test_parts_are_disjoint_and_cover_the_source(n: int, cuts: tuple[float, ...]) -> None:
    parts = [Part(n, low, high, seed=4) for low, high in zip((0.0, *cuts), cuts, strict=False)]
    rows = [part.rows(torch.arange(len(part))) for part in parts]
    assert torch.equal(torch.cat(rows).sort().values, torch.arange(n))
    for part, found in zip(parts, rows, strict=True):
        assert torch.equal(found, found.sort().values)  # the order of the source
        assert torch.equal(part.rows(torch.arange(len(part)).flip(0)), found.flip(0))


def test_parts_have_their_share_of_any_stretch_and_follow_their_own_seed() -> None:
    part, other = Part(1_000_000, 0.8, 0.9, seed=0), Part(1_000_000, 0.8, 0.9, seed=1)
    assert len(part) == 100_000
    rows = part.rows(torch.arange(len(part)))
    assert z_score(torch.bincount(rows // 10_000, minlength=100).float()) < 5
    assert 0.05 < float(torch.isin(rows, other.rows(torch.arange(len(other)))).float().mean()) < 0.15
    assert len(Part(1_000_000, 0.0, 0.0005)) == 500  # small shares are not rounded away


def test_the_order_costs_little() -> None:
    """Quiet, it makes 30 to 50 million rows a second on one thread; a machine under load is given a margin of ten."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    order, window, seconds = RowOrder(10**9), torch.arange(65_536), []
    for _ in range(5):
        began = time.perf_counter()
        order.rows(0, window)
        seconds.append(time.perf_counter() - began)
    torch.set_num_threads(threads)
    assert len(window) / min(seconds) > 3e6
