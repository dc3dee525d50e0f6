"""A loss or gradient that is not finite: which step, which rows, and that the weights never saw it."""

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from project.data.sources import Source
from project.engine.checkpoint import Checkpoints
from project.engine.nonfinite import NonFinite, NotFinite
from project.engine.resume import Resume
from project.engine.watch import Stopped
from project.module import Module
from tests.numbered import COLUMNS, Numbered, fit, weights
from tests.ranks import on_ranks

ROWS, BATCH = 64, 8


class Poisoned(Source):
    """The rows of ``Numbered``, but for one value."""

    def __init__(self, row: int, value: float = float("nan"), target: bool = False) -> None:
        self.inner, self.row, self.value, self.target = Numbered(ROWS), row, value, target

    def __len__(self) -> int:
        return ROWS

    def read(self, rows):
        x, y = self.inner.read(rows)
        column = y[:, 0] if self.target else x[:, 2]
        column[rows == self.row] = self.value
        return x, y

    def where(self, row: int) -> str:
        return f"table.csv, line {row + 2}"


def train(source, folder, mode="stop", devices=1, callbacks=(), module=None, **settings):
    checkpoints = Checkpoints(every_n_train_steps=2)
    checkpoints.dirpath = folder
    data = settings.pop("data", {"batch_size": BATCH // devices, "shuffle": False})
    # a plain Checkpoints, last among the callbacks, as in the command
    parts = (*callbacks, Resume(), NonFinite(mode), checkpoints)
    return fit(source, module, devices, parts, data, enable_checkpointing=True, **settings)


def stopped(source, folder, module=None, **settings):
    """The words of the stop, and the module whose weights it protected."""
    module = module or Module(nn.Linear(COLUMNS, 1))
    with pytest.raises(NotFinite) as stop:
        train(source, folder, module=module, **settings)
    assert torch.isfinite(weights(module)).all()
    return str(stop.value), module


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (Poisoned(19), "row 19 (table.csv, line 21): its input column 2 is nan"),
        (Poisoned(19, float("inf")), "row 19 (table.csv, line 21): its input column 2 is inf"),
        (Poisoned(19, float("inf"), target=True), "row 19 (table.csv, line 21): its target is inf"),
    ],
)
def test_the_step_the_row_its_place_and_the_last_good_checkpoint_are_named(tmp_path, source, words):
    said, module = stopped(source, tmp_path)
    assert "gradient of net.weight and 1 more, at optimizer step 3 in epoch 1" in said
    assert words in said
    assert f"The last good checkpoint: {tmp_path / 'last.ckpt'}, after step 2." in said
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 2
    assert torch.equal(saved["state_dict"]["net.weight"], module.net.weight)


def test_a_step_not_saved_yet_is_saved_before_the_run_stops(tmp_path):
    said, module = stopped(Poisoned(31), tmp_path)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert "after step 3." in said
    assert saved["global_step"] == 3
    assert torch.equal(saved["state_dict"]["net.weight"], module.net.weight)


def test_accumulation_names_rows_of_the_whole_window(tmp_path):
    said, _ = stopped(Poisoned(17), tmp_path, accumulate_grad_batches=4)  # micro-batch 2 of the first window
    assert "optimizer step 1 in epoch 1" in said
    assert "row 17 (" in said
    assert "No checkpoint yet" in said


def test_a_rate_that_is_too_high(tmp_path):
    module = Module(nn.Linear(COLUMNS, 1))
    module.optimizer = lambda p: torch.optim.SGD(p, lr=1e12)
    said, _ = stopped(Numbered(ROWS), tmp_path, module)
    assert "finite one by one: too high a rate?" in said or "its prediction is" in said


class InfiniteLoss(Module):
    """A loss that is infinite while every gradient is finite."""

    def compute_loss(self, pred, target):
        loss = super().compute_loss(pred, target)
        return (
            loss + float("inf") if self.global_step == 3 and self.global_rank == self.trainer.world_size - 1 else loss
        )


def test_an_infinite_loss_with_finite_gradients(tmp_path):
    said, _ = stopped(Numbered(ROWS), tmp_path, InfiniteLoss(nn.Linear(COLUMNS, 1)))
    assert "optimizer step 4 in epoch 1" in said


def ranks_stop(folder, bad, mode):
    module = (InfiniteLoss if bad is None else Module)(nn.Linear(COLUMNS, 1))
    source = Numbered(ROWS) if bad is None else Poisoned(bad)
    try:
        trainer, *_ = train(source, folder, mode, devices=2, module=module)
        return trainer.global_step, weights(module)
    except (NotFinite, Stopped) as stop:
        return str(stop), weights(module)


@pytest.mark.parametrize(("bad", "step"), [(23, 3), (None, 4)])  # rows 20 … 23 of a step are rank 1's
def test_two_processes_stop_together_though_only_one_has_the_bad_row(tmp_path, bad, step):
    (said, first), (_, second) = on_ranks(2, ranks_stop, tmp_path, bad, "stop")
    assert f"optimizer step {step} in epoch 1" in said
    if bad is not None:
        assert f"row {bad} (table.csv, line {bad + 2})" in said
    assert torch.equal(first, second)
    assert torch.isfinite(first).all()


def test_two_processes_skip_together(tmp_path):
    (steps, first), (_, second) = on_ranks(2, ranks_stop, tmp_path, 23, "skip")
    assert steps == ROWS // BATCH
    assert torch.equal(first, second)
    assert torch.isfinite(first).all()


class Without(L.Callback):
    """Does by hand what skipping should: leaves one step out."""

    def __init__(self, step):
        self.step = step

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == self.step:
            for p in pl_module.parameters():
                p.grad = None


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_skipping_is_as_if_the_step_had_not_been(tmp_path, capsys, accumulate, optimizer):
    def module():
        torch.manual_seed(1)
        made = Module(nn.Linear(COLUMNS, 1))
        made.optimizer = lambda p: optimizer(p, lr=0.01, **({"momentum": 0.9} if optimizer is torch.optim.SGD else {}))
        return made

    skipping, by_hand = module(), module()
    settings = {"accumulate_grad_batches": accumulate}
    train(Poisoned(19), tmp_path / "a", "skip", module=skipping, **settings)
    train(Numbered(ROWS), tmp_path / "b", module=by_hand, callbacks=[Without(2 if accumulate == 1 else 0)], **settings)
    assert torch.equal(weights(skipping), weights(by_hand))
    assert "skipped     1 optimizer steps" in capsys.readouterr().out


def normed():
    torch.manual_seed(1)
    return Module(nn.Sequential(nn.Linear(COLUMNS, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))


def statistics_of(module):
    """The statistics of the BatchNorm, and how many batches it has seen."""
    return {name: value for name, value in module.net.state_dict().items() if "running" in name or "tracked" in name}


class UnseenBy(L.Callback):
    """The statistics of a BatchNorm are put back after one step: as if its rows had not been."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.before = {n: b.clone() for n, b in pl_module.named_buffers()}

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == self.step:
            for name, buffer in pl_module.named_buffers():
                buffer.copy_(self.before[name])


@pytest.mark.parametrize(("accumulate", "step"), [(1, 2), (4, 0)])
def test_a_skipped_step_leaves_nothing_in_a_batchnorm(tmp_path, accumulate, step):
    skipping, by_hand, settings = normed(), normed(), {"accumulate_grad_batches": accumulate}
    train(Poisoned(19), tmp_path / "a", "skip", module=skipping, **settings)
    train(Numbered(ROWS), tmp_path / "b", module=by_hand, callbacks=[Without(step), UnseenBy(step)], **settings)
    assert torch.equal(weights(skipping), weights(by_hand))
    ours, expected = statistics_of(skipping), statistics_of(by_hand)
    assert int(ours["1.num_batches_tracked"]) == ROWS // BATCH - accumulate
    assert all(torch.isfinite(ours[name]).all() and torch.equal(ours[name], expected[name]) for name in expected)


def ranks_norm(folder):
    module = normed()
    train(Poisoned(23), folder, "skip", devices=2, module=module)
    return statistics_of(module)


def test_two_processes_put_the_statistics_back_though_only_one_has_the_bad_row(tmp_path):
    for statistics in on_ranks(2, ranks_norm, tmp_path):
        assert int(statistics["1.num_batches_tracked"]) == ROWS // BATCH - 1
        assert all(torch.isfinite(value).all() for value in statistics.values())


class BadGradient(Module):
    """A finite loss whose gradient is not, whatever the scale, from step 2 on."""

    def compute_loss(self, pred, target):
        loss = super().compute_loss(pred, target)
        return loss + (pred * 0).sum().sqrt() if self.global_step >= 2 else loss


def scaled(source, folder, mode="stop", module=None, scale=2.0**16):
    """In 16 bits with a scaler, as on CUDA."""
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))
    module = module or Module(nn.Linear(COLUMNS, 1))
    return train(source, folder, mode, module=module, plugins=[plugin], log_every_n_steps=1)


def test_a_scaler_does_not_leave_out_bad_rows_for_ever(tmp_path):
    with pytest.raises(NotFinite, match=r"optimizer step 3 in epoch 1") as stop:
        scaled(Poisoned(19), tmp_path)
    assert "row 19 (table.csv, line 21): its input column 2 is nan" in str(stop.value)
    assert f"{tmp_path / 'last.ckpt'}, after step 2." in str(stop.value)


def test_a_scale_that_is_too_large_at_first_is_no_fault(tmp_path, capsys):
    trainer, *_ = scaled(Numbered(ROWS), tmp_path, scale=2.0**20)
    assert trainer.precision_plugin.scaler.get_scale() < 2.0**20  # it has left out a step
    assert "skipped" not in capsys.readouterr().out


def test_gradients_that_are_bad_at_any_scale_stop_a_run_with_a_scaler(tmp_path):
    module = BadGradient(nn.Linear(COLUMNS, 1))
    with pytest.raises(NotFinite, match="Not finite: the loss or the gradient"):
        scaled(Numbered(ROWS), tmp_path, module=module, scale=4.0)
    assert torch.isfinite(weights(module)).all()


def test_skipping_with_a_scaler_counts(tmp_path, capsys):
    trainer, *_ = scaled(Poisoned(19), tmp_path, "skip")
    assert "skipped     1 optimizer steps" in capsys.readouterr().out
    assert torch.isfinite(weights(trainer.lightning_module)).all()


def test_finite_training_is_not_touched(tmp_path):
    one, other = Module(nn.Linear(COLUMNS, 1)), Module(nn.Linear(COLUMNS, 1))
    other.load_state_dict(one.state_dict())
    train(Numbered(ROWS), tmp_path, module=one)
    fit(Numbered(ROWS), other, data={"batch_size": BATCH, "shuffle": False})
    assert torch.equal(weights(one), weights(other))


class OnDevice(NonFinite):
    """The way of an accelerator, on the CPU."""

    def on_train_start(self, trainer, pl_module):
        super().on_train_start(trainer, pl_module)
        self._at_once = self._on_cpu = False
        del self.__dict__["on_train_batch_end"]


@pytest.mark.parametrize("every", [4, 100])
def test_the_way_of_an_accelerator(tmp_path, every):
    module, checkpoints = Module(nn.Linear(COLUMNS, 1)), Checkpoints(every_n_train_steps=2)
    checkpoints.dirpath = tmp_path
    with pytest.raises(NotFinite) as stop:
        fit(
            Poisoned(19),
            module,
            callbacks=(Resume(), OnDevice(), checkpoints),
            data={"batch_size": BATCH, "shuffle": False},
            enable_checkpointing=True,
            log_every_n_steps=every,
        )
    assert "optimizer step 3 in epoch 1" in str(stop.value)
    assert "row 19 (table.csv, line 21)" in str(stop.value)
    assert f"{tmp_path / 'last.ckpt'}, after step 2." in str(stop.value)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 2
    assert torch.isfinite(weights(module)).all()
