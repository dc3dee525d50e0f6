"""Same effective batch, same model; every row once; the same twice. Devices and workers are execution details."""

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from project.data.datamodule import StreamDataModule
from project.data.stream import Shares
from project.engine.resume import Resume
from project.module import Module
from tests.numbered import COLUMNS, Numbered, Seen, fit, flat, source_of, trainer_of, weights
from tests.ranks import on_ranks

EFFECTIVE, ROWS, STEPS = 12, 500, 200
GEOMETRIES = {  # devices: (rows per micro-batch, accumulation)
    1: [(12, 1), (3, 4)],
    2: [(6, 1), (2, 3)],
    4: [(3, 1), (1, 3)],
}
OPTIMIZERS: dict[str, Any] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "Adam": functools.partial(torch.optim.Adam, lr=0.01),
}


def train(
    kind: str, optimizer: str, devices: int, micro: int, accumulate: int, folder: Path, steps: int = STEPS, **data: Any
) -> Any:
    """(this rank's rows at each optimizer step, the weights at the end)."""
    module = Module(torch.nn.Linear(COLUMNS, 1))
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    module.optimizer = OPTIMIZERS[optimizer]
    settings = {"max_epochs": -1, "max_steps": steps, "accumulate_grad_batches": accumulate}
    data = {"batch_size": micro, "chunk_size": 100, **data}
    _, _, seen = fit(source_of(kind, ROWS, folder), module, devices, data=data, **settings)
    return seen.steps, weights(module)


def train_all(kind: str, optimizer: str, devices: int, folder: Path, **data: Any) -> Any:
    return [train(kind, optimizer, devices, *sizes, folder, **data) for sizes in GEOMETRIES[devices]]


def together(ranks: list[Any]) -> list[Any]:
    """The runs of several ranks as those of one: rows of a step from all of them, the weights, which must be equal."""
    for (_, first), *others in zip(*ranks, strict=True):
        assert all(torch.equal(first, other) for _, other in others)
    return [
        ({step: flat(seen.get(step, []) for seen, _ in runs) for step in runs[0][0]}, runs[0][1])
        for runs in zip(*ranks, strict=True)
    ]


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kind", "optimizer", "drop_last"),
    [
        pytest.param("synthetic", "SGD", True, marks=pytest.mark.slow),
        ("npy", "Adam", True),
        pytest.param("parquet", "Adam", False, marks=pytest.mark.slow),
    ],
)
def test_same_effective_batch_same_model(
    kind: str, optimizer: str, drop_last: bool, devices: int, tmp_path: Path
) -> None:
    runs = train_all(kind, optimizer, 1, tmp_path, drop_last=drop_last)
    runs += together(
        on_ranks(devices, functools.partial(train_all, kind, optimizer, devices, tmp_path, drop_last=drop_last))
    )
    expected_rows, expected_weights = runs[0]
    assert len(expected_rows) == STEPS
    for rows, found in runs[1:]:
        assert {step: sorted(r) for step, r in rows.items()} == {s: sorted(r) for s, r in expected_rows.items()}
        assert (found - expected_weights).abs().max() < 1e-6


def test_workers_and_chunks_change_no_bit(tmp_path: Path) -> None:
    def run(workers: int, chunk: int) -> Any:
        return train("npy", "SGD", 1, 4, 3, tmp_path, steps=60, num_workers=workers, chunk_size=chunk, drop_last=False)

    rows, expected = run(0, 4)
    for workers in (0, 1, 3):
        for chunk in (77, 10 * ROWS):
            found_rows, found = run(workers, chunk)
            assert found_rows == rows  # in the same order, too
            assert torch.equal(found, expected)


def each_row_once(devices: int, kind: str, folder: Path) -> Any:
    """By number of rows: what this rank saw in training, validation, test and prediction."""
    out = {}
    for rows in (1, 5, 101):
        (folder / str(rows)).mkdir(exist_ok=True)
        source, data = (
            source_of(kind, rows, folder / str(rows)),
            {"batch_size": 3, "eval_batch_size": 4, "chunk_size": 7},
        )
        sources = {"val_source": source, "test_source": source}
        if rows < devices:  # training is refused; the rest is not
            seen = Seen(rows)
            trainer, module = trainer_of(devices, callbacks=[seen]), Module(torch.nn.Linear(COLUMNS, 1))
            everything = StreamDataModule(source, **data, **sources)
            with pytest.raises(ValueError, match=f"1 training rows of 1 for {devices} devices"):
                trainer.fit(module, everything)
            trainer = trainer_of(devices, callbacks=[seen])
            trainer.validate(module, everything, verbose=False)
        else:
            data |= {**sources, "drop_last": False, "num_workers": 3 if rows == 101 else 0}
            trainer, module, seen = fit(source, None, devices, data=data, accumulate_grad_batches=2)
            everything = trainer.datamodule
        trainer.test(module, everything, verbose=False)
        trainer.predict(module, everything, return_predictions=False)
        out[rows] = {"train": flat(seen.steps.values()), **seen.evaluated}
    return out


@pytest.mark.parametrize(
    ("devices", "kind"),
    [
        (1, "parquet"),
        (2, "synthetic"),
        (3, "parquet"),
        *(pytest.param(*rest, marks=pytest.mark.slow) for rest in ((1, "synthetic"), (2, "parquet"), (3, "synthetic"))),
    ],
)
def test_every_row_once_in_each_phase(devices: int, kind: str, tmp_path: Path) -> None:
    ranks = on_ranks(devices, each_row_once, devices, kind, tmp_path)
    for rows in (1, 5, 101):
        for phase in ("train", "val", "test", "predict"):
            found = sorted(flat(rank[rows][phase] for rank in ranks))
            assert found == ([] if phase == "train" and rows < devices else list(range(rows))), (rows, phase)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("rows", [1, 5, 101, 1_000_003])
@pytest.mark.parametrize("batch", [1, 7, 4096])
def test_shares_cover_each_position_once_in_batches_of_all_ranks(world: int, rows: int, batch: int) -> None:
    if rows // (world * batch) > 50_000:
        batch = 32
    full = rows // (batch * world * 2) * (batch * world * 2)
    for first, tail in ((0, rows), (full, rows - full)):  # evaluation; training with windows of two micro-batches
        ranks = [Shares(first, tail, batch, world, r, window=2) for r in range(world)]
        assert len({len(shares) for shares in ranks}) == 1  # as many collective calls on every rank
        at = 0
        for m in range(len(ranks[0])):
            for shares in ranks:
                low, high = shares.span(m)
                assert low == at
                assert high - low <= batch
                at = high
            weight = sum(s.weight(m) for s in ranks)
            assert weight == pytest.approx(world if m < first // (batch * world) else weight)
        assert at == rows
        whole = first // (batch * world)
        if tail:  # all rows of the tail together weigh what a window of whole micro-batches does
            assert sum(s.weight(m) for s in ranks for m in range(whole, len(s))) == pytest.approx(2 * world)


def collectives(devices: int) -> Any:
    """How often this rank calls each collective operation while it trains and evaluates on rows that do not divide."""
    calls: dict[str, int] = {}

    def counted(name: str, original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return original(*args, **kwargs)

        return call

    for name in ("all_reduce", "all_gather", "broadcast", "barrier", "all_gather_object", "broadcast_object_list"):
        setattr(torch.distributed, name, counted(name, getattr(torch.distributed, name)))
    batches = []
    for rows in (4, 11, 30):
        source = Numbered(rows)
        data = {"batch_size": 4, "eval_batch_size": 2, "drop_last": False, "val_source": source, "test_source": source}
        trainer, module, _ = fit(source, None, devices, data=data, accumulate_grad_batches=2, max_epochs=2)
        trainer.test(module, trainer.datamodule, verbose=False)
        batches.append((trainer.global_step, trainer.num_training_batches))
    return calls, batches


def test_ranks_with_unequal_rows_call_each_other_equally_often() -> None:
    first, *others = on_ranks(3, collectives, 3)
    assert first[0]["all_gather"] > 10
    assert all(other == first for other in others)


# ---- the tail


class Constant(Numbered):
    """Rows with x = 1 and y = 1: with weight 0 and the squared error, every row's gradient is -2."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.in_features = 1

    def read(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.ones(len(rows), 1), torch.ones(len(rows), 1)


class Slope(Module):
    """One weight, 0; writes down the gradient of each optimizer step."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(1, 1, bias=False))
        torch.nn.init.zeros_(self.net.weight)
        self.optimizer = functools.partial(torch.optim.SGD, lr=0.0)
        self.gradients: list[float] = []

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append(round(float(self.net.weight.grad), 5))


class OwnStep(Slope):
    """A subclass that overrides ``training_step`` alone, and returns the loss alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self(batch[0]) - batch[1]).square().mean()


class ByHand(Slope):
    """Manual optimisation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.compute_loss(self(batch[0]), batch[1]))
        optimizer.step()


def gradients(devices: int, rows: int, micro: int, accumulate: int, cls: type[Slope], **settings: Any) -> list[float]:
    module, data = cls(), {"batch_size": micro, "drop_last": False}
    fit(Constant(rows), module, devices, data=data, accumulate_grad_batches=accumulate, **settings)
    return module.gradients


def tails(devices: int) -> Any:
    return {
        "five micro-batches, window of four": gradients(devices, 5 * 4 * devices, 4, 4, Slope),
        "window longer than the epoch": gradients(devices, 3, 1, 8, Slope),
        "incomplete micro-batch": gradients(devices, 4 * devices * 2 + 3, 4, 1, Slope),
        "one row for all ranks": gradients(devices, 4 * devices * 2 + 1, 4, 2, Slope),
        "ends inside an epoch": gradients(devices, 5 * 4 * devices, 4, 4, Slope, max_steps=3, max_epochs=-1),
        "own training_step": gradients(devices, 4 * devices * 2 + 1, 4, 2, OwnStep),
        "by hand": gradients(devices, 4 * devices * 2 + 3, 4, 1, ByHand),
    }


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_every_row_of_an_incomplete_window_weighs_alike(devices: int) -> None:
    steps = {"window longer than the epoch": 1, "incomplete micro-batch": 3, "ends inside an epoch": 3, "by hand": 3}
    for rank in on_ranks(devices, tails, devices):
        for name, found in rank.items():
            assert found == [-2.0] * steps.get(name, 2), (name, found)


# ---- seeds


def test_the_same_seed_gives_the_same_bits_and_another_seed_other_rows_and_weights() -> None:
    def run(seed: int) -> Any:
        _, module, seen = fit(Numbered(100), None, data={"batch_size": 8}, seed=seed)
        return seen.steps, weights(module)

    (rows, first), (same_rows, same), (other_rows, other) = run(1), run(1), run(2)
    assert rows == same_rows
    assert torch.equal(first, same)
    assert rows != other_rows
    assert not torch.equal(first, other)


def test_epochs_differ_in_order_also_with_workers_kept_alive() -> None:
    for workers in (0, 2):
        _, _, seen = fit(Numbered(60), None, data={"batch_size": 60, "num_workers": workers}, max_epochs=3)
        orders = list(seen.steps.values())
        assert [sorted(order) for order in orders] == [list(range(60))] * 3
        assert len({tuple(order) for order in orders}) == 3


class Drawing(Numbered):
    """A source that draws: its numbers must come from a generator of its worker's own."""

    def read(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.rand(len(rows), COLUMNS), torch.zeros(len(rows), 1)


class Draws(Module):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(COLUMNS, 1))
        self.draws: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.draws += [*torch.rand(2).tolist(), *batch[0][:, 0].tolist()]
        return super().training_step(batch, batch_idx)


def draws(devices: int) -> list[float]:
    module = Draws()
    data = {"batch_size": 4, "chunk_size": 4, "num_workers": 2}
    fit(Drawing(64), module, devices, callbacks=(Resume(),), data=data, max_epochs=2)
    return module.draws


def test_ranks_workers_steps_and_epochs_never_share_draws() -> None:
    found = flat(on_ranks(2, draws, 2))
    assert len(found) == 2 * 2 * 8 * (2 + 4)
    assert len(set(found)) == len(found)


# ---- the command


def test_deterministic_trains(run: Any, small: list[str]) -> None:
    assert run(*small, "--deterministic", "true").code == 0


FLAGS = ["--data.source.rows", "200", "--data.batch_size", "4", "--max_epochs", "2", "--accelerator", "cpu"]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


@pytest.mark.slow
def test_torchrun_is_the_same_job_as_devices_2(here: Path) -> None:
    """Launched by torchrun, without --devices: one job of two processes with one run folder, and the same bits."""
    root = Path(__file__).parent.parent
    launchers = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
        "devices": [sys.executable],
    }
    for name, launcher in launchers.items():
        extra = ["--devices", "2"] if name == "devices" else []
        command = [*launcher, str(root / "train.py"), *FLAGS, "--run_dir", name, *extra]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("2 devices") == 1, done.stdout
    assert sorted(p.name for p in here.iterdir() if p.name != "configs") == ["devices", "torchrun"]
    by_launcher, by_us = weights_of(here / "torchrun"), weights_of(here / "devices")
    assert all(torch.equal(value, by_us[name]) for name, value in by_launcher.items())
