"""A pytest plugin that prints a failure as soon as an xdist worker reports it.

pytest itself prints failures at the end, which an interrupted run does not reach.
"""

from __future__ import annotations

import pytest

__all__ = ["pytest_sessionstart"]


class _FailuresAtOnce:
    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self.reporter = reporter

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.reporter.write_sep("_", f"{report.nodeid} ({report.when})")
            for title, text in (("", report.longreprtext), *report.sections):
                self.reporter.write_line(f"{title}\n{text}")
            self.reporter.flush()


def pytest_sessionstart(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    if reporter and session.config.getoption("numprocesses", None):
        session.config.pluginmanager.register(_FailuresAtOnce(reporter))
