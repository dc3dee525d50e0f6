"""``torchrun --max_restarts`` with ``--resume auto``: a worker that is killed costs the steps since the last save."""

import os
import signal
from pathlib import Path

import pytest

from tests.scaling.jobs import SLOW_NET, TORCHRUN, apart, command, saved, start, until, workers

OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
JOB = ["--resume", "auto", "--run_dir", "job", *SLOW_NET, "--model.net.sleep", "0.1"]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_is_replaced_and_the_run_ends_as_if_nothing_had_been(here, rank):
    launcher = [*TORCHRUN, "--standalone", "--nproc_per_node=2", "--max_restarts=2"]
    job = start(*JOB, cwd=here, launcher=launcher, screen="screen", **OWN_STORE)
    try:
        until(lambda: saved("job", 3), "the save after step 6", job, "screen")
        os.kill(workers(job)[rank], signal.SIGKILL)
        assert job.wait(240) == 0, Path("screen").read_text()
    finally:
        job.kill()
    assert "resume      job/checkpoints/last.ckpt, after optimizer step" in Path("screen").read_text()
    whole = [*SLOW_NET, "--run_dir", "whole"]
    command(*whole, cwd=here, launcher=[*TORCHRUN, "--standalone", "--nproc_per_node=2"])
    assert apart("job", "whole") == 0


@pytest.mark.slow
def test_a_worker_killed_before_the_first_save_starts_anew_in_the_same_folder(here):
    launcher = [*TORCHRUN, "--standalone", "--nproc_per_node=2", "--max_restarts=1"]
    line = [*JOB, "--checkpoint.every_n_train_steps", "1000", "--model.net.sleep", "0.3"]
    job = start(*line, cwd=here, launcher=launcher, screen="screen", **OWN_STORE)
    try:
        until((here / "train-1").exists, "the first step", job, "screen")
        os.kill(workers(job)[1], signal.SIGKILL)
        assert job.wait(240) == 0, Path("screen").read_text()
    finally:
        job.kill()
    assert (here / "job" / "attempt-1" / "config.yaml").exists()
    assert Path("screen").read_text().count("trained     20 optimizer steps") == 1


def test_restarts_that_may_hang_are_refused(refused, small, monkeypatch):
    """torch keeps one store for all attempts, with the addresses of processes that are gone."""
    torchrun = {"RUN_ID": "none", "MAX_RESTARTS": "2", "USE_AGENT_STORE": "True"}
    for name, value in torchrun.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun" in refused(*small)
