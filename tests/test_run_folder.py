"""One run folder a job: everything in it, shared with no other job, nothing earlier altered."""

import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.utilities import rank_zero_only

from project.cli import main
from project.run import Run
from tests.ranks import on_ranks

ROOT = Path(__file__).parent.parent


def content(folder):
    return {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in Path(folder).rglob("*") if p.is_file()}


def test_what_is_in_it(run, here, small):
    done = run(*small, "--run_dir", "out")
    assert done.folder == Path("out")
    assert {p.name for p in done.folder.iterdir()} == {
        "checkpoints",
        "config.yaml",
        "environment.json",
        "metrics.csv",
        "tensorboard",
    }
    assert sorted(p.name for p in (done.folder / "checkpoints").iterdir()) == ["best-step=20.ckpt", "last.ckpt"]
    assert yaml.safe_load((done.folder / "config.yaml").read_text())["data"]["init_args"]["batch_size"] == 8
    assert [p.name for p in here.iterdir() if p.name not in ("configs", "out")] == []


def test_the_record_of_the_environment(run, small, monkeypatch):
    def git(*words):
        return subprocess.run(("git", *words), cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    monkeypatch.setattr(sys, "argv", ["train.py", *small])
    record = json.loads((run(*small).folder / "environment.json").read_text())
    assert record["command"] == f"train.py {' '.join(small)}"
    assert record["git"] == {"revision": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    assert record["packages"]["torch"] == torch.__version__
    assert record["devices"].startswith("CPU")
    monkeypatch.setenv("PATH", "")  # no git here
    assert json.loads((run(*small).folder / "environment.json").read_text())["git"] is None


def test_twice_in_a_row(run, small):
    first = run(*small).folder
    before = content(first)
    second = run(*small).folder
    assert second != first
    assert first.parent == second.parent == Path("runs/linear")
    assert content(first) == before


def test_a_folder_with_something_in_it_is_refused(run, refused, here, small):
    assert run(*small, "--run_dir", "out").code == 0
    before = content(here)
    assert "--run_dir out exists and is not empty" in refused(*small, "--run_dir", "out")
    assert content(here) == before
    (here / "empty").mkdir()
    assert run(*small, "--run_dir", "empty").folder == Path("empty")


def test_an_empty_folder_that_was_there_outlives_a_refusal(here, run):
    (here / "empty").mkdir()
    assert run("--run_dir", "empty", "--data.source.rows", "20").code == 2
    assert list((here / "empty").iterdir()) == []


def test_a_folder_that_cannot_be_made(refused, here):
    (here / "file").touch()
    assert "--run_dir file/out: cannot make file: File exists" in refused("--run_dir", "file/out")


def test_the_name_is_that_of_the_first_config(run, small):
    folder = run("--config", "configs/generate.yaml", "--config", "configs/overlays/quick.yaml", *small).folder
    assert folder.parent == Path("runs/generate")


def test_jobs_that_start_in_the_same_second_never_share_one(here):
    """Forty at once, in threads and in processes."""
    with ThreadPoolExecutor(20) as threads, multiprocessing.get_context("fork").Pool(4) as processes:
        made = processes.map_async(_folder, range(20), chunksize=1)
        folders = [*threads.map(_folder, range(20)), *made.get(timeout=30)]
    assert len(set(folders)) == 40
    assert all(os.path.isdir(folder) for folder in folders)


def _folder(_):
    return str(Run(None, "job").folder)


def test_loggers_of_the_users_leave_nothing_of_ours_out(run, small):
    done = run(*small, "--logger", "CSVLogger", "--logger.save_dir", "csv")
    assert Path("csv/lightning_logs/version_0/metrics.csv").exists()
    kept = ["checkpoints", "config.yaml", "environment.json", "metrics.csv", "tensorboard"]
    assert sorted(p.name for p in done.folder.iterdir()) == kept


@pytest.mark.slow  # test_readme.py starts two as well
def test_two_processes_of_one_command(here, small):
    """Real ones, started by Lightning: one folder, one config, one voice."""
    command = [sys.executable, ROOT / "train.py", "--accelerator", "cpu", "--devices", "2", "--strategy", "ddp", *small]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no warning of Lightning's about what we decided on purpose
    (folder,) = (here / "runs" / "linear").iterdir()
    assert sorted(p.name for p in folder.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "environment.json",
        "metrics.csv",
        "tensorboard",
    ]
    assert done.stdout.count("run folder") == done.stdout.count("epoch 1/1") == done.stdout.count("results") == 1
    assert "16 effective = 8 rows x 2 devices x 1 accumulated" in done.stdout


def test_two_processes_of_torchrun(here, small, capfd):
    """What torchrun sets in the environment decides how many; only rank 0 speaks and writes."""
    assert on_ranks(2, _under_torchrun, [*small, "--run_dir", "out"]) == [0, 0]
    assert capfd.readouterr().out.count("16 effective = 8 rows x 2 devices x 1 accumulated") == 1
    assert [p.name for p in here.iterdir() if p.name != "configs"] == ["out"]
    assert yaml.safe_load(Path("out/config.yaml").read_text())["trainer"]["devices"] == 2
    assert len(list(Path("out/tensorboard").glob("events*"))) > 0


def test_a_number_of_devices_that_torchrun_contradicts(here, small, capfd):
    assert on_ranks(2, _under_torchrun, [*small, "--devices", "3"]) == [2, 2]
    assert capfd.readouterr().err.count("--devices 3, but torchrun started 2 processes here") == 1
    assert not Path("runs").exists()


def _under_torchrun(argv):
    rank = int(os.environ["LOCAL_RANK"])
    rank_zero_only.rank = rank  # which a new process reads from the environment
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    os.environ["TORCHELASTIC_RUN_ID"] = "none"
    try:
        main(argv)
    except SystemExit as stop:
        return stop.code
    return 0


@pytest.mark.slow
def test_torchrun_itself(here, small):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", ROOT / "train.py", *small]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (folder,) = (here / "runs" / "linear").iterdir()
    assert (folder / "checkpoints" / "last.ckpt").exists()
    assert done.stdout.count("16 effective = 8 rows x 2 devices x 1 accumulated") == 1
