"""Weights & Biases and MLflow by one overlay each, offline, beside our own records."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def train(folder, overlay, *flags, before="pass"):
    program = f"import sys; {before}; from project.cli import main; main(sys.argv[1:])"
    files = ["--config", ROOT / "configs/linear.yaml", "--config", ROOT / f"configs/overlays/{overlay}.yaml"]
    small = ["--data.source.rows", "200", "--data.batch_size", "8", "--max_epochs", "1", "--run_dir", "run"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "offline"}
    command = [sys.executable, "-c", program, *files, *small, *flags]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


def recorded(folder):
    """The last value of everything in metrics.csv."""
    rows = list(csv.DictReader((folder / "run" / "metrics.csv").read_text().splitlines()))
    return {name: float(value) for row in rows for name, value in row.items() if value}


@pytest.mark.slow
def test_mlflow_gets_every_value_and_metrics_csv_is_still_written(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    done = train(tmp_path, "mlflow")
    assert done.returncode == 0, done.stderr
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("starter").experiment_id])
    assert run.info.status == "FINISHED"
    expected = {n: v for n, v in recorded(tmp_path).items() if n != "step"}
    assert {"train/loss", "val/loss", "test/loss", "lr", "rows_per_s"} <= expected.keys()
    assert {n: run.data.metrics[n] for n in expected} == pytest.approx(expected)


@pytest.mark.slow
def test_wandb_gets_every_value_and_metrics_csv_is_still_written(tmp_path):
    pytest.importorskip("wandb")
    done = train(tmp_path, "wandb", "--logger.offline", "true")
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("runs/wandb/offline-run-*/run-*.wandb")
    content = file.read_bytes()
    assert {"train/loss", "val/loss", "test/loss"} <= recorded(tmp_path).keys()
    for name in recorded(tmp_path).keys() - {"step"}:
        assert name.encode() in content, name


@pytest.mark.slow
@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_a_missing_package_gives_the_line_that_installs_it(tmp_path, package):
    absent = f"import importlib.metadata as m; old = m.distribution; sys.modules['{package}'] = None"
    lost = f"m.distribution = lambda n: old('no-such-package') if n.startswith('{package}') else old(n)"
    done = train(tmp_path, package, before=f"{absent}; {lost}")
    assert done.returncode == 2, done.stderr
    assert f"pip install -U '{package}" in done.stderr
    assert len(done.stderr.splitlines()) <= 5
    assert list(tmp_path.iterdir()) == []
