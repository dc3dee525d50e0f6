"""Overlays: small config files to stack on any experiment."""

import re

import pytest

from project.cli import main

ROWS = ["--data.source.rows", "5000", "--data.batch_size", "16"]


@pytest.fixture
def stacked(run):
    def stacked(name, *flags):
        done = run("--config", "configs/linear.yaml", "--config", f"configs/overlays/{name}.yaml", *ROWS, *flags)
        assert done.code == 0, done.err
        return done

    return stacked


def test_quick_run(stacked):
    assert "trained     20 optimizer steps; 320 rows used" in stacked("quick").out


def test_overfit_one_batch(stacked):
    """16 rows, 10 inputs, again and again: the loss of each epoch falls."""
    done = stacked("overfit", "--max_epochs", "30", "--optimizer.lr", "0.1")
    assert "trained     30 optimizer steps; 480 rows used" in done.out
    losses = [float(x) for x in re.findall(r"^epoch.*train/loss (\S+)", done.out, re.M)]
    assert len(losses) == 30
    assert losses[-1] < 0.1 * losses[0]


def test_anomaly_detection_names_the_operation(stacked, here):
    (here / "roots.py").write_text(
        "from torch import nn\n"
        "class Root(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x).mul(0).sqrt()  # 0, with a slope of 0 x infinity\n"
    )
    assert stacked("anomaly", "--max_steps", "2").code == 0
    flags = ["--config", "configs/overlays/anomaly.yaml", "--model.net", "roots.Root"]
    with pytest.warns(match="roots.py"), pytest.raises(RuntimeError, match="Function 'MulBackward0' returned nan"):
        main(["--config", "configs/linear.yaml", *flags])


def test_profiler(stacked):
    done = stacked("profiler", "--max_steps", "5")
    assert "run_training_epoch" in (done.folder / "fit-profile.txt").read_text()
