"""Every benchmark runs and prints its tables and ratios; what they measure here says nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("part", ["step_tax", "evaluation", "scaling", "startup", "compiled", "gpu"])
def test_a_part_of_the_page_of_performance(part: str) -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    run = subprocess.run(
        [sys.executable, "benchmarks/all.py", "--quick", part], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    if part == "gpu" and "No CUDA device" in run.stdout:
        return
    table, _, last = run.stdout.partition("\n```text\n")
    assert table.startswith("| ")
    ratios = last.partition("```")[0].splitlines()
    assert ratios
    assert all(float(line.rpartition(": ")[2]) > 0 for line in ratios)
    assert (ROOT / "docs" / "performance.md").read_text() == page  # only the whole command writes it


@pytest.mark.slow
def test_the_script_for_a_gpu_runs_in_small_on_the_cpu() -> None:
    command = [sys.executable, "benchmarks/gpu.py", "--device", "cpu", "--scale", "64"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "ours, MFU" in out
    assert float(out.strip().rpartition(": ")[2]) > 0
