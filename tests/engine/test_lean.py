"""The lean step: the weights of the plain Trainer to the last bit, whatever else is asked of it."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler
from torch import nn

from project.data.datamodule import StreamDataModule
from project.data.sources import SyntheticSource
from project.engine.checkpoint import Checkpoints
from project.engine.lean import LeanModule, NoProfiler, skip_empty_hooks, spare
from project.engine.metrics_csv import MetricsCSV
from project.engine.report import Report
from project.engine.resume import Resume
from project.module import Module


class Plain(L.LightningModule):
    """What a user of Lightning would write."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, batch, batch_idx):
        x, y = batch
        pred = self.net(x)
        loss = nn.functional.mse_loss(pred.float() if pred.dtype == torch.bfloat16 else pred, y)
        if self.talkative:
            self.log("mine", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Talkative(Module):
    """Logs for itself at every step."""

    def training_step(self, batch, batch_idx):
        outputs = super().training_step(batch, batch_idx)
        self.log("mine", outputs["loss"], on_step=True, on_epoch=True)
        return outputs


class Hooks(L.Callback):
    """Uses every hook of a step, and must see every one of them."""

    def __init__(self):
        self.calls = []

    def on_train_batch_start(self, *args):
        self.calls.append("start")

    def on_before_zero_grad(self, *args):
        self.calls.append("zero")

    def on_before_backward(self, *args):
        self.calls.append("before")

    def on_after_backward(self, *args):
        self.calls.append("after")

    def on_before_optimizer_step(self, *args):
        self.calls.append("step")

    def on_train_batch_end(self, *args):
        self.calls.append("end")


def data():
    return StreamDataModule(SyntheticSource(rows=640, features=3), batch_size=8, split=(0.9, 0.1, 0.0))


def fit(folder, module, callbacks, profiler, lean=False, **settings):
    t = L.Trainer(
        accelerator="cpu",
        devices=1,
        logger=MetricsCSV(folder),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        profiler=profiler,
        num_sanity_val_steps=0,
        **{"max_epochs": 2, "log_every_n_steps": 10, "enable_checkpointing": False, **settings},
    )
    if lean:
        spare(t)
    L.seed_everything(0)
    t.fit(module, data())
    assert ("mine_epoch" in t.callback_metrics) == getattr(module, "talkative", isinstance(module, Talkative))
    return [p.detach().clone() for p in module.net.parameters()]


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


CASES = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 3},
    "clipping by norm": {"gradient_clip_val": 0.1},
    "clipping by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "64-true": {"precision": "64-true"},
    "max_steps": {"max_steps": 37},
    "profiler": {"profiler": "simple"},
    "all at once": {
        "precision": "bf16-mixed",
        "accumulate_grad_batches": 3,
        "gradient_clip_val": 0.1,
        "profiler": "simple",
    },
}


@pytest.mark.parametrize("talkative", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_weights_are_those_of_the_plain_trainer(tmp_path, case, talkative):
    settings = dict(CASES[case])
    profiler = settings.pop("profiler", None)
    plain = Plain(net())
    plain.talkative = talkative
    expected = fit(tmp_path, plain, [], profiler, **settings)
    lean = (Talkative if talkative else Module)(net())
    lean.optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    (tmp_path / "lean").mkdir()
    callbacks = [Report(False), Resume(), Checkpoints(), LearningRateMonitor(), hooks := Hooks()]
    settings |= {"enable_checkpointing": True, "default_root_dir": tmp_path}
    got = fit(tmp_path / "lean", lean, callbacks, profiler or NoProfiler(), lean=True, **settings)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert {hooks.calls.count(name) for name in ("start", "before", "after", "end")} == {hooks.calls.count("end")}
    assert hooks.calls.count("step") == hooks.calls.count("zero") > 0


def test_the_command_uses_its_own_profiler_only_where_none_was_asked_for(run, small):
    from project.cli import CLI

    assert isinstance(CLI([*small, "--run_dir", "one"]).trainer.profiler, NoProfiler)
    assert isinstance(CLI([*small, "--run_dir", "two", "--profiler", "simple"]).trainer.profiler, SimpleProfiler)


def test_a_subclass_of_a_callback_may_fill_any_hook_and_call_the_empty_one_above_it():
    class Mine(Report):
        seen = 0

        def on_after_backward(self, trainer, pl_module):
            super().on_after_backward(trainer, pl_module)
            self.seen += 1

    callback = Mine(False)
    skip_empty_hooks(callback)
    assert callback.on_before_zero_grad is None
    callback.on_after_backward(None, None)
    assert callback.seen == 1


class Mixed(Module):
    """Overrides what the lean module shortens."""

    def __init__(self, net):
        super().__init__(net)
        self.seen = []

    def on_after_backward(self):
        super().on_after_backward()
        self.seen.append("backward")

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.seen.append("batch")
        return batch

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.seen.append("clip")
        super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)


def test_what_a_module_overrides_is_called(tmp_path):
    module = Mixed(net())
    fit(tmp_path, module, [], None, max_steps=5, limit_val_batches=0)
    assert {name: module.seen.count(name) for name in set(module.seen)} == {"backward": 5, "batch": 5, "clip": 5}


def test_hooks_of_a_datamodule_are_called(tmp_path):
    class Doubling(StreamDataModule):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch[0] * 2, batch[1]

    x = torch.ones(2, 3)
    module = Module(net())
    module._trainer = type("Trainer", (), {"datamodule": data()})()
    assert module._call_batch_hook("on_after_batch_transfer", (x, x), 0)[0] is x
    t = L.Trainer(
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        limit_val_batches=0,
    )
    seen = []

    class Look(Module):
        def training_step(self, batch, batch_idx):
            seen.append(batch[0])
            return super().training_step(batch, batch_idx)

    source = SyntheticSource(rows=640, features=3)
    L.seed_everything(0)
    t.fit(Look(net()), d := Doubling(source, batch_size=8, shuffle=False, split=(1.0, 0.0, 0.0)))
    assert torch.equal(seen[0], source.read(d.rows("train", 0))[0] * 2)


def test_batches_that_are_elsewhere_are_moved():
    module = Module(net())
    meta, here = torch.device("meta"), torch.ones(2)
    assert module._call_batch_hook("transfer_batch_to_device", (here,), meta, 0)[0].device == meta
    assert module._call_batch_hook("transfer_batch_to_device", [here], meta, 0)[0].device == meta
    assert module._call_batch_hook("transfer_batch_to_device", (here,), here.device, 0)[0] is here


def test_an_optimizer_with_a_zero_grad_of_its_own_keeps_it():
    class Counting(torch.optim.SGD):
        zeroed = 0

        def zero_grad(self, set_to_none=True):
            self.zeroed += 1
            super().zero_grad(set_to_none)

    class Tiny(LeanModule):
        pass

    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    Tiny().optimizer_zero_grad(0, 0, own := Counting([parameter], lr=0.1))
    assert own.zeroed == 1
    parameter.grad = torch.ones(1)
    Tiny().optimizer_zero_grad(0, 0, torch.optim.SGD([parameter], lr=0.1))
    assert parameter.grad is None


def test_no_profiler_is_a_profiler_that_does_nothing():
    assert isinstance(NoProfiler(), PassThroughProfiler)
    with NoProfiler().profile("anything"), NoProfiler().profile("within"):
        pass
