"""The report: right values, no work between reports, a screen that suits where it is read."""

import csv
import io
import sys

import lightning as L
import pytest
import torch
import torchmetrics
from torch import nn

from project.data.datamodule import StreamDataModule
from project.data.sources import SyntheticSource
from project.engine.memory import peak_memory
from project.engine.metrics_csv import MetricsCSV
from project.engine.report import Report
from project.engine.resume import Resume
from project.engine.screen import Screen
from project.module import Module
from project.scores import Scores
from tests.ranks import on_ranks


def train(tmp_path, report, module=None, callbacks=(), data=None, rows=500, **trainer):
    L.seed_everything(0)
    settings = {"batch_size": 8, "split": (0.8, 0.2, 0.0), **(data or {})}
    t = L.Trainer(
        devices=1,
        logger=MetricsCSV(tmp_path),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[report, *callbacks],
        **{
            "accelerator": "cpu",
            "max_epochs": 2,
            "log_every_n_steps": 10,
            "enable_checkpointing": False,
            **trainer,
        },
    )
    module = module or Module(nn.Linear(3, 1), metrics={"r2": torchmetrics.R2Score()})
    t.fit(module, StreamDataModule(SyntheticSource(rows=rows, features=3), **settings))
    with open(tmp_path / "metrics.csv", newline="") as file:
        return t, list(csv.DictReader(file))


class EachStep(L.Callback):
    """What logging every step would have seen."""

    def __init__(self):
        self.losses, self.pairs = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)
        self.pairs.append((outputs["pred"], outputs["target"]))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_reported_losses_are_those_of_per_step_logging(tmp_path, accumulate):
    seen = EachStep()
    t, rows = train(tmp_path, Report(False), callbacks=[seen], accumulate_grad_batches=accumulate, max_epochs=1)
    reported = {int(r["step"]): float(r["train/loss"]) for r in rows if r["train/loss"]}
    n = 10 * accumulate
    for i, step in enumerate(range(10, t.global_step, 10)):
        assert reported[step] == pytest.approx(sum(seen.losses[i * n : (i + 1) * n]) / n, rel=1e-6)
    (epoch,) = [float(r["train/epoch_loss"]) for r in rows if r.get("train/epoch_loss")]
    assert epoch == pytest.approx(sum(seen.losses) / len(seen.losses), rel=1e-6)


def test_metrics_of_an_epoch_are_those_of_all_its_rows(tmp_path):
    seen = EachStep()
    _, rows = train(tmp_path, Report(False), callbacks=[seen], max_epochs=1)
    pred, target = (torch.cat(side).double().flatten() for side in zip(*seen.pairs, strict=True))
    expected = 1 - (target - pred).square().sum() / (target - target.mean()).square().sum()
    assert float(rows[-1]["train/r2"]) == pytest.approx(float(expected), abs=1e-6)


def test_batches_whose_rows_have_another_shape_are_measured(tmp_path):
    class Cut(Module):
        def training_step(self, batch, batch_idx):
            out = super().training_step(batch, batch_idx)
            wide = 1 + batch_idx % 2  # such as sentences, some longer than others
            return {**out, "pred": out["pred"].expand(-1, wide), "target": out["target"].expand(-1, wide)}

    module = Cut(nn.Linear(3, 1), metrics={"mse": torchmetrics.MeanSquaredError()})
    _, rows = train(tmp_path, Report(False), module, max_epochs=1)
    assert float(rows[-1]["train/mse"]) > 0


def test_rows_of_a_short_last_batch_count_as_the_others(tmp_path):
    seen = EachStep()
    _, rows = train(tmp_path, Report(False), callbacks=[seen], max_epochs=1, rows=505, data={"drop_last": False})
    sizes = [len(target) for _, target in seen.pairs]
    assert len(set(sizes)) == 2
    expected = sum(n * loss for n, loss in zip(sizes, seen.losses, strict=True)) / sum(sizes)
    assert float(rows[-1]["train/epoch_loss"]) == pytest.approx(expected, rel=1e-6)


def test_a_step_that_returns_a_bare_loss_or_nothing_is_reported_as_far_as_it_goes(tmp_path):
    class Bare(Module):
        def training_step(self, batch, batch_idx):
            return self.compute_loss(self(batch[0]), batch[1])

    class Manual(Module):
        automatic_optimization = False

        def __init__(self, net):
            super().__init__(net)
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.compute_loss(self(batch[0]), batch[1]))
            optimizer.step()

    _, rows = train(tmp_path, report := Report(False), Bare(nn.Linear(3, 1)), max_epochs=1)
    assert report.rows_used == 400
    assert rows[-1]["train/epoch_loss"]
    (tmp_path / "manual").mkdir()
    t, rows = train(tmp_path / "manual", Report(False), Manual(nn.Linear(3, 1)), max_epochs=1)
    assert t.global_step == 50
    assert {float(r["lr"]) for r in rows if r["lr"]} == {0.01}


def test_every_row_has_the_rate_of_learning_speed_and_memory(tmp_path):
    _, rows = train(tmp_path, Report(False))
    for row in rows:
        if row["rows_per_s"]:
            assert float(row["rows_per_s"]) == pytest.approx(8 * float(row["steps_per_s"]))
            assert float(row["memory_mb"]) > 50
    assert [int(r["step"]) for r in rows if r["rows_per_s"]] == [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]
    assert {float(r["lr"]) for r in rows if r["lr"]} == {0.01}


def test_a_resumed_report_knows_the_steps_before_the_stop(tmp_path):
    from lightning.pytorch.callbacks import ModelCheckpoint

    _, whole = train(tmp_path, Report(False), callbacks=[Resume()], max_epochs=1)
    (tmp_path / "cut").mkdir()
    stop = ModelCheckpoint(tmp_path / "cut", filename="stop", every_n_train_steps=7)
    train(
        tmp_path / "cut",
        Report(False),
        callbacks=[Resume(), stop],
        max_epochs=1,
        max_steps=7,
        enable_checkpointing=True,
    )
    L.seed_everything(0)
    t = L.Trainer(
        accelerator="cpu",
        logger=(log := MetricsCSV(tmp_path / "cut")),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Report(False), Resume()],
        enable_checkpointing=False,
        max_epochs=1,
        log_every_n_steps=10,
    )
    log.rewind(7)
    module = Module(nn.Linear(3, 1), metrics={"r2": torchmetrics.R2Score()})
    data = StreamDataModule(SyntheticSource(rows=500, features=3), batch_size=8, split=(0.8, 0.2, 0.0))
    t.fit(module, data, ckpt_path=tmp_path / "cut" / "stop.ckpt", weights_only=True)
    with open(tmp_path / "cut" / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for name in ("train/loss", "train/epoch_loss", "val/loss"):
        for a, b in zip(
            [r for r in whole if r[name]], [r for r in rows if r[name] and int(r["step"]) > 7], strict=True
        ):
            assert float(a[name]) == pytest.approx(float(b[name]), rel=1e-6), (name, a["step"])


def part_of_a_run(folder, world, ckpt=None, **limits):
    """On each rank: 6 optimizer steps of 64 rows an epoch, from ``ckpt`` or anew. Returns the rows of metrics.csv."""
    L.seed_everything(0)
    module = Module(nn.Linear(3, 1), metrics={"r2": torchmetrics.R2Score(), "pearson": torchmetrics.PearsonCorrCoef()})
    log = MetricsCSV(folder)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        logger=log,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[Report(False), Resume()],
        log_every_n_steps=4,
        max_epochs=1,
        **limits,
    )
    data = StreamDataModule(SyntheticSource(rows=500, features=3), split=(0.8, 0.2, 0.0), batch_size=64 // world)
    trainer.fit(module, data, ckpt_path=ckpt, weights_only=True)
    trainer.save_checkpoint(folder / "end.ckpt")
    if trainer.global_rank == 0:
        with open(folder / "metrics.csv", newline="") as file:
            return list(csv.DictReader(file))
    return None


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 2)])
def test_metrics_of_a_cut_epoch_are_of_all_its_rows_on_another_number_of_processes_too(tmp_path, before, after):
    for name in ("whole", "cut", "next"):
        (tmp_path / name).mkdir()
    whole = on_ranks(after, part_of_a_run, tmp_path / "whole", after)[0]
    on_ranks(before, limited, tmp_path / "cut", before)
    rows = on_ranks(after, part_of_a_run, tmp_path / "next", after, tmp_path / "cut" / "end.ckpt")[0]
    names = ["train/loss", "train/epoch_loss", "train/r2", *(["train/pearson"] if before <= after else [])]
    for name in names:  # Pearson's correlation has no way to merge what two processes hold
        a, b = ({r["step"]: float(r[name]) for r in found if r[name] and r["step"] != "3"} for found in (whole, rows))
        assert a == pytest.approx(b, rel=1e-12 if before == after else 1e-5), name


def test_a_metric_that_cannot_go_on_with_fewer_processes_says_so_once(caplog):
    scores = Scores({"pearson": torchmetrics.PearsonCorrCoef(), "r2": torchmetrics.R2Score()})
    x = torch.arange(8.0)
    scores.update(x, x.square())
    again = Scores({"pearson": torchmetrics.PearsonCorrCoef(), "r2": torchmetrics.R2Score()})
    again.restore([*scores.state(), *scores.state()])
    assert caplog.messages == ["train/pearson cannot go on with fewer devices: its value misses rows of this epoch"]
    once, (twice, rows) = scores.take()[0], again.take()
    assert (rows, float(twice["r2"])) == (16, pytest.approx(float(once["r2"])))


def limited(folder, world):
    part_of_a_run(folder, world, max_steps=3)


@pytest.mark.gpu
def test_no_step_between_two_reports_waits_for_the_device(tmp_path):
    class Strict(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            # the first step of a window may allocate, the last one reports
            torch.cuda.set_sync_debug_mode("error" if 0 < batch_idx % 10 < 9 else "default")

    try:
        t, rows = train(tmp_path, Report(False), callbacks=[Strict()], max_epochs=1, accelerator="cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert t.global_step == 50
    assert float(rows[-1]["memory_reserved_mb"]) > 0


class Stdout(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.isatty = lambda: terminal


@pytest.fixture
def screen(monkeypatch):
    def make(terminal):
        monkeypatch.setattr(sys, "stdout", Stdout(terminal))
        monkeypatch.setenv("TERM", "xterm")
        return sys.stdout

    return make


def test_a_log_file_gets_whole_lines_without_control_characters(tmp_path, screen, monkeypatch):
    out = screen(terminal=False)
    monkeypatch.setattr("project.engine.screen.FIRST_LINE_SECONDS", 0.0)
    monkeypatch.setattr("project.engine.screen.LINE_SECONDS", 0.0)
    train(tmp_path, Report())
    lines = out.getvalue().splitlines()
    assert "\r" not in out.getvalue()
    assert "\x1b" not in out.getvalue()
    assert lines[-1].startswith("epoch 2/2  train/loss ")
    assert any("epoch 1/2  2% of 50 batches  step 1" in line for line in lines)
    assert any(line.startswith("validate  ") for line in lines)


def test_a_steady_pace(tmp_path, screen, monkeypatch):
    out = screen(terminal=False)
    monkeypatch.setattr("project.engine.screen.FIRST_LINE_SECONDS", 600.0)
    train(tmp_path, Report())
    assert len(out.getvalue().splitlines()) == 2  # over before the first: only the lines of the epochs


def test_a_terminal_gets_a_bar(tmp_path, screen, monkeypatch):
    out = screen(terminal=True)
    monkeypatch.setattr("project.engine.screen.REDRAW_SECONDS", 0.0)
    train(tmp_path, Report())
    assert "\r" in out.getvalue()
    assert "loss" in out.getvalue()


def test_a_dumb_terminal_is_no_terminal(screen, monkeypatch):
    screen(terminal=True)
    monkeypatch.setenv("TERM", "dumb")
    assert not Screen(enabled=True).terminal


def test_a_narrow_terminal_and_an_unknown_length_do_not_break_the_bar(screen, monkeypatch):
    out = screen(terminal=True)
    monkeypatch.setenv("COLUMNS", "30")
    bar = Screen(enabled=True)
    bar.show("epoch 1", 5, float("inf"), "step 5  loss 0.1  1,000 rows/s  400 MB")
    bar.close()
    assert max(len(part) for part in out.getvalue().split("\r")) <= 30
    screen(terminal=False)
    lines = Screen(enabled=True)
    lines.show("epoch 1", 5, float("inf"), "")
    assert sys.stdout.getvalue() == "epoch 1  5 batches\n"


def test_the_line_of_an_epoch_tells_its_own_values_and_those_the_user_logs(tmp_path, screen):
    class Talkative(Module):
        def training_step(self, batch, batch_idx):
            self.log("mine", float(batch_idx), on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    out = screen(terminal=False)
    train(tmp_path, Report(), Talkative(nn.Linear(3, 1)), check_val_every_n_epoch=2)
    first, second = [line for line in out.getvalue().splitlines() if line.startswith("epoch")]
    assert "  mine 24.5  " in first
    assert "val/loss" not in first  # there was no validation yet, nor are old scores told again
    assert "  val/loss " in second


def test_flops_make_a_share_of_what_the_devices_could_do(tmp_path, monkeypatch):
    monkeypatch.setattr("project.engine.report.most_rows_per_s", lambda trainer, module: 1e6)
    _, rows = train(tmp_path, Report(False), max_epochs=1)
    for row in rows:
        if row["rows_per_s"]:
            assert float(row["mfu"]) == pytest.approx(float(row["rows_per_s"]) / 1e6)


def test_switched_off_it_is_silent(tmp_path, screen):
    out = screen(terminal=False)
    train(tmp_path, Report(draw=False))
    assert out.getvalue() == ""


def test_peak_memory_is_said_in_megabytes():
    assert peak_memory(torch.device("cpu")).endswith(" MB")
