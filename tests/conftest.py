"""What several tests use: the command in this process, in a folder of its own, on very little data."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from project.cli import main

ROOT = Path(__file__).parent.parent

torch.set_num_threads(1)  # small tensors gain nothing from more, and a process that forks must not have started them


class Outcome:
    """What a command left: exit code, screen, run folder."""

    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err

    @property
    def folder(self):
        (line,) = [line for line in self.out.splitlines() if line.startswith("run folder")]
        return Path(line.removeprefix("run folder").strip())

    @property
    def score(self):
        """The final scores by name."""
        lines = [line.split() for line in self.out.splitlines() if line.startswith("  ")]
        return {words[0]: float(words[1]) for words in lines if len(words) == 2 and "/" in words[0]}


@pytest.fixture(autouse=True, scope="session")
def no_page():
    """Runs of other tests write no report.html, as if matplotlib were not there: it takes longer than they do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("project.summary.find_spec", lambda name: None)
        yield


@pytest.fixture
def small():
    """Flags for 160 training rows in 20 steps: the command on them takes a fifth of a second."""
    return ["--data.source.rows", "200", "--data.batch_size", "8", "--max_epochs", "1"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current folder, but for the configs; the process is left as it was found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    before = dict(os.environ)
    yield tmp_path
    os.environ.clear()
    os.environ.update(before)
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def run(here, capfd):
    """Runs `python train.py ...` in this process and returns its outcome; an error of the user's code is raised."""

    def run(*argv):
        code = 0
        try:
            main([str(arg) for arg in argv])
        except SystemExit as stop:
            code = stop.code or 0
        screen = capfd.readouterr()
        return Outcome(code, screen.out, screen.err)

    return run


@pytest.fixture
def refused(run, here):
    """Runs a command that must be refused: exit code 2, one to five lines, nothing left behind. Returns the words."""

    def refused(*argv):
        before = sorted(here.rglob("*"))
        done = run(*argv)
        assert done.code == 2, done.err + done.out
        assert 1 <= len(done.err.splitlines()) <= 5, done.err
        assert "Traceback" not in done.err
        assert [p for p in sorted(here.rglob("*")) if p not in before and "__pycache__" not in p.parts] == []
        return done.err

    return refused
