"""SyntheticSource and ArraySource: same row, same bits; any array of numbers; nothing else, and no code run."""

import logging
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from project.data.normals import GOLDEN, signed, splitmix64
from project.data.sources import ArraySource, SyntheticSource

N = 100_000


@pytest.fixture(scope="module")
def drawn() -> torch.Tensor:
    return SyntheticSource(N, 10).read(torch.arange(N))[0].double()


# -- synthetic


@pytest.mark.parametrize("kind", ["linear", "binary"])
@pytest.mark.parametrize("features", [1, 5, 10, 129])
def test_a_row_has_the_same_bits_in_any_company(kind: Any, features: int) -> None:
    source = SyntheticSource(10**9, features, kind, seed=3)
    rows = torch.randint(10**9, (12_345,), generator=torch.Generator().manual_seed(0))
    x, y = source.read(rows)
    assert (x.dtype, x.shape, y.dtype, y.shape) == (torch.float32, (12_345, features), torch.float32, (12_345, 1))
    assert x.is_contiguous()
    for some in (slice(0, 1), slice(5, 12), slice(100, 164), slice(1000, 11_000), slice(0, 0)):
        for mine, whole in zip(source.read(rows[some]), (x, y), strict=True):
            assert torch.equal(mine, whole[some])
    order = torch.randperm(len(rows))
    assert torch.equal(source.read(rows[order])[0], x[order])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(source.read(rows)[1], y)
    finally:
        torch.set_num_threads(threads)


def test_the_hash_is_splitmix64() -> None:
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # published first output of seed 0
    source = SyntheticSource(10, 2, seed=7)
    key, pairs = splitmix64(7), 2
    for row in range(10):
        bits = splitmix64((key + (row * pairs + 0) * GOLDEN) % 2**64)
        radius = np.sqrt(-2 * np.log(((bits >> 33) + 0.5) / 2**31))
        angle = np.pi * signed((bits & 0xFFFFFFFF) << 32) / 2**63
        assert source.read(torch.tensor([row]))[0][0, 0].item() == pytest.approx(radius * np.cos(angle), abs=2e-6)


def test_columns_are_independent_standard_normals(drawn: torch.Tensor) -> None:
    deviations = N**-0.5
    assert drawn.mean(0).abs().max() < 5 * deviations
    assert (drawn.var(0) - 1).abs().max() < 5 * 2**0.5 * deviations
    assert ((drawn**4).mean(0) - 3).abs().max() < 5 * 96**0.5 * deviations
    assert 4 < drawn.abs().max() < 6.7
    alike = torch.corrcoef(drawn.T) - torch.eye(10)
    alike_squares = torch.corrcoef((drawn**2).T) - torch.eye(10)  # two columns share a radius
    to_squares = torch.corrcoef(torch.cat([drawn, drawn**2], 1).T)[:10, 10:].fill_diagonal_(0)
    to_next_row = torch.corrcoef(torch.cat([drawn[:-1], drawn[1:]], 1).T)[:10, 10:]
    for found in (alike, alike_squares, to_squares, to_next_row):
        assert found.abs().max() < 5 * deviations
    assert len(drawn.unique(dim=0)) == N
    assert drawn[:, 0].unique().numel() > 0.99 * N


def test_targets_follow_the_stated_law(drawn: torch.Tensor) -> None:
    weight = torch.tensor(SyntheticSource(1).weight, dtype=torch.float64)
    line = drawn @ weight + SyntheticSource(1).bias
    noise = SyntheticSource(N, noise=0.5).read(torch.arange(N))[1][:, 0] - line
    assert abs(float(noise.std()) - 0.5) < 0.01
    assert abs(float(noise.mean())) < 0.01
    y = SyntheticSource(N, kind="binary").read(torch.arange(N))[1][:, 0]
    assert set(y.unique().tolist()) == {0.0, 1.0}
    chance = torch.sigmoid(3 * line)
    for low in torch.arange(0, 1, 0.1).tolist():
        here = (chance >= low) & (chance < low + 0.1)
        assert abs(float(y[here].mean() - chance[here].mean())) < 5 * 0.5 / float(here.sum()) ** 0.5


def test_seeds_give_other_rows_and_other_laws() -> None:
    first, second = SyntheticSource(1000, seed=0), SyntheticSource(1000, seed=1)
    x, z = (source.read(torch.arange(1000))[0].flatten().tolist() for source in (first, second))
    assert len(set(x) & set(z)) < 20
    assert first.weight != second.weight
    assert pickle.loads(pickle.dumps(first)).weight == first.weight


@pytest.mark.parametrize("wrong", [{"rows": -1}, {"features": 0}, {"noise": float("nan")}, {"kind": "cubic"}])
def test_impossible_settings_name_the_flag(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"--data\.source\.{next(iter(wrong))} is"):
        SyntheticSource(**wrong)


@pytest.mark.parametrize("row", [-1, 10])
def test_rows_that_do_not_exist(row: int) -> None:
    with pytest.raises(IndexError, match=r"rows -?\d+ to \d+ were asked of a source of 10 rows"):
        SyntheticSource(10).read(torch.tensor([0, row]))


def test_places_in_words(tmp_path: Path) -> None:
    assert ArraySource(save(tmp_path, np.zeros((5, 2)))).where(3).endswith("a.npy, row 3 (counted from 0)")


# -- arrays


def save(folder: Path, array: Any, name: str = "a.npy") -> str:
    np.save(folder / name, array, allow_pickle=True)
    return str(folder / name)


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", ">f4", ">i8", "i8", "i4", "u4", "u1", "?"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_any_real_dtype_and_layout(tmp_path: Path, dtype: str, order: Any, caplog: pytest.LogCaptureFixture) -> None:
    numbers = np.random.default_rng(0).integers(0, 2, (50, 3))
    caplog.set_level(logging.INFO, "project")
    source = ArraySource(
        save(tmp_path, np.asarray(numbers.astype(dtype), order=order)), save(tmp_path, numbers[:, 0], "y.npy")
    )
    rows = torch.tensor([3, 49, 0, 3])
    for _ in range(2):
        x, y = source.read(rows)
        assert torch.equal(x, torch.from_numpy(numbers[rows]).float())
        assert torch.equal(y, torch.from_numpy(numbers[rows][:, :1]).float())
        assert x.is_contiguous()
        assert y.is_contiguous()
    assert len([r for r in caplog.records if "a.npy" in r.message]) == (dtype != "f4")
    assert (len(source), source.in_features, source.read(rows[:0])[0].shape) == (50, 3, (0, 3))


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((8,), "float32", (2, 1)),
        ((8, 1), "float32", (2, 1)),
        ((8, 2), "float32", (2, 2)),
        ((8,), "int64", (2,)),
        ((8, 1), "int64", (2,)),
        ((8, 2), "int64", (2, 2)),
    ],
)
def test_target_shapes(tmp_path: Path, shape: tuple[int, ...], dtype: Any, expected: tuple[int, ...]) -> None:
    y = np.arange(np.prod(shape)).reshape(shape)
    source = ArraySource(save(tmp_path, np.zeros(8)), save(tmp_path, y, "y.npy"), dtype)
    x, read = source.read(torch.tensor([1, 0]))
    assert (x.shape, read.shape, str(read.dtype)) == ((2, 1), expected, f"torch.{dtype}")
    assert read.flatten()[0] == y[1].flatten()[0]


@pytest.mark.parametrize("shape", [(1, 8), (7,), (8, 1, 1), ()])
def test_shapes_that_are_no_rows(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"a.npy: \[8, 2\], .*y.npy: \[.*\]\nExpected: x"):
        ArraySource(save(tmp_path, np.zeros((8, 2))), save(tmp_path, np.zeros(shape), "y.npy"))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e39])
def test_numbers_that_are_none(tmp_path: Path, value: float) -> None:
    x = np.zeros((9, 3))
    x[7, 2] = value
    source = ArraySource(save(tmp_path, x))
    source.read(torch.arange(7))
    with pytest.raises(ValueError, match=r"a.npy, row 7, column 2 .*: .* found, a finite"):
        source.read(torch.tensor([8, 7, 1]))


@pytest.mark.parametrize("y", [np.array([0.0, 0.5]), np.array([0, np.nan]), np.array([0, 2**64 - 1], np.uint64)])
def test_class_numbers_must_be_whole(tmp_path: Path, y: Any) -> None:
    source = ArraySource(save(tmp_path, np.zeros(2)), save(tmp_path, y, "y.npy"), "int64")
    with pytest.raises(ValueError, match=r"y\.npy, row 1, column 0 .* a whole number"):
        source.read(torch.arange(2))


def test_integers_that_float32_rounds_are_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = ArraySource(save(tmp_path, np.array([[1, 2**24 + 2], [1, 2**24 + 1]])))
    source.read(torch.tensor([0]))
    assert "rounds" not in caplog.text
    for _ in range(2):
        source.read(torch.tensor([1]))
    assert caplog.text.count("row 1, column 1 (counted from 0): float32 rounds the integer 16777217") == 1


class Bomb:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.marker, "w")


def test_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    marker, path = tmp_path / "ran", tmp_path / "pickle.npy"
    path.write_bytes(pickle.dumps(Bomb(str(marker))))
    for name in (str(path), save(tmp_path, np.array([Bomb(str(marker))], dtype=object), "object.npy")):
        with pytest.raises(ValueError, match=r"\.npy cannot be read as an array of numbers: it holds Python objects"):
            ArraySource(name)
    assert not marker.exists()


def test_files_that_hold_no_array(tmp_path: Path) -> None:
    (tmp_path / "empty.npy").touch()
    np.savez(tmp_path / "many.npz", a=np.zeros(3))
    whole = save(tmp_path, np.zeros(1000), "cut.npy")
    os.truncate(whole, 500)
    cases = {
        "empty.npy": "cannot be read",
        "many.npz": "an archive",
        "cut.npy": "cannot be read",
        "none.npy": "No such file",
    }
    for name, words in cases.items():
        with pytest.raises(ValueError, match=rf"{name}.*{words}"):
            ArraySource(str(tmp_path / name))
    for array in (np.zeros(3, complex), np.array(["a", "b"]), np.zeros(3, "M8[s]"), np.zeros(3, [("a", "f4")])):
        with pytest.raises(ValueError, match=r"a\.npy holds .*; one array of real numbers"):
            ArraySource(save(tmp_path, array))


def test_a_file_that_changes_is_refused(tmp_path: Path) -> None:
    source = ArraySource(save(tmp_path, np.zeros(9)))
    save(tmp_path, np.zeros(10))
    with pytest.raises(ValueError, match=r"a\.npy has changed since"):
        source.read(torch.arange(3))


def test_sorted_reads_and_pickles_give_the_same_rows(tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((99, 3), np.float32)
    source = ArraySource(save(tmp_path, x))
    rows = torch.randint(99, (500,))
    again = pickle.loads(pickle.dumps(source))
    again._sort = True
    assert b"memmap" not in pickle.dumps(source)
    assert torch.equal(again.read(rows)[0], torch.from_numpy(x)[rows])
    assert torch.equal(source.read(rows)[0], torch.from_numpy(x)[rows])
