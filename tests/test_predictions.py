"""Predictions: one file, row number first, in the order of the input, each row once, whatever ran them."""

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from torch import Tensor, nn

from project.data.datamodule import StreamDataModule
from project.engine.predictions import ROWS, PredictionWriter
from project.module import Module
from tests.numbered import COLUMNS, Numbered, trainer_of
from tests.ranks import on_ranks

KINDS = (".csv", ".parquet", ".npy")


def model(outputs: int = 1) -> Module:
    torch.manual_seed(0)
    return Module(nn.Linear(COLUMNS, outputs))


def predict(path: Path, rows: int, devices: int = 1, module: Module | None = None, **data: Any) -> int:
    writer = PredictionWriter(path)
    trainer = trainer_of(devices, callbacks=[writer])
    trainer.predict(module or model(), StreamDataModule(Numbered(rows), **data), return_predictions=False)
    return writer.written


def read(path: Path) -> np.ndarray:
    """The file as one array [rows, 1 + columns]."""
    if path.suffix == ".npy":
        return np.load(path, allow_pickle=False)
    table = pyarrow.csv.read_csv(path) if path.suffix == ".csv" else pyarrow.parquet.read_table(path)
    assert table.column_names[0] == "row"
    return np.column_stack([column.to_numpy() for column in table.columns])


def expected(rows: int, module: Module | None = None) -> np.ndarray:
    x, _ = Numbered(rows).read(torch.arange(rows))
    with torch.no_grad():
        return np.column_stack([np.arange(rows), (module or model())(x).flatten(1).numpy()])


def predict_all(devices: int, folder: Path) -> list[int]:
    written = []
    for rows in (1, 2, 5, 11, 101):
        for kind in KINDS:
            path = folder / f"{devices}-{rows}{kind}"
            written.append(predict(path, rows, devices, eval_batch_size=4, chunk_size=5))
    return written


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_one_file_with_each_row_once_in_input_order(devices: int, tmp_path: Path) -> None:
    first, *others = on_ranks(devices, predict_all, devices, tmp_path)
    assert first == [rows for rows in (1, 2, 5, 11, 101) for _ in KINDS]
    assert all(other == [0] * len(first) for other in others)  # rank 0 writes
    assert len(list(tmp_path.iterdir())) == len(first)
    for rows in (1, 2, 5, 11, 101):
        for kind in KINDS:
            np.testing.assert_allclose(read(tmp_path / f"{devices}-{rows}{kind}"), expected(rows), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_workers_and_chunks_change_no_byte_and_batches_only_the_last_digits(kind: str, tmp_path: Path) -> None:
    def contents(name: str, **data: Any) -> bytes:
        predict(tmp_path / (name + kind), 203, **data)
        return (tmp_path / (name + kind)).read_bytes()

    first = contents("first", eval_batch_size=7)
    for workers, chunk in ((0, 1), (0, 7), (1, 50), (3, 10_000)):
        assert contents(f"{workers}-{chunk}", eval_batch_size=7, num_workers=workers, chunk_size=chunk) == first
    for batch in (1, 64, 4096):
        contents(f"batch-{batch}", eval_batch_size=batch)
        np.testing.assert_allclose(read(tmp_path / f"batch-{batch}{kind}"), expected(203), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_several_outputs_have_a_column_each_and_long_files_more_than_one_piece(kind: str, tmp_path: Path) -> None:
    rows = ROWS + 10
    assert predict(tmp_path / f"p{kind}", rows, module=model(3), eval_batch_size=5000) == rows
    np.testing.assert_allclose(read(tmp_path / f"p{kind}"), expected(rows, model(3)), atol=1e-6, rtol=0)
    if kind == ".parquet":
        names = pyarrow.parquet.read_schema(tmp_path / "p.parquet").names
        assert names == ["row", "prediction_0", "prediction_1", "prediction_2"]


class Classes(Module):
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(1)


def test_whole_numbers_stay_whole_and_halves_become_floats(tmp_path: Path) -> None:
    predict(tmp_path / "classes.csv", 9, module=Classes(nn.Linear(COLUMNS, 3)))
    values = pyarrow.csv.read_csv(tmp_path / "classes.csv")["prediction"]
    assert str(values.type) == "int64"
    writer = PredictionWriter(tmp_path / "half.parquet")
    data = StreamDataModule(Numbered(9))
    trainer_of(callbacks=[writer], precision="bf16-true").predict(model(), data, return_predictions=False)
    assert str(pyarrow.parquet.read_schema(tmp_path / "half.parquet").field("prediction").type) == "float"


class Breaks(Module):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            raise RuntimeError("half-way")
        return super().predict_step(batch, batch_idx)


@pytest.mark.parametrize("kind", KINDS)
def test_an_unfinished_file_never_bears_the_final_name(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"p{kind}"
    rows = 3 * ROWS  # so that something was written when it breaks
    with pytest.raises(RuntimeError, match="half-way"):
        predict(path, rows, module=Breaks(nn.Linear(COLUMNS, 1)), eval_batch_size=ROWS)
    assert list(tmp_path.iterdir()) == []
    path.with_name(path.name + ".tmp").write_text("the user's")
    predict(path, 5)
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name, path.name + ".tmp"]
    assert path.with_name(path.name + ".tmp").read_text() == "the user's"


def test_a_file_that_has_appeared_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("precious")
    with pytest.raises(FileExistsError, match="the predictions are in"):
        predict(tmp_path / "p.csv", 5)
    assert (tmp_path / "p.csv").read_text() == "precious"
    (unfinished,) = tmp_path.glob(".*p.csv.tmp")
    assert len(unfinished.read_text().splitlines()) == 6


class Pair(Module):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch


def test_what_is_not_one_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"one tensor \[rows, ...\].*found"):
        predict(tmp_path / "p.csv", 5, module=Pair(nn.Linear(COLUMNS, 1)))


def peak(rows: int, path: Path) -> int:
    """Peak resident memory, in MB, of a process that predicts so many rows."""
    predict(path, rows)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_memory_does_not_grow_with_the_number_of_rows(kind: str, tmp_path: Path) -> None:
    (few,) = on_ranks(1, peak, 300_000, tmp_path / f"few{kind}", timeout=300)
    (many,) = on_ranks(1, peak, 5_000_000, tmp_path / f"many{kind}", timeout=300)
    assert many - few < 40, f"{few} MB for 300,000 rows, {many} MB for 5,000,000"
    if kind == ".npy":
        rows = np.load(tmp_path / "many.npy", mmap_mode="r")[:, 0]
        assert len(rows) == 5_000_000
        assert rows[-1] == 4_999_999
