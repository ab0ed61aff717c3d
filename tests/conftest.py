"""Hooks of the whole suite. Fixtures, and code that needs torch, are in `tests.helpers.devices`,
which xdist's controller process does not load.
"""

from __future__ import annotations

import gc
import os
import random
from collections import Counter
from collections.abc import Generator

import hypothesis
import pytest

from tests.helpers.failures_at_once import pytest_sessionstart  # noqa: F401

SEED_VARIABLE = "HSTU_ATTN_TEST_SEED"
NO_GPU, NO_KERNELS = "needs a GPU", "needs a build with CUDA kernels"
NO_REDIS = "needs redis-server, and Python's package redis"
NO_TMPFS = "needs to mount a tmpfs, as root may"
NO_WAITAOF = "needs redis-server 7.2 or later, or Valkey's under that name"

for _profile, _examples in (("suite", 100), ("quick", 15)):
    hypothesis.settings.register_profile(
        _profile,
        deadline=None,
        max_examples=_examples,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
hypothesis.settings.load_profile("suite")


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get(SEED_VARIABLE, "random") in ("", "random"):
        os.environ[SEED_VARIABLE] = str(random.SystemRandom().randrange(2**31))
    has_workers = config.getoption("numprocesses", None) and not config.option.collectonly
    if hasattr(config, "workerinput") or not has_workers:
        config.pluginmanager.import_plugin("tests.helpers.devices")


def pytest_report_header(config: pytest.Config) -> str:
    return (
        f"inputs: {SEED_VARIABLE}={os.environ[SEED_VARIABLE]} "
        "(set it to repeat them; unset or 'random' draws a seed for each run)"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disables garbage collection while tests are collected, since no garbage is created."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs files with many slow tests first, so that xdist workers end at about the same time."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    for reason in (NO_GPU, NO_KERNELS, NO_REDIS, NO_TMPFS, NO_WAITAOF):
        if count := sum(reason in text for text in skipped):
            terminalreporter.write_line(f"{count} tests skipped: {reason}")
