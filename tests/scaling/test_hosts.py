"""Two hosts: network namespaces, joined by a cable (veth). Needs root and iproute2."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.scaling.jobs import SLOW_NET, SMALL, TORCHRUN, apart, command, kill_all, saved, start, until

pytestmark = pytest.mark.slow
ADDRESS = "10.77.31.{}"


class Hosts:
    """Two hosts by number, 0 and 1, that see only each other."""

    def __init__(self):
        self.names = [f"host{i}-{os.getpid()}" for i in range(2)]
        self.cables = [f"c{i}-{os.getpid()}" for i in range(2)]

    def build(self):
        for name in self.names:
            _ip("netns", "add", name)
        zero, one = self.names
        _ip("link", "add", self.cables[0], "netns", zero, "type", "veth", "peer", "name", self.cables[1], "netns", one)
        for i, (name, cable) in enumerate(zip(self.names, self.cables, strict=True)):
            _ip("-n", name, "addr", "add", f"{ADDRESS.format(i + 1)}/24", "dev", cable)
            _ip("-n", name, "link", "set", cable, "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def launcher(self, host, nodes=2, processes=1):
        """What to put before ``train.py`` to run it on a host: torchrun, as on each machine of a cluster."""
        where = ["--nnodes", nodes, "--nproc_per_node", processes, "--node_rank", host if nodes > 1 else 0]
        meet = ["--master_addr", ADDRESS.format(1 if nodes > 1 else host + 1), "--master_port", 29511]
        return ["ip", "netns", "exec", self.names[host], *TORCHRUN, *map(str, where), *map(str, meet)]

    def env(self, host):
        return {"GLOO_SOCKET_IFNAME": self.cables[host]}

    def unplug(self):
        _ip("-n", self.names[1], "link", "set", self.cables[1], "down")


def _ip(*words):
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts():
    if os.name != "posix" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    both = Hosts()
    try:
        try:
            both.build()
        except subprocess.CalledProcessError as e:
            pytest.skip(f"no network namespaces here: {e.stderr.strip()}")
        yield both
    finally:
        for name in both.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def begin(hosts, *argv):
    """The job on both hosts; they share the current folder, as machines of a cluster share a disk."""
    both = range(2)
    return [start(*argv, cwd=".", launcher=hosts.launcher(h), screen=f"screen-{h}", **hosts.env(h)) for h in both]


def test_two_hosts_equal_two_processes_of_one(here, hosts):
    jobs = begin(hosts, *SMALL, "--run_dir", "hosts")
    assert [job.wait(240) for job in jobs] == [0, 0], Path("screen-0").read_text() + Path("screen-1").read_text()
    said = Path("screen-0").read_text()
    assert "16 effective = 8 rows x 2 devices x 1 accumulated" in said
    assert "run folder" not in Path("screen-1").read_text()
    command(*SMALL, "--run_dir", "local", cwd=here, launcher=[*TORCHRUN, "--nproc_per_node=2"])
    assert apart("hosts", "local") == 0


SHORT = '{"class_path": "lightning.pytorch.strategies.DDPStrategy", "init_args": {"timeout": "0:00:20"}}'


@pytest.mark.parametrize("how", ["its processes die", "its power goes"])
def test_a_host_that_dies_ends_the_job_and_the_other_goes_on_alone(here, hosts, how):
    """A host without power sends no farewell: what notices is the timeout of the process group."""
    strategy = ["--strategy", SHORT] if how == "its power goes" else []
    line = ["--resume", "auto", "--run_dir", "job", *SLOW_NET]
    zero, one = begin(hosts, *line, *strategy, "--model.net.sleep", "0.1")
    try:
        until(lambda: saved("job", 3), "the save after step 6", zero, "screen-0")
        if strategy:
            hosts.unplug()
        kill_all(one)
        assert zero.wait(120) != 0
    finally:
        kill_all(zero)
        kill_all(one)
    assert "rank 0: another rank is gone" in Path("screen-0").read_text()
    alone = hosts.launcher(0, nodes=1, processes=2)
    said = command(*line, "--strategy", "auto", cwd=here, launcher=alone, **hosts.env(0))
    assert "resume      job/checkpoints/last.ckpt, after optimizer step" in said
    command(*SLOW_NET, "--run_dir", "whole", cwd=here, launcher=[*TORCHRUN, "--nproc_per_node=2"])
    assert apart("job", "whole") == 0
