"""The command: help, which setting wins, classes of the user's own, devices, exit codes."""

import inspect
import traceback

import lightning as L
import numpy as np
import pytest
import torch
import yaml

from project import devices
from project.cli import ONCE, main
from project.usage import UsageError

OWN = """
import lightning as L
import torch
from torch import nn
from project.module import Module

class Net(nn.Module):
    def __init__(self, in_features: int = 3, hidden: int = 4):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(in_features, hidden), nn.Linear(hidden, 1))
    def forward(self, x):
        return self.layers(x)

class Scaled(Module):
    def __init__(self, net: nn.Module, factor: float = 1.0, **kwargs):
        super().__init__(net, **kwargs)
        self.factor = factor
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)["loss"] * self.factor

class Alone(L.LightningModule):
    def __init__(self, width: int = 10):
        super().__init__()
        self.layer = nn.Linear(width, 1)
    def training_step(self, batch, batch_idx):
        x, y = batch
        return (self.layer(x) - y).square().mean()
    def test_step(self, batch, batch_idx):
        self.log("test/loss", self.training_step(batch, batch_idx))
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.5)

class Slip(nn.Linear):
    def forward(self, x):
        return len(7) if self.training else super().forward(x)

class Stumble(nn.Module):
    def __init__(self):
        len(7)

class Pairs(L.LightningDataModule):
    def __init__(self, rows: int = 40):
        super().__init__()
        self.data = torch.utils.data.TensorDataset(torch.randn(rows, 3), torch.randn(rows, 1))
    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.data, 8)
    def val_dataloader(self):
        return torch.utils.data.DataLoader(self.data, 8)

class Touch(L.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 3:
            with open("x.npy", "ab") as file:
                file.write(bytes(4000))
"""

SOURCE = "project.data.sources.SyntheticSource"


@pytest.fixture
def own(here):
    (here / "own.py").write_text(OWN)


@pytest.fixture
def shown(here, capfd):
    """What `--print_config` shows, as text and as a dictionary."""

    def shown(*argv):
        with pytest.raises(SystemExit) as stop:
            main([*argv, "--print_config"])
        assert not stop.value.code
        text = capfd.readouterr().out
        return text, yaml.safe_load(text)

    return shown


# ---- help


@pytest.mark.parametrize("line", ["--help", "fit --help", "predict --help", "-h"])
def test_help_fits_two_screens(run, line):
    lines = run(*line.split()).out.splitlines()
    assert len(lines) <= 100
    assert max(map(len, lines)) <= 120
    for name in ("--config", "--run_dir", "--optimizer", "--checkpoint.monitor", "--model.net", "--data.batch_size"):
        assert any(line.startswith(f"  {name} ") and len(line) > 40 for line in lines), name  # with a word on it
    assert any(line.startswith("  python train.py --accelerator gpu --devices 2") for line in lines)


def test_help_of_the_trainer(run):
    out = run("--help_trainer").out
    for name in set(inspect.signature(L.Trainer.__init__).parameters) - {"self"}:
        assert f"\n  --{name} " in out or f"\n  --{name}\n" in out


@pytest.mark.parametrize(
    ("line", "setting"),
    [
        ("--model.help", "--model.standardise"),
        ("--model.help own.Scaled", "--model.factor"),
        ("--model.net.help project.models.LinearModel", "--model.net.out_features"),
        ("--data.source.help", "--data.source.rows"),
        ("--optimizer.help=Adam", "--optimizer.betas"),
        ("--callbacks.help EarlyStopping", "--callbacks.patience"),
    ],
)
def test_help_of_a_class(run, own, line, setting):
    done = run(*line.split())
    assert done.code == 0
    assert f"\n  {setting} " in done.out


# ---- which setting wins


def test_flag_over_later_file_over_earlier_file_over_default(here, shown):
    (here / "a.yaml").write_text("trainer: {max_epochs: 11, max_steps: 11, min_epochs: 11}")
    (here / "b.yaml").write_text("trainer: {max_epochs: 12, max_steps: 12}")
    files = ["--config", "a.yaml", "--config=b.yaml"]
    for argv in (["--max_epochs", "13", *files], [*files, "--trainer.max_epochs=13"]):
        _, config = shown("fit", *argv, "--model.net", "project.models.Generate", "--data.source", SOURCE)
        trainer = config["trainer"]
        assert (trainer["max_epochs"], trainer["max_steps"], trainer["min_epochs"]) == (13, 12, 11)
        assert trainer["accumulate_grad_batches"] == 1


def test_lists_are_replaced_or_added_to(here, shown):
    """CLI-05: one rule for files and flags, `name+` adds."""

    def names(*argv):
        callbacks = shown("--config", "configs/linear.yaml", "--config", "a.yaml", *argv)[1]["trainer"]["callbacks"]
        return [(c["class_path"].rpartition(".")[2], c["init_args"].get("patience")) for c in callbacks]

    stop = "class_path: EarlyStopping, init_args: {monitor: val/loss, patience: 7}"
    (here / "a.yaml").write_text("trainer: {callbacks: [{class_path: ModelSummary}]}")
    (here / "add.yaml").write_text(f"trainer: {{callbacks+: [{{{stop}}}]}}")
    (here / "replace.yaml").write_text(f"trainer: {{callbacks: [{{{stop}}}]}}")
    assert names() == [("ModelSummary", None)]
    assert names("--config", "add.yaml") == [("ModelSummary", None), ("EarlyStopping", 7)]
    assert names("--config", "replace.yaml") == [("EarlyStopping", 7)]
    flags = ["--callbacks+=EarlyStopping", "--callbacks.patience=3", "--callbacks.monitor=val/loss"]
    assert names(*flags) == [("ModelSummary", None), ("EarlyStopping", 3)]


def test_our_own_parts_stay_beside_the_users(run, small):
    done = run(*small, "--callbacks+=EarlyStopping", "--callbacks.monitor=val/loss", "--callbacks.patience=3")
    assert (done.folder / "checkpoints" / "last.ckpt").exists()
    assert (done.folder / "metrics.csv").exists()
    assert "epoch 1/1" in done.out


def test_another_class_drops_settings_it_does_not_have(shown):
    _, config = shown("--optimizer", "Adam", "--config", "configs/linear.yaml", "--optimizer.lr", "0.1")
    assert config["optimizer"]["class_path"] == "torch.optim.Adam"
    assert config["optimizer"]["init_args"]["lr"] == 0.1
    assert "momentum" not in config["optimizer"]["init_args"]


def test_what_is_printed_is_what_runs(here, run, shown, small):
    flags = [*small, "--optimizer", "Adam", "--checkpoint.train_time_interval=null", "--lr_scheduler", "ExponentialLR"]
    text, printed = shown(*flags, "--lr_scheduler.gamma=0.5")
    saved = yaml.safe_load((run(*flags, "--lr_scheduler.gamma=0.5").folder / "config.yaml").read_text())
    assert saved == {name: value for name, value in printed.items() if name in saved}
    assert printed.keys() - saved.keys() == set(ONCE) - {"config"}
    assert saved["checkpoint"]["train_time_interval"] is None  # not its default
    (here / "printed.yaml").write_text(text)
    assert shown("--config", "printed.yaml")[1] == printed


def test_the_saved_config_reruns_to_the_same_weights(run, small):
    """CLI-06: also where the size of the input follows from the data."""
    first = run(*small, "--data.source.features=7", "--optimizer.momentum=0.9", "--seed_everything=3")
    again = run("--config", first.folder / "config.yaml")
    assert again.folder != first.folder
    one, two = (
        torch.load(done.folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for done in (first, again)
    )
    assert one["net.linear.weight"].shape == (1, 7)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert (first.folder / "config.yaml").read_text() == (again.folder / "config.yaml").read_text()


# ---- classes of the user's own


def test_own_net_whose_size_has_a_default(run, own, small):
    assert "Net, 49 parameters" in run(*small, "--model.net", "own.Net").out


def test_own_module_with_more_settings(run, own, small):
    slow, fast = (run(*small, "--model", "own.Scaled", "--model.factor", f).score["val/loss"] for f in ("0.1", "3"))
    assert fast < slow


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`")
def test_own_lightning_module(run, refused, own, small, here):
    (here / "own.yaml").write_text(f"model: {{class_path: own.Alone}}\ndata: {{source: {SOURCE}}}")
    done = run("--config", "own.yaml", *small)
    assert done.code == 0
    state = torch.load(done.folder / "checkpoints" / "last.ckpt", weights_only=True)["optimizer_states"]
    assert state[0]["param_groups"][0]["lr"] == 0.5
    assert done.score["test/loss"] > 0
    err = refused("--config", "own.yaml", "--optimizer.lr", "0.1")
    assert "--optimizer: Alone has a configure_optimizers of its own" in err


def test_own_data_module(run, refused, own):
    assert "--model.net.in_features is needed: Pairs has no in_features" in refused("--data", "own.Pairs")
    done = run("--data", "own.Pairs", "--model.net.in_features=3", "--max_epochs=1", "--log_every_n_steps=1")
    assert "Pairs: who reads which row, and resuming exactly, are up to it" in done.out
    assert "trained     5 optimizer steps; 40 rows used" in done.out
    again = run("--config", done.folder / "config.yaml")
    assert again.score == done.score
    assert "val/loss" in again.score


# ---- devices (DEV-01)

CPU = {"1": 1, "2": 2, "auto": "auto"}
NOT_ON_CPU = ["0", "-1", "0,1", "1,", "[0]", "99", "abc"]
TWO_GPUS = {"1": 1, "2": 2, "auto": "auto", "-1": -1, "0,1": "0,1", "1,": "1,", "[0]": [0]}
NOT_ON_TWO_GPUS = ["0", "3", "99", "2,", "[2]", "abc", "-2"]


@pytest.fixture
def ask(monkeypatch):
    """What `--devices VALUE` becomes on a machine with so many GPUs."""

    def ask(value, accelerator="auto", gpus=0):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        config = {"accelerator": accelerator, "devices": value, "num_nodes": 1}
        devices.check_devices(config)
        return config["devices"]

    return ask


def both_forms(value):
    """As text, and as YAML reads it."""
    return [yaml.safe_load(value)] + [value] * (not value.startswith("["))


@pytest.mark.parametrize("value", CPU | dict.fromkeys(NOT_ON_CPU))
def test_devices_on_the_cpu(ask, value):
    for form in both_forms(value):
        for accelerator in ("auto", "cpu"):
            if value in CPU:
                assert ask(form, accelerator) == CPU[value]
            else:
                with pytest.raises(UsageError, match=r"--devices .*number of processes, 1 to \d+ here, or auto"):
                    ask(form, accelerator)


@pytest.mark.parametrize("value", TWO_GPUS | dict.fromkeys(NOT_ON_TWO_GPUS))
def test_devices_on_two_gpus(ask, value):
    for form in both_forms(value):
        for accelerator in ("auto", "gpu"):
            if value in TWO_GPUS:
                assert ask(form, accelerator, gpus=2) in (TWO_GPUS[value], form)
            else:
                with pytest.raises(UsageError, match=r"--devices .*: found 2 GPUs"):
                    ask(form, accelerator, gpus=2)


@pytest.mark.parametrize("line", ["--devices [0]", "--devices=-1", "--devices 0,1"])
def test_devices_are_refused_by_the_command(refused, here, line):
    name, value = line.lstrip("-").replace("=", " ").split()
    (here / "mine.yaml").write_text(f"trainer: {{{name}: '{value}'}}")
    for argv in (line.split(), ["--config", "configs/linear.yaml", "--config", "mine.yaml"]):
        assert f"--devices {value}: on the CPU" in refused(*argv)


def test_a_gpu_where_there_is_none(refused, monkeypatch):
    """What was asked, what was found, the likely reason, the command that works here."""
    err = refused("--accelerator", "gpu", "--devices", "2")
    assert "--accelerator gpu --devices 2: no such device was found here; likely reason: this torch" in err
    assert "What works here: --accelerator cpu --devices 2" in err
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES='' hides every GPU" in refused("--accelerator", "cuda")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert "likely reason: " in refused("--accelerator", "gpu", "--devices", "0,1")


# ---- exit codes


@pytest.mark.parametrize("limit", ["--max_steps=0", "--max_epochs=0", "--limit_train_batches=0"])
def test_nothing_trained_is_a_failure(run, small, limit):
    done = run(*small, limit)
    assert done.code == 1
    assert done.err.startswith("train.py: error: Nothing was trained: no optimizer step was made.")
    assert "trained " not in done.out


@pytest.mark.parametrize("net", ["own.Slip", "own.Stumble"])
def test_an_error_in_code_of_the_users_keeps_its_traceback(run, own, small, net):
    with pytest.raises(TypeError, match="has no len") as raised:
        run(*small, "--model.net", net)
    text = "".join(traceback.format_exception(raised.value))
    assert "own.py" in "".join(text.splitlines()[-4:])  # the last thing on the screen
    assert "Union subtypes" not in text  # the listing that jsonargparse puts around it


@pytest.mark.parametrize("workers", ["0", "2"])
def test_an_error_in_the_data_is_told_in_words(run, own, here, workers):
    """A file that is changed while it is read: the run fails, its folder stays, exit code 1."""
    np.save(here / "x.npy", np.random.rand(400, 3).astype("float32"))
    np.save(here / "y.npy", np.random.rand(400).astype("float32"))
    source = ["--data.source=project.data.sources.ArraySource", "--data.source.x=x.npy", "--data.source.y=y.npy"]
    sizes = ["--data.batch_size=8", "--data.chunk_size=8", f"--data.num_workers={workers}"]
    done = run(*source, *sizes, "--callbacks=own.Touch")
    assert done.code == 1
    assert len(done.err.splitlines()) <= 5
    assert "has changed since this run opened it" in done.err
    assert (done.folder / "config.yaml").exists()


FORGETS = """
from project.module import Module
class Forgets(Module):
    def training_step(self, batch, batch_idx):
        self.compute_loss(self(batch[0]), batch[1])
"""


def test_a_training_step_that_returns_no_loss_is_no_training(run, here, small):
    (here / "forgets.py").write_text(FORGETS)
    done = run(*small, "--model", "forgets.Forgets")
    assert done.code == 1
    assert "training_step returned no loss" in done.err


def test_the_end_says_what_is_of_the_best_and_why_training_stopped_early(run, small):
    stop = ["--callbacks", "EarlyStopping", "--callbacks.monitor", "val/loss", "--callbacks.patience", "1"]
    done = run(*small[:-2], *stop, "--optimizer.lr", "0.9", "--max_epochs", "9")
    assert "stopped early: " in done.out
    assert "the best by val/loss (" in done.out
    assert "scores      train/ and val/ of the last epoch, test/ of what was tested" in done.out
