"""Case LOG-01: what a log file, a pipe, a dumb terminal and several processes get to see."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPT = """
import sys
sys.path.insert(0, {root!r})
import project.engine.screen as screen
screen.FIRST_LINE_SECONDS, screen.LINE_SECONDS, screen.REDRAW_SECONDS = 0.0, 0.05, 0.05
from project.cli import main
main()
"""
FLAGS = ["--accelerator", "cpu", "--max_epochs", "2", "--data.source.rows", "8000", "--data.batch_size", "4"]
FLAGS += ["--report_page", "false"]


@pytest.fixture
def script(tmp_path):
    (tmp_path / "t.py").write_text(SCRIPT.format(root=str(ROOT)))
    return f"{sys.executable} t.py " + " ".join(FLAGS)


def is_plain(text):
    return not [c for c in text if (ord(c) < 32 and c != "\n") or ord(c) == 127]


@pytest.mark.slow
def test_two_processes_into_a_pipe_and_a_file(tmp_path, script):
    command = f"set -o pipefail; {script} --devices 2 --run_dir two 2>&1 | tee out.log"
    out = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert out == (tmp_path / "out.log").read_text()
    assert is_plain(out)
    lines = [line for line in out.splitlines() if line.startswith("epoch 1/2  ")]
    shares = [int(line.split("  ")[1].partition("%")[0]) for line in lines[:-1]]
    assert len(shares) > 1
    assert shares == sorted(shares)  # one process speaks
    for words in (" step ", "loss ", " rows/s", " MB", " left"):
        assert words in lines[-2]
    assert lines[-1].startswith("epoch 1/2  train/loss ")


@pytest.mark.slow
def test_a_dumb_terminal_gets_lines_and_an_able_one_a_bar(tmp_path, script):
    seen = {}
    for term in ("dumb", "xterm"):
        ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": term, "COLUMNS": "60"}
        command = f"{script} --max_steps 800 --run_dir {term}"
        process = subprocess.Popen(command, shell=True, cwd=tmp_path, env=environment, stdout=theirs, stderr=theirs)
        os.close(theirs)
        read = b""
        while True:
            try:
                read += (piece := os.read(ours, 65536))
            except OSError:  # the other end is closed
                break
            if not piece:
                break
        assert process.wait() == 0, read.decode()
        seen[term] = read.decode().replace("\r\n", "\n")
    assert is_plain(seen["dumb"])
    assert " of 1,600 batches" in seen["dumb"]
    assert "\repoch 1/2: " in seen["xterm"]
    assert "%|" in seen["xterm"]
