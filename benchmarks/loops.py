"""The loops that are compared: bare, of Lightning's documentation, of a popular template, ours."""

import contextlib
import io
import itertools
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import lightning as L
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar, ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from project.cli import main
from project.models import LinearModel

ROWS, COLUMNS = 64, 10
WARM = 50  # steps of the bare loop before it is timed; the other loops' first steps count
COMMAND = ["--accelerator", "cpu", "--max_epochs", "1", "--run_dir"]
CLOCK = "--callbacks+=benchmarks.loops.{}"


class Clock(L.Callback):
    """Processor time of the steps of one epoch, without the validation after them; nothing is done at a step."""

    microseconds = 0.0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.begun = time.process_time()
        Clock.microseconds = 0.0

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not Clock.microseconds:
            Clock.microseconds = (time.process_time() - self.begun) / trainer.num_training_batches * 1e6

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.on_train_epoch_end(trainer, pl_module)


class Task:
    """The same rows for every loop."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.x, self.y = torch.randn(steps * ROWS, COLUMNS), torch.randn(steps * ROWS, 1)

    def bare(self, batches: Any = None) -> float:
        model, loss_of = LinearModel(COLUMNS, 1), nn.MSELoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        begun = 0.0
        for warm in (True, False):
            begun = time.process_time()
            views = zip(self.x.split(ROWS), self.y.split(ROWS), strict=True)
            for x, y in itertools.islice(views, WARM) if warm else batches or views:
                loss = loss_of(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return (time.process_time() - begun) / self.steps * 1e6

    def bare_loader(self) -> float:
        return self.bare(DataLoader(TensorDataset(self.x, self.y), batch_size=ROWS))

    def trainer(self, module: L.LightningModule, loader: Any, **settings: Any) -> float:
        with tempfile.TemporaryDirectory() as folder, quiet(terminal=True):
            callbacks: list[Any] = [Clock()]
            if settings.pop("full", False):
                settings["logger"] = [TensorBoardLogger(folder), CSVLogger(folder)]
                callbacks += [ModelCheckpoint(folder, save_last=True), *rich_bar()]
                callbacks += [ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=50)]
            settings |= {"default_root_dir": folder, "callbacks": callbacks, "enable_model_summary": False}
            L.Trainer(accelerator="cpu", devices=1, max_epochs=1, **settings).fit(module, loader)
        return Clock.microseconds

    def ours(self, *flags: str, terminal: bool = False) -> float:
        """The command itself, as a user types it."""
        rows = str(round(self.steps * ROWS / 0.8))
        with tempfile.TemporaryDirectory() as folder, quiet(terminal):
            main([*COMMAND, f"{folder}/run", "--data.source.rows", rows, CLOCK.format("Clock"), *flags])
        return Clock.microseconds


class Documented(L.LightningModule):
    """As Lightning's documentation shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LinearModel(COLUMNS, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Silent(Documented):
    """Logs nothing, for a Trainer with everything off."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])


class HydraStyle(Documented):
    """A mean of losses and a metric, both logged at every step and shown in the bar."""

    def __init__(self) -> None:
        super().__init__()
        self.loss, self.metric = torchmetrics.MeanMetric(), torchmetrics.MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        prediction = self.model(x)
        loss = nn.functional.mse_loss(prediction, y)
        self.loss(loss)
        self.metric(prediction, y)
        self.log("train/loss", self.loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/mse", self.metric, on_step=False, on_epoch=True, prog_bar=True)
        return loss


class Views:
    """Batches as views: the least a loader can do."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __len__(self) -> int:
        return self.task.steps

    def __iter__(self) -> Any:
        return iter(zip(self.task.x.split(ROWS), self.task.y.split(ROWS), strict=True))


class Samples(Dataset[Any]):
    """One row at a time, put together by the loader."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __len__(self) -> int:
        return len(self.task.x)

    def __getitem__(self, i: int) -> Any:
        return self.task.x[i], self.task.y[i]


class Screen(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def rich_bar() -> list[L.Callback]:
    """The bar of the popular template; Lightning's own where rich is not installed."""
    try:
        return [RichProgressBar()]
    except ModuleNotFoundError:
        return []


@contextlib.contextmanager
def quiet(terminal: bool = False) -> Any:
    with contextlib.redirect_stdout(Screen(terminal)), contextlib.redirect_stderr(Screen(terminal)):
        yield


def two_processes(steps: int) -> float:
    """The step of each of two processes, by the command, as a multiple of the bare loop in the same process."""
    rows = str(round(2 * steps * ROWS / 0.8))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", *COMMAND, f"{folder}/run", "--data.source.rows", rows, "--devices", "2"]
        command.append(CLOCK.format("Printed"))
        here = Path(__file__).parent.parent
        out = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True).stdout
    return float(out.partition("times ")[2].split()[0])


class Printed(Clock):
    """Tells the step's cost, as a multiple of a bare loop run at once after it."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        bare = Task(trainer.global_step // 2).bare()
        if trainer.is_global_zero:
            print(f"times {Clock.microseconds / bare}")


def loops(task: Task) -> dict[str, Callable[[], float]]:
    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    tensors = lambda: DataLoader(TensorDataset(task.x, task.y), batch_size=ROWS)  # noqa: E731
    metrics = ["--model.metrics", "{r2: torchmetrics.R2Score, mse: torchmetrics.MeanSquaredError}"]
    return {
        "bare loop": task.bare,
        "bare loop, DataLoader(TensorDataset)": task.bare_loader,
        "Trainer, barebones": lambda: task.trainer(Silent(), Views(task), barebones=True),
        "Trainer, all off": lambda: task.trainer(Silent(), Views(task), **off),
        "Lightning as documented": lambda: task.trainer(Documented(), tensors()),
        "Lightning, stock full-featured": lambda: task.trainer(Documented(), Views(task), full=True),
        "Hydra template style": lambda: task.trainer(HydraStyle(), DataLoader(Samples(task), ROWS), full=True),
        "ours": task.ours,
        "ours, at a terminal": lambda: task.ours(terminal=True),
        "ours, no metric": lambda: task.ours("--model.metrics", "null"),
        "ours, two metrics": lambda: task.ours(*metrics),
        "ours, accumulation 4": lambda: task.ours("--accumulate_grad_batches", "4"),
        "ours, clipping": lambda: task.ours("--gradient_clip_val", "1.0"),
    }


def settle() -> None:
    """One thread, and silence."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
