"""Ctrl-C and the schedulers' signals: the step is finished and saved, every process ends, and resuming is exact."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import lightning as L
import pytest
import torch

from project.engine.checkpoint import AtomicCheckpointIO

CODE = {"SIGINT": 130, "SIGTERM": 143, "SIGUSR1": 138}
SHAPES = {
    "1 process": {},
    "2 workers": {"argv": ("--data.num_workers", "2", "--data.chunk_size", "16")},
    "accumulation": {"argv": ("--accumulate_grad_batches", "3")},
    "2 processes": {"ranks": 2},
    "2 of torchrun": {"ranks": 2, "torchrun": True},
}
ALL = [(shape, name, 0) for shape in SHAPES for name in CODE]
ALL += [(shape, name, 1) for shape in ("2 processes", "2 of torchrun") for name in CODE]  # rank 1 alone hears it
FAST = [("1 process", "SIGINT", 0), ("2 workers", "SIGUSR1", 0), ("2 processes", "SIGTERM", 1)]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in FAST]


def start(job, shape, *argv, **options):
    settings = {**SHAPES[shape], **options}
    return job(*settings.pop("argv", ()), *argv, **settings)


def codes(one, name):
    """Rank 0 speaks for processes that it has launched itself; under torchrun each tells torchrun."""
    return [CODE[name]] * len(one.pids)


def resumes_exactly(job, stopped, shape, *argv):
    """Whether going on gives the run that was never stopped."""
    resumed = start(job, shape, "--resume", "run", *argv, sleep=0).end()
    whole = start(job, shape, "--run_dir", "whole", *argv, sleep=0).end()
    assert {*resumed.codes, *whole.codes} == {0}, resumed.screen
    a, b = resumed.checkpoint(), torch.load(whole.folder / "whole/checkpoints/last.ckpt", weights_only=True)
    assert a["global_step"] == b["global_step"] > stopped
    return all(torch.equal(a["state_dict"][n], b["state_dict"][n]) for n in b["state_dict"])


@pytest.mark.parametrize(("shape", "name", "rank"), [*FAST, *SLOW])
def test_in_training(job, table, shape, name, rank):
    stopped = start(job, shape).when("train", 5).signal(name, rank).end()
    assert stopped.codes == codes(stopped, name), stopped.screen
    assert stopped.seconds < 10
    assert "Traceback" not in stopped.screen
    step = stopped.checkpoint()["global_step"]
    assert step >= 1
    assert f"after optimizer step {step}; saved run/checkpoints/last.ckpt" in stopped.screen
    assert stopped.screen.count("--resume run") == 1
    assert "tested" not in stopped.screen
    assert resumes_exactly(job, step, shape)
    table(f"{name} to rank {rank} in training, {shape}", f"exit {CODE[name]}, resumed exactly", stopped.seconds)


def test_as_a_terminal_sends_it_to_every_process_at_once(job, table):
    stopped = start(job, "2 of torchrun", "--data.num_workers", "1").when("train", 5).signal("SIGINT", everyone=True)
    time.sleep(0.1)
    stopped.signal("SIGINT", everyone=True).end()  # torchrun passes on what its processes have heard already
    assert stopped.codes == [130, 130]
    assert stopped.checkpoint()["global_step"] >= 1
    table("Ctrl-C at a terminal, torchrun with workers", "exit 130, saved", stopped.seconds)


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ("1 process", "SIGTERM"),
        pytest.param("1 process", "SIGUSR1", marks=pytest.mark.slow),
        pytest.param("2 processes", "SIGTERM", marks=pytest.mark.slow),
        pytest.param("2 of torchrun", "SIGUSR1", marks=pytest.mark.slow),
    ],
)
def test_in_validation(job, table, shape, name):
    small = ("--data.eval_batch_size", "2", "--val_check_interval", "6")
    stopped = start(job, shape, *small).when("train", 6).when("eval", 4).signal(name).end()
    assert stopped.codes == codes(stopped, name), stopped.screen
    step = stopped.checkpoint()["global_step"]
    assert step % 6 == 0
    assert resumes_exactly(job, step, shape, *small)
    table(f"{name} in validation, {shape}", f"exit {CODE[name]}, resumed exactly", stopped.seconds)


@pytest.mark.parametrize(
    "command", [*(pytest.param(c, marks=pytest.mark.slow) for c in ("validate", "test")), "predict"]
)
def test_in_evaluation_and_prediction(job, table, command):
    job("--max_epochs", "1", sleep=0).end()
    asked = ("--ckpt_path", "run/checkpoints/last.ckpt", "--run_dir", "second", "--data.eval_batch_size", "2")
    stopped = job(*asked, command=(command,)).when("eval", 3).signal("SIGINT").end()
    assert stopped.codes == [130], stopped.screen
    assert "stopped     by Ctrl-C" in stopped.last_lines[-1]
    assert not list((stopped.folder / "second").glob("predictions*"))  # nothing half-done
    table(f"SIGINT in {command}", "exit 130, no half file", stopped.seconds)


def test_after_training_nothing_else_begins(job, table):
    """A signal in the last save: the test that would follow is left out."""
    late = ("--max_epochs", "1", "--limit_val_batches", "0")
    stopped = job(*late, "--callbacks", "tests.faults.test_signals.SignalAtTheEnd").end()
    assert stopped.codes == [143], stopped.screen
    assert stopped.checkpoint()["global_step"] == 20
    assert "tested" not in stopped.screen
    table("SIGTERM in the last save", "exit 143, saved, not tested", 0.0)


class SignalAtTheEnd(L.Callback):
    def on_train_end(self, trainer, pl_module):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)


class SlowIO(AtomicCheckpointIO):
    """Tells when it saves, and takes half a second more."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        Path("saving").touch()
        time.sleep(0.5)
        super().save_checkpoint(checkpoint, path, storage_options)


@pytest.mark.parametrize(
    ("shape", "name"),
    [("1 process", "SIGTERM"), pytest.param("2 processes", "SIGTERM", marks=pytest.mark.slow)],
)
def test_during_a_save(job, table, shape, name):
    one = start(job, shape, "--checkpoint.every_n_train_steps", "4", "--plugins", "tests.faults.test_signals.SlowIO")
    one.wait(lambda: (one.folder / "saving").exists()).signal(name).end()
    assert one.codes == codes(one, name), one.screen
    assert one.checkpoint()["global_step"] >= 4
    assert [p.name for p in (one.run / "checkpoints").iterdir()] == ["last.ckpt"]
    table(f"{name} during a save, {shape}", f"exit {CODE[name]}, the save is finished", one.seconds)


@pytest.mark.parametrize("shape", ["1 process", "2 processes"])
def test_a_second_ctrl_c_leaves_at_once(job, table, shape):
    one = start(job, shape, "--num_sanity_val_steps", "0", sleep=30).when("train", 1)  # a step of half a minute
    one.signal("SIGINT")
    time.sleep(0.7)
    one.signal("SIGINT").end()
    assert one.codes == [130]
    assert one.seconds < 5
    table(f"second Ctrl-C, {shape}", "exit 130 at once", one.seconds)


def test_before_anything_is_imported(tmp_path, table):
    """The one scenario that needs a process of its own: the signal comes while torch is imported."""
    train = Path(__file__).parent.parent.parent / "train.py"
    with open(tmp_path / "screen", "w") as screen:
        one = subprocess.Popen([sys.executable, str(train)], cwd=tmp_path, stdout=screen, stderr=screen)
        time.sleep(1.0)
        began = time.monotonic()
        one.send_signal(signal.SIGINT)
        assert one.wait(10) == 130
    assert "Traceback" not in (tmp_path / "screen").read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["screen"]
    table("SIGINT while torch is imported", "exit 130, no traceback", time.monotonic() - began)


class SlowStart(L.Callback):
    def setup(self, trainer, pl_module, stage):
        Path("starting").touch()
        time.sleep(5)


def test_before_the_first_step(job, table):
    one = job("--callbacks", "tests.faults.test_signals.SlowStart")
    one.wait(lambda: (one.folder / "starting").exists()).signal("SIGTERM").end()
    assert one.codes == [143], one.screen
    assert one.seconds < 3
    assert "Traceback" not in one.screen
    table("SIGTERM before the first step", "exit 143 at once", one.seconds)
