# SPDX-License-Identifier: Apache-2.0
"""Fixtures that the functional tests share: one corpus, one teacher, its dumps, its students.

With ``-n`` several processes run the tests, and each makes what its tests share.
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.functional_tests.cases import STRATEGIES, Workshop
from tests.functional_tests.failing_jobs import FailingJobs
from tests.functional_tests.harness import JobRunner

MATRIX = (
    "test_layouts",
    "test_student",
    "test_targets",
    "test_teacher",
    "test_tool_convert",
    "test_tool_diff",
    "test_tool_import",
    "test_tool_info",
    "test_tool_plan",
    "test_tool_repair",
    "test_tool_report",
    "test_tool_show",
    "test_tool_verify",
)
"""Modules whose tests share most dumps and students; those of other modules share but a few."""

LONG = ("test_kills", *MATRIX)
"""Modules that take longest, to be begun first, so that processes end at about the same time."""

_ROW, _JOB, _END = "row of the table", "training job", "end of a failed job"
Timing = tuple[str, tuple[float, str]]
"""What was timed; seconds, and the name of the job."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--logits-save-format",
        choices=["mixed", "2", "3"],
        default="mixed",
        help="format of every dump; by default each has its own, so that both are tested",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Have one process run the tests of a module, and one those of all of :data:`MATRIX`."""
    from xdist.scheduler import LoadScopeScheduling

    class ByJobs(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            module = nodeid.partition("::")[0]
            return "matrix" if Path(module).stem in MATRIX else module

    # It would begin with the modules of most tests, and few jobs may take long.
    config.option.loadscopereorder = False
    return ByJobs(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of :data:`LONG` first; all others stay in order."""
    order = {stem: number for number, stem in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONG)))


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> JobRunner:
    return JobRunner(tmp_path_factory.mktemp("jobs"))


@pytest.fixture(scope="session")
def workshop(jobs: JobRunner, pytestconfig: pytest.Config) -> Workshop:
    # The option is not known where pytest was started for all tests.
    asked = pytestconfig.getoption("--logits-save-format", "mixed")
    return Workshop(jobs, None if asked == "mixed" else int(asked))


@pytest.fixture(scope="session")
def failing_jobs(jobs: JobRunner) -> FailingJobs:
    return FailingJobs(jobs)


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> list[str]:
    """Give the flags of a checkpoint strategy; skips that of a package that is not installed."""
    if request.param == "nvrx":
        pytest.importorskip("nvidia_resiliency_ext")
    return ["--async-strategy", request.param]


@pytest.fixture
def table_row(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Add a line to the table that is shown after the tests."""
    return lambda row: record_property(_ROW, row)


@pytest.fixture(scope="session")
def new_timings(jobs: JobRunner, failing_jobs: FailingJobs) -> Callable[[], list[Timing]]:
    """Give what each job took, and the end of one that fails, once."""
    given = {_JOB: 0, _END: 0}

    def new() -> list[Timing]:
        timings = {
            _JOB: [(job.seconds, job.name) for job in jobs.finished],
            _END: [(failed.seconds, failed.job.name) for failed in failing_jobs.ended],
        }
        found = [(kind, timing) for kind in timings for timing in timings[kind][given[kind] :]]
        given.update({kind: len(timings[kind]) for kind in timings})
        return found

    return new


@pytest.fixture(autouse=True)
def recorded_timings(
    new_timings: Callable[[], list[Timing]],
    record_property: Callable[[str, object], None],
) -> Iterator[None]:
    """Keep what jobs took in the test's report, which reaches the process that shows it."""
    yield
    for kind, timing in new_timings():
        record_property(kind, timing)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    shown: dict[str, list[Any]] = {_ROW: [], _JOB: [], _END: []}
    for report in itertools.chain(*terminalreporter.stats.values()):
        # Those of the other phases have a part of the same.
        if isinstance(report, pytest.TestReport) and report.when == "teardown":
            for name, value in report.user_properties:
                if name in shown:
                    shown[name].append(value)
    if shown[_ROW]:
        terminalreporter.section("targets used, compared with the float64 oracle")
        for line in shown[_ROW]:
            terminalreporter.line(line)
    total = sum(seconds for seconds, _ in shown[_JOB])
    titles = {
        _JOB: f"{len(shown[_JOB])} training jobs, {total:.0f} s",
        _END: "seconds from the message of a failure to the end of the job",
    }
    for kind, title in titles.items():
        if shown[kind]:
            terminalreporter.section(title)
        for seconds, name in shown[kind]:
            terminalreporter.line(f"{seconds:6.1f} s  {name}")
