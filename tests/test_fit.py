"""``from project import fit``: what a notebook uses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from torch import nn

from project import fit
from project.data.datamodule import StreamDataModule
from project.data.sources import SyntheticSource
from project.models import LinearModel

ROOT = Path(__file__).parent.parent


def net():
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def test_a_net_and_a_source_are_enough(here):
    model = net()
    before = model.weight.detach().clone()
    trainer = fit(model, SyntheticSource(rows=200, features=4), max_epochs=2, run_dir="run")
    assert trainer.global_step == 2 * (160 // 64)
    assert not torch.equal(before, model.weight)
    saved = torch.load("run/checkpoints/last.ckpt", weights_only=True)["state_dict"]["net.weight"]
    assert torch.equal(saved, trainer.lightning_module.net.weight)
    assert Path("run/metrics.csv").exists()
    told = json.loads(Path("run/environment.json").read_text())
    assert told["devices"].startswith("CPU")
    assert told["ended"]
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    assert config["trainer"] == {"max_epochs": 2}
    assert config["model"].startswith("Linear(")


def test_a_net_that_the_data_does_not_suit_is_refused_and_leaves_no_folder(here):
    with pytest.raises(ValueError, match=r"(?s)The data has 5 input columns.*Its first layer takes 4"):
        fit(net(), SyntheticSource(rows=200, features=5), max_epochs=1, run_dir="run")
    assert not Path("run").exists()


def test_it_trains_the_model_that_the_command_trains(here, run):
    flags = ["--data.source.rows", "200", "--data.batch_size", "8", "--max_epochs", "1", "--optimizer.lr", "0.05"]
    assert run(*flags, "--run_dir", "command").code == 0
    start = torch.load("command/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    L.seed_everything(0)
    model = LinearModel(10, 1)
    data = StreamDataModule(SyntheticSource(rows=200, features=10), batch_size=8)
    fit(model, data, optimizer=lambda p: torch.optim.SGD(p, lr=0.05), max_epochs=1)
    assert torch.equal(model.linear.weight, start["net.linear.weight"])


def test_importing_the_package_loads_no_torch():
    code = "import project, sys; assert 'torch' not in sys.modules; assert 'fit' in project.__all__"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


SPAWNED = """
import torch
from project import fit
from project.data.datamodule import StreamDataModule
from project.data.sources import SyntheticSource
from project.models import LinearModel

if __name__ == "__main__":
    torch.manual_seed(0)
    one, two = LinearModel(4, 1), LinearModel(4, 1)
    two.load_state_dict(one.state_dict())
    for model, devices, strategy, rows in ((one, 1, "auto", 16), (two, 2, "ddp_spawn", 8)):
        data = StreamDataModule(SyntheticSource(rows=200, features=4), batch_size=rows)
        how = {"accelerator": "cpu", "devices": devices, "strategy": strategy, "run_dir": strategy}
        trainer = fit(model, data, max_epochs=1, **how)
    a, b = one.linear.weight, trainer.lightning_module.net.linear.weight
    saved = torch.load("ddp_spawn/checkpoints/last.ckpt", weights_only=True)
    assert saved["global_step"] == 10  # the Trainer's own count stays in the processes that are gone
    assert torch.allclose(a, b, atol=1e-6), (a, b)
    print("equal")
"""


@pytest.mark.slow
def test_two_spawned_processes_train_the_same_model(tmp_path):
    (tmp_path / "notebook.py").write_text(SPAWNED)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "notebook.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "equal"
    assert (tmp_path / "ddp_spawn" / "checkpoints" / "last.ckpt").exists()
    assert len(list(tmp_path.glob("runs/*"))) == 0, "one folder per run"
