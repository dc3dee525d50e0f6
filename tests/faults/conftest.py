"""`pytest -m faults` runs every scenario; at the end comes a table: scenario × outcome × seconds."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
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
            import os

            os.kill(pid, 9)


@pytest.fixture
def table(request):
    """``table(scenario, outcome, seconds)``: a line of the table."""
    lines = request.config.stash.setdefault(TABLE, [])
    return lambda scenario, outcome, seconds: lines.append((scenario, outcome, seconds))


def pytest_terminal_summary(terminalreporter, config):
    lines = config.stash.get(TABLE, [])
    if lines:
        terminalreporter.section("faults: scenario | outcome | seconds")
        for scenario, outcome, seconds in lines:
            terminalreporter.write_line(f"| {scenario} | {outcome} | {seconds:.1f} |")
