# SPDX-License-Identifier: Apache-2.0
"""Fixtures that the functional tests share: one corpus, one teacher, its dumps, its students."""

from collections.abc import Callable

import pytest

from tests.functional_tests.cases import Workshop
from tests.functional_tests.failing_jobs import FailingJobs
from tests.functional_tests.harness import JobRunner

_table: list[str] = []
_runners: list[JobRunner] = []
_failing: list[FailingJobs] = []


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> JobRunner:
    runner = JobRunner(tmp_path_factory.mktemp("jobs"))
    _runners.append(runner)
    return runner


@pytest.fixture(scope="session")
def workshop(jobs: JobRunner) -> Workshop:
    return Workshop(jobs)


@pytest.fixture(scope="session")
def failing_jobs(jobs: JobRunner) -> FailingJobs:
    _failing.append(FailingJobs(jobs))
    return _failing[-1]


@pytest.fixture
def table_row() -> Callable[[str], None]:
    """Add a line to the table that is shown after the tests."""
    return _table.append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _table:
        terminalreporter.section("targets used, compared with the float64 oracle")
        for line in _table:
            terminalreporter.line(line)
    for runner in _runners:
        total = sum(job.seconds for job in runner.finished)
        terminalreporter.section(f"{len(runner.finished)} training jobs, {total:.0f} s")
        for job in runner.finished:
            terminalreporter.line(f"{job.seconds:6.1f} s  {job.name}")
    for failing in _failing:
        terminalreporter.section("seconds from the message of a failure to the end of the job")
        for failed in failing.ended:
            terminalreporter.line(f"{failed.seconds:6.1f} s  {failed.job.name}")
