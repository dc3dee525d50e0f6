"""Memory stays flat however long a run is and however many rows its source has."""

import gc
import re
import subprocess
import sys
import time
from pathlib import Path

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn

from project.data.datamodule import StreamDataModule
from project.data.sources import SyntheticSource
from project.engine.checkpoint import Checkpoints
from project.engine.lean import NoProfiler, spare
from project.engine.memory import MB, Memory, resident
from project.engine.metrics_csv import MetricsCSV
from project.engine.nonfinite import NonFinite
from project.engine.report import Report
from project.engine.resume import Resume
from project.module import Module

ROOT = Path(__file__).parent.parent.parent


class Readings(L.Callback):
    """Resident MB and live tensors at chosen steps."""

    def __init__(self, steps):
        self.steps, self.resident, self.tensors = steps, {}, {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx + 1 in self.steps:
            gc.collect()
            self.resident[batch_idx + 1] = resident() / MB
            self.tensors[batch_idx + 1] = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())


def train(folder, steps, rows, logger):
    """One epoch of ``steps`` steps with everything on; returns the readings."""
    readings = Readings(steps)
    callbacks = [Report(False), Resume(), NonFinite(), readings, Checkpoints(every_n_train_steps=steps[-1] // 2)]
    t = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        max_steps=steps[-1],
        limit_val_batches=2,
        logger=[logger, MetricsCSV(folder)],
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        profiler=NoProfiler(),
        default_root_dir=folder,
    )
    spare(t)
    module = Module(nn.Linear(10, 1), metrics={"r2": torchmetrics.R2Score(), "mse": torchmetrics.MeanSquaredError()})
    data = StreamDataModule(SyntheticSource(rows=rows), batch_size=8, chunk_size=1024, split=(0.999, 0.001, 0.0))
    t.fit(module, data)
    return readings


if __name__ == "__main__":  # a process of its own: what other tests leave would hide what this one takes
    torch.set_num_threads(1)
    folder, rows, steps = Path(sys.argv[1]), *([int(n) for n in words.split(",")] for words in sys.argv[2:])
    for n in rows:
        (folder / str(n)).mkdir(parents=True)
        found = train(folder / str(n), steps, n, TensorBoardLogger(folder))
        for step in steps:
            print("reading", n, step, found.resident[step], found.tensors[step])


def readings(folder, rows, steps):
    """(resident MB, live tensors) by rows of the source and step, in one process."""
    words = [str(folder), ",".join(map(str, rows)), ",".join(map(str, steps))]
    command = [sys.executable, "-m", "tests.engine.test_memory", *words]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = [line.split()[1:] for line in out.splitlines() if line.startswith("reading")]
    return {(int(n), int(step)): (float(mb), int(tensors)) for n, step, mb, tensors in lines}


@pytest.mark.slow
def test_memory_and_tensors_do_not_grow_with_steps_or_rows(tmp_path):
    """Predictions of many small batches are kept for the metrics, a bounded number: tensors come and go."""
    small, large = 10**6, 10**9
    found = readings(tmp_path, [small, large], [2000, 4000, 8000])
    for rows in (small, large):
        assert max(tensors for (n, _), (_, tensors) in found.items() if n == rows) < 10_000
        assert found[rows, 8000][0] - found[rows, 2000][0] < 5
    assert abs(found[large, 8000][0] - found[small, 8000][0]) < 5


@pytest.mark.slow
def test_memory_is_flat_from_step_1000_to_200000(tmp_path):
    rows, steps = 10**7, [1000, 50_000, 100_000, 200_000]
    found = readings(tmp_path, [rows], steps)
    for step in steps[1:]:
        assert found[rows, step][0] - found[rows, 1000][0] < 5
        assert found[rows, step][1] < 10_000


def test_a_reading_counts_workers_and_keeps_the_highest_only(monkeypatch):
    memory = Memory(torch.device("cpu"))
    alone = memory.read(1)
    assert 50 < alone < 100_000
    monkeypatch.setattr(memory, "_next", float("inf"))  # however slow this machine is
    child = subprocess.Popen([sys.executable, "-c", "print('up', flush=True); input()"], stdin=-1, stdout=-1)
    child.stdout.readline()
    assert memory.read(2) == alone  # read once a second at most
    monkeypatch.setattr(memory, "_next", 0.0)
    assert memory.read(3) > alone + 3
    assert memory.peak_step == 3
    child.communicate(b"\n")
    assert not [value for value in vars(memory).values() if isinstance(value, list)]


def test_the_peak_is_told_with_its_step_and_share():
    memory = Memory(torch.device("cpu"))
    memory.note(memory.read(1) + 100, 7, 2)
    assert re.fullmatch(r"[\d,]+ MB by step 7, \d+% of the machine's, on the fullest of 2 ranks", memory.peak_words())
    assert Memory(torch.device("cpu")).peak_words().endswith(" MB")  # nothing was read


def test_a_reading_takes_less_than_a_millisecond(monkeypatch):
    memory = Memory(torch.device("cpu"))
    took = []
    for _ in range(200):
        monkeypatch.setattr(memory, "_next", 0.0)
        began = time.thread_time()
        memory.read(1)
        took.append(time.thread_time() - began)
    assert min(took) < 1e-3
