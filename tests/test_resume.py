"""A run stopped anywhere and resumed is the run that was never stopped, to the last bit: RES-01 … RES-04."""

import math

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint, GradientAccumulationScheduler
from torch import nn

from project.data.datamodule import StreamDataModule
from project.data.sources import SyntheticSource
from project.data.tables import TableSource
from project.engine.checkpoint import AtomicCheckpointIO
from project.engine.resume import Resume
from project.module import Module
from tests.numbered import source_of
from tests.ranks import on_ranks


class Diary(L.Callback):
    """Writes down which rows each optimizer step learned from, and when validations finished."""

    def __init__(self):
        self.steps, self.validations, self.rates = {}, [], {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.rates[trainer.global_step] = trainer.optimizers[0].param_groups[0]["lr"]
        rows = trainer.datamodule.rows("train", batch_idx, trainer.current_epoch).tolist()
        self.steps.setdefault(trainer.global_step, []).extend(rows)

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.validations.append(trainer.global_step)


class SaveEverywhere(Checkpoint):
    """Saves at every hook at which anyone could; a Checkpoint, so that Lightning runs it last, as it would ours."""

    def __init__(self, folder, diary):
        self.folder, self.diary, self.files = folder, diary, []

    def save(self, trainer, hook):
        path = self.folder / f"{len(self.files):03d}-{hook}-epoch{trainer.current_epoch}-step{trainer.global_step}.ckpt"
        trainer.save_checkpoint(path)
        self.files.append((path, trainer.global_step, hook, len(self.diary.validations)))

    def on_train_batch_end(self, trainer, *_):
        self.save(trainer, "batch")

    def on_validation_epoch_end(self, trainer, pl_module):
        self.save(trainer, "scores")

    def on_validation_end(self, trainer, pl_module):
        self.save(trainer, "validation")

    def on_train_epoch_end(self, trainer, pl_module):
        self.save(trainer, "epoch")

    def on_train_end(self, trainer, pl_module):
        self.save(trainer, "end")


def warm_up_and_cosine(optimizer, warm_up=5, horizon=40):
    def rate(step):
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.5 + 0.5 * math.cos(math.pi * min(1.0, (step - warm_up) / (horizon - warm_up)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.05)


def run(
    ckpt=None,
    extra=(),
    data=None,
    seed=0,
    dropout=0.2,
    optimizer=momentum,
    schedule=warm_up_and_cosine,
    allow_changed=False,
    **trainer,
):
    """One training of a net with dropout, momentum and a schedule; returns trainer, weights and diary."""
    L.seed_everything(seed)
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 1))
    module = Module(net)
    module.optimizer = optimizer
    module.lr_scheduler = schedule
    settings = {"split": (0.8, 0.2, 0.0), "batch_size": 8, "eval_batch_size": 8, "chunk_size": 20, **(data or {})}
    source = settings.pop("source", None) or SyntheticSource(rows=105, features=5)
    stream = StreamDataModule(source, **settings)
    diary = Diary()
    t = L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=bool(extra),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[Resume(allow_changed), diary, *(make(diary) for make in extra)],
        **{"devices": 1, **trainer},
    )
    t.strategy.checkpoint_io = AtomicCheckpointIO()
    t.fit(module, stream, ckpt_path=ckpt, weights_only=True)
    return t, torch.cat([p.detach().flatten() for p in module.parameters()]), diary


LIMITS = {
    1: [{"max_epochs": 2}, {"max_epochs": -1, "max_steps": 17}],
    3: [{"max_epochs": 2}, {"max_epochs": -1, "max_steps": 5}],
}
INTERVALS = [{}, {"val_check_interval": 3}, {"check_val_every_n_epoch": None, "val_check_interval": 6}]
SWEEP = [(a, limit, interval) for a in (1, 3) for limit in LIMITS[a] for interval in INTERVALS]


def sweep(
    tmp_path, accumulate, limit, interval, every, data=None, then_data=None, then_trainer=None, tolerance=0.0, **more
):
    """Save everywhere; resume from each; compare weights, rows, validations and where it ended. Returns the count."""
    settings = {"accumulate_grad_batches": accumulate, **limit, **interval, **more}
    savers = []
    whole, weights, diary = run(
        extra=[lambda d: savers.append(SaveEverywhere(tmp_path, d)) or savers[-1]], data=data, **settings
    )
    files = savers[0].files[::every]
    for path, step, _hook, validated in files:
        t, again, then = run(ckpt=path, data=then_data or data, **{**settings, **(then_trainer or {})})
        where = f"{path.name} under Lightning {L.__version__}"
        assert torch.allclose(again, weights, rtol=0, atol=tolerance), f"weights differ from {where}"
        expected = {s: sorted(rows) for s, rows in diary.steps.items() if s >= step}
        assert {s: sorted(rows) for s, rows in then.steps.items()} == expected, f"rows differ from {where}"
        # saved in on_validation_end, that validation is over; the diary, an ordinary callback, has counted it
        assert then.validations == diary.validations[validated:], f"validations differ from {where}"
        assert t.global_step == whole.global_step, f"steps after {where}"
        if step < whole.max_steps or whole.max_steps < 0:  # a finished run is left as it is, its epoch not closed again
            assert t.current_epoch == whole.current_epoch, f"epochs after {where}"
    return len(files)


@pytest.mark.parametrize(("accumulate", "limit", "interval"), SWEEP)
def test_a_checkpoint_of_any_hook_resumes_exactly(tmp_path, accumulate, limit, interval):
    assert sweep(tmp_path, accumulate, limit, interval, every=9) >= 2


OTHER = {
    "fewer-larger-micro-batches": ({"batch_size": 24}, {"accumulate_grad_batches": 1}),
    "other-accumulation": ({"batch_size": 12}, {"accumulate_grad_batches": 2}),
    "workers": ({"batch_size": 8, "num_workers": 2}, {}),
    "chunk-size": ({"batch_size": 8, "chunk_size": 1000}, {}),
}


@pytest.mark.parametrize("how", OTHER)
def test_the_same_effective_batch_continues_in_another_shape(tmp_path, how):
    data, trainer = OTHER[how]
    geometry_stays = "accumulate_grad_batches" not in trainer
    assert sweep(
        tmp_path,
        3,
        {"max_epochs": 2},
        {},
        every=7,
        data={"batch_size": 8},
        then_data=data,
        then_trainer=trainer,
        dropout=0.2 if geometry_stays else 0.0,
        tolerance=0.0 if geometry_stays else 1e-6,
    )


@pytest.mark.parametrize("data", [{"drop_last": False}, {"shuffle": False}, {"num_workers": 2}])
@pytest.mark.parametrize("optimizer", [momentum, adam])
def test_other_settings_resume_exactly(tmp_path, data, optimizer):
    assert sweep(tmp_path, 3, {"max_epochs": 2}, {}, every=11, data=data, optimizer=optimizer)


KINDS = ["synthetic", "npy", "parquet", "csv", "csv.gz"]
FAST = [("npy", 2), ("parquet", 2), ("csv.gz", 0)]


def stopped_in_mid_epoch(tmp_path, kind, workers, every):
    data = {"source": source_of(kind, 105, tmp_path), "num_workers": workers}
    return sweep(tmp_path, 3, {"max_epochs": 2}, {}, every=every, data=data)


@pytest.mark.parametrize(("kind", "workers"), FAST)
def test_every_source_resumes_exactly(tmp_path, kind, workers):
    assert stopped_in_mid_epoch(tmp_path, kind, workers, every=13)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_every_source_resumes_exactly_from_anywhere(tmp_path, kind, workers):
    assert stopped_in_mid_epoch(tmp_path, kind, workers, every=1) > 12


@pytest.mark.parametrize("stop", [3, 17])
def test_the_rate_of_learning_lies_on_the_curve_of_the_run_that_was_never_stopped(tmp_path, stop):
    def ten(optimizer):
        return warm_up_and_cosine(optimizer, warm_up=10)

    settings = {"data": {"batch_size": 4}, "schedule": ten, "accumulate_grad_batches": 4, "max_epochs": -1}
    _, weights, whole = run(max_steps=40, **settings)
    assert [whole.rates[s] for s in (0, 8, 9, 10)] == pytest.approx([0.005, 0.045, 0.05, 0.05])  # 10 updates long
    t, _, first = run(max_steps=stop, **settings)
    t.save_checkpoint(tmp_path / "end.ckpt")
    _, again, then = run(ckpt=tmp_path / "end.ckpt", max_steps=40, **settings)
    assert {**first.rates, **then.rates} == whole.rates
    assert torch.equal(again, weights)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("stop", [1, 4, 6, 7])
def test_stopped_by_a_limit_after_any_step_it_goes_on_as_if_never_stopped(tmp_path, accumulate, stop):
    _, weights, diary = run(max_epochs=3, accumulate_grad_batches=accumulate)
    t, _, first = run(max_epochs=3, max_steps=stop, accumulate_grad_batches=accumulate)
    t.save_checkpoint(tmp_path / "end.ckpt")
    _, again, then = run(ckpt=tmp_path / "end.ckpt", max_epochs=3, accumulate_grad_batches=accumulate)
    assert {**first.steps, **then.steps} == diary.steps
    assert first.validations + then.validations == diary.validations
    assert torch.equal(again, weights)


def stop_and_go_on(tmp_path, accumulate, optimizer, stops):
    """On each rank: a whole run, and ones stopped and resumed, which agree in weights, rows and validations."""
    settings = {"devices": 2, "strategy": "ddp", "max_epochs": 2, "accumulate_grad_batches": accumulate}
    settings |= {"data": {"batch_size": 12 // accumulate, "num_workers": 0}, "optimizer": optimizer}
    t, weights, diary = run(**settings)
    for stop in stops or range(1, t.global_step):
        t, _, first = run(max_steps=stop, **settings)
        t.save_checkpoint(tmp_path / "end.ckpt")
        _, again, then = run(ckpt=tmp_path / "end.ckpt", **settings)
        assert torch.equal(weights, again), f"weights after a stop at step {stop}"
        assert {**first.steps, **then.steps} == diary.steps, f"rows after a stop at step {stop}"
        assert first.validations + then.validations == diary.validations, f"validations after a stop at step {stop}"


@pytest.mark.parametrize(("optimizer", "stops"), [(momentum, [2]), (adam, [4])])
def test_two_processes_resume_bit_equal(tmp_path, optimizer, stops):
    on_ranks(2, stop_and_go_on, tmp_path, 3, optimizer, stops)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [momentum, adam])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_two_processes_resume_bit_equal_after_any_step(tmp_path, accumulate, optimizer):
    on_ranks(2, stop_and_go_on, tmp_path, accumulate, optimizer, None, timeout=300)


def go_on(path, batch_size, accumulate):
    world = dist.get_world_size() if dist.is_initialized() else 1
    more = {"devices": world, "strategy": "ddp"} if world > 1 else {}
    _, weights, diary = run(
        ckpt=path,
        data={"batch_size": batch_size},
        dropout=0.0,
        max_epochs=2,
        accumulate_grad_batches=accumulate,
        **more,
    )
    return weights, diary.steps


def test_from_one_process_to_two_and_back_the_rows_go_on_and_the_weights_agree(tmp_path):
    _, weights, diary = run(data={"batch_size": 8}, dropout=0.0, max_epochs=2, accumulate_grad_batches=3)
    t, *_ = run(data={"batch_size": 8}, dropout=0.0, max_epochs=2, accumulate_grad_batches=3, max_steps=4)
    t.save_checkpoint(tmp_path / "one.ckpt")
    ranks = on_ranks(2, go_on, tmp_path / "one.ckpt", 6, 2)
    for step in (4, 5):
        assert sorted(ranks[0][1][step] + ranks[1][1][step]) == sorted(diary.steps[step])
    assert torch.allclose(ranks[0][0], weights, rtol=0, atol=1e-6)


def first_checkpoint(tmp_path):
    savers = []
    run(extra=[lambda d: savers.append(SaveEverywhere(tmp_path, d)) or savers[-1]], max_epochs=1)
    return savers[0].files[4][0]


CHANGES = {
    "effective batch": {"data": {"batch_size": 4}},
    "seed": {"seed": 1},
    "training rows": {"data": {"split": (0.9, 0.1, 0.0)}},
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_changes_the_rows_of_a_step_is_refused_and_named(tmp_path, what):
    path = first_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=rf"(?s)Saved → now.*{what}: .+ → .+--resume_changed true"):
        run(ckpt=path, max_epochs=2, **CHANGES[what])
    t, *_ = run(ckpt=path, max_epochs=2, allow_changed=True, **CHANGES[what])
    assert t.current_epoch == 2


def test_a_folder_of_data_with_one_more_file_is_refused(tmp_path):
    def table():
        return {"source": TableSource(str(tmp_path / "data"), target="y")}

    (tmp_path / "data").mkdir()
    source_of("csv", 105, tmp_path / "data")
    t, *_ = run(data=table(), max_epochs=2, max_steps=4)
    t.save_checkpoint(tmp_path / "end.ckpt")
    (tmp_path / "data" / "more.csv").write_bytes((tmp_path / "data" / "rows.csv").read_bytes())
    with pytest.raises(ValueError, match=r"(?s)Saved → now.*training rows: 84 → 168.*source rows: 105 → 210"):
        run(ckpt=tmp_path / "end.ckpt", data=table(), max_epochs=2)


def test_an_effective_batch_that_changes_during_a_run_is_refused():
    with pytest.raises(ValueError, match="GradientAccumulationScheduler changes the effective batch"):
        run(extra=[lambda _: GradientAccumulationScheduler({1: 2})], max_epochs=2)


@pytest.mark.slow
@pytest.mark.parametrize(("accumulate", "limit", "interval"), SWEEP)
def test_every_checkpoint_of_every_hook_resumes_exactly(tmp_path, accumulate, limit, interval):
    assert sweep(tmp_path, accumulate, limit, interval, every=1) > 12
