"""Variables that a launcher has left in the shell: named at the start, never a silent wait."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.pytorch.utilities import rank_zero_only

from project.leftovers import STARTED_BY, refuse_leftovers
from project.usage import UsageError

TRAIN = Path(__file__).parent.parent / "train.py"
PORT = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611"}
SLURM = {"SLURM_NTASKS": "4", "SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "7"}


@pytest.fixture
def start(monkeypatch):
    for name in list(os.environ):
        if name.startswith("SLURM_") or "RANK" in name or "WORLD" in name or name in (STARTED_BY, "MASTER_ADDR"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(rank_zero_only, "rank", 0)

    def start(env, devices=1, num_nodes=1):
        monkeypatch.setenv(STARTED_BY, "")  # so that it is taken back
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        refuse_leftovers({"devices": devices, "num_nodes": num_nodes, "plugins": None})

    return start


@pytest.mark.parametrize(
    ("env", "devices", "named"),
    [
        ({"WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0", **PORT}, 2, "unset LOCAL_RANK RANK WORLD_SIZE"),
        ({"RANK": "1"}, 1, "RANK=1: set by a launcher, but none started this process"),
        ({"NODE_RANK": "1"}, 1, "unset NODE_RANK"),
        ({"MASTER_ADDR": "10.0.0.7"}, 2, "unset MASTER_ADDR"),
        (SLURM, 1, "SLURM_NTASKS=4 promises 4 processes"),
        ({**SLURM, "SLURM_PROCID": "0"}, 1, "unset SLURM_JOB_ID SLURM_JOB_NAME SLURM_NTASKS SLURM_PROCID"),
    ],
)
def test_they_are_named_and_how_to_unset_them(start, env, devices, named):
    with pytest.raises(UsageError) as refused:
        start(env, devices)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("env", "devices"),
    [
        ({}, 2),
        ({"NODE_RANK": "0"}, 2),
        (PORT, 2),
        ({"MASTER_ADDR": "10.0.0.7"}, 1),
        ({**SLURM, "SLURM_JOB_NAME": "interactive"}, 1),
        ({**SLURM, "SLURM_PROCID": "0"}, 4),
    ],
)
def test_what_does_no_harm_is_left_alone(start, env, devices):
    start(env, devices)


@pytest.mark.slow
def test_the_command_ends_at_once_though_the_variables_say_that_it_is_another_rank(tmp_path):
    env = {**os.environ, "WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1", **PORT}
    line = [sys.executable, str(TRAIN), "--devices", "2"]
    done = subprocess.run(line, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "unset LOCAL_RANK RANK WORLD_SIZE" in done.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_two_jobs_at_once_on_one_machine(tmp_path):
    line = [sys.executable, str(TRAIN), "--devices", "2", "--max_steps", "20", "--data.source.rows", "2000"]
    env = {**os.environ, "NODE_RANK": "0"}
    jobs = [subprocess.Popen([*line, "--run_dir", str(tmp_path / name)], env=env) for name in "ab"]
    assert [job.wait(120) for job in jobs] == [0, 0]
