"""Commands on several ranks: in forked processes, which cost little, or as a user starts them."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from lightning.pytorch.utilities import rank_zero_only

from project.cli import main

ROOT = Path(__file__).parent.parent.parent
TRAIN = str(ROOT / "train.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
# 160 training rows: 10 optimizer steps of 16 rows an epoch; dropout-free, so that geometries can be compared
SMALL = ["--accelerator", "cpu", "--data.source.rows", "200", "--data.batch_size", "8", "--max_epochs", "2"]
SMALL += ["--optimizer", "Adam", "--optimizer.lr", "0.01", "--enable_progress_bar", "false"]


def command(*argv, cwd, launcher=(sys.executable,), code=0, timeout=240, **env):
    """Runs the command in real processes and returns its screen.

    Raises:
        AssertionError: With the screen, at another exit code.
    """
    line = [*launcher, TRAIN, *map(str, argv)]
    done = subprocess.run(line, cwd=cwd, env=environment(**env), capture_output=True, text=True, timeout=timeout)
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def environment(**more):
    """The environment of this process without what launchers put there, on one thread, and finding ``tests``."""
    launchers = re.compile(r"(WORLD_SIZE|RANK|LOCAL_|NODE_RANK|MASTER_|TORCHELASTIC|SLURM|PL_|GROUP_)")
    kept = {k: v for k, v in os.environ.items() if not launchers.match(k)}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def rank_of_command(lines):
    """For ``on_ranks``: runs commands one after another as a rank that torchrun has started; their exit codes."""
    rank = int(os.environ["LOCAL_RANK"])
    world = str(torch.distributed.get_world_size())
    rank_zero_only.rank = rank  # which a new process reads from the environment
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": "0"}
    os.environ["TORCHELASTIC_RUN_ID"] = "none"
    codes = []
    for line in lines:
        try:
            main(list(map(str, line)))
            codes.append(0)
        except SystemExit as stop:
            codes.append(stop.code)
    return codes


def weights(folder, name="last.ckpt"):
    """(optimizer step, all weights in one vector) of a run folder's checkpoint."""
    saved = torch.load(Path(folder, "checkpoints", name), weights_only=True)
    return saved["global_step"], torch.cat([v.flatten() for v in saved["state_dict"].values()])


def apart(one, other):
    """The largest difference between the last weights of two runs, which must have made the same number of steps."""
    (a, first), (b, second) = weights(one), weights(other)
    assert a == b
    return float((first - second).abs().max())


# a net that takes its time, so that there is a middle of the run, and a checkpoint every three steps
SLOW_NET = [*SMALL, "--model.net", "tests.faults.harness.Slow", "--checkpoint.every_n_train_steps", "3"]


def start(*argv, cwd, launcher, screen, **env):
    """Starts the command and leaves it running; what it says goes to the file ``screen``. It leads a session."""
    with open(screen, "a") as out:
        line = [*launcher, TRAIN, *map(str, argv)]
        return subprocess.Popen(line, cwd=cwd, env=environment(**env), stdout=out, stderr=out, start_new_session=True)


def until(happened, what, job, screen, timeout=120):
    """Waits for something to happen while a job runs."""
    end = time.monotonic() + timeout
    while not happened():
        assert job.poll() is None, f"the job ended before {what}:\n{Path(screen).read_text()}"
        assert time.monotonic() < end, f"{what}: not in {timeout} s\n{Path(screen).read_text()}"
        time.sleep(0.02)


def saved(folder, after_step=0):
    """Whether a run has a checkpoint after so many optimizer steps."""
    try:
        return weights(folder)[0] > after_step
    except FileNotFoundError:
        return False


def workers(launcher):
    """Processes by local rank that a torchrun has started."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher.pid and (rank := re.search(r"\0LOCAL_RANK=(\d+)", (folder / "environ").read_text())):
                found[int(rank[1])] = int(folder.name)
    return found


def kill_all(job):
    """As a power cut does: every process of the session dies at once."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ProcessLookupError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[3]) == job.pid:
                os.kill(int(folder.name), signal.SIGKILL)
    job.wait()
