"""Sweeps: any setting, several processes, pruned, interrupted and resumed, and the best config runs again.

Most trials here are a stand-in for train.py that needs no torch; the last test runs the real one.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from project.tools import sweep as tool
from project.usage import UsageError

pytest.importorskip("optuna")  # of requirements-dev.txt
ROOT = Path(__file__).parents[2]
STAND_IN = """
import os, sys, time
flags = dict(a[2:].split("=", 1) for a in sys.argv if a.startswith("--") and "=" in a)
run, x = sys.argv[sys.argv.index("--run_dir") + 1], float(flags["x"])
if "refuse" in flags:
    sys.exit(print("train.py: error: --refuse: no such flag", file=sys.stderr) or 2)
if "crash" in flags and x > 0.5:
    raise ValueError("x is too large")
os.makedirs(run)
open(run + "/config.yaml", "w").write(f"x: {x}")
with open(run + "/metrics.csv", "w") as file:
    file.write("step,val/loss\\n")
    for step in range(1, 6):
        file.write(f"{step},{x + 1 / step}\\n")
        file.flush()
        time.sleep(float(flags.get("pause", 0)))
"""


@pytest.fixture
def sweep(tmp_path, monkeypatch, capsys):
    """Runs `python -m project.tools.sweep` in this process with trials of the stand-in."""
    (tmp_path / "train.py").write_text(STAND_IN)
    monkeypatch.setattr(tool, "TRAIN", tmp_path / "train.py")
    monkeypatch.setattr(tool, "POLL_SECONDS", 0.02)
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)

    def sweep(*argv):
        code = 0
        try:
            tool.main(["--sweep_dir", "s", *argv])
        except SystemExit as stop:
            code = stop.code
        screen = capsys.readouterr()
        return code, screen.out + screen.err

    yield sweep
    signal.signal(signal.SIGTERM, before)


def values(screen):
    return [float(v) for v in re.findall(r"^trial \d+ +x=(\S+)", screen, re.M)]


def test_the_best_of_the_trials_asked_for_is_written_ready_to_run(sweep):
    code, screen = sweep("--sweep", "x=0.0..1.0", "--trials", "3")
    assert code == 0, screen
    assert len(values(screen)) == 3
    assert "s: 3 complete" in screen
    best = min(Path("s").glob("trial-*/config.yaml"), key=lambda p: float(p.read_text()[3:]))
    assert Path("s/best.yaml").read_text() == best.read_text()


def test_failed_trials_are_counted_and_shown_and_a_sweep_goes_on(sweep):
    flags = ("--crash=1", "--sweep", "x=0.2,0.9", "--pruner", "none")
    code, screen = sweep(*flags, "--trials", "6")
    failed = len([x for x in values(screen) if x == 0.9])
    assert code == (0 if failed < 6 else 1)
    assert screen.count("failed, exit code 1: ValueError: x is too large") == failed
    code, more = sweep(*flags, "--trials", "8")
    assert re.findall(r"^trial (\d+)", more, re.M) == ["6", "7"]
    failed += len([x for x in values(more) if x == 0.9])
    assert ", ".join([f"{8 - failed} complete", *([f"{failed} fail"] if failed else [])]) in more


def test_another_search_in_the_same_folder_is_refused(sweep):
    assert sweep("--sweep", "x=0.2,0.9", "--trials", "1")[0] == 0
    code, screen = sweep("--sweep", "x=0.2,0.8", "--trials", "2")
    assert code == 2
    assert "s holds another sweep: sweep ['x=0.2,0.9'], now ['x=0.2,0.8']" in screen


def test_a_flag_that_train_py_refuses_ends_the_sweep(sweep):
    code, screen = sweep("--refuse=1", "--sweep", "x=0.0..1.0")
    assert code == 2
    assert "--refuse: no such flag" in screen
    assert len(re.findall(r"^trial", screen, re.M)) == 1


def test_a_trial_that_does_worse_is_stopped(sweep):
    """Trials 0 to 3 at 0.1; trial 4 at 9 is stopped at its second value, long before its end."""
    flags = ("--sweep", "x=0.1,9.0")
    import optuna

    class Planned(optuna.samplers.RandomSampler):
        def sample_independent(self, study, trial, name, distribution):
            return "9.0" if trial.number == 4 else "0.1"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optuna.samplers, "TPESampler", lambda **_: Planned())
        code, screen = sweep(*flags, "--pause=0.08", "--trials", "5")
    assert code == 0, screen
    assert "4 complete, 1 pruned" in screen
    assert re.search(r"^trial 4 +x=9\.0  pruned at val/loss 9\.", screen, re.M)
    assert len(Path("s/trial-0004/metrics.csv").read_text().splitlines()) < 6


def start(folder, *argv):
    program = (
        f"from project.tools import sweep; from pathlib import Path; sweep.TRAIN = Path({str(folder)!r}, 'train.py')"
    )
    command = [sys.executable, "-c", f"{program}; sweep.main()", "--sweep_dir", "s", *argv]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, **pipes)


@pytest.mark.slow
def test_two_processes_share_the_trials(tmp_path):
    (tmp_path / "train.py").write_text(STAND_IN)
    flags = ("--sweep", "x=0.0..1.0", "--pause=0.2", "--trials", "9", "--pruner", "none")
    both = [start(tmp_path, *flags) for _ in range(2)]
    screens = [p.communicate(timeout=120)[0] for p in both]
    assert [p.returncode for p in both] == [0, 0], screens
    numbers = [re.findall(r"^trial (\d+)", screen, re.M) for screen in screens]
    assert sorted(map(int, numbers[0] + numbers[1])) == list(range(9))
    assert all(numbers), "one of them did all the work"


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_sweep_that_is_stopped_goes_on_with_the_same_trial(tmp_path, how):
    (tmp_path / "train.py").write_text(STAND_IN)
    flags = ("--sweep", "x=0.0..1.0", "--pause=0.4", "--trials", "2", "--pruner", "none")
    first = start(tmp_path, *flags)
    config = tmp_path / "s" / "trial-0000" / "config.yaml"
    end = time.monotonic() + 60
    while not config.exists() and time.monotonic() < end:
        time.sleep(0.05)
    first.send_signal(how)
    first.communicate(timeout=60)
    assert first.returncode == (143 if how == signal.SIGTERM else -how)
    second = start(tmp_path, *flags)
    screen = second.communicate(timeout=120)[0]
    assert second.returncode == 0, screen
    assert re.findall(r"^trial (\d+)", screen, re.M) == ["1", "2"]
    assert (tmp_path / "s" / "trial-0001" / "config.yaml").read_text() == config.read_text()
    assert "s: 2 complete" in screen


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optimizer.lr=log:1e-4..1e-1", ("optimizer.lr", [], 1e-4, 0.1, True)),
        ("--model.net.hidden=8..64", ("model.net.hidden", [], 8, 64, False)),
        ("a=0.5..2", ("a", [], 0.5, 2.0, False)),
        ("data.batch_size=16,32", ("data.batch_size", ["16", "32"])),
        ("optimizer=SGD,Adam", ("optimizer", ["SGD", "Adam"])),
        ("sizes=[8, 8],[64]", ("sizes", ["[8, 8]", "[64]"])),
    ],
)
def test_dimensions(text, expected):
    d = tool.Dimension(text)
    assert (d.name, d.choices, *([d.low, d.high, d.log] if not d.choices else [])) == expected


@pytest.mark.parametrize("text", ["lr", "lr=", "lr=0.1", "=1..2", "lr=2..1", "lr=log:0..1", "lr=log:a,b"])
def test_what_is_no_dimension(text):
    with pytest.raises(UsageError, match=r"expected NAME=LOW\.\.HIGH"):
        tool.Dimension(text)


@pytest.mark.slow
def test_the_best_config_gives_the_best_trial_again(tmp_path):
    """With the real train.py: the same weights to the last bit."""
    flags = ["--config", ROOT / "configs" / "linear.yaml", "--data.source.rows=500", "--max_epochs=2"]
    search = ["--sweep", "optimizer.lr=log:1e-3..1e-1", "--sweep", "data.batch_size=8,16", "--trials=2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}

    def python(*argv):
        done = subprocess.run(
            [sys.executable, *argv], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    screen = python("-m", "project.tools.sweep", *flags, *search, "--sweep_dir", "s")
    best = int(re.search(r"^best +trial (\d+)", screen, re.M)[1])
    python(ROOT / "train.py", "--config", "s/best.yaml", "--run_dir", "again")
    weights = [
        torch.load(tmp_path / run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]["net.linear.weight"]
        for run in (f"s/trial-{best:04}", "again")
    ]
    assert torch.equal(*weights)
