"""kill -9 at any moment: what is on the disk resumes, and ends as the run that was never killed."""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from project.cli import main

CONFIG = """
model: {net: {class_path: project.models.LinearModel, init_args: {out_features: 1}}}
data:
  source: {class_path: project.data.sources.SyntheticSource, init_args: {rows: 2000, features: 3}}
  batch_size: 8
optimizer: {class_path: torch.optim.Adam, init_args: {lr: 0.01}}
checkpoint: {every_n_train_steps: 3}
trainer: {max_epochs: 2, log_every_n_steps: 10, accelerator: cpu, enable_progress_bar: false}
"""


def job(folder, temporary):
    """One attempt, in a process forked from this one: Lightning is imported already."""
    os.environ["TMPDIR"] = temporary
    torch.set_num_threads(1)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    os.chdir(folder)
    main(["--resume", "auto", "--run_dir", "job", "--config", "config.yaml"])


def attempt(folder, temporary, kill_after=None):
    """Runs the job; kills it so many seconds after its first save. Returns its exit code, negative for a signal."""
    path = folder / "job" / "checkpoints" / "last.ckpt"
    before = path.stat().st_mtime_ns if path.exists() else 0
    process = multiprocessing.get_context("fork").Process(target=job, args=(str(folder), temporary))
    process.start()
    while kill_after is not None and process.is_alive():
        if path.exists() and path.stat().st_mtime_ns != before:
            time.sleep(kill_after)
            process.kill()
            break
        time.sleep(0.002)
    process.join(120)
    return process.exitcode


def last(folder):
    return torch.load(folder / "job" / "checkpoints" / "last.ckpt", weights_only=True)


def best(checkpoint):
    return next(state["best"] for name, state in checkpoint["callbacks"].items() if name.startswith("Checkpoints"))


def killed_again_and_again(tmp_path, kills, temporary):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
        (folder / "config.yaml").write_text(CONFIG)
    assert attempt(whole, temporary) == 0
    draw, killed = random.Random(kills), 0
    for _ in range(kills):
        killed += attempt(cut, temporary, draw.uniform(0.0, 2.0 / kills)) == -signal.SIGKILL
        last(cut)  # opens, whole
    assert attempt(cut, temporary) == 0
    assert killed
    a, b = last(whole), last(cut)
    assert all(torch.equal(a["state_dict"][n], b["state_dict"][n]) for n in a["state_dict"])
    assert a["global_step"] == b["global_step"] == 400
    assert {p.name for p in (cut / "job" / "checkpoints").iterdir()} == {"last.ckpt", *best(a)}
    steps = [line.split(",")[0] for line in (cut / "job" / "metrics.csv").read_text().splitlines()[1:]]
    assert steps == sorted(set(steps), key=int)
    assert set(steps) == {line.split(",")[0] for line in (whole / "job" / "metrics.csv").read_text().splitlines()[1:]}
    return killed


def test_killed_at_random_moments(tmp_path):
    killed_again_and_again(tmp_path, kills=2, temporary=str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("temporary", ["same disk", "other disk"])
def test_killed_many_times(tmp_path, temporary):
    other = Path("/dev/shm")
    if temporary == "other disk" and not other.is_dir():
        pytest.skip("no other file system here")
    killed_again_and_again(tmp_path, kills=30, temporary=str(other if temporary == "other disk" else tmp_path))
