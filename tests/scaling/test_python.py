"""Several processes from Python: started afresh (spawn, as on macOS and Windows) and forked from a notebook."""

import pickle
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from project.module import Module
from tests.scaling.jobs import ROOT, environment

(EXAMPLE,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "scaling.md").read_text(), re.S)
SAVE = "\ntorch.save(module.net.state_dict(), 'weights.pt')\n"


def learnt(here):
    return torch.load(here / "weights.pt", weights_only=True)["weight"]


def run_as_script(here, text):
    (here / "script.py").write_text(text)
    line = [sys.executable, "script.py"]
    done = subprocess.run(line, cwd=here, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def seeded(text, batch_size=32):
    text = text.replace("import lightning as L\n", "import torch\nimport lightning as L\nL.seed_everything(1)\n")
    return text.replace("SyntheticSource(1000, 10)", f"SyntheticSource(1000, 10), batch_size={batch_size}")


@pytest.fixture
def expected(here):
    """What one process learns from the same rows a step."""
    script = seeded(EXAMPLE, 64).replace('devices=2, strategy="ddp_notebook"', "devices=1")
    run_as_script(here, script + SAVE)
    return learnt(here)


@pytest.mark.slow
def test_spawn_from_a_script(here, expected):
    (here / "weights.pt").unlink()
    body = seeded(EXAMPLE).replace("ddp_notebook", "ddp_spawn") + SAVE
    inside = "\n".join(f"    {line}" for line in body.splitlines())
    run_as_script(here, f'if __name__ == "__main__":\n{inside}\n')
    assert torch.allclose(learnt(here), expected, atol=1e-5)


@pytest.mark.slow
def test_fork_from_an_interactive_python(here, expected):
    """What a notebook is to Lightning: ``python -i``, fed line by line."""
    (here / "weights.pt").unlink()
    text = seeded(EXAMPLE) + SAVE
    line = [sys.executable, "-i", "-q"]
    done = subprocess.run(line, cwd=here, env=environment(), input=text, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert torch.allclose(learnt(here), expected, atol=1e-5), done.stderr


def test_a_module_can_be_sent_to_a_spawned_process():
    sent = pickle.loads(pickle.dumps(Module(nn.Linear(2, 1))))
    assert isinstance(sent.optimizer(sent.parameters()), torch.optim.SGD)
