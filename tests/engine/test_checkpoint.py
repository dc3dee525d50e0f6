"""Checkpoint files: complete or absent, `last` and the best, and nothing sick among them: CKP-01, CKP-02."""

import os
import subprocess
import sys
import textwrap
from datetime import timedelta

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

from project.data.datamodule import StreamDataModule
from project.data.sources import SyntheticSource
from project.engine.checkpoint import AtomicCheckpointIO, Checkpoints
from project.engine.resume import Resume
from project.module import Module


def train(tmp_path, checkpoints, module=None, callbacks=(), ckpt=None, **trainer):
    L.seed_everything(0)
    stream = StreamDataModule(SyntheticSource(rows=320, features=3), batch_size=8)
    checkpoints.dirpath = tmp_path / "checkpoints"
    t = L.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Resume(), *callbacks, checkpoints],
        **{"max_epochs": 3, "log_every_n_steps": 4, **trainer},
    )
    t.strategy.checkpoint_io = AtomicCheckpointIO()
    t.fit(module or Module(nn.Linear(3, 1)), stream, ckpt_path=ckpt, weights_only=True)
    return t


def load(path):
    return torch.load(path, weights_only=True)


def names(tmp_path):
    return sorted(p.name for p in (tmp_path / "checkpoints").iterdir())


def test_last_is_the_end_of_the_run_and_the_best_is_its_own_file(tmp_path):
    checkpoints = Checkpoints()
    t = train(tmp_path, checkpoints)
    assert load(checkpoints.last_path)["global_step"] == t.global_step == 96
    assert names(tmp_path) == ["best-step=96.ckpt", "last.ckpt"]
    assert checkpoints.best_path.endswith("best-step=96.ckpt")


def test_last_and_best_of_one_save_are_written_once(tmp_path):
    checkpoints = Checkpoints()
    train(tmp_path, checkpoints, max_epochs=1)
    assert os.path.samefile(checkpoints.last_path, checkpoints.best_path)


def test_a_limit_in_mid_epoch_still_leaves_the_end_of_the_run_without_an_extra_validation(tmp_path):
    checkpoints = Checkpoints()
    train(tmp_path, checkpoints, max_steps=10)
    assert load(checkpoints.last_path)["global_step"] == 10
    assert checkpoints.best_path == ""


@pytest.mark.parametrize(("mode", "best"), [("min", [1.0, 2.0]), ("max", [5.0, 3.0])])
def test_top_k_keeps_the_best_scores_in_order(tmp_path, mode, best):
    class Scores(Module):
        scores = iter([3.0, 1.0, 5.0, 2.0])

        def on_validation_epoch_end(self):
            if not self.trainer.sanity_checking:
                self.log("val/score", next(self.scores))

    Scores.scores = iter([3.0, 1.0, 5.0, 2.0])
    checkpoints = Checkpoints(monitor="val/score", mode=mode, save_top_k=2)
    train(tmp_path, checkpoints, Scores(nn.Linear(3, 1)), max_epochs=4, num_sanity_val_steps=0)
    assert list(checkpoints.best.values()) == best
    assert len(names(tmp_path)) == 3


@pytest.mark.parametrize(
    ("monitor", "mode"), [("val/loss", "min"), ("val/r2", "max"), ("val/mae", "min"), ("val_loss", "min"), ("x", None)]
)
def test_what_is_better_follows_from_the_score(monitor, mode):
    module = Module(nn.Linear(3, 1), metrics={"r2": torchmetrics.R2Score(), "mae": torchmetrics.MeanAbsoluteError()})
    checkpoints = Checkpoints(monitor=monitor)
    checkpoints.follow(module)
    assert checkpoints.mode == mode
    typed = Checkpoints(monitor=monitor, mode="max")
    typed.follow(module)
    assert typed.mode == "max"


def test_where_nothing_tells_what_is_better_it_must_be_said(tmp_path):
    class Logs(Module):
        def on_validation_epoch_end(self):
            self.log("val/score", 1.0)

    with pytest.raises(ValueError, match=r"val/score: nothing tells .*\n.*--checkpoint.mode min or"):
        train(tmp_path, Checkpoints(monitor="val/score"), Logs(nn.Linear(3, 1)))
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("at", ["unlink", "link"])
def test_a_kill_between_the_files_of_one_save_leaves_none_that_nobody_knows(tmp_path, monkeypatch, at):
    checkpoints = Checkpoints()
    train(tmp_path, checkpoints, max_epochs=1)
    place = (Checkpoints, "_also") if at == "link" else (SingleDeviceStrategy, "remove_checkpoint")

    def killed(*_):
        raise SystemExit(137)

    with monkeypatch.context() as patch:
        patch.setattr(*place, killed)
        patch.setattr(Checkpoints, "on_exception", lambda *_: None)
        with pytest.raises(SystemExit):
            train(tmp_path, Checkpoints(), max_epochs=2, ckpt=checkpoints.last_path)
    assert load(tmp_path / "checkpoints" / "last.ckpt")["global_step"] == 32
    again = Checkpoints()
    train(tmp_path, again, max_epochs=2, ckpt=checkpoints.last_path)
    assert names(tmp_path) == ["best-step=64.ckpt", "last.ckpt"]


def test_a_score_that_is_not_finite_is_never_the_best(tmp_path):
    class Sick(Module):
        def on_validation_epoch_end(self):
            self.log("val/loss", torch.tensor(float("nan") if self.current_epoch else 7.0))

    checkpoints = Checkpoints()
    train(tmp_path, checkpoints, Sick(nn.Linear(3, 1)))
    assert checkpoints.best == {"best-step=32.ckpt": 7.0}


@pytest.mark.parametrize("sanity", [2, 0])
def test_an_unknown_score_to_monitor_is_refused_with_the_names_there_are(tmp_path, sanity):
    class Trained(L.Callback):
        steps = 0

        def on_train_batch_end(self, trainer, *_):
            self.steps += 1

    trained = Trained()
    with pytest.raises(ValueError, match=r"--checkpoint.monitor val_lss: .*only val/loss\."):
        train(tmp_path, Checkpoints(monitor="val_lss"), callbacks=[trained], num_sanity_val_steps=sanity)
    assert trained.steps == (0 if sanity else 32)


def test_weights_that_are_not_finite_never_become_last(tmp_path):
    class Explodes(Module):
        def on_train_batch_start(self, batch, batch_idx):
            if self.global_step == 40:
                nn.init.constant_(self.net.weight, float("inf"))

    checkpoints = Checkpoints(every_n_train_steps=5)
    train(tmp_path, checkpoints, Explodes(nn.Linear(3, 1)))
    saved = load(checkpoints.last_path)
    assert saved["global_step"] == 40
    assert all(torch.isfinite(w).all() for w in saved["state_dict"].values())


def test_every_n_steps_and_by_time(tmp_path):
    class Steps(L.Callback):
        def __init__(self):
            self.seen = []

        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            self.seen.append(trainer.global_step)

    train(tmp_path, Checkpoints(every_n_train_steps=10), callbacks=[by_step := Steps()], max_steps=25)
    assert by_step.seen == [10, 20, 25]
    train(tmp_path, Checkpoints(train_time_interval=timedelta(0)), callbacks=[by_time := Steps()], max_steps=9)
    assert by_time.seen == [4, 8, 9]


def test_a_failing_run_leaves_its_last_step_to_resume_from(tmp_path):
    class Fails(Module):
        def training_step(self, batch, batch_idx):
            if self.global_step == 7:
                raise KeyError("a bug of the user's")
            return super().training_step(batch, batch_idx)

    checkpoints = Checkpoints()
    with pytest.raises(KeyError, match="bug"):
        train(tmp_path, checkpoints, Fails(nn.Linear(3, 1)))
    assert load(tmp_path / "checkpoints" / "last.ckpt")["global_step"] == 7
    t = train(tmp_path, Checkpoints(), ckpt=str(tmp_path / "checkpoints" / "last.ckpt"))
    assert t.global_step == 96


def test_resuming_remembers_the_best_so_far(tmp_path):
    train(tmp_path, Checkpoints(), max_epochs=2)
    again = Checkpoints()
    train(tmp_path, again, ckpt=str(tmp_path / "checkpoints" / "last.ckpt"), max_epochs=3)
    assert len(again.best) == 1
    assert names(tmp_path) == [*again.best, "last.ckpt"]


def test_leftovers_of_a_killed_save_are_cleaned(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt.tmp").write_bytes(b"half a file")
    train(tmp_path, Checkpoints(), max_epochs=1)
    assert names(tmp_path) == ["best-step=32.ckpt", "last.ckpt"]


def test_a_full_disk_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": 1}, path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        AtomicCheckpointIO().save_checkpoint({"step": 2}, path)
    assert load(path) == {"step": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.slow
def test_a_process_killed_while_it_saves_never_tears_a_file(tmp_path):
    program = textwrap.dedent(
        """
        import sys, torch
        from project.engine.checkpoint import AtomicCheckpointIO
        io, step = AtomicCheckpointIO(), 0
        while True:
            io.save_checkpoint({"step": step, "weights": torch.full((2_000_000,), float(step))}, sys.argv[1])
            step += 1
            print(step, flush=True)
        """
    )
    path = tmp_path / "last.ckpt"
    child = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for line in child.stdout:
        if int(line) == 5:
            child.kill()
            break
    child.wait()
    saved = load(path)
    assert saved["step"] >= 4
    assert (saved["weights"] == saved["step"]).all()


def test_checkpoints_hold_plain_types_only(tmp_path):
    checkpoints = Checkpoints()
    train(tmp_path, checkpoints, max_epochs=1)

    def plain(value):
        if isinstance(value, dict):
            return all(plain(k) and plain(v) for k, v in value.items())
        if isinstance(value, list | tuple):
            return all(plain(v) for v in value)
        return value is None or isinstance(value, str | int | float | bool | torch.Tensor)

    saved = load(checkpoints.last_path)
    assert plain({k: v for k, v in saved.items() if k != "state_dict"})
    assert set(saved["state_dict"]) == {"net.weight", "net.bias"}
