"""The page on renaming is true: after its commands, in a clone, nothing is called project and the tests pass."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_renamed_as_the_page_says_the_tests_pass(tmp_path):
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--no-hardlinks", ROOT, clone], check=True)
    commands = re.search(r"```bash\n(.*?)```", (ROOT / "docs" / "renaming.md").read_text(), re.S)[1]
    subprocess.run(["bash", "-euo", "pipefail", "-c", commands], cwd=clone, check=True)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*argv):
        return subprocess.run(argv, cwd=clone, env=env, capture_output=True, text=True, check=False).stdout

    left = run("git", "grep", "-nE", r"(from|import) project\b|\bproject[./]", "--", "*.py", "*.toml", "*.yaml")
    assert left == ""
    assert "project: starter" in (clone / "configs" / "overlays" / "wandb.yaml").read_text()  # another's name
    done = run(sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider")
    assert re.search(r"^\d+ passed", done, re.M), done[-3000:]
    assert "failed" not in done.splitlines()[-1]
