"""Out of memory: the same rows in smaller parts, with the gradient of the whole, on every rank."""

import contextlib
import functools
import io
import os

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from project import scores
from project.data.datamodule import StreamDataModule
from project.engine.checkpoint import Checkpoints
from project.engine.oom import OutOfMemory
from project.engine.parts import DoesNotFit
from project.engine.predictions import PredictionWriter
from project.engine.resume import Resume
from project.models.deep import Deep
from project.module import Module
from tests.faults.harness import Job
from tests.numbered import COLUMNS, Numbered, fit, trainer_of, weights
from tests.ranks import on_ranks

ROWS, BATCH = 60, 12


class Full(torch.autograd.Function):
    """Runs out of memory in the backward pass of more than ``most`` rows."""

    @staticmethod
    def forward(ctx, x, most):
        ctx.most = most
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if len(gradient) > ctx.most:
            raise torch.OutOfMemoryError("simulated, backward")
        return gradient, None


class Small(nn.Module):
    """A net with room for ``most`` rows, in its forward or backward pass, on one rank or all, at one step or all."""

    def __init__(self, most, where="forward", rank=None, step=None, middle=None):
        super().__init__()
        self.first, self.last, self.middle = nn.Linear(COLUMNS, 4), nn.Linear(4, 1), middle or nn.Tanh()
        self.most, self.where, self.rank, self.step, self.trainer = most, where, rank, step, None
        self.largest = 0  # rows that went through

    def room(self):
        trainer = self.trainer
        most = self.most[trainer.global_rank] if isinstance(self.most, list) else self.most
        elsewhere = self.rank is not None and trainer.global_rank != self.rank
        later = self.step is not None and trainer.global_step != self.step
        return 10**9 if elsewhere or later else most

    def forward(self, x):
        room = self.room()
        if self.where == "forward" and len(x) > room:
            raise torch.OutOfMemoryError("simulated, forward")
        if self.where == "cpu" and len(x) > room:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        x = self.middle(self.first(x))
        if self.where == "backward":
            x = Full.apply(x, room)
        self.largest = max(self.largest, len(x))
        return self.last(x)


class Gradients(L.Callback):
    """Writes down the gradient of each optimizer step."""

    def __init__(self):
        self.all = []

    def on_train_start(self, trainer, pl_module):
        if isinstance(pl_module.net, Small):
            pl_module.net.trainer = trainer

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.all.append(torch.cat([p.grad.flatten() for p in pl_module.parameters()]).clone())


def train(most=10**9, where="forward", rank=None, step=None, devices=1, module=None, data=None, extra=(), **settings):
    """(gradients of all steps, the module, the callback)."""
    torch.manual_seed(1)
    net = Small(most, where, rank, step, settings.pop("middle", None))
    module = Module(net) if module is None else module(net)
    gradients, oom = Gradients(), settings.pop("oom", None) or OutOfMemory()
    if bucket := settings.pop("bucket", None):
        settings["strategy"] = DDPStrategy(bucket_cap_mb=bucket)
    data = {"batch_size": BATCH // devices, **(data or {})}
    fit(Numbered(ROWS), module, devices, (gradients, Resume(), oom, *extra), data, **settings)
    return torch.stack(gradients.all), module, oom


def near(a, b, tolerance=1e-6):
    assert a.shape == b.shape
    assert (a - b).abs().max() <= tolerance * max(1.0, float(b.abs().max()))


SETTINGS = [
    {},
    {"accumulate_grad_batches": 5},
    {"accumulate_grad_batches": 2, "data": {"drop_last": False, "batch_size": 7}},  # weights of the tail's rows
    {"gradient_clip_val": 0.1},
    {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 5},
    {"module": lambda net: Module(net, loss=nn.L1Loss())},
]


@functools.cache
def whole(i, devices=1):
    return train(**SETTINGS[i], devices=devices)[0]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("i", range(len(SETTINGS)))
def test_the_gradients_of_parts_are_those_of_the_whole(where, i):
    found, module, oom = train(5, where, **SETTINGS[i])
    near(found, whole(i))
    assert oom.rows["train"] == (4 if i == 2 else 3)
    if where == "forward":
        assert module.net.largest == oom.rows["train"]


def test_down_to_one_row_and_what_the_allocator_of_the_cpu_says(capsys):
    found, module, _ = train(1, "cpu")
    near(found, whole(0))
    assert module.net.largest == 1
    said = capsys.readouterr().out
    assert said.count("oom") == 1
    assert "train batches of 12 rows go in parts of 1" in said


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_one_failure_in_the_middle(where):
    near(train(5, where, step=1, accumulate_grad_batches=2)[0], train(accumulate_grad_batches=2)[0])


class CountedDrops(nn.Module):
    """Dropout whose mask follows from the random state and, like a mask drawn row by row, not from the batch."""

    def forward(self, x):
        return x * (torch.rand(len(x), 4) > 0.5)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_random_numbers_are_those_of_the_step_that_failed(where):
    near(train(5, where, middle=CountedDrops())[0], train(middle=CountedDrops())[0])


def test_batchnorm_sees_parts_and_only_those(tmp_path):
    def trained(most, batch, accumulate):
        norm = nn.BatchNorm1d(4)
        data = {"batch_size": batch, "shuffle": False}
        return train(most, "backward", middle=norm, data=data, accumulate_grad_batches=accumulate)[0], norm

    (found, norm), (expected, by_hand) = trained(6, 12, 1), trained(10**9, 6, 2)
    near(found, expected)
    near(norm.running_var, by_hand.running_var)
    assert norm.num_batches_tracked == by_hand.num_batches_tracked == 10


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    "precision",
    [*(pytest.param(p, marks=pytest.mark.slow) for p in ("bf16-mixed", "64-true")), "scaler"],
)
def test_precisions(where, precision):
    def settings():
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        plugin = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
        return plugin if precision == "scaler" else {"precision": precision}

    double = {"module": lambda net: Module(net.double())} if precision == "64-true" else {}
    found, *_ = train(5, where, accumulate_grad_batches=2, gradient_clip_val=0.5, **settings(), **double)
    expected, *_ = train(accumulate_grad_batches=2, gradient_clip_val=0.5, **settings(), **double)
    near(found, expected, 1e-6 if double else 2e-2)


# ---- several ranks


WINDOW = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1, "max_epochs": 2}


def on_both(settings, bucket):
    """Gradients of all cases on this rank, the whole ones first."""
    two = {**settings, "devices": 2, "bucket": bucket}
    two["data"] = {"batch_size": BATCH // 2, **settings.get("data", {})}
    found = [train(**two)[0]]
    for where in ("forward", "backward"):
        found.append(train(1, where, rank=1, **two)[0])
        found.append(train(2, where, rank=1, step=1, **two)[0])  # when whole micro-batches have gone through before
        found.append(train(2, where, rank=0, **two)[0])
        found.append(train([4, 2], where, **two)[0])  # another limit on each rank
    return found


@pytest.mark.parametrize(
    ("settings", "bucket"),  # MB; with the second one, some gradients are on their way when the backward pass fails
    [
        (WINDOW, 1e-6),
        pytest.param({}, 25, marks=pytest.mark.slow),
        pytest.param({}, 1e-6, marks=pytest.mark.slow),
        pytest.param(WINDOW, 25, marks=pytest.mark.slow),
    ],
)
def test_whichever_rank_fails_all_go_on_with_the_same_gradient(settings, bucket):
    (expected, *cases), others = on_ranks(2, on_both, settings, bucket)
    for found, other in zip(cases, others[1:], strict=True):
        near(found, expected)
        assert torch.equal(found, other)


class Unused(Small):
    """A net of which a part is left out at every other step."""

    def __init__(self, *args):
        super().__init__(*args)
        self.beside = nn.Linear(COLUMNS, 1)

    def forward(self, x):
        return super().forward(x) + (self.beside(x) if self.trainer.global_step % 2 else 0)


def unused(strategy):
    two = {"devices": 2, "data": {"batch_size": BATCH // 2}, "max_epochs": 2}
    found = []
    for most, where in ((10**9, "forward"), (2, "forward"), (2, "backward")):
        torch.manual_seed(1)
        net = Unused(most, where, 1)
        kept = Kept()
        fit(Numbered(ROWS), Module(net), callbacks=(kept, OutOfMemory()), **two, strategy=DDPStrategy(**strategy))
        found.append((weights(net), kept.none))
    return found


class Kept(Gradients):
    def __init__(self):
        self.none = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.none.append([p.grad is None for p in pl_module.parameters()])


@pytest.mark.slow
def test_parameters_that_a_step_does_not_use_stay_without_a_gradient():
    for rank in on_ranks(2, unused, {"find_unused_parameters": True}):
        for found in rank[1:]:
            near(found[0], rank[0][0])
            assert found[1] == rank[0][1]
        assert any(any(step) for step in rank[0][1])


# ---- what is kept, and what is refused


def test_the_size_is_in_the_checkpoint_and_used_after_a_resume(tmp_path, capsys):
    def run(most, **settings):
        checkpoints = Checkpoints()
        checkpoints.dirpath = tmp_path
        extra = {"extra": (checkpoints,), "enable_checkpointing": True}
        return train(most, "forward", **extra, **settings)

    run(5, max_steps=2)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["callbacks"]["OutOfMemory"] == {"rows": [[3, 0]]}
    oom = OutOfMemory()
    torch.manual_seed(1)
    net, gradients = Small(10**9), Gradients()
    trainer = trainer_of(callbacks=[gradients, Resume(), oom], max_epochs=1)
    data = StreamDataModule(Numbered(ROWS), split=(1.0, 0.0, 0.0), batch_size=BATCH)
    L.seed_everything(1, verbose=False)
    trainer.fit(Module(net), data, ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    assert (oom.rows["train"], net.largest) == (3, 3)
    assert trainer.global_step == 5


class Calls(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_one_row_that_does_not_fit_stops_with_a_good_checkpoint(tmp_path, where):
    checkpoints, module = Checkpoints(), None
    checkpoints.dirpath = tmp_path

    def keep(net):
        nonlocal module
        module = Module(net)
        return module

    settings = {"extra": (checkpoints,), "enable_checkpointing": True, "middle": Calls()}
    with pytest.raises(DoesNotFit) as stop:
        train(0, where, step=2, module=keep, **settings)
    said = str(stop.value)
    assert "Out of memory in train after optimizer step 2: not even one row fits." in said
    assert f"The last checkpoint: {tmp_path / 'last.ckpt'}, after step 2." in said
    for word in ("Peak", " MB", "[1, 5]", "--precision", "--accumulate_grad_batches", "checkpointing", "shards"):
        assert word in said
    assert stop.value.code == 1
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 2
    assert saved["state_dict"]["net.middle.calls"] == 2  # nothing of the step that failed


class NoRoom(Deep):
    """Has room for ``tried`` rows in evaluation mode; for none on ``rank`` after so many training steps."""

    def __init__(self, in_features: int, after: int = 10**9, rank: int = 0, tried: int = 10**9) -> None:
        super().__init__(in_features, width=8, depth=2)
        self.after, self.rank, self.tried, self.calls = after, rank, tried, 0

    def forward(self, x):
        self.calls += self.training
        here = int(os.environ.get("LOCAL_RANK", "0")) == self.rank
        if (here and self.calls > self.after) if self.training else len(x) > self.tried:
            raise torch.OutOfMemoryError("simulated")
        return super().forward(x)


def command(folder, *argv, ranks=1):
    return Job(folder, "--model.net", "tests.engine.test_oom.NoRoom", *argv, sleep=None, ranks=ranks).end()


@pytest.mark.slow
def test_the_command_ends_with_1_a_checkpoint_and_what_to_try(tmp_path):
    one = command(tmp_path, "--model.net.after", "3")
    assert one.codes == [1]
    assert "Traceback" not in one.screen
    assert "error: Out of memory in train after optimizer step 3: not even one row fits." in one.screen
    assert "last.ckpt, after step 3." in one.screen
    assert "See docs/memory.md" in one.last_lines[-1]
    assert one.checkpoint()["global_step"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_where_it_does_not_fit_ends_all_in_words(tmp_path, rank):
    flags = ("--model.net.after", "3", "--model.net.rank", rank, "--checkpoint.every_n_train_steps", "2")
    one = command(tmp_path, *flags, ranks=2)
    assert one.codes == [1]
    assert "Traceback" not in one.screen, one.screen
    assert "Out of memory in train after optimizer step 3: not even one row fits" in one.screen
    assert "last.ckpt, after step 2." in one.screen
    assert f"rank {rank}: Out of memory" in one.last_lines[-1] or "See docs/memory.md" in one.last_lines[-1]
    assert one.checkpoint()["global_step"] == 2


@pytest.mark.slow
def test_the_look_at_a_few_rows_before_the_start(tmp_path):
    one = command(tmp_path, "--model.net.tried", "0")
    assert one.codes == [1]
    assert "error: Out of memory before the start: not even one row fits on the CPU" in one.screen
    assert "Traceback" not in one.screen
    one = command(tmp_path, "--model.net.tried", "1", "--max_steps", "2", "--run_dir", "other")
    assert one.codes == [0], one.screen
    assert "eval batches of" in one.screen


class ByHand(Module):
    def __init__(self, net):
        super().__init__(net)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)["loss"]
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()


class OwnLoss(nn.Module):
    """The largest error of all rows."""

    def forward(self, pred, target):
        return (pred - target).abs().max()


class OwnStep(Module):
    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("mine", loss, on_step=False, on_epoch=True)
        return loss


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (ByHand, "it optimises by hand"),
        (lambda net: Module(net, loss=nn.MSELoss(reduction="sum")), "MSELoss is set to be no mean over rows"),
    ],
)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_where_parts_would_be_wrong_a_line_says_why_and_the_run_ends_in_words(module, why, where, capsys):
    with pytest.raises(DoesNotFit, match=f"Out of memory in train after optimizer step 0: {why}"):
        train(5, where, module=module)
    assert why in capsys.readouterr().out


def test_a_loss_that_is_no_mean_is_found_out():
    with pytest.raises(DoesNotFit, match="the loss is no mean over rows"):
        train(5, module=lambda net: Module(net, loss=OwnLoss()))


def test_a_training_step_of_ones_own_and_what_it_logs():
    def run(most):
        found, module, _ = train(most, module=OwnStep, data={"batch_size": 10})
        return found, module.trainer.callback_metrics["mine"]

    (found, logged), (expected, whole_logged) = run(4), run(10**9)
    near(found, expected)
    near(logged, whole_logged)


def test_another_error_stands_and_stop_switches_it_off():
    class Broken(Small):
        def forward(self, x):
            raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        train(module=lambda net: Module(Broken(5)))
    with pytest.raises(torch.OutOfMemoryError):
        train(5, oom=OutOfMemory("stop"))


def refused():
    said = []
    for options in ({"static_graph": True}, {"gradient_as_bucket_view": True}):
        trainer = trainer_of(2, strategy=DDPStrategy(**options), max_steps=1, callbacks=[OutOfMemory()])
        data = StreamDataModule(Numbered(ROWS), split=(1.0, 0.0, 0.0), batch_size=BATCH)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            trainer.fit(Module(nn.Linear(COLUMNS, 1)), data)
        said.append(out.getvalue())
    return said


@pytest.mark.slow
def test_ways_of_ddp_that_give_wrong_gradients_in_parts_are_refused():
    said, _ = on_ranks(2, refused)
    assert "wrong gradients with DDP's static_graph" in said[0]
    assert "wrong gradients with DDP's gradient_as_bucket_view" in said[1]


# ---- evaluation and prediction


class Evaluated(Small):
    """Has room for ``most`` rows in evaluation."""

    def room(self):
        return self.most


def scored(most, devices=1, eval_batch_size=25):
    torch.manual_seed(1)
    module = Module(Evaluated(most), metrics={"r2": torchmetrics.R2Score()})
    trainer = trainer_of(devices, callbacks=[OutOfMemory()])
    data = StreamDataModule(Numbered(ROWS), split=(0.0, 0.5, 0.5), eval_batch_size=eval_batch_size)
    scores = trainer.validate(module, data, verbose=False)[0] | trainer.test(module, data, verbose=False)[0]
    predictions = trainer.predict(module, data)
    return scores, torch.cat(predictions), dict(module.rows_scored), module.net.largest


def same_scores(found, expected):
    assert found[0].keys() == expected[0].keys() >= {"val/loss", "val/r2", "test/r2"}
    for name, value in expected[0].items():
        assert found[0][name] == pytest.approx(value, rel=1e-6)
    near(found[1], expected[1])
    assert found[2] == expected[2] == {"val": 30, "test": 30}


def test_scores_and_predictions_are_those_of_the_whole_and_no_row_counts_twice():
    found = scored(7)
    same_scores(found, scored(10**9))
    assert found[3] == 4  # 15, 8, 4


def written(folder, most, devices=1):
    """The lines of predictions.csv."""
    torch.manual_seed(1)
    trainer = trainer_of(devices, callbacks=[OutOfMemory(), PredictionWriter(folder / f"{most}.csv")])
    source = Numbered(ROWS)
    data = StreamDataModule(source, predict_source=source, eval_batch_size=25)
    trainer.predict(Module(Evaluated(most)), data, return_predictions=False)
    if trainer.world_size > 1:
        torch.distributed.barrier()
    return (folder / f"{most}.csv").read_text().splitlines()


def same_file(found, expected):
    rows = [[line.split(",") for line in lines[1:]] for lines in (found, expected)]
    assert [int(row[0]) for row in rows[0]] == [int(row[0]) for row in rows[1]] == [*range(ROWS)]
    near(*(torch.tensor([float(row[1]) for row in lines]) for lines in rows))


def test_the_file_of_predictions_keeps_its_order(tmp_path):
    same_file(written(tmp_path, 7), written(tmp_path, 10**9))


def on_each(most):
    return scored(most if torch.distributed.get_rank() else 10**9, 2), scored(10**9, 2)


@pytest.mark.slow
def test_a_rank_alone_can_score_in_parts():
    for found, expected in on_ranks(2, on_each, 3):
        same_scores(found, expected)


def test_metrics_that_run_out_of_memory_never_count_rows_twice():
    class Large(torchmetrics.MeanSquaredError):
        def update(self, preds, target):
            super().update(preds, target)
            raise torch.OutOfMemoryError("simulated, metric")

    module = Module(Evaluated(10**9), metrics={"large": Large()})
    data = StreamDataModule(Numbered(3000), split=(0.0, 1.0, 0.0), eval_batch_size=3000)
    held = scores.HELD
    scores.HELD = 1
    try:
        with pytest.raises(DoesNotFit, match="metrics were updated before it"):
            trainer_of(callbacks=[OutOfMemory()]).validate(module, data, verbose=False)
    finally:
        scores.HELD = held


# ---- on a GPU, for real


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_one_on_a_gpu_with_little_room(tmp_path):
    """A micro-batch that takes far more than the allocator may have: half a GB of activations against 256 MB."""
    total = torch.cuda.get_device_properties(0).total_memory

    def run(limited):
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(2**28 / total if limited else 1.0)
        try:
            torch.manual_seed(1)
            wide = nn.Sequential(nn.Linear(COLUMNS, 4096), nn.Tanh(), nn.Linear(4096, 1))
            gradients, oom = Gradients(), OutOfMemory()
            trainer = trainer_of(accelerator="gpu", callbacks=[gradients, Resume(), oom], max_epochs=1)
            data = StreamDataModule(Numbered(2**16), split=(1.0, 0.0, 0.0), batch_size=2**15)
            L.seed_everything(1, verbose=False)
            trainer.fit(Module(wide), data)
            return torch.stack(gradients.all), oom
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    (found, oom), (expected, _) = run(True), run(False)
    near(found, expected, 1e-5)
    assert oom.rows["train"] < 2**15
