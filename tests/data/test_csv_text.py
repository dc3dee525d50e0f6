"""CSV, read closely: digits kept, quotes closed, blank lines counted, changes seen, rows called by their place."""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv
import pytest
import torch

from project.data import csv_text
from project.data.sources import ArraySource
from project.data.tables import TableSource
from tests.data.test_tables import ALL, csv, parquet, rows_of

# -- whole numbers


def test_class_numbers_keep_every_digit_in_any_spelling(tmp_path: Path) -> None:
    large = [2**53 + 1, 2**63 - 1, -(2**63), 5]
    for spelt in (
        ["{}"],
        [" {}", "{}"],
        ["+{}", "{}"],
        ["{}.0", "{}"],
    ):  # the first is cast at once, the others looked at
        cells = [spelt[i % len(spelt)].format(n).replace("+-", "-") for i, n in enumerate(large)]
        path = csv(tmp_path, "a,y\n" + "".join(f"1,{cell}\n" for cell in cells))
        assert TableSource(path, ["a"], "y", "int64").read(ALL(4))[1].tolist() == large


@pytest.mark.parametrize("cell", ["0x10", "0X1f", "9223372036854775808", "1e30", "2.5", "1e400"])
@pytest.mark.parametrize("other", ["7", " 7"])
def test_what_is_no_whole_number_is_refused_however_its_neighbours_are_spelt(
    tmp_path: Path, cell: str, other: str
) -> None:
    path = csv(tmp_path, f"a,y\n1,{other}\n1,{cell}\n")
    with pytest.raises(ValueError, match=rf"line 3, column 'y': '{cell}' found, a whole number expected"):
        len(TableSource(path, ["a"], "y", "int64"))


@pytest.mark.parametrize("value", [2**24 + 1, 2**53 + 1, 2**60 + 1, 2**63 - 1])
@pytest.mark.parametrize("kind", ["csv", "parquet", "npy"])
def test_integers_of_any_size_that_float32_rounds_bring_a_warning(
    tmp_path: Path, value: int, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    for number, words in ((value, True), (2**60, False)):
        caplog.clear()
        numbers = np.array([1, number])
        if kind == "npy":
            np.save(tmp_path / "a.npy", numbers)
            ArraySource(str(tmp_path / "a.npy")).read(ALL(2))
        else:
            text = "".join(f"\n{n}" for n in numbers)
            path = csv(tmp_path, f"a{text}") if kind == "csv" else parquet(tmp_path, {"a": numbers})
            TableSource(path).read(ALL(2))
        assert ("float32 rounds" in caplog.text) == words


def test_floats_are_no_integers_however_large(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    len(TableSource(csv(tmp_path, "a,b\n1e30,12345678901234567.5\n1.5e17,3.3e38\n")))
    assert "rounds" not in caplog.text


# -- headers


@pytest.mark.parametrize("first", ["1,nan", "inf,2", "-Infinity,NaN", "1,NA", "null,2", "1e5,N/A"])
def test_a_row_of_numbers_and_missing_values_is_no_header(tmp_path: Path, first: str) -> None:
    with pytest.raises(ValueError, match=rf"no header: its first line is '{first}'; add column names"):
        len(TableSource(csv(tmp_path, f"{first}\n3,4\n")))


def test_a_name_among_numbers_makes_a_header(tmp_path: Path) -> None:
    assert rows_of(TableSource(csv(tmp_path, "2019,total\n3,4\n"))) == [[3, 4]]


# -- quotes


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('a,b\n1,"2\n3,4\n5,6\n', 2),  # open to the end
        ('a,b\n1,2\n3,"4\n5,6\n7,"8"\n9,1\n', 3),  # closed by a later one
        ('a,b\n1,2\n"3,4\n5,6\n', 3),  # too few cells
        ('a,b,text\n1,2,"x\n3,4,y\n5,6,z\n', 2),  # in a column that is not used
        ('a,b,text\n1,2,"x\n3,4,"y"\n5,6,z\n', 2),
        ('a\n1\n"2\n3\n', 3),
    ],
)
@pytest.mark.parametrize("skip", [False, True])
def test_a_quote_that_is_not_closed_swallows_no_row_in_silence(
    tmp_path: Path, text: str, line: int, skip: bool
) -> None:
    features = ["a"] if text.startswith("a\n") else ["a", "b"]
    with pytest.raises(ValueError, match=rf"a\.csv, line {line}.*\nIs a quote missing\?"):
        len(TableSource(csv(tmp_path, text), features, skip_bad_rows=skip))


def test_quotes_within_words_and_over_lines_are_fine(tmp_path: Path) -> None:
    text = 'a,text\n1,5" pipe\n2,"two\nlines, ""quoted"""\n3,\n'
    assert rows_of(TableSource(csv(tmp_path, text), ["a"])) == [[1], [2], [3]]


def test_a_quote_open_over_more_than_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_text, "BLOCK_BYTES", 1 << 10)
    text = 'a,b\n1,2\n3,"4\n' + "5,6\n" * 5000
    with pytest.raises(ValueError, match=r"a\.csv, line 3.*\nIs a quote missing\?"):
        len(TableSource(csv(tmp_path, text), skip_bad_rows=True))


# -- a table of one column


@pytest.mark.parametrize("block", [None, 1])
@pytest.mark.parametrize("head", ["a\n", "\n\na\r\n"])
def test_a_blank_line_of_one_column_is_an_empty_cell_unless_it_is_the_last(
    tmp_path: Path, head: str, block: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if block:
        monkeypatch.setattr(csv_text, "BLOCK_BYTES", block)
    above = head.count("\n")
    clean = csv(tmp_path, head + "1\n2\n" * 50 + "\n\n\n", "clean.csv")
    assert rows_of(TableSource(clean)) == [[1], [2]] * 50
    with pytest.raises(ValueError, match=rf"line {above + 3}, column 'a': '' found"):
        len(TableSource(csv(tmp_path, head + "1\n2\n\n3\n", "blank.csv")))
    path = csv(tmp_path, head + "1\n2\n\n\n3\n" + "4\n" * 99 + "x\n5,6\n\n7\n\n\n")
    source = TableSource(path, skip_bad_rows=True)
    assert rows_of(source) == [[1], [2], [3], *[[4]] * 99, [7]]
    for line, words in ((3, "''"), (4, "''"), (105, "'x'"), (106, "2 cells"), (107, "''")):
        assert re.search(rf"line {above + line}: .*{words} found", caplog.text)
    assert source.skipped == 5
    assert [source.where(row).rpartition(" ")[2] for row in (1, 2, 102)] == [str(above + n) for n in (2, 5, 108)]


def test_a_quoted_empty_cell_at_the_end_is_a_row(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 3, column 'a': '' found"):
        len(TableSource(csv(tmp_path, 'a\n1\n""\n')))


# -- files that change


def test_a_change_that_keeps_size_and_time_is_seen(tmp_path: Path) -> None:
    path = csv(tmp_path, "a\n1\n")
    state = os.stat(path)
    assert rows_of(TableSource(path)) == [[1]]
    with open(path, "r+") as file:
        file.write("a\n7\n")
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert (os.stat(path).st_size, os.stat(path).st_mtime_ns) == (state.st_size, state.st_mtime_ns)
    assert rows_of(TableSource(path)) == [[7]]


# -- rows by their place in the files


def test_numbers_are_those_of_the_files_with_bad_rows_counted(tmp_path: Path) -> None:
    csv(tmp_path, "a\n0\nx\n2\n", "a.csv")
    csv(tmp_path, "a\nx\n4\n5,5\n6\n", "b.csv")
    parquet(tmp_path, {"a": [7.0, None, 9.0]}, "c.parquet")
    source = TableSource(str(tmp_path), skip_bad_rows=True)
    rows = ALL(len(source))
    assert source.numbers(rows).tolist() == source.read(rows)[0].flatten().tolist() == [0, 2, 4, 6, 7, 9]
    assert [re.split("[ ,/]+", source.where(i))[-5:][0 if i > 3 else -3] for i in range(6)][:2] == ["a.csv", "a.csv"]
    assert [int(re.search(r"(?:line|row) (\d+)", source.where(i))[1]) for i in range(6)] == [2, 4, 3, 5, 0, 2]  # type: ignore[index]


@pytest.fixture
def trained(run: Any, here: Path) -> Any:
    """A model of two columns, trained on a table; returns the path of its checkpoint."""
    rows = np.random.default_rng(0).random((100, 2))
    csv(here, "a,b,y\n" + "".join(f"{a},{b},{a + b}\n" for a, b in rows), "train.csv")
    done = run(*TABLE, "--max_epochs", "1", "--data.batch_size", "8")
    assert done.code == 0, done.err
    return done


TABLE = ["--data.source", "project.data.tables.TableSource", "--data.source.files", "train.csv"]
TABLE += ["--data.source.target", "y"]
NEW = ["--data.predict_source", "project.data.tables.TableSource", "--data.predict_source.files", "new.csv"]


def test_predictions_are_numbered_as_the_rows_of_the_file(trained: Any, run: Any, here: Path) -> None:
    csv(here, "b,a\n1,1\n1,x\n2,2\n", "new.csv")
    path = trained.folder / "checkpoints" / "last.ckpt"
    done = run(
        "predict", *TABLE, *NEW, "--data.predict_source.skip_bad_rows", "true", "--ckpt_path", path, "--output", "p.csv"
    )
    assert done.code == 0, done.err
    assert pyarrow.csv.read_csv("p.csv")["row"].to_pylist() == [0, 2]


def test_predict_opens_no_more_of_the_training_table_than_it_needs(
    trained: Any, run: Any, here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    csv(here, "b,a\n1,1\n", "new.csv")
    path = trained.folder / "checkpoints" / "last.ckpt"
    said = [record.message for record in caplog.get_records("setup")]
    assert len([words for words in said if "converting" in words]) == 1  # training and test rows are of one file
    csv(here, "a,b,y\nnot,numbers,here\n", "train.csv")  # only its header is read
    done = run("predict", *TABLE, *NEW, "--ckpt_path", path, "--output", "p.csv")
    assert done.code == 0, done.err
    assert "train.csv: converting" not in caplog.text
    assert "new.csv: converting" in caplog.text
    os.unlink("train.csv")  # with columns that are named, not even that
    columns = ["--data.source.features", "[a,b]"]
    done = run("predict", *TABLE, *columns, *NEW, "--ckpt_path", path, "--output", "q.csv")
    assert done.code == 0, done.err
    assert Path("p.csv").read_text() == Path("q.csv").read_text()


def test_sources_of_their_own_in_one_file_are_converted_once(
    run: Any, here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    csv(here, "a,b,y\n" + "1,2,3\n2,3,5\n" * 50, "train.csv")
    tests = [word.replace("data.source", "data.test_source") for word in TABLE]
    vals = [word.replace("data.source", "data.val_source") for word in TABLE]
    done = run(*TABLE, *tests, *vals, "--data.split", "[1,0,0]", "--max_epochs", "1", "--data.batch_size", "8")
    assert done.code == 0, done.err
    assert "100 train, 100 val, 100 test" in done.out
    assert caplog.text.count("converting to Parquet, once") == 1
    assert torch.isfinite(torch.tensor(list(done.score.values()))).all()
