"""Precision: what is supported works, what is not is refused with the list; the one in use is said and saved."""

import pytest
import torch
import yaml

from project import devices
from project.usage import UsageError

ON_THE_CPU = {"32-true": torch.float32, "bf16-mixed": torch.float32, "bf16-true": torch.bfloat16}
ON_THE_CPU["64-true"] = torch.float64


@pytest.mark.parametrize("precision", ON_THE_CPU)
def test_precisions_on_the_cpu(run, small, precision):
    done = run(*small, "--precision", precision, "--optimizer.lr", "0.1", "--num_sanity_val_steps", "0")
    assert done.code == 0, done.err
    assert f"; precision {precision}\n" in done.out
    assert yaml.safe_load((done.folder / "config.yaml").read_text())["trainer"]["precision"] == precision
    saved = torch.load(done.folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert {w.dtype for w in saved["state_dict"].values()} == {ON_THE_CPU[precision]}
    assert done.score["test/loss"] < 0.5  # a model that has learnt nothing has 1


def test_a_short_name_is_spelt_out(run, small):
    done = run(*small, "--precision", "bf16", "--max_steps", "1")
    assert yaml.safe_load((done.folder / "config.yaml").read_text())["trainer"]["precision"] == "bf16-mixed"


@pytest.mark.parametrize("precision", ["16-mixed", "16-true", "16", "transformer-engine"])
def test_what_the_cpu_lacks_is_refused(refused, small, precision):
    """Lightning would train in bf16-mixed instead of 16-mixed."""
    said = refused(*small, "--precision", precision)
    assert f"--precision {precision}: not supported here" in said
    assert "32-true, bf16-mixed, bf16-true, 64-true" in said


def config(**settings):
    plain = {"accelerator": "auto", "devices": 1, "num_nodes": 1, "strategy": "auto", "precision": "32-true"}
    return {**plain, "plugins": None, "sync_batchnorm": False, **settings}


@pytest.fixture
def hardware(monkeypatch):
    """Pretends that this machine has GPUs of NVIDIA or Apple."""

    def hardware(gpus=0, mps=False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return hardware


@pytest.mark.parametrize("accelerator", ["auto", "gpu", "mps"])
def test_apples_gpus_have_no_float64(hardware, accelerator):
    hardware(mps=True)
    with pytest.raises(UsageError, match=r"64-true: not supported here.*16-mixed"):
        devices.check_strategy(config(accelerator=accelerator, precision="64-true"))
    devices.check_strategy(config(accelerator=accelerator, precision="16-mixed"))


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-true", "64-true"])
def test_gpus_of_nvidia_have_all(hardware, precision):
    hardware(gpus=1)
    devices.check_strategy(config(accelerator="cuda", precision=precision, strategy="fsdp"))


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        ("fsdp", "runs on GPUs only"),
        ("deepspeed_stage_2", "pip install deepspeed"),
        ("ddp_notebook", "for Python and notebooks"),
        ("ddp_spawn", "for Python and notebooks"),
        ("dp", "ddp gives each device a process of its own"),
        ("xla", "torch_xla"),
        ("horovod", "invalid strategy name"),
    ],
)
def test_strategies_that_cannot_work_are_refused(strategy, reason):
    with pytest.raises(UsageError, match=reason) as refused:
        devices.check_strategy(config(accelerator="cpu", devices=2, strategy=strategy))
    assert str(refused.value).endswith("What works here: --strategy ddp")


def test_sync_batchnorm_needs_gpus():
    devices.check_strategy(config(accelerator="cpu", sync_batchnorm=True))  # one process: nothing to do
    with pytest.raises(UsageError, match="SyncBatchNorm runs on GPUs only"):
        devices.check_strategy(config(accelerator="cpu", devices=2, sync_batchnorm=True))
