"""The doctor: what it says of machines that are well, that lack something, and on which nothing would run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from project.tools import doctor

ROOT = Path(__file__).parents[2]
SMI = """| NVIDIA-SMI 550.54.15   Driver Version: 550.54.15   CUDA Version: 12.4     |
"""


@pytest.fixture
def card(tmp_path, monkeypatch):
    """An nvidia-smi that shows a card."""
    fake = tmp_path / "nvidia-smi"
    fake.write_text(
        f"#!/bin/sh\nif [ \"$1\" = -L ]; then echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\nelse echo '{SMI}'; fi\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


def found(checks):
    return {name: (status, words, todo) for name, status, words, todo in checks}


def test_a_card_with_a_torch_for_the_cpu_is_said_so(card, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, words, todo = found(doctor._devices())["cuda"]
    assert status == "warning"
    assert words.startswith("there is NVIDIA H200 (driver 550.54.15), but this torch (")
    assert words.endswith("is built for the CPU only")
    assert todo == "a torch with CUDA (the driver runs up to 12.4) from https://pytorch.org/get-started"


def test_a_card_that_torch_cannot_use_is_said_so(card, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, words, todo = found(doctor._devices())["cuda"]
    assert status == "warning"
    assert "there is NVIDIA H200" in words
    assert "show CUDA 13.0 or later" in todo


def test_no_card_is_no_fault(monkeypatch):
    monkeypatch.setattr(doctor, "_driver", lambda: ("", ""))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, words, todo = found(doctor._devices())["cuda"]
    assert (status, todo) == ("ok", "")
    assert words.startswith("no GPU: ")


def test_a_missing_compiler_is_a_warning(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert found(doctor._devices())["compiler"][0] == "warning"


@pytest.mark.parametrize(
    ("release", "words"), [("2.6.2", "a malicious release"), ("2.6.3", "change your passwords"), ("2.6.6", "")]
)
def test_malicious_releases_of_lightning_are_refused(monkeypatch, release, words):
    monkeypatch.setattr(doctor, "version", lambda name: release)
    status, version, todo = found(doctor._packages())["lightning"]
    assert (status, version) == ("failed" if words else "ok", release)
    assert words in todo


def test_a_package_that_cannot_be_imported_fails_and_the_rest_goes_on(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr(doctor, "CHECKS", {"packages": doctor._packages, "limits": doctor._limits})
    with pytest.raises(SystemExit, match="1"):
        doctor.main([])
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("FAILED  pyarrow"))
    assert lines[at + 1].strip() == "→ pip install -r requirements.txt"
    assert any(" disk " in line for line in lines[at:])


def test_a_check_that_breaks_down_is_a_failed_one(monkeypatch, capsys):
    def broken():
        raise OSError("libcudart.so: cannot open")
        yield

    monkeypatch.setattr(doctor, "CHECKS", {"devices": broken, "limits": doctor._limits})
    with pytest.raises(SystemExit, match="1"):
        doctor.main(["--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is False
    assert said["checks"][0]["found"] == "OSError: libcudart.so: cannot open"
    assert len(said["checks"]) > 3


def test_few_files_little_memory_and_leftovers_are_warnings_with_what_to_do(monkeypatch, capsys):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: type("Disk", (), {"free": 64 * 2**20}))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(doctor, "CHECKS", {"limits": doctor._limits})
    with pytest.raises(SystemExit, match="0"):
        doctor.main([])
    screen = capsys.readouterr().out
    for words in ("ulimit -n 4096", "--shm-size=2g", "--run_dir on another disk", "WORLD_SIZE=2", "unset what is left"):
        assert words in screen
    assert screen.count("WARNING") == 4 + ("cores" in screen.partition("OMP_NUM_THREADS")[0] and "OMP_NUM" in screen)


def test_a_folder_that_cannot_be_written_to_fails(monkeypatch):
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    assert found(doctor._limits())["folder"][0] == "failed"


def test_the_speed_of_products_is_measured():
    status, words, _ = found(doctor._speed())["product, cpu"]
    assert status == "ok"
    assert "at 1000 x 1000" in words
    assert float(words.split()[3]) > 0


@pytest.mark.slow
def test_two_processes_add_numbers(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "7")  # left over, and not theirs
    monkeypatch.setattr(doctor, "MEET_SECONDS", 120)
    status, words, _ = found(doctor._all_reduce())["all-reduce, gloo"]
    assert status == "ok", words


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import time; time.sleep(60)", "were not done in 3 s"),
        ("raise SystemExit('no route to host')", "fails: no route to host"),
    ],
)
def test_processes_that_do_not_meet_are_a_warning_and_none_is_left(monkeypatch, code, words):
    monkeypatch.setattr(doctor, "MEET_SECONDS", 3)
    monkeypatch.setattr(doctor, "ALL_REDUCE", code)
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(doctor.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    if "sleep" not in code:
        monkeypatch.setattr(doctor, "MEET_SECONDS", 60)
    status, said, todo = found(doctor._all_reduce())["all-reduce, gloo"]
    assert (status, words in said) == ("warning", True), said
    assert "GLOO_SOCKET_IFNAME" in todo
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)


@pytest.mark.slow
def test_one_screen_for_people_and_json_for_programs(monkeypatch, tmp_path):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "project.tools.doctor"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) <= 40
    done = subprocess.run([*command, "--json"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    names = {check["name"] for check in json.loads(done.stdout)["checks"]}
    assert {"python", "torch", "cuda", "cores", "open files", "disk", "product, cpu", "all-reduce, gloo"} <= names
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_a_gpu_is_named_measured_and_faster_than_the_cpu():
    devices, speed = found(doctor._devices()), found(doctor._speed())
    assert devices["cuda"][0] == "ok"
    assert "capability" in devices["cuda:0"][1]
    assert "x the CPU" in speed["product, cuda:0"][1]
    assert "from pinned memory" in speed["transfer, cuda:0"][1]
