"""Exports: what is written equals the module, at any batch size, and is read without any of our code."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from project.cli import main
from project.models import LinearModel
from project.module import Module
from project.tools import export as tool
from project.usage import Failed

for package in ("onnx", "onnxscript", "onnxruntime", "safetensors"):  # of requirements-dev.txt
    pytest.importorskip(package)
TABLE = "project.data.tables.TableSource"


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """A run of 20 steps on inputs in raw units, standardised."""
    folder = tmp_path_factory.mktemp("once")
    rows = np.random.default_rng(0).normal(40, 12, (200, 4))
    lines = [",".join(f"{v:.6f}" for v in row) for row in rows]
    (folder / "rows.csv").write_text("\n".join(["a,b,c,y", *lines]) + "\n")
    source = ["--data.source", TABLE, f"--data.source.files={folder / 'rows.csv'}", "--data.source.target=y"]
    flags = ["--data.batch_size", "8", "--max_epochs", "1", "--model.standardise", "true"]
    main(["--run_dir", str(folder / "run"), *source, *flags])
    return folder


@pytest.fixture
def trained(once, here):
    shutil.copytree(once / "run", here / "run")
    shutil.copy(once / "rows.csv", here)
    return here / "run"


@pytest.fixture
def export(capfd):
    """Runs `python -m project.tools.export ...` in this process; returns exit code and screen."""

    def export(*argv):
        code = 0
        try:
            tool.main([str(arg) for arg in argv])
        except SystemExit as stop:
            code = stop.code
        screen = capfd.readouterr()
        return code, screen.out + screen.err

    return export


def test_safetensors_holds_weights_standardisation_and_how_to_build_the_net(trained, export):
    from safetensors import safe_open

    code, screen = export(trained, "--format", "safetensors")
    assert code == 0, screen
    assert "optimizer step 20 of" in screen
    assert "best-step=20.ckpt" in screen
    with safe_open(trained / "model.safetensors", "pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dictionary
        about = file.metadata()
    saved = torch.load(trained / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert weights.keys() == {"net.linear.weight", "net.linear.bias", "standardise.mean", "standardise.std"}
    assert all(torch.equal(weights[name], saved[name]) for name in weights)
    assert json.loads(about["input"]) == [3]
    assert json.loads(about["model"])["init_args"]["net"]["class_path"] == "project.models.LinearModel"


def test_nothing_is_overwritten_unasked(trained, export):
    (trained / "model.safetensors").write_text("mine")
    code, screen = export(trained, "--format", "safetensors")
    assert (code, (trained / "model.safetensors").read_text()) == (2, "mine")
    assert "--overwrite" in screen
    assert export(trained, "--format", "safetensors", "--output", trained / "other.safetensors")[0] == 0
    assert export(trained, "--format", "safetensors", "--overwrite")[0] == 0
    assert (trained / "model.safetensors").stat().st_size == (trained / "other.safetensors").stat().st_size > 100


class Marker:
    def __reduce__(self):
        return print, ("code of the checkpoint ran",)


def test_an_untrusted_checkpoint_runs_no_code(trained, export):
    """SEC-01"""
    checkpoint = torch.load(trained / "checkpoints" / "last.ckpt", weights_only=True)
    torch.save({**checkpoint, "hidden": Marker()}, trained / "theirs.ckpt")
    asked = (trained, "--format", "safetensors", "--ckpt_path", trained / "theirs.ckpt")
    code, screen = export(*asked)
    assert code == 2
    assert "is not loaded: it holds more than tensors" in screen
    assert "code of the checkpoint ran" not in screen
    assert not (trained / "model.safetensors").exists()
    code, screen = export(*asked, "--weights_only", "false")
    assert code == 0
    assert "code of the checkpoint ran" in screen


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nowhere"], "nowhere: no config.yaml there; expected the run folder"),
        (["run", "--ckpt_path", "none.ckpt"], "--ckpt_path none.ckpt cannot be read"),
        (["run", "--output", "no/such/folder/net.safetensors"], "No such file or directory"),
    ],
)
def test_mistakes_in_one_line(trained, export, argv, words):
    code, screen = export(*argv, "--format", "safetensors")
    assert code in (1, 2)
    assert words in screen
    assert len(screen.splitlines()) == 1


def test_a_missing_package_gives_the_line_that_installs_it(trained, export, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert export(trained, "--format", "onnx") == (
        2,
        "export: error: --format onnx needs onnxruntime: pip install onnx onnxscript onnxruntime\n",
    )


def test_a_file_that_computes_something_else_is_not_kept(tmp_path, monkeypatch):
    def wrong(net, x, path, about):
        path.write_text("")
        return lambda x: net(x) + 1e-3

    monkeypatch.setitem(tool.FORMATS, "torch_export", (".pt2", (), wrong))
    with pytest.raises(Failed, match=r"at 1 rows the file differs from the module by 0\.001"):
        tool.export(Module(LinearModel(3, 1)), torch.randn(7, 3), "torch_export", tmp_path / "net.pt2")
    assert list(tmp_path.iterdir()) == []


READERS = {
    "onnx": "import onnxruntime; f = onnxruntime.InferenceSession(p)\ndef run(x): return f.run(None, {'input': x})[0]",
    "torch_export": "import torch; f = torch.export.load(p).module()\n"
    "def run(x): return f(torch.from_numpy(x)).detach().numpy()",
}


@pytest.mark.slow
@pytest.mark.parametrize("form", READERS)
def test_read_without_our_code_it_predicts_what_the_command_predicts(trained, export, run, form, tmp_path):
    """... at a batch of 1, of 7 and of 200, from raw inputs."""
    code, screen = export(trained, "--format", form, "--output", tmp_path / "net", "--ckpt_path", "last")
    assert code == 0, screen
    flags = ["--config", trained / "config.yaml", "--ckpt_path", trained / "checkpoints" / "last.ckpt"]
    assert run("predict", *flags, "--output", "expected.npy").code == 0
    code = (
        f"import sys, numpy\np = {str(tmp_path / 'net')!r}\n{READERS[form]}\n"
        "x = numpy.loadtxt('rows.csv', numpy.float32, delimiter=',', skiprows=1)[:, :3]\n"
        "assert not {'lightning', 'project'} & set(sys.modules)\n"
        "numpy.save('found.npy', numpy.concatenate([run(x[:1]), run(x[1:8]), run(x[8:])]))\n"
    )
    subprocess.run([sys.executable, "-I", "-c", code], check=True, timeout=120)
    expected, found = np.load("expected.npy"), np.load("found.npy")
    assert found.shape == (200, 1)
    assert np.allclose(found.ravel(), expected["prediction"].ravel(), 1e-5, 1e-5)
