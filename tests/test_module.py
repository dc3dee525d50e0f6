"""The module: scores of whole sets at any batch size and number of ranks, precisions, subclasses, safe checkpoints."""

import copy
import functools
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, MulticlassAccuracy, MulticlassAUROC

from project.data.datamodule import StreamDataModule
from project.data.sources import Source, SyntheticSource
from project.models import Generate, LinearModel
from project.module import Module
from project.scores import Scores, match
from project.settings import check_step
from tests.numbered import COLUMNS, Numbered, fit, trainer_of, weights
from tests.ranks import on_ranks


class Fixed(Source):
    """Rows that are given as tensors."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors, self.in_features = tensors, tensors[0].shape[-1]

    def __len__(self) -> int:
        return len(self.tensors[0])

    def read(self, rows: Tensor) -> tuple[Tensor, ...]:
        return tuple(t[rows] for t in self.tensors)


def evaluate(module: Module, source: Source, phase: str, devices: int, batch: int) -> dict[str, float]:
    data = StreamDataModule(source, val_source=source, test_source=source, eval_batch_size=batch)
    (scores,) = getattr(trainer_of(devices), phase)(module, data, verbose=False)
    scores.pop("step")  # where loggers put the values
    assert module.rows_scored[{"validate": "val"}.get(phase, phase)] == len(source)
    return scores


# ---- scores (MET-01 and its kinds)


def five_rows(devices: int) -> list[float]:
    module = Module(nn.Linear(1, 1, bias=False))
    nn.init.zeros_(module.net.weight)
    source = Fixed(torch.ones(5, 1), torch.tensor([0.0, 0.0, 0.0, 0.0, 10.0])[:, None])
    cases = [(phase, batch) for phase in ("validate", "test") for batch in (1, 2, 4, 4096)]
    names = {"validate": "val/loss", "test": "test/loss"}
    return [evaluate(module, source, phase, devices, batch)[names[phase]] for phase, batch in cases]


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_squared_errors_0_0_0_0_100_have_a_mean_of_exactly_20(devices: int) -> None:
    assert on_ranks(devices, five_rows, devices) == [[20.0] * 8] * devices


def whole_set(module: Module, x: Tensor, y: Tensor) -> dict[str, float]:
    """The scores in float64 torch, over all rows at once."""
    with torch.no_grad():
        pred, y = module(x).double().flatten(), y.double().flatten()
    error = pred - y
    true, false = pred[y > 0.5], pred[y <= 0.5]
    pairs = (true[:, None] > false).double() + 0.5 * (true[:, None] == false).double()
    spread = (y - y.mean()).square().sum()
    return {
        "loss": nn.functional.binary_cross_entropy(pred, y).item(),
        "mse": error.square().mean().item(),
        "rmse": error.square().mean().sqrt().item(),
        "mae": error.abs().mean().item(),
        "r2": (1 - error.square().sum() / spread).item() if len(y) > 1 and spread else float("nan"),
        "accuracy": ((pred > 0.5) == (y > 0.5)).double().mean().item(),
        "auroc": pairs.mean().item() if pairs.numel() else float("nan"),
    }


def scores(devices: int, rows: int) -> list[dict[str, float]]:
    """Scores at several batch sizes, those of a second time included."""
    torch.manual_seed(0)
    module = Module(
        Generate(),
        nn.BCELoss(),
        {
            "mse": torchmetrics.MeanSquaredError(),
            "rmse": torchmetrics.MeanSquaredError(squared=False),
            "mae": torchmetrics.MeanAbsoluteError(),
            "r2": torchmetrics.R2Score(),
            "accuracy": BinaryAccuracy(),
            "auroc": BinaryAUROC(),
        },
    )
    source = SyntheticSource(rows, 5, "binary", seed=3)
    found = [evaluate(module, source, "test", devices, batch) for batch in (1, 7, 4096, 4096)]
    expected = whole_set(module, *source.read(torch.arange(rows)))
    return [{name: (value, expected[name.removeprefix("test/")]) for name, value in run.items()} for run in found]


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 2, 5, 101])
def test_scores_are_those_of_the_whole_set_at_any_batch_size_and_number_of_ranks(devices: int, rows: int) -> None:
    for rank in on_ranks(devices, scores, devices, rows):
        for run in rank:
            assert len(run) == 7
            for name, (found, expected) in run.items():
                if expected == expected:  # AUROC of one class, R² of one row are not defined
                    assert found == pytest.approx(expected, abs=1e-6), (name, rows)


def other_shapes(devices: int) -> Any:
    """Class numbers, and several outputs: states that a rank without rows could not know the shape of."""
    out = []
    for rows in (2, 50):
        torch.manual_seed(0)
        x, classes = torch.randn(rows, 4), torch.arange(rows) % 3
        loss, metrics = nn.CrossEntropyLoss(), {"auroc": MulticlassAUROC(3), "accuracy": MulticlassAccuracy(3)}
        module = Module(nn.Linear(4, 3), loss, metrics)
        two = Module(nn.Linear(4, 2), metrics={"r2": torchmetrics.R2Score()})
        with torch.no_grad():
            expected = loss(module.net(x).double(), classes), (two.net(x) - x[:, :2]).double().square().mean()
        found = (
            evaluate(module, Fixed(x, classes), "test", devices, 1),
            evaluate(two, Fixed(x, x[:, :2]), "test", devices, 1),
        )
        out.append([*found, *(float(e) for e in expected)])
    return out


def test_class_numbers_and_several_outputs_are_scored_even_where_a_rank_has_no_rows() -> None:
    (alone,), ranks = on_ranks(1, other_shapes, 1), on_ranks(3, other_shapes, 3)
    for rank in ranks:
        for (a, b, ce, mse), (one_a, one_b, *_) in zip(rank, alone, strict=True):
            assert a["test/loss"] == pytest.approx(ce, abs=1e-6)
            assert b["test/loss"] == pytest.approx(mse, abs=1e-6)
            assert a == pytest.approx(one_a, abs=1e-6, nan_ok=True)
            assert b == pytest.approx(one_b, abs=1e-6, nan_ok=True)


class Each(L.Callback):
    """The validation scores of each epoch."""

    def __init__(self) -> None:
        self.scores: list[dict[str, float]] = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.scores.append({n: float(v) for n, v in trainer.callback_metrics.items() if n.startswith("val/")})


def frozen(devices: int, sanity: int) -> Any:
    """Three epochs that change nothing (rate 0), with metrics, and the warnings on the way."""
    each, module = Each(), Module(nn.Linear(COLUMNS, 1), metrics={"r2": torchmetrics.R2Score()})
    module.optimizer = functools.partial(torch.optim.SGD, lr=0.0)
    with torch.no_grad():
        module.net.weight.fill_(0.1)
    data = {"batch_size": 4, "eval_batch_size": 4, "val_source": Numbered(11)}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit(Numbered(24), module, devices, (each,), data, max_epochs=3, num_sanity_val_steps=sanity)
    return each.scores, [str(w.message) for w in said]


def test_epochs_do_not_leak_into_each_other_and_the_sanity_check_leaves_no_trace() -> None:
    ((without, _),), ((with_check, _),) = on_ranks(1, frozen, 1, 0), on_ranks(1, frozen, 1, 2)
    assert len(without) == 3
    assert without[0].keys() == {"val/loss", "val/r2"}
    assert without == [without[0]] * 3 == with_check


def test_lightning_has_nothing_to_warn_of() -> None:
    for _, said in on_ranks(2, frozen, 2, 2):
        assert [w for w in said if "sync_dist" in w or "infer" in w or "before the ``update``" in w] == []


def stop_early(devices: int) -> Any:
    torch.manual_seed(0)
    module = Module(nn.Linear(COLUMNS, 1))
    data = {"batch_size": 8, "eval_batch_size": 3, "val_source": Numbered(7)}
    stop = EarlyStopping("val/loss", patience=2, min_delta=0.02)
    trainer, _, _ = fit(Numbered(64), module, devices, (stop,), data, max_epochs=200)
    return trainer.global_step, stop.best_score.item(), stop.stopped_epoch


def test_early_stopping_decides_alike_on_all_ranks() -> None:
    first, *others = on_ranks(3, stop_early, 3)
    assert 0 < first[2] < 199
    assert others == [first] * 2


# ---- targets and losses


@pytest.mark.parametrize(
    "net", [LinearModel(1, 1), nn.Sequential(nn.Linear(1, 1), nn.Flatten(0))], ids=["[N, 1]", "[N]"]
)
def test_flat_and_column_targets_give_identical_losses_and_learn(net: nn.Module) -> None:
    x = torch.randn(256, 1)
    results = []
    for y in (2 * x, 2 * x[:, 0], (2 * x).double()):
        L.seed_everything(0, verbose=False)
        module = Module(net)
        for p in module.parameters():
            nn.init.zeros_(p)
        module.optimizer = functools.partial(torch.optim.SGD, lr=0.1)
        data = {"batch_size": 32, "val_source": Fixed(x, y)}
        trainer, _, _ = fit(Fixed(x, y), module, data=data, max_epochs=-1, max_steps=60)
        trainer.validate(module, trainer.datamodule, verbose=False)
        results.append((float(trainer.callback_metrics["val/loss"]), weights(module)))
    assert results[0][0] < 1e-4
    assert all(loss == results[0][0] and torch.equal(w, results[0][1]) for loss, w in results[1:])


@pytest.mark.parametrize(
    ("pred", "target"), [((8, 1), (1, 8)), ((8, 1), (8, 2)), ((8,), (7,)), ((8, 3), (8,)), ((4, 2), (8,))], ids=str
)
def test_what_cannot_be_matched_is_refused_with_both_shapes(pred: tuple[int, ...], target: tuple[int, ...]) -> None:
    module = Module(nn.Identity())
    for compare in (module.compute_loss, functools.partial(module.measure, "val")):
        with pytest.raises(ValueError, match=rf"\[{', '.join(map(str, pred))}\].*\[{', '.join(map(str, target))}\]"):
            compare(torch.zeros(pred), torch.zeros(target))


def test_whole_numbers_are_targets_like_others_unless_they_are_class_numbers() -> None:
    pred, y = torch.rand(8, 1), torch.arange(8)
    assert torch.equal(match(pred, y), y[:, None].float())  # and not compared all with all
    assert match(torch.rand(8, 3), y) is y
    assert match(torch.rand(8, 3, 5), torch.zeros(8, 5, dtype=torch.int64)).shape == (8, 5)
    with pytest.raises(ValueError, match=r"\[8, 3\].*\[7\]"):
        match(torch.rand(8, 3), torch.arange(7))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true", "bf16-true"])
@pytest.mark.parametrize("kind", ["probability", "real"])
def test_every_precision_trains_and_scores(precision: str, kind: str) -> None:
    binary = kind == "probability"
    net, loss = (Generate(), nn.BCELoss()) if binary else (nn.Linear(5, 1), nn.MSELoss())
    metric = BinaryAUROC() if binary else torchmetrics.R2Score()
    module = Module(net, loss, {"score": metric}, standardise=True)
    module.optimizer = functools.partial(torch.optim.SGD, lr=1.0 if binary else 0.1)
    source = SyntheticSource(1000, 5, "binary" if binary else "linear", seed=1)
    data = {"batch_size": 16, "split": (0.8, 0.2, 0.0)}
    trainer, _, _ = fit(source, module, data=data, precision=precision, max_epochs=4)
    assert float(trainer.callback_metrics["val/score"]) > 0.7
    assert module.compute_loss(torch.rand(4, 1).bfloat16(), torch.rand(4, 1)).dtype == torch.float32


# ---- subclasses


class Adversaries(Module):
    """Manual optimisation with two optimizers."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(COLUMNS, 3), nn.Linear(3, 1)))
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.05) for layer in self.net]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.compute_loss(self(batch[0]), batch[1]))
            optimizer.step()


class OwnStep(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self(batch[0]) - batch[1]).abs().mean()


@pytest.mark.parametrize("module", [Adversaries(), OwnStep(nn.Linear(COLUMNS, 1))], ids=["two optimizers", "own step"])
def test_a_subclass_overrides_one_step_and_keeps_the_rest(module: Module) -> None:
    each = Each()
    data = {"batch_size": 8, "val_source": Numbered(50)}
    fit(Numbered(200), module, 1, (each,), data, max_epochs=5)
    losses = [epoch["val/loss"] for epoch in each.scores]
    assert losses[-1] < 0.8 * losses[0]


# ---- checkpoints from Python


def test_a_checkpoint_loads_safely_into_the_module_and_into_the_plain_net(tmp_path: Path) -> None:
    module = Module(Generate(), nn.BCELoss(), {"auroc": BinaryAUROC()}, standardise=True)
    trainer, _, _ = fit(SyntheticSource(64, 5, "binary"), module, data={"batch_size": 8})
    trainer.save_checkpoint(path := tmp_path / "last.ckpt")
    x = torch.randn(16, 5)

    loaded = Module.load_from_checkpoint(path, net=Generate(), standardise=True, weights_only=True)
    assert torch.equal(loaded.eval()(x), module.eval()(x))
    assert loaded.standardise.fitted

    state = torch.load(path, weights_only=True)["state_dict"]
    assert set(state) == {f"net.generate.0.{p}" for p in ("weight", "bias")} | {"standardise.mean", "standardise.std"}
    net = Generate()
    net.load_state_dict({name.removeprefix("net."): value for name, value in state.items() if name.startswith("net.")})
    assert torch.equal(net(module.standardise(x)), module(x))


def test_a_module_without_standardise_loads_in_three_lines(tmp_path: Path) -> None:
    trainer, module, _ = fit(SyntheticSource(64, 5, "binary"), Module(Generate(), nn.BCELoss()), data={"batch_size": 8})
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    loaded = Module.load_from_checkpoint(tmp_path / "last.ckpt", net=Generate(), weights_only=True)
    assert torch.equal(weights(loaded), weights(module))


# ---- Standardise


def fitted(devices: int, chunk: int, rows: int = 40_000) -> Any:
    module = Module(nn.Linear(COLUMNS, 1), standardise=True)
    data = {"batch_size": 16, "chunk_size": chunk}
    fit(Numbered(rows), module, devices, data=data, max_epochs=-1, max_steps=1)
    return module.standardise.mean, module.standardise.std


def test_standardise_is_fitted_to_the_training_rows_the_same_bits_at_any_ranks_and_chunk_size() -> None:
    x, _ = Numbered(40_000).read(torch.arange(40_000))
    (mean, std), *others = [on_ranks(1, fitted, 1, 100)[0], *on_ranks(2, fitted, 2, 7777)]
    torch.testing.assert_close(mean, x.double().mean(0).float(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(std, x.double().std(0, correction=0).float(), rtol=1e-6, atol=0)
    assert all(torch.equal(mean, m) and torch.equal(std, s) for m, s in others)


def test_standardise_is_not_fitted_again_when_a_checkpoint_brings_it(tmp_path: Path) -> None:
    module = Module(nn.Linear(COLUMNS, 1), standardise=True)
    trainer, _, _ = fit(Numbered(64), module, data={"batch_size": 8})
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = Module(nn.Linear(COLUMNS, 1), standardise=True)
    again._fit_standardise = lambda _: pytest.fail("fitted again")  # type: ignore[method-assign]
    data = StreamDataModule(Numbered(64), batch_size=8, split=(1.0, 0.0, 0.0))
    trainer_of(max_epochs=2).fit(again, data, ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    assert torch.equal(again.standardise.mean, module.standardise.mean)


def test_standardise_says_what_it_needs() -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 2), torch.randn(8, 1)))
    with pytest.raises(ValueError, match="StreamDataModule"):
        trainer_of(max_epochs=1).fit(Module(nn.Linear(2, 1), standardise=True), loader)


# ---- schedules


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_schedule_moves_once_an_optimizer_step(accumulate: int) -> None:
    module = Module(nn.Linear(COLUMNS, 1))
    module.lr_scheduler = functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step))
    data = {"batch_size": 4}
    trainer, _, _ = fit(Numbered(48), module, data=data, accumulate_grad_batches=accumulate)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 / (1 + 12 // accumulate))


FEW = (100 * torch.randn(8, 5), torch.arange(8.0)[:, None])


@pytest.mark.parametrize(
    ("module", "batch", "says"),
    [
        (Module(LinearModel(5, 1)), (torch.zeros(1, 7), FEW[1]), r"7 input columns.*LinearModel.*\n.*takes 5"),
        (Module(LinearModel(5, 1), nn.BCELoss()), FEW, r"--model.loss BCELoss: .*\[8, 1\] from .* between 0 and 1"),
        (Module(LinearModel(5, 1), nn.CrossEntropyLoss()), FEW, "one output.*always 0.\n.*BCEWithLogitsLoss"),
        (Module(LinearModel(5, 2)), FEW, r"--model.loss MSELoss.*\[8, 2\].*\[8, 1\]"),
        (Module(LinearModel(5, 1), metrics={"acc": BinaryAccuracy()}), FEW, "--model.metrics: .*expected only"),
    ],
    ids=["columns", "loss", "one class", "shapes", "metric"],
)
def test_what_cannot_work_together_is_refused_before_training(module, batch, says) -> None:
    with pytest.raises(ValueError, match=says):
        check_step(module, batch, "fit")


class Generates(Module):
    """Gives its net something else than the inputs, and says so by steps of its own."""

    def training_step(self, batch, batch_idx):
        return self.net(torch.randn(len(batch[0]), 4)).square().mean()

    def validation_step(self, batch, batch_idx):
        pass


def test_steps_of_the_users_own_decide_what_the_net_gets() -> None:
    check_step(Generates(nn.Linear(4, 10)), FEW, "fit")
    with pytest.raises(ValueError, match="refuses rows"):
        check_step(Generates(nn.Linear(4, 10)), FEW, "predict")


def test_trying_a_few_rows_first_leaves_no_trace() -> None:
    module = Module(nn.Sequential(nn.Linear(5, 1), nn.Dropout()), metrics={"r2": torchmetrics.R2Score()})
    before, drawn = copy.deepcopy(module.state_dict()), torch.random.get_rng_state()
    check_step(module, FEW, "fit")
    assert module.training
    assert module.net[1].training
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module.results("val") == {}


def a_million(devices: int) -> tuple[float, float]:
    """The loss over 1,000,003 rows, and what torch says in float64."""
    source, module = Numbered(1_000_003), Module(nn.Linear(COLUMNS, 1))
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(0.5)
        found = evaluate(module, source, "test", devices, 10_000)["test/loss"]
        x, y = source.read(torch.arange(len(source)))
        return found, float((x.double().sum(1, keepdim=True) * 0.5 + 0.5 - y).square().mean())


def test_a_million_and_three_rows_are_scored_once_each() -> None:
    for found, expected in on_ranks(2, a_million, 2):
        assert found == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("name", ["loss", "rows", "epoch_loss"])
def test_a_metric_may_not_take_a_name_of_ours(name):
    with pytest.raises(ValueError, match=rf"--model.metrics.{name}: this name is taken"):
        Module(nn.Linear(1, 1), metrics={name: torchmetrics.MeanSquaredError()})


@pytest.mark.parametrize("size", [1, 7, 50, 301])
def test_scores_of_logits_do_not_depend_on_the_batch(size):
    """Torchmetrics guesses logits from each batch by its values; here most batches lie within 0 and 1."""
    from torchmetrics.classification import BinaryAccuracy, BinaryAUROC

    module = Module(nn.Identity(), nn.BCEWithLogitsLoss(), {"accuracy": BinaryAccuracy(), "auroc": BinaryAUROC()})
    logits = torch.linspace(-1, 1, 301)[:, None]
    target = (torch.arange(301) % 3 == 0).float()[:, None]
    for pred, y in zip(logits.split(size), target.split(size), strict=True):
        module.measure("val", pred, y, module.compute_loss(pred, y))
    scores = module.results("val")
    expected = ((logits > 0) == (target > 0)).double().mean()
    assert float(scores["val/accuracy"]) == pytest.approx(float(expected), abs=1e-7)
    whole = BinaryAUROC()(logits.sigmoid().flatten().double(), target.flatten().long())
    assert float(scores["val/auroc"]) == pytest.approx(float(whole), abs=1e-7)


def test_batches_of_unequal_shapes_are_scored_together() -> None:
    """Small batches are put together before metrics see them; sentences of different lengths cannot be."""
    scores = Scores({"mse": torchmetrics.MeanSquaredError()})
    scores.prepare(torch.device("cpu"))
    for length in (3, 3, 5):
        scores.update(torch.ones(2, length), torch.zeros(2, length), torch.tensor(float(length)))
    found, rows = scores.take()
    assert (float(found["mse"]), float(found["loss"]), rows) == (1.0, pytest.approx(11 / 3), 6)
