"""Nothing of ours is tied to one kind of device: ``cuda``, ``mps``, ``xpu`` and ``tpu`` pass through."""

import re

import pytest
import torch
import torchmetrics

from project import devices
from project.scores import Scores
from tests.scaling.jobs import ROOT
from tests.scaling.test_precision import config

# figures.py draws, on the CPU
SOURCES = [p for p in (*ROOT.glob("project/**/*.py"), ROOT / "train.py") if p.name != "figures.py"]
# A tensor is moved to a device by the strategy's, never by a name; these say so where torch has a call for CUDA alone.
NAMED = re.compile(r"""\.cuda\(|\.to\(\s*["']|device\(\s*["'](?!cpu|meta)|device\s*=\s*["'](?!cpu|meta)""")
# float64 of the device: .double() on anything that is not on the CPU already, or a double made on a device
DOUBLE = re.compile(r"(?<!\.cpu\(\))\.double\(\)|float64[^\n]*device=|device=[^\n]*float64")


@pytest.mark.parametrize("pattern", [NAMED, DOUBLE], ids=["device names", "float64 on a device"])
def test_the_source_names_no_device(pattern):
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line) and ".cpu()" not in line
    ]
    assert found == []


@pytest.mark.parametrize("line", ["x.cuda()", 'x.to("cuda")', 'torch.device("cuda:0")', 'torch.zeros(1, device="mps")'])
def test_the_search_finds_names(line):
    assert NAMED.search(line)


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float64), ("cuda", torch.float64), ("mps", torch.float32)])
def test_scores_take_the_widest_float_that_a_device_has(device, dtype):
    scores = Scores({"r2": torchmetrics.R2Score()})
    scores.prepare(torch.device(device))
    states = [s for m in scores.modules() if isinstance(m, torchmetrics.Metric) for s in m.metric_state.values()]
    assert {s.dtype for s in states if s.is_floating_point()} == {dtype}


@pytest.mark.parametrize("accelerator", ["cuda", "mps", "xpu", "tpu"])
def test_accelerators_pass_through(monkeypatch, accelerator):
    """What Lightning makes of the name is its own affair; it is neither changed nor refused where there is a device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: accelerator == "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(accelerator == "cuda"))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: accelerator == "mps")
    settings = config(accelerator=accelerator)
    devices.check_devices(settings)
    devices.check_strategy(settings)
    assert settings == config(accelerator=accelerator)
