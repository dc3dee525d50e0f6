"""The README is true: its commands run, its snippets work as they stand."""

import contextlib
import re
import shlex
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
import yaml

from project.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


def commands():
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    return lines + re.findall(r"`(python (?:train\.py|-m project\.tools\.\w+) [^`…]*)`", README)


def snippet(name):
    """The fenced block that begins with the comment `# name`."""
    (found,) = [b for b in blocks("python") + blocks("yaml") if b.startswith(f"# {name}\n")]
    return found


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A folder with what the commands read, so that runs land outside the repository."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("configs", "data"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns(".cache"))
    for name in ("mlp.py", "mlp.yaml", "waves.py"):
        (folder / name).write_text(snippet(name))
    return folder


@pytest.fixture
def here(clone, monkeypatch):
    monkeypatch.chdir(clone)
    monkeypatch.syspath_prepend(str(clone))
    return clone


def test_the_page_lists_what_this_file_runs():
    assert blocks("bash")[0] == "pip install -r requirements.txt && python train.py\npytest\n"  # run by .ci/run
    assert all(
        c.startswith(("python train.py", "python -m project.tools.", "pip install", "pytest")) for c in commands()
    )


def runnable():
    """The commands that train or predict in this process; on two GPUs, and on two processes, a start of its own."""
    return [c for c in dict.fromkeys(commands()) if c.startswith("python train.py") and "--devices 2" not in c]


@pytest.mark.parametrize("command", runnable())
def test_command(here, command, capsys):
    main(shlex.split(command)[2:])
    assert "run folder" in capsys.readouterr().out


@pytest.mark.parametrize("tool", ["report", "export", pytest.param("doctor", marks=pytest.mark.slow)])
def test_tool(here, tool):
    """After the command that made its run (tests of this file run in order)."""
    found = [shlex.split(c)[3:] for c in commands() if c.startswith(f"python -m project.tools.{tool}")]
    if tool == "report":
        pytest.importorskip("matplotlib")
    if not Path("runs/generate/first/checkpoints/last.ckpt").exists():
        main(["--config", "configs/generate.yaml", "--run_dir", "runs/generate/first", "--max_epochs", "1"])
    for argv in found:
        with contextlib.suppress(SystemExit) if tool == "doctor" else contextlib.nullcontext():  # it may find faults
            import_module(f"project.tools.{tool}").main(argv)
    assert found


def test_two_processes_from_the_command_line(here):
    (command,) = [c for c in commands() if "--accelerator cpu --devices 2" in c]
    arguments = [sys.executable, str(ROOT / "train.py"), *shlex.split(command)[2:], "--limit_train_batches", "200"]
    done = subprocess.run(arguments, cwd=here, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "64 effective = 16 rows x 2 devices x 2 accumulated" in done.stdout
    assert done.stdout.count("run folder") == done.stdout.count("results") == 1  # of one voice
    assert done.stderr == ""  # no warning about what was decided on purpose


def test_two_gpus_are_used_or_refused_in_words(here, capsys):
    assert "python train.py --accelerator gpu --devices 2" in commands()
    if torch.cuda.device_count() >= 2:
        pytest.skip("covered by the GPU tests")
    with pytest.raises(SystemExit) as stopped:
        main(["--accelerator", "gpu", "--devices", "2"])
    assert stopped.value.code == 2
    assert "--accelerator cpu --devices 2" in capsys.readouterr().err


def test_the_example_model_is_one_short_file_and_one_short_config():
    assert len(snippet("mlp.py").splitlines()) <= 25
    assert len(snippet("mlp.yaml").splitlines()) <= 12
    assert set(yaml.safe_load(snippet("mlp.yaml"))) == {"model", "data", "optimizer", "trainer"}


def test_the_example_source_gives_sine_waves(here):
    from waves import Waves

    x, y = Waves(100).read(torch.tensor([25, 0]))
    assert x.shape == y.shape == (2, 1)
    assert torch.allclose(y, torch.tensor([[1.0], [0.0]]), atol=1e-4)


def test_loading_a_checkpoint_from_python(here):
    """After the command that writes it (tests of this file run in order)."""
    if not Path("runs/generate/first/checkpoints/last.ckpt").exists():
        main(["--config", "configs/generate.yaml", "--run_dir", "runs/generate/first", "--max_epochs", "1"])
    (code,) = [b for b in blocks("python") if "load_from_checkpoint" in b]
    names: dict[str, torch.nn.Module] = {}
    exec(code, names)
    x = torch.randn(16, 5)
    assert torch.equal(names["net"](x), names["module"].to("cpu")(x))


def test_every_test_named_in_the_table_of_promises_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)`", README)
    assert named
    assert [n for n in named if not (ROOT / n).exists()] == []


def test_every_page_linked_exists():
    assert [n for n in re.findall(r"\]\((docs/[\w./]+)\)", README) if not (ROOT / n).exists()] == []
