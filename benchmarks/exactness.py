"""Same effective batch, same model; same rows, same scores: measured on this machine, in under three minutes.

    python benchmarks/exactness.py

Rows carry their own number. Every run trains a small network 200 steps at an effective batch of 24 rows, shuffled, and
writes down which rows each optimizer step saw; the table compares it with one process, one micro-batch a step. Several
devices are real gloo processes on the CPU.
"""

import functools
import logging
import os
import platform
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import lightning as L
import torch
import torchmetrics
from torch import Tensor, nn
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC

from project.data.datamodule import StreamDataModule
from project.data.sources import SyntheticSource
from project.models import Generate
from project.module import Module
from tests.numbered import COLUMNS, Numbered, fit, trainer_of, weights
from tests.ranks import on_ranks

ROWS, STEPS = 1000, 200
GEOMETRIES = {1: [(24, 1), (12, 2), (8, 3), (1, 24)], 2: [(12, 1), (6, 2), (3, 4)], 4: [(6, 1), (2, 3)]}
OPTIMIZERS: dict[str, Any] = {
    "SGD, momentum 0.9": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "Adam": functools.partial(torch.optim.Adam, lr=0.001),
}
SCORED, EVAL_BATCHES = 20_011, (7, 64, 4096)
METRICS = {
    "mse": torchmetrics.MeanSquaredError(),
    "rmse": torchmetrics.MeanSquaredError(squared=False),
    "mae": torchmetrics.MeanAbsoluteError(),
    "r2": torchmetrics.R2Score(),
    "accuracy": BinaryAccuracy(),
    "auroc": BinaryAUROC(),
}


def train(
    optimizer: str, devices: int, micro: int, accumulate: int, **data: Any
) -> tuple[dict[Any, list[int]], Tensor]:
    """(this rank's rows at each optimizer step, weights after 200 steps)."""
    L.seed_everything(0, verbose=False)
    module = Module(nn.Sequential(nn.Linear(COLUMNS, 16), nn.Tanh(), nn.Linear(16, 1)))
    module.optimizer = OPTIMIZERS[optimizer]
    settings = {"max_epochs": -1, "max_steps": STEPS, "accumulate_grad_batches": accumulate}
    _, _, seen = fit(Numbered(ROWS), module, devices, data={"batch_size": micro, **data}, **settings)
    return seen.steps, weights(module)


def train_all(devices: int) -> list[Any]:
    return [train(optimizer, devices, *sizes) for optimizer in OPTIMIZERS for sizes in GEOMETRIES[devices]]


def of_all_ranks(ranks: list[Any]) -> list[Any]:
    rows = [{step: sorted(sum((seen[step] for seen, _ in runs), [])) for step in runs[0][0]} for runs in zip(*ranks)]  # noqa: B905, RUF017
    return [(steps, found) for steps, (_, found) in zip(rows, ranks[0], strict=True)]


def geometries() -> None:
    print(
        "devices  micro-batch  accumulation  equal rows at every step  "
        + "  ".join(f"max |Δw|, {o}" for o in OPTIMIZERS)
    )
    runs = {devices: of_all_ranks(on_ranks(devices, train_all, devices, timeout=150)) for devices in GEOMETRIES}
    n = len(GEOMETRIES[1])
    references = [runs[1][0], runs[1][n]]
    for devices, sizes in GEOMETRIES.items():
        for i, (micro, accumulate) in enumerate(sizes):
            found = [runs[devices][i], runs[devices][i + len(sizes)]]
            same = all(rows == expected for (rows, _), (expected, _) in zip(found, references, strict=True))
            apart = [float((w - e).abs().max()) for (_, w), (_, e) in zip(found, references, strict=True)]
            cells = [f"{value:<{9 + len(o) + 2}.1e}" for value, o in zip(apart, OPTIMIZERS, strict=True)]
            print(f"{devices:<9}{micro:<13}{accumulate:<14}{'yes' if same else 'NO':<26}{''.join(cells)}".rstrip())


def workers_and_chunks() -> None:
    print("workers  rows a chunk  rows and weights against 0 workers, one micro-batch a chunk")
    rows, expected = train("Adam", 1, 8, 3, chunk_size=8)
    for workers in (0, 1, 3):
        for chunk in (8, 77, 10 * ROWS):
            found_rows, found = train("Adam", 1, 8, 3, num_workers=workers, chunk_size=chunk)
            same = found_rows == rows and torch.equal(found, expected)
            print(f"{workers:<9}{chunk:<14}{'bit-equal' if same else 'DIFFERENT'}")


def score(devices: int) -> list[dict[str, float]]:
    """The scores at each evaluation batch."""
    torch.manual_seed(0)
    module, source = Module(Generate(), nn.BCELoss(), METRICS), SyntheticSource(SCORED, 5, "binary")
    out = []
    for batch in EVAL_BATCHES:
        data = StreamDataModule(source, test_source=source, eval_batch_size=batch)
        out += trainer_of(devices).test(module, data, verbose=False)
    return out


def whole_set() -> dict[str, float]:
    """The scores in float64 torch, over all rows at once."""
    torch.manual_seed(0)
    net = Generate()
    x, y = SyntheticSource(SCORED, 5, "binary").read(torch.arange(SCORED))
    with torch.no_grad():
        pred, y = net(x).double().flatten(), y.double().flatten()
    error, true, false = pred - y, pred[y > 0.5], pred[y <= 0.5]
    above = (true[:, None] > false).double() + 0.5 * (true[:, None] == false).double()
    return {
        "loss": nn.functional.binary_cross_entropy(pred, y).item(),
        "mse": error.square().mean().item(),
        "rmse": error.square().mean().sqrt().item(),
        "mae": error.abs().mean().item(),
        "r2": (1 - error.square().sum() / (y - y.mean()).square().sum()).item(),
        "accuracy": ((pred > 0.5) == (y > 0.5)).double().mean().item(),
        "auroc": above.mean().item(),
    }


def scores() -> None:
    expected = whole_set()
    found = {devices: on_ranks(devices, score, devices, timeout=100)[0] for devices in (1, 2, 3)}
    print(f"{'score':<10}{'float64 torch':<18}max |Δ| over batches of {', '.join(map(str, EVAL_BATCHES))} rows at")
    print(" " * 28 + "".join(f"{devices} process{'es' if devices > 1 else '':<6}" for devices in found))
    for name, value in expected.items():
        apart = [max(abs(run[f"test/{name}"] - value) for run in runs) for runs in found.values()]
        print(f"{name:<10}{value:<18.12f}" + "".join(f"{a:<15.1e}" for a in apart).rstrip())


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    versions = f"torch {torch.__version__}, Lightning {L.__version__}, torchmetrics {torchmetrics.__version__}"
    print(f"{versions}, {platform.machine()}, {os.cpu_count()} cores")
    print(f"\nTraining, {STEPS} steps of 24 rows, {ROWS:,} rows shuffled")
    geometries()
    print("\nReading ahead")
    workers_and_chunks()
    print(f"\nScores of {SCORED:,} rows")
    scores()


if __name__ == "__main__":
    main()
