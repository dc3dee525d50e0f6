"""Files that somebody else made: whatever asks for them, no code of theirs runs, and the refusal names the file."""

import pickle
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from project.cli import main
from project.tools import export, report

SMALL = ("--data.source.rows", "100", "--data.batch_size", "8", "--max_epochs", "2")
CLASSES = {  # what Lightning has imported from a checkpoint, before 2.6.6 even unasked
    "_class_path": "theirs.Net",
    "_instantiator": "theirs.make",
    "class_path": "theirs.Net",
    "net": {"class_path": "theirs.Net", "init_args": {}},
    "loss": "theirs.Loss",
}
TABLE = ("--data.source", "project.data.tables.TableSource", "--data.source.target", "y", "--data.source.files")
ARRAY = ("--data.source", "project.data.sources.ArraySource", "--data.source.x")


class Bomb:
    """Unpickled, it makes a file."""

    def __reduce__(self):
        return open, ("ran", "w")


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("once") / "run"
    main([*SMALL, "--max_epochs", "1", "--run_dir", str(folder)])
    return folder


@pytest.fixture
def theirs(once, here):
    """``run``, a run folder whose checkpoint brings an object; a checkpoint of class paths; and what they point to."""
    shutil.copytree(once, "run")
    path = Path("run/checkpoints/last.ckpt")
    saved = torch.load(path, weights_only=True)
    classes = dict.fromkeys(("hyper_parameters", "datamodule_hyper_parameters"), CLASSES)
    torch.save({**saved, **classes, "hparams_name": "theirs.Net"}, "classes.ckpt")
    for best in path.parent.iterdir():
        torch.save({**saved, "hyper_parameters": {"net": Bomb()}}, best)
    Path("theirs.py").write_text("open('ran', 'w')\n")
    return path


MODES = {
    "fit --ckpt_path": ("fit", "--ckpt_path", "{}"),
    "fit --init_weights": ("fit", "--init_weights", "{}"),
    "validate": ("validate", "--ckpt_path", "{}"),
    "test": ("test", "--ckpt_path", "{}"),
    "predict": ("predict", "--ckpt_path", "{}"),
}


def refuses(said, path):
    first, second, *_ = said.splitlines()
    return f"{path} is not loaded: it holds more than tensors" in first and "--weights_only false" in second


def test_an_object_in_a_checkpoint_is_refused_in_every_mode(theirs, refused, run, capfd, table):
    """SEC-01"""
    for mode, argv in MODES.items():
        assert refuses(refused(*(a.format(theirs) for a in argv), *SMALL), theirs), mode
    assert refuses(refused("--resume", "run"), theirs)
    tools = {"export": (export, ["run", "--format", "torch_export"]), "report": (report, ["run", "--predict"])}
    for name, (tool, argv) in tools.items():
        (Path("run") / "report.html").unlink(missing_ok=True)
        with pytest.raises(SystemExit, match="2"):
            tool.main(argv)
        assert refuses(capfd.readouterr().err, theirs), name
        assert not {p.name for p in Path("run").iterdir()} & {"report.html", "model.pt2"}
    assert not Path("ran").exists()
    table("a pickled object in a checkpoint, every command", "exit 2, nothing of it ran", 0.0)


def test_the_one_switch_trusts_it(theirs, run):
    done = run("validate", "--ckpt_path", theirs, *SMALL, "--weights_only", "false")
    assert (done.code, Path("ran").exists()) == (0, True), done.err


@pytest.mark.parametrize("modes", [["fit --ckpt_path", "predict"], pytest.param([*MODES], marks=pytest.mark.slow)])
def test_class_paths_in_a_checkpoint_are_never_imported(theirs, run, table, modes):
    """SEC-01: they are plain text, and the weights beside them are used with the classes that the user names."""
    for mode in modes:
        done = run(*(a.format("classes.ckpt") for a in MODES[mode]), *SMALL)
        assert done.code == 0, (mode, done.err)
    export.main(["run", "--format", "torch_export", "--ckpt_path", "classes.ckpt"])
    if len(modes) == len(MODES):
        shutil.copy("classes.ckpt", theirs)
        assert run("--resume", "run", "--max_epochs", "2").code == 0
        report.main(["run", "--predict"])
    assert not Path("ran").exists()
    table("class paths in a checkpoint, every command", "plain text: nothing is imported", 0.0)


def test_a_file_that_is_no_checkpoint(here, refused):
    for name, content in {"text": b"hello", "empty": b"", "cut": b"PK\x03\x04cut short"}.items():
        Path(name).write_bytes(content)
        said = refused("test", "--ckpt_path", name, *SMALL)
        assert f"--ckpt_path {name} " in said.splitlines()[0]


def odd_objects():
    np.save("odd.npy", np.array([[Bomb()]] * 20, dtype=object), allow_pickle=True)


def odd_pickle():
    Path("odd.npy").write_bytes(pickle.dumps(Bomb()))


def table_of(values, path="odd.parquet", name="a"):
    return lambda: pq.write_table(pa.table({name: values, "y": [2.0] * len(values)}), path)


def odd_end():
    table_of([1.0] * 20)()
    Path("odd.parquet").write_bytes(Path("odd.parquet").read_bytes()[:-20])


def odd_schema():
    table_of([1.0] * 20, "good.parquet")()
    table_of([1.0] * 20, name="b")()


ODD = {
    "an array of objects": (odd_objects, (*ARRAY, "odd.npy"), "it holds Python objects"),
    "a pickle named .npy": (odd_pickle, (*ARRAY, "odd.npy"), "it holds Python objects"),
    "Parquet without its end": (odd_end, (*TABLE, "odd.parquet"), "odd.parquet"),
    "text in a column": (table_of(["no", "number"] * 10), (*TABLE, "odd.parquet"), "'a'"),
    "lists in a column": (table_of([[1.0]] * 20), (*TABLE, "odd.parquet"), "'a'"),
    "columns of another table": (odd_schema, (*TABLE, "[good.parquet, odd.parquet]"), "'b'"),
}


def test_data_files_are_refused(here, refused, table):
    for what, (make, flags, words) in ODD.items():
        make()
        said = refused(*flags)
        assert "odd." in said.splitlines()[0], (what, said)
        assert words in said, (what, said)
    assert not Path("ran").exists()
    table("object arrays, pickles named .npy, broken or odd Parquet", "exit 2, file and reason named", 0.0)
