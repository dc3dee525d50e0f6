"""Which packages can be installed: the malicious releases never, nothing under its floor, a lock of hashes only."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
MALICIOUS = ("2.6.2", "2.6.3")  # releases of lightning that stole credentials at import


def requirements(name):
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    return {r.name: r for r in (Requirement(line) for line in lines if line and not line.startswith("-"))}


def locked():
    """{package: (version, its hashes)} of requirements.lock."""
    text = re.sub(r"^ *#.*\n", "", (ROOT / "requirements.lock").read_text(), flags=re.M)
    blocks = re.split(r"\n(?=\w)", text.replace("\\\n", " ").strip())
    return {
        b.split("==")[0]: (b.split("==")[1].split()[0], re.findall(r"--hash=sha256:([0-9a-f]{64})\b", b))
        for b in blocks
    }


@pytest.mark.parametrize("package", ["lightning", "pytorch-lightning"])
def test_the_malicious_releases_and_those_that_run_code_from_checkpoints_cannot_be_chosen(package):
    declared = requirements("requirements.txt")["lightning"].specifier
    offered = [Version(v) for v in ("2.5.0", "2.6.1", *MALICIOUS, "2.6.5", "2.6.6", "2.6.7")]
    assert [str(v) for v in declared.filter(offered)] == ["2.6.6", "2.6.7"]
    assert {f"!={v}" for v in MALICIOUS} <= {str(s) for s in declared}  # by name, whatever becomes of the floor
    assert Version(locked()[package][0]) in declared


def test_every_requirement_has_a_floor():
    for name, requirement in requirements("requirements.txt").items():
        assert any(s.operator in (">=", "==") for s in requirement.specifier), name


def test_the_lock_has_every_requirement_within_its_range():
    packages = locked()
    for name, requirement in requirements("requirements.txt").items():
        if name != "torch":  # its files differ between CPU and CUDA builds
            assert Version(packages[name][0]) in requirement.specifier, name


def test_the_lock_pins_every_package_by_hash_and_names_no_other_place():
    packages = locked()
    assert len(packages) > 30
    assert all(hashes for _, hashes in packages.values())
    text = (ROOT / "requirements.lock").read_text()
    assert not re.search(r"https?://|file:|--(index|extra-index|find-links|trusted)|/home|/opt|/tmp", text)


def test_what_an_extra_adds_cannot_loosen_it():
    assert "lightning" not in requirements("requirements-dev.txt")


ONE = '{"name": "lightning", "version": "2.6.2", '
ANSWERS = {
    "a weakness": (
        ONE + '"vulns": [{"id": "X-1", "fix_versions": ["2.6.6"]}]}',
        1,
        "lightning 2.6.2: X-1, mended in 2.6.6",
    ),
    "no weakness": (ONE + '"vulns": []}', 0, "audited 1 of 1 packages: 0 known weaknesses"),
    "nothing looked up": ('{"name": "lightning", "skip_reason": "not found"}', 0, "audit skipped: none of the 1"),
    "no answer": ("", 0, "audit skipped: none of the 0"),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_the_audit_step_fails_on_a_weakness_and_says_when_it_could_not_look(case, tmp_path):
    answer, code, words = ANSWERS[case]
    stand_in = tmp_path / "pip-audit"
    stand_in.write_text(f"#!/bin/sh\ncat <<'END'\n{{\"dependencies\": [{answer}]}}\nEND\n")
    stand_in.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, ROOT / ".ci" / "audit"], env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, words in done.stdout) == (code, True), done.stdout + done.stderr
