"""TableSource: what comes in must be numbers, found by name; what is not is named with file, column and row."""

import gzip
import io
import logging
import os
import pickle
import re
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from project.data import csv_text, tables
from project.data.tables import TableSource

ALL = torch.arange


def rows_of(source: TableSource) -> list[list[float]]:
    return torch.cat([part.reshape(len(source), -1).double() for part in source.read(ALL(len(source)))], 1).tolist()


def csv(folder: Path, text: str | bytes, name: str = "a.csv") -> str:
    path = folder / name
    data = text.encode() if isinstance(text, str) else text
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return str(path)


def parquet(folder: Path, columns: dict[str, Any], name: str = "a.parquet", group: int = 100) -> str:
    pq.write_table(pa.table(columns), folder / name, row_group_size=group)
    return str(folder / name)


# -- what is read


@pytest.mark.parametrize(
    "text",
    [
        "a,b,y\n1,2,3\n4,5,6\n",
        "a,b,y\n1,2,3\n4,5,6",
        "\ufeffa,b,y\r\n1,2,3\r\n4,5,6\r\n\r\n",
        '"a","b","y"\n"1","2","3"\n4,5,6\n\n\n',
        "\n\n a, b ,y\n\n 1, +2,3.0\n\n4e0,5.,6\n",
        "b,y,a\n2,3,1\n5,6,4\n",
        "a,b,name,y\n1,2,x,3\n4,5,,6\n",
    ],
)
@pytest.mark.parametrize("name", ["a.csv", "A.CSV.GZ", "a.csv.gz"])
def test_spellings_of_one_table(tmp_path: Path, text: str, name: str) -> None:
    data = gzip.compress(text.encode()) if name == "A.CSV.GZ" else text
    source = TableSource(csv(tmp_path, data, name), ["a", "b"], "y")
    assert rows_of(source) == [[1, 2, 3], [4, 5, 6]]
    assert (len(source), source.in_features, source.skipped, source.block) == (2, 2, 0, 2)


def test_columns_by_default_and_by_name(tmp_path: Path) -> None:
    path = csv(tmp_path, "a,b,y\n1,2,3\n4,5,6\n")
    assert [part.tolist() for part in TableSource(path).read(ALL(2))] == [[[1, 2, 3], [4, 5, 6]]]
    assert [part.tolist() for part in TableSource(path, target="b").read(ALL(2))] == [[[1, 3], [4, 6]], [[2], [5]]]
    assert TableSource(path, ["y"], ["b", "a"]).read(ALL(1))[1].tolist() == [[2, 1]]
    x, y = TableSource(path, ["a"], "y", "int64").read(torch.tensor([1, 0, 1]))
    assert (x.dtype, y.dtype, y.tolist()) == (torch.float32, torch.int64, [6, 3, 6])
    assert TableSource(path, ["a"], ["b", "y"], "int64").read(ALL(2))[1].tolist() == [[2, 3], [5, 6]]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int64", "uint8", "bool", "decimal"])
@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_dtypes_of_one_table(tmp_path: Path, dtype: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "project")
    whole = np.random.default_rng(0).integers(0, 2, (300, 2))
    columns = [[Decimal(int(v)) for v in c] for c in whole.T] if dtype == "decimal" else list(whole.T.astype(dtype))
    if kind == "csv":
        lines = [",".join(map(str, line)) for line in zip(*columns, strict=True)]
        path = csv(tmp_path, "\n".join(["a,y", *lines]))
    else:
        path = parquet(tmp_path, {"a": columns[0], "y": columns[1]})
    for target_dtype in ("float32", "int64"):
        assert rows_of(TableSource(path, ["a"], "y", target_dtype)) == whole.tolist()
    assert ("converted" in caplog.text) == (kind == "parquet") or dtype == "float32"


def test_many_files_are_one_table(tmp_path: Path) -> None:
    for i in range(3):
        (tmp_path / f"in{i}").mkdir()
        csv(tmp_path, f"a,y\n{i},0\n{i},1\n", f"in{i}/t.csv")
    parquet(tmp_path, {"y": [7.0], "a": [9]}, "z.parquet")
    (tmp_path / "notes.txt").write_text("x")
    pattern = f"{tmp_path}/in*/t.csv"
    assert rows_of(TableSource(pattern, target="y"))[2:5] == [[1, 0], [1, 1], [2, 0]]
    mixed = TableSource([str(tmp_path), pattern], target="y")
    assert rows_of(mixed)[:2] == [[9, 7], [0, 0]]
    assert mixed.read(torch.tensor([6, 0, 3, 3]))[0].tolist() == [[2], [9], [1], [1]]
    assert len(TableSource(f"{tmp_path}/**/*.csv", target="y")) == 6
    assert [mixed.where(i).rsplit("/", 2)[1:] for i in (0, 3)] == [
        [tmp_path.name, "z.parquet, row 0 (counted from 0)"],
        ["in1", "t.csv, line 2"],
    ]


def test_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    csv(tmp_path, "a,b\n1,2\n")
    parquet(tmp_path, {"a": [1], "b": [2]})
    for name in ("a.csv", "a.parquet", "*.csv", "*.p?rquet"):
        assert rows_of(TableSource(f"{tmp_path.as_uri()}/{name}")) == [[1, 2]]
    monkeypatch.chdir(tmp_path)
    for name in ("a.csv", "*.csv", "./a.*v", "."):
        assert rows_of(TableSource(name))[0] == [1, 2]
    with pytest.raises(ValueError, match=r"source\.files: nowhere://x cannot be opened: "):
        len(TableSource("nowhere://x"))


def test_other_file_systems_need_a_folder_for_copies(tmp_path: Path) -> None:
    import fsspec

    with fsspec.filesystem("memory").open("/t/a.csv", "wb") as out:
        out.write(b"a\n5\n")
    with pytest.raises(ValueError, match=r"--data\.source\.cache_dir"):
        len(TableSource("fsspec+memory://t/a.csv"))
    assert rows_of(TableSource("fsspec+memory://t/a.csv", cache_dir=str(tmp_path))) == [[5]]


def test_no_rows(tmp_path: Path) -> None:
    for path in (csv(tmp_path, "a,b\n"), parquet(tmp_path, {"a": pa.array([], pa.int64())})):
        source = TableSource(path)
        assert (len(source), source.read(ALL(0))[0].shape[0]) == (0, 0)
        with pytest.raises(IndexError):
            source.read(torch.tensor([0]))


# -- what is refused

HEAD = "a,b\n1,2\n\n3,4\n"
BAD_CELLS = ["x", "", "N/A", "NaN", "inf", "-Infinity", '"1,5"', "(1+2j)", "1e39", "1_000", "0x1", "1 2", '"1\n2"']


@pytest.mark.parametrize("cell", BAD_CELLS)
def test_a_bad_cell_is_named(tmp_path: Path, cell: str) -> None:
    path = csv(tmp_path, f"{HEAD}5,{cell}\n7,8\n")
    text = cell.strip('"')
    with pytest.raises(ValueError, match="found") as caught:
        len(TableSource(path))
    assert f"a.csv, line 5, column 'b': {text!r} found, a number expected\n" in str(caught.value)
    assert "--data.source.skip_bad_rows true" in str(caught.value)
    assert os.listdir(tmp_path / ".cache") == []
    assert rows_of(TableSource(path, ["a"])) == [[1], [3], [5], [7]]
    source = TableSource(path, skip_bad_rows=True)
    assert (rows_of(source), source.skipped) == ([[1, 2], [3, 4], [7, 8]], 1)
    assert source.where(2).endswith("line 7" if "\n" in cell else "line 6")


def test_class_numbers_must_be_whole(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"line 3, column 'y': '1\.5' found, a whole number expected"):
        len(TableSource(csv(tmp_path, "a,y\n1,1\n1,1.5\n"), ["a"], "y", "int64"))
    with pytest.raises(ValueError, match=r"a\.parquet, row 1 .*, column 'y': 1\.5 found, a whole number"):
        TableSource(parquet(tmp_path, {"a": [1, 1], "y": [1, 1.5]}), ["a"], "y", "int64").read(ALL(1))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{HEAD}5,6,7\n", r"a\.csv, line 5: 3 cells found, 2 expected: '5,6,7'"),
        (f"{HEAD}5\n", r"a\.csv, line 5: 1 cells found, 2 expected: '5'"),
        ("1,2\n3,4\n", r"a\.csv has no header: its first line is '1,2'"),
        ("a,b,a\n1,2,3\n", r"a\.csv has two columns named 'a'"),
        (",a\n0,1\n", r"a\.csv: column 1, '', has no name .*\nList the columns"),
        ("", r"a\.csv is empty"),
        ("a,b\n1,2\n".encode("utf-16"), r"a\.csv is not UTF-8"),
        (b"a,b\n1,\xff\n", r"a\.csv cannot be read.*UTF8"),
    ],
)
def test_files_that_are_no_table(tmp_path: Path, text: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        len(TableSource(csv(tmp_path, text)))


@pytest.mark.parametrize("name", ["a.csv.gz", "a.parquet"])
@pytest.mark.parametrize("keep", [0.5, 0.99, 0.0])
def test_files_that_are_cut_off(tmp_path: Path, name: str, keep: float) -> None:
    numbers = np.random.default_rng(0).random(5000)
    text = "a\n" + "\n".join(map(str, numbers))
    path = csv(tmp_path, text, name) if "csv" in name else parquet(tmp_path, {"a": numbers})
    os.truncate(path, int(os.path.getsize(path) * keep))
    with pytest.raises(ValueError, match=rf"{name} (cannot be read|is empty)"):
        len(TableSource(path))


def test_names_that_do_not_fit(tmp_path: Path) -> None:
    path = csv(tmp_path, "bmi,age,target\n1,2,3\n")
    with pytest.raises(ValueError, match=r"no column 'bmj'; did you mean 'bmi'\?\nIts columns: 'bmi', 'age', 'target'"):
        len(TableSource(path, ["bmj"], "target"))
    for wrong in ({"features": ["bmi", "bmi"]}, {"features": ["bmi"], "target": "bmi"}, {"features": []}):
        with pytest.raises(ValueError, match="name a column once"):
            TableSource(path, **wrong)
    for files, words in (([], "no file is"), ([path, path], "a.csv is there twice")):
        with pytest.raises(ValueError, match=words):
            len(TableSource(files))
    with pytest.raises(ValueError, match=r"column 'name' holds string; numbers are expected"):
        len(TableSource(parquet(tmp_path, {"name": ["x"], "a": [1]})))


@pytest.mark.parametrize(
    "odd", [{"a": [1], "c": [2]}, {"a": [1]}, {"a": [1], "b": [2], "c": [3]}, {"a": [1], "b": [""]}]
)
def test_another_schema_in_the_middle(tmp_path: Path, odd: dict[str, Any]) -> None:
    files = [parquet(tmp_path, {"a": [1], "b": [2]}, f"{i}.parquet") for i in range(4)]
    parquet(tmp_path, odd, "2.parquet")
    with pytest.raises(
        ValueError, match=r"2\.parquet(: column 3, 'c', is not in the first file| has no column 'b'|, column 'b')"
    ):
        TableSource(files).prepare()


def test_nothing_found_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "b.txt").touch()
    cases = {
        f"{tmp_path}/*.csv": f"Looked at {tmp_path}/, which holds b.txt, empty",
        f"{tmp_path}/empty": f"Looked at {tmp_path}/empty, which holds nothing",
        f"{tmp_path}/none.csv": f"Looked at {tmp_path}/none.csv, which does not exist",
        f"{tmp_path}/b.txt": "b.txt is none of .csv, .csv.gz, .parquet",
    }
    for pattern, words in cases.items():
        with pytest.raises(ValueError, match=re.escape(words).replace("/,", "/?,")):
            len(TableSource(pattern))


def test_row_70001_of_100000(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_text, "BLOCK_BYTES", 1 << 16)
    lines = [f"{i},{i % 7}" for i in range(1, 100_001)]
    lines[70_000] = "70001,oops"
    lines[50] = "1,2,3"
    lines[60] = "x,2"
    path = csv(tmp_path, "a,b\n" + "\n".join(lines) + "\n")
    lines_wrong = {52: "3 cells", 62: "column 'a': 'x'", 70_002: "column 'b': 'oops'"}
    source = TableSource(path, skip_bad_rows=True)
    assert (len(source), source.skipped, source.block) == (99_997, 3, 4096)
    assert "3 bad rows are left out" in caplog.text
    for line, words in lines_wrong.items():
        assert f"line {line}: {words}" in caplog.text
    for row in (49, 50, 58, 59, 69_997, 69_998, 99_996):
        value = int(source.read(torch.tensor([row]))[0][0, 0])
        assert source.where(row) == f"{path}, line {value + 1}"
    again = TableSource(path, skip_bad_rows=True)
    assert (len(again), again.skipped) == (99_997, 3)
    csv(tmp_path, re.sub("1,2,3|x,2", "5,6", Path(path).read_text()))
    with pytest.raises(ValueError, match=r"line 70002, column 'b': 'oops' found"):
        len(TableSource(path))


def test_ten_of_many_bad_rows_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = TableSource(csv(tmp_path, "a\n" + "x\n1\n" * 30), skip_bad_rows=True)
    assert (len(source), source.skipped) == (30, 30)
    assert caplog.text.count("'x' found") == 10
    assert "line 20: column 'a'" in caplog.text
    assert "and 20 more" in caplog.text


# -- Parquet


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_bad_rows_in_parquet(tmp_path: Path, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    numbers: list[Any] = [float(i) for i in range(1000)]
    flags: list[Any] = [i % 2 == 0 for i in range(1000)]
    numbers[123], numbers[500], flags[777] = value, value, None
    files = [parquet(tmp_path, {"a": numbers, "b": flags}, f"{i}.parquet") for i in range(2)]
    source = TableSource(files)
    source.read(ALL(100))
    with pytest.raises(ValueError, match=r"1\.parquet, row 123 \(counted from 0\), column 'a': .* found"):
        source.read(torch.tensor([1199]))
    source = TableSource(files, skip_bad_rows=True)
    good = [i for i in range(1000) if i not in (123, 500, 777)]
    assert [row[0] for row in rows_of(source)] == good * 2
    assert (len(source), source.skipped) == (1994, 6)
    assert "6 bad rows are left out" in caplog.text
    assert "0.parquet, row 777 (counted from 0)" in caplog.text
    assert source.where(997 + 123).endswith("1.parquet, row 124 (counted from 0)")
    pickled = pickle.loads(pickle.dumps(source))
    assert torch.equal(pickled.read(torch.tensor([5, 1500]))[0], source.read(torch.tensor([5, 1500]))[0])


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_rounded_integers_are_warned_of_once(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    fine, rounded = [2**24 + 2, 5], [2**24 + 1, 5]
    if kind == "csv":
        path = csv(tmp_path, "\n".join(["a,b,c", *(f"{a},{b},{b}.5" for a, b in zip(fine, rounded, strict=True))]))
    else:
        path = parquet(tmp_path, {"a": fine, "b": rounded}, group=1)
    for run in (1, 2):  # the second finds the copy of the first
        source = TableSource(path)
        source.read(ALL(2))
        source.read(ALL(2))
        assert caplog.text.count("column 'b': float32 rounds") == run
    assert "column 'a': float32" not in caplog.text
    assert "column 'c': float32" not in caplog.text


def test_files_that_change_are_refused(tmp_path: Path) -> None:
    path = parquet(tmp_path, {"a": list(range(1000))})
    source = TableSource(path)
    source.read(ALL(100))
    parquet(tmp_path, {"a": list(range(1001))})
    with pytest.raises(ValueError, match=r"a\.parquet has changed since"):
        source.read(torch.tensor([500]))
    os.unlink(path)
    with pytest.raises(ValueError, match=r"a\.parquet is not there any more"):
        source.read(torch.tensor([500]))


def test_few_groups_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = parquet(tmp_path, {"a": np.arange(10_000.0), "b": np.arange(10_000.0)})
    decoded: list[int] = []
    decode = TableSource._decode

    def counted(self: TableSource, number: int, refuse: bool) -> Any:
        decoded.append(number)
        return decode(self, number, refuse)

    monkeypatch.setattr(TableSource, "_decode", counted)
    source = TableSource(path)
    rows = torch.randint(6400, (20, 500))
    for some in rows:
        assert source.read(some)[0][:, 0].tolist() == some.tolist()
    assert len(decoded) == 64
    monkeypatch.setattr(tables, "KEPT_BYTES", 10 * 100 * 2 * 4)
    source.read(ALL(10_000))
    assert len(source._kept) <= 10


# -- the copy of a CSV file


def test_the_copy_is_made_once_and_again_after_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "project")
    path = csv(tmp_path, "a,y\n1,2\n")
    made = lambda: caplog.text.count("converting")  # noqa: E731
    for _ in range(2):
        len(TableSource(path, target="y"))
    assert made() == 1
    for options in ({"target": "a"}, {"features": ["a"]}):  # columns of the same copy
        assert rows_of(TableSource(path, **options))[0] == ([2, 1] if "target" in options else [1])
    assert made() == 1
    for options in ({"target_dtype": "int64"}, {"skip_bad_rows": True}):
        len(TableSource(path, target="y", **options))
    assert made() == 3
    csv(tmp_path, "a,y\n7,2\n")
    os.utime(path, ns=(1, 1))
    assert rows_of(TableSource(path, target="y")) == [[7, 2]]
    copy = max((tmp_path / ".cache").iterdir(), key=lambda file: file.stat().st_mtime_ns)
    copy.write_bytes(b"damaged")
    assert rows_of(TableSource(path, target="y")) == [[7, 2]]


def test_left_over_pieces_are_cleaned(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    for name in ("old.csv-1.parquet.1.tmp", "new.csv-1.parquet.2.tmp"):
        (cache / name).touch()
    os.utime(cache / "old.csv-1.parquet.1.tmp", (1, 1))
    len(TableSource(csv(tmp_path, "a\n1\n"), cache_dir=str(cache)))
    names = sorted(p.name for p in cache.iterdir())
    assert names[1:] == ["new.csv-1.parquet.2.tmp"]
    assert re.fullmatch(r"a\.csv-[0-9a-f]{16}-[0-9a-f]{16}\.parquet", names[0])


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / ".cache").touch()
    with pytest.raises(ValueError, match=r"a\.csv cannot be converted into .*\n.*--data\.source\.cache_dir"):
        len(TableSource(csv(tmp_path, "a\n1\n")))


def test_a_csv_file_that_changes_under_the_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = csv(tmp_path, "a\n1\n")
    report = csv_text.Conversion.report

    def slow(self: Any) -> list[int]:
        csv(tmp_path, "a\n1\n2\n")
        return report(self)

    monkeypatch.setattr(csv_text.Conversion, "report", slow)
    with pytest.raises(ValueError, match=r"a\.csv changed while it was read"):
        len(TableSource(path))


CONVERT = """
import sys, torch
from project.data.tables import TableSource
input()
source = TableSource(sys.argv[1], target="y")
print(len(source), float(source.read(torch.arange(len(source)))[0].double().sum()))
"""


@pytest.mark.slow
def test_two_jobs_convert_at_once(tmp_path: Path) -> None:
    path = csv(tmp_path, "a,y\n" + "".join(f"{i},1\n" for i in range(100_000)))
    command, pipe = [sys.executable, "-c", CONVERT, path], subprocess.PIPE
    jobs = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    for job in jobs:  # both have imported all by the time they are told to go, or soon after
        assert job.stdin is not None
        job.stdin.write("go\n")
        job.stdin.flush()
    assert [job.communicate(timeout=60)[0] for job in jobs] == ["100000 4999950000.0\n"] * 2
    assert len(os.listdir(tmp_path / ".cache")) == 1


@pytest.mark.slow
def test_workers_read_through_forks_and_pickles(tmp_path: Path) -> None:
    source = TableSource(csv(tmp_path, "a,y\n" + "".join(f"{i},{i}\n" for i in range(9000))), target="y")
    source.read(ALL(10))
    windows = [ALL(i, i + 3000) for i in (0, 3000, 6000)]

    class Reads(torch.utils.data.Dataset[Any]):
        def __getitem__(self, i: int) -> Any:
            return source.read(windows[i])

    loader = torch.utils.data.DataLoader(
        Reads(), None, sampler=[2, 0, 1], num_workers=2, multiprocessing_context="fork"
    )
    assert [int(x[0, 0]) for x, _ in loader] == [6000, 0, 3000]
    state = pickle.dumps(source)
    assert len(state) < 5000
    code = f"import pickle, torch; s = pickle.loads({state!r}); print(int(s.read(torch.tensor([8999]))[0]))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "8999\n"


MEMORY = """
import sys, torch
from project.data.tables import TableSource
def peak(): return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024
small = TableSource(sys.argv[1], target="c0"); small.read(torch.arange(len(small)))
before = peak()
big = TableSource(sys.argv[2], target="c0")
rows = len(big)
converted = peak() - before
total = 0.0
for first in range(0, len(big), 16_384):
    total += float(big.read(torch.arange(first, min(first + 16_384, len(big))))[0].double().sum())
print(converted, peak() - before, len(big))
"""


@pytest.mark.parametrize("megabytes", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, megabytes: int) -> None:
    names = ",".join(f"c{i}" for i in range(10))
    block = io.StringIO()
    np.savetxt(block, np.random.default_rng(0).random((20_000, 10)), fmt="%.8f", delimiter=",")
    text = block.getvalue()
    repeats = megabytes * 10**6 // len(text)
    with open(tmp_path / "big.csv", "w") as out:
        out.write(names + "\n")
        for _ in range(repeats):
            out.write(text)
    small = csv(tmp_path, f"{names}\n{text}", "small.csv")
    began = time.monotonic()
    command = [sys.executable, "-c", MEMORY, small, str(tmp_path / "big.csv")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    converted, read, rows = map(float, run.stdout.split())
    print(
        f"{megabytes} MB, {rows:.0f} rows: peak +{converted:.0f} MB, +{read:.0f} MB, {time.monotonic() - began:.1f} s"
    )
    assert rows == repeats * 20_000
    assert read < 120


def test_other_parts_read_the_columns_of_the_training_table_by_name(tmp_path):
    (tmp_path / "train.csv").write_text("a,b,y\n1,2,0\n3,4,1\n")
    (tmp_path / "new.csv").write_text("b,a\n20,10\n")
    (tmp_path / "wrong.csv").write_text("c,d\n20,10\n")
    train = TableSource(str(tmp_path / "train.csv"), target="y")
    new = TableSource(str(tmp_path / "new.csv"))
    new.take_columns_of(train)
    assert new.read(torch.tensor([0]))[0].tolist() == [[10.0, 20.0]]
    wrong = TableSource(str(tmp_path / "wrong.csv"))
    wrong.take_columns_of(train)
    with pytest.raises(ValueError, match=r"wrong.csv has no column 'a'"):
        len(wrong)
