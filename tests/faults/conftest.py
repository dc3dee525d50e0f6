"""`pytest -m faults` runs every scenario; at the end comes a table: scenario × outcome × seconds.

With FAULTS_PAGE=docs/faults.md in the environment the table goes into that page too: lines of scenarios that ran
replace those that were there.
"""

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HEAD = "| scenario | outcome | seconds |\n| --- | --- | --- |\n"
TABLE = pytest.StashKey[list]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("faults")


@pytest.fixture
def job(tmp_path):
    """Starts a run in an empty folder; its end goes into the table."""
    from tests.faults.harness import Job

    started = []

    def start(*argv, **options):
        started.append(Job(tmp_path, *argv, **options))
        return started[-1]

    yield start
    for one in started:
        for pid in one._alive():  # a test that failed half-way
            os.kill(pid, 9)


@pytest.fixture
def table(request):
    """``table(scenario, outcome, seconds)``: a line of the table."""
    lines = request.config.stash.setdefault(TABLE, [])
    return lambda scenario, outcome, seconds: lines.append((scenario, outcome, seconds))


def pytest_terminal_summary(terminalreporter, config):
    lines = {scenario: f"| {scenario} | {outcome} | {s:.1f} |" for scenario, outcome, s in config.stash.get(TABLE, [])}
    if lines:
        terminalreporter.section("faults: scenario | outcome | seconds")
        terminalreporter.write_line("\n".join(lines.values()))
        if page := os.environ.get("FAULTS_PAGE"):
            before, head, rows = Path(page).read_text().partition(HEAD)
            old = {row.split(" | ")[0].removeprefix("| "): row for row in rows.splitlines()}
            Path(page).write_text(before + head + "\n".join((old | lines)[name] for name in sorted(old | lines)) + "\n")
