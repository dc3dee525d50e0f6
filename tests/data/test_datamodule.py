"""What the data module gives, refuses and rounds; splits; a user's own data."""

import logging

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from project.data.datamodule import StreamDataModule
from project.data.sources import ArraySource, SyntheticSource
from project.module import Module
from tests.numbered import COLUMNS, Numbered, fit, numbers, trainer_of, weights

FOUR = {"batch_size": 2, "split": (1.0, 0.0, 0.0)}  # 10 micro-batches of 20 rows, windows of four


def part_rows(data: StreamDataModule, name: str) -> set[int]:
    _, part = data.part(name)
    return set(part.rows(torch.arange(len(part))).tolist())


# ---- splits


def test_parts_never_overlap_and_cover_the_source() -> None:
    data = StreamDataModule(Numbered(1001), split=(0.7, 0.2, 0.1))
    train, val, test = (part_rows(data, name) for name in ("train", "val", "test"))
    assert (len(train), len(val), len(test)) == (701, 200, 100)
    assert train | val | test == set(range(1001))


def test_the_cut_depends_on_split_seed_alone() -> None:
    first = part_rows(StreamDataModule(Numbered(500)), "val")
    L.seed_everything(99, verbose=False)
    assert part_rows(StreamDataModule(Numbered(500), batch_size=3, shuffle=False, num_workers=2), "val") == first
    assert part_rows(StreamDataModule(Numbered(500), split_seed=1), "val") != first


def test_a_source_of_its_own_replaces_the_share_of_the_source() -> None:
    data = StreamDataModule(Numbered(100), val_source=Numbered(30), split=(0.9, 0.05, 0.05), predict_source=Numbered(7))
    assert len(part_rows(data, "train")) == 90
    assert part_rows(data, "val") == set(range(30))
    assert not part_rows(data, "train") & part_rows(data, "test")
    assert part_rows(data, "predict") == set(range(7))
    assert part_rows(StreamDataModule(Numbered(9)), "predict") == set(range(9))  # else all rows, numbered as they are


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch_size": 0}, "--data.batch_size 0"),
        ({"num_workers": -1}, "--data.num_workers -1"),
        ({"split": (0.9, 0.2, 0.1)}, "--data.split"),
        ({"split": (1.1, -0.1, 0.0)}, "--data.split"),
    ],
)
def test_impossible_settings_are_refused(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StreamDataModule(Numbered(10), **arguments)


# ---- too little data


@pytest.mark.parametrize(
    ("rows", "data", "words"),
    [
        (0, {}, "0 training rows of 0"),
        (
            3,
            {"batch_size": 8, "split": (1.0, 0.0, 0.0)},
            "3 training rows of 3 .* 8 = 8 rows x 1 dev.*drop_last false",
        ),
        (10, {"batch_size": 2, "split": (0.99, 0.01, 0.0)}, "No rows to validate on: 0 of 10 rows.*--data.split"),
        (10, {"batch_size": 2, "val_source": Numbered(0)}, "No rows to validate on: 0 of 0 rows.*--data.val_source"),
    ],
)
def test_too_little_data_is_refused_with_rows_sizes_and_remedy(rows: int, data: dict, words: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){words}"):
        fit(Numbered(rows), data={"split": (0.8, 0.1, 0.1), **data})


def test_three_rows_with_batches_of_eight_train_one_step_if_asked_to() -> None:
    trainer, _, seen = fit(Numbered(3), data={"batch_size": 8, "drop_last": False})
    assert trainer.global_step == 1
    assert sorted(*seen.steps.values()) == [0, 1, 2]
    assert trainer.datamodule.rows_of_epoch() == (3, 3)


@pytest.mark.parametrize("phase", ["test", "predict"])
def test_phases_without_rows_are_refused(phase: str) -> None:
    data = StreamDataModule(Numbered(4), split=(1.0, 0.0, 0.0), predict_source=Numbered(0))
    with pytest.raises(ValueError, match=f"No rows to {phase}"):
        getattr(trainer_of(), phase)(Module(torch.nn.Linear(COLUMNS, 1)), data)


def test_rows_that_an_epoch_uses_and_leaves_out_are_known() -> None:
    assert fit(Numbered(103), data={"batch_size": 10})[0].datamodule.rows_of_epoch() == (100, 103)
    assert fit(Numbered(103), data={"batch_size": 10, "drop_last": False})[0].datamodule.rows_of_epoch() == (103, 103)
    limited, _, _ = fit(Numbered(103), data={"batch_size": 10}, limit_train_batches=4)
    assert limited.datamodule.rows_of_epoch() == (40, 103)


# ---- limits and accumulation windows


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ({"limit_train_batches": 6}, "--limit_train_batches 6: .* window of 4.*such as 4"),
        ({"overfit_batches": 3}, "--overfit_batches 3: .* window of 4"),
        ({"val_check_interval": 5}, "--val_check_interval 5: .* window of 4"),
    ],
)
def test_a_number_that_cuts_a_window_is_refused(limit: dict, words: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){words}"):
        fit(Numbered(20), data=FOUR, accumulate_grad_batches=4, **limit)


@pytest.mark.parametrize(
    ("limit", "words", "steps"),
    [
        ({"limit_train_batches": 0.7}, "--limit_train_batches 0.7: rounded to 4 micro-batches", 1),
        ({"overfit_batches": 0.7}, "--overfit_batches 0.7: rounded to 4 micro-batches", 1),
        ({"val_check_interval": 0.7}, "--val_check_interval 0.7: rounded to 4 micro-batches", 2),
    ],
)
def test_a_fraction_that_cuts_a_window_is_rounded_with_a_line(limit: dict, words: str, steps: int, caplog) -> None:
    class Validations(L.Callback):
        steps: list[int] = []  # noqa: RUF012

        def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.steps = [*self.steps, trainer.global_step]

    caplog.set_level(logging.INFO, "project")
    validations = Validations()
    data = {**FOUR, "val_source": Numbered(4), "eval_batch_size": 2}
    trainer, _, _ = fit(Numbered(20), None, 1, (validations,), data, accumulate_grad_batches=4, **limit)
    assert words in caplog.text
    assert trainer.global_step == steps
    assert validations.steps == list(range(1, steps + 1))


def test_steps_across_epochs_cannot_be_counted_if_an_epoch_ends_in_an_incomplete_window() -> None:
    settings = {"accumulate_grad_batches": 4, "val_check_interval": 8, "check_val_every_n_epoch": None}
    with pytest.raises(ValueError, match=r"incomplete accumulation window of 4.*\n.*--data.drop_last true"):
        fit(Numbered(20), data={**FOUR, "drop_last": False}, **settings)


def test_overfitting_takes_the_same_rows_in_every_epoch() -> None:
    _, _, seen = fit(Numbered(20), data=FOUR, overfit_batches=2, max_epochs=3)
    assert list(seen.steps.values()) == [[0, 1], [2, 3]] * 3


# ---- what the rows are


def test_rows_tells_the_numbers_of_a_micro_batch() -> None:
    trainer, _, seen = fit(Numbered(50), data={"batch_size": 8}, max_epochs=2)
    data = trainer.datamodule
    for (epoch, step), rows in seen.steps.items():
        assert data.rows("train", step - 6 * epoch, epoch).tolist() == rows


def test_a_source_that_reads_in_blocks_is_shuffled_in_blocks_of_its_part() -> None:
    data = StreamDataModule(Numbered(100_000, block=100), split=(0.5, 0.0, 0.0))
    data.trainer = trainer_of()
    order = data.chunks("train").order
    assert order.cells == 50_000 // (50 * 64) + 1


def test_the_input_size_follows_from_the_source_stated_or_read(tmp_path) -> None:
    class Unstated(Numbered):
        in_features = None

        def __init__(self, rows: int) -> None:
            super().__init__(rows)
            del self.in_features

    np.save(tmp_path / "x.npy", np.zeros((9, 7), dtype=np.float32))
    assert StreamDataModule(Numbered(5)).in_features == COLUMNS
    assert StreamDataModule(Unstated(5)).in_features == COLUMNS
    assert StreamDataModule(ArraySource(str(tmp_path / "x.npy"))).in_features == 7


# ---- a user's own data


def test_own_dataloaders_and_data_modules_work_with_our_module() -> None:
    x, y = Numbered(40).read(torch.arange(40))

    class Own(L.LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            return DataLoader(TensorDataset(x, y), batch_size=8)

        val_dataloader = predict_dataloader = test_dataloader = train_dataloader

    results = []
    for data in ({"datamodule": Own()}, {"train_dataloaders": Own().train_dataloader()}):
        module = Module(torch.nn.Linear(COLUMNS, 1))
        torch.nn.init.zeros_(module.net.weight)
        torch.nn.init.zeros_(module.net.bias)
        trainer = trainer_of(max_epochs=2)
        trainer.fit(module, **data)
        results.append(weights(module))
    ours = Module(torch.nn.Linear(COLUMNS, 1))
    torch.nn.init.zeros_(ours.net.weight)
    torch.nn.init.zeros_(ours.net.bias)
    fit(Numbered(40), ours, data={"batch_size": 8, "shuffle": False}, max_epochs=2)
    assert all(torch.equal(weights(ours), result) for result in results)
    loader = DataLoader(x, batch_size=8)  # inputs alone, as a plain tensor
    assert torch.cat(trainer_of().predict(module, loader)).shape == (40, 1)
    assert numbers(x, 40) == list(range(40))


@pytest.mark.parametrize(
    "split", [(0.7, 0.2, 0.1), (0.6, 0.3, 0.1), (0.9, 0.05, 0.05), (0.8, 0.1, 0.1), (1 / 3, 1 / 3, 1 / 3)]
)
def test_no_length_gives_a_row_to_two_parts_or_to_none(split):
    for n in [*range(1, 300), 60_015, 60_035]:
        data = StreamDataModule(SyntheticSource(n), split=split)
        parts = [data.part(name)[1] for name in ("train", "val", "test")]
        rows = torch.cat([part.rows(torch.arange(len(part))) for part in parts])
        assert torch.equal(rows.sort().values, torch.arange(n)), (n, [len(p) for p in parts])
