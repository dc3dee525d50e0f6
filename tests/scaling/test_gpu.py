"""Strategies and precisions on GPUs: `pytest -m gpu tests/scaling`. The commands are those of docs/scaling.md."""

import pytest
import torch

from tests.scaling.jobs import apart, command

pytestmark = pytest.mark.gpu
GPUS = torch.cuda.device_count()
LINE = ["--accelerator", "gpu", "--data.source.rows", "1000", "--data.batch_size", "8", "--max_epochs", "2"]
LINE += ["--model.net", "project.models.deep.Deep", "--optimizer", "Adam", "--enable_progress_bar", "false"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "model_parallel"])
def test_stopped_and_resumed(here, strategy):
    flags = [*LINE, "--strategy", strategy, "--devices", GPUS, "--deterministic", "true"]
    command(*flags, "--run_dir", "whole", cwd=here, CUBLAS_WORKSPACE_CONFIG=":4096:8")
    command(*flags, "--run_dir", "cut", "--max_steps", 7, cwd=here, CUBLAS_WORKSPACE_CONFIG=":4096:8")
    command("--resume", "cut", "--max_steps", -1, cwd=here, CUBLAS_WORKSPACE_CONFIG=":4096:8")
    assert apart("whole", "cut") < 1e-5


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "bf16-true", "16-true", "64-true"])
def test_precisions(here, precision):
    said = command(*LINE, "--precision", precision, "--optimizer", "SGD", "--run_dir", "one", cwd=here)
    assert f"; precision {precision}\n" in said


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_sync_batchnorm_and_benchmark(here):
    said = command(*LINE, "--devices", 2, "--sync_batchnorm", "true", "--benchmark", "true", cwd=here)
    assert "8 rows x 2 devices" in said
