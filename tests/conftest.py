"""Fixtures and hooks of the whole suite: the seed, the device, and what the GPU kernels lack."""

from __future__ import annotations

import os
import random
from collections.abc import Generator, Iterator

import hypothesis
import pytest
import torch

_SEED_VARIABLE = "HSTU_ATTN_TEST_SEED"

hypothesis.settings.register_profile(
    "suite",
    deadline=None,
    max_examples=100,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("suite")


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get(_SEED_VARIABLE, "random") in ("", "random"):
        os.environ[_SEED_VARIABLE] = str(random.SystemRandom().randrange(2**31))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, min(torch.get_num_threads() // workers, 4)))
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # triton reads it when it is first imported


def pytest_report_header(config: pytest.Config) -> str:
    return (
        f"inputs: {_SEED_VARIABLE}={os.environ[_SEED_VARIABLE]} "
        "(set it to repeat them; unset or 'random' draws a seed for each run)"
    )


def _why_no_gpu(kernels: bool = True) -> str | None:
    if not torch.cuda.is_available():
        return "needs a GPU"
    from hstu_attn import ops

    return None if ops.has_cuda_kernels() or not kernels else "needs a build with CUDA kernels"


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if marker and (reason := _why_no_gpu(**marker.kwargs)):
        pytest.skip(reason)


# ---------------------------------------------------------------------------------------------
# What the GPU kernels do not have yet
# ---------------------------------------------------------------------------------------------

# A test marked gpu_missing(feature) must fail on a GPU, and with this message.
_REFUSALS = {"relative bias": "the relative bias is not built for GPUs"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks cases whose parameter `bias` names a relative bias; other tests carry the mark."""
    from hstu_attn.testing import BIAS_NAMES  # imports triton, so TRITON_INTERPRET must be set

    relative = {name for name in BIAS_NAMES if not name.startswith("rab")}
    for item in items:
        callspec = getattr(item, "callspec", None)
        bias = callspec and callspec.params.get("bias")
        if isinstance(bias, str) and bias in relative:
            item.add_marker(pytest.mark.gpu_missing("relative bias"))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Treats `gpu_missing` as `xfail(strict=True)` does, and compares the error's message."""
    missing = pyfuncitem.get_closest_marker("gpu_missing")
    if missing is None or pyfuncitem.get_closest_marker("gpu") is None:
        return (yield)
    (feature,) = missing.args
    try:
        yield
    except RuntimeError as error:  # direct callers of an operator do not get NotImplementedError
        if _REFUSALS[feature] not in str(error):
            raise
        pytest.xfail(f"GPU kernels have no {feature}")
    pytest.fail(f"GPU kernels have a {feature}: take the mark gpu_missing away", pytrace=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reason = _why_no_gpu()
    skipped = terminalreporter.stats.get("skipped", [])
    count = sum(reason is not None and reason in str(report.longrepr) for report in skipped)
    if count:
        terminalreporter.write_line(f"{count} tests skipped: {reason}")


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """Each test's inputs depend on the seed of the run and on the test's name alone."""
    torch.manual_seed(hash_of(os.environ[_SEED_VARIABLE] + request.node.nodeid))


def hash_of(text: str) -> int:
    """Returns a hash that is the same in every process."""
    value = 0
    for byte in text.encode():
        value = (value * 1000003 + byte) % 2**63
    return value


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Makes gradients bitwise repeatable for tests that compare two calls, as on a CPU."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# A GPU of compute capability 9.0 runs every test twice, with the kernels of sm90 and of sm80.
_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
_ARCHS = ["sm90", "sm80"] if _HOPPER else ["sm80"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("gpu")
    if marker and marker.kwargs.get("kernels", True) and "device" not in metafunc.fixturenames:
        metafunc.parametrize("_arch", _ARCHS, indirect=True)


@pytest.fixture(autouse=True)
def _arch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chooses the GPU kernels that a test runs."""
    if arch := getattr(request, "param", None):
        monkeypatch.setenv("HSTU_ATTN_FORCE_ARCH", arch.removeprefix("sm"))


@pytest.fixture(
    params=["cpu", *(pytest.param(f"cuda-{arch}", marks=pytest.mark.gpu) for arch in _ARCHS)]
)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test on the CPU and on a GPU, with the kernels of each architecture."""
    name, _, arch = str(request.param).partition("-sm")
    if arch:
        monkeypatch.setenv("HSTU_ATTN_FORCE_ARCH", arch)
    return name
