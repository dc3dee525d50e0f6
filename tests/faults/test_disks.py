"""A disk that is full, read-only or gone: the checkpoint before it is whole and named, nothing half-done is left."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.faults.harness import Slow

NET = 100_000  # floats: about 400 kB a checkpoint


class Big(Slow):
    """A net of 400 kB."""

    def __init__(self, in_features: int = 10, sleep: float = 0.0) -> None:
        super().__init__(in_features, sleep)
        self.register_buffer("more", torch.zeros(NET))


class Disk:
    """A disk in memory, mounted where no other process sees it but through ``path``."""

    def __init__(self, folder: Path, size: str) -> None:
        self.mounted = folder / "disk"
        self.mounted.mkdir()
        mount = f"mount -t tmpfs -o size={size} none {self.mounted} && echo mounted && exec sleep 300"
        line = ["unshare", "-m", "--propagation", "private", "sh", "-c", mount]
        try:
            self.holder = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        except FileNotFoundError:
            pytest.skip("needs unshare")
        if self.holder.stdout.readline() != b"mounted\n":
            self.holder.wait()
            pytest.skip("needs the right to mount a disk")
        self.path = Path(f"/proc/{self.holder.pid}/root{self.mounted}")

    def do(self, *command) -> None:
        subprocess.run(["nsenter", "-t", str(self.holder.pid), "-m", *command, self.mounted], check=True)

    def fill(self, but: int = 0) -> None:
        with open(self.path / "filler", "wb", buffering=0) as file:
            rest = os.statvfs(self.path).f_bavail * 4096 - but
            while rest > 0:
                rest -= file.write(b"x" * min(rest, 1 << 16))


@pytest.fixture
def disk(tmp_path):
    made = []

    def make(size):
        made.append(Disk(tmp_path, size))
        return made[-1]

    yield make
    for one in made:
        one.holder.kill()
        one.holder.wait()
        one.holder.stdout.close()


def training(job, disk, *argv, **options):
    """A run on that disk that has saved once."""
    run = disk.path / "run"
    net = {"net": "tests.faults.test_disks.Big"}
    one = job("--run_dir", run, "--num_sanity_val_steps", "0", *argv, **net, **options)
    return one.wait(lambda: (run / "checkpoints/last.ckpt").exists()), run


def files(run):
    return sorted(p.name for p in (run / "checkpoints").iterdir())


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_disk_that_is_full_when_it_saves(job, table, disk, ranks):
    small = disk("4m")
    one, run = training(job, small, "--checkpoint.every_n_train_steps", "8", ranks=ranks)
    before = torch.load(run / "checkpoints/last.ckpt", weights_only=True)["global_step"]
    small.fill(but=64 << 10)  # enough for the logs
    one.end()
    assert one.codes == [1]
    last = run / "checkpoints/last.ckpt"
    said = one.screen[one.screen.index("train.py: error") :]
    assert f"error: {run}/checkpoints/" in said  # last.ckpt, or the best
    assert ".ckpt could not be written: No space left on device (about 400," in said, said
    assert " free)" in said
    assert f"{last} is whole; go on with --resume {run}" in one.last_lines[-1]
    assert "Traceback" not in one.screen
    assert torch.load(last, weights_only=True)["global_step"] >= before
    assert not [name for name in files(run) if name.endswith(".tmp")]
    table(f"full disk during a save, {ranks} processes", "exit 1, the one before is whole and named", one.seconds)


@pytest.mark.slow
def test_a_disk_that_is_full_when_it_logs(job, table, disk):
    small = disk("4m")
    one, run = training(job, small, "--log_every_n_steps", "1")
    small.fill()
    one.end()
    assert one.codes == [1], one.screen
    assert "could not be written: " in one.screen[one.screen.index("train.py: error") :]
    assert "(0 bytes free)" in one.last_lines[-2], one.screen
    assert "last.ckpt is whole" in one.last_lines[-1]
    assert torch.load(run / "checkpoints/last.ckpt", weights_only=True)["global_step"] > 0
    assert not list(run.rglob("*.tmp"))
    table("full disk during a log write", "exit 1, the checkpoint is whole and named", one.seconds)


@pytest.mark.slow
def test_a_disk_that_becomes_read_only(job, table, disk):
    one, run = training(job, small := disk("4m"), "--checkpoint.every_n_train_steps", "8", "--logger", "false")
    small.do("mount", "-o", "remount,ro")
    one.end()
    assert one.codes == [1]
    assert "could not be written: Read-only file system" in one.last_lines[-2], one.screen
    assert "last.ckpt is whole" in one.last_lines[-1]
    assert not [name for name in files(run) if name.endswith(".tmp")]
    table("read-only disk during a save", "exit 1, the one before is whole and named", one.seconds)


@pytest.mark.slow
@pytest.mark.parametrize("logger", [True, False])
def test_a_disk_that_vanishes(job, table, disk, logger):
    logs = () if logger else ("--logger", "false")
    one, run = training(job, small := disk("4m"), "--checkpoint.every_n_train_steps", "8", *logs)
    small.do("umount", "-l")
    one.end()
    assert one.codes == [1]
    assert f"the folder {run} has vanished" in one.last_lines[-2], one.screen
    assert not list(small.path.iterdir())  # nothing written to the disk under it
    what = "a log write" if logger else "a save"
    table(f"disk vanishes before {what}", "exit 1, nothing written elsewhere", one.seconds)


def test_too_little_room_for_two_checkpoints_is_said_at_the_start(job, table, disk):
    small = disk("600k")
    often = ("--max_epochs", "1", "--checkpoint.every_n_train_steps", "10")
    one = job("--run_dir", small.path / "run", *often, sleep=0, net="tests.faults.test_disks.Big").end()
    assert "bytes, but two checkpoints, the last and one being written, need about 800," in one.screen, one.screen
    assert one.codes == [1]
    assert "No space left on device" in one.screen
    assert torch.load(small.path / "run/checkpoints/last.ckpt", weights_only=True)["global_step"] == 10
    table("room for one checkpoint only", "said at the start; exit 1 at the second save", one.seconds)


@pytest.mark.slow
def test_predictions_on_a_full_disk(job, table, disk):
    job("--max_epochs", "1", sleep=0).end()
    small = disk("300k")
    line = ("--ckpt_path", "run/checkpoints/last.ckpt", "--run_dir", small.path / "out", "--data.source.rows", "100000")
    one = job(*line, sleep=0, command=("predict",)).end()
    assert one.codes == [1], one.screen
    assert "could not be written: " in one.screen[one.screen.index("train.py: error") :]
    assert not list((small.path / "out").glob("*pred*"))
    table("full disk in predict", "exit 1, no half file", one.seconds)
