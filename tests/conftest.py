"""Fixtures of the whole suite: a fresh seed, the device, and a count of what needed a GPU."""

from __future__ import annotations

import os
import random
from collections.abc import Generator, Iterator

import hypothesis
import pytest
import torch

_SEED_VARIABLE = "HSTU_ATTN_TEST_SEED"
_skipped_for_gpu = 0

hypothesis.settings.register_profile(
    "suite",
    deadline=None,
    max_examples=100,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("suite")


def pytest_configure(config: pytest.Config) -> None:
    seed = os.environ.get(_SEED_VARIABLE) or str(random.SystemRandom().randrange(2**31))
    os.environ[_SEED_VARIABLE] = seed
    torch.set_num_threads(min(torch.get_num_threads(), 4))
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # counts when triton is first imported


def pytest_report_header(config: pytest.Config) -> str:
    return f"inputs: {_SEED_VARIABLE}={os.environ[_SEED_VARIABLE]}"


def _why_no_gpu(kernels: bool = True) -> str | None:
    if not torch.cuda.is_available():
        return "needs a GPU"
    from hstu_attn import ops

    return None if ops.has_cuda_kernels() or not kernels else "needs a build with CUDA kernels"


def pytest_runtest_setup(item: pytest.Item) -> None:
    global _skipped_for_gpu
    marker = item.get_closest_marker("gpu")
    if marker and (reason := _why_no_gpu(**marker.kwargs)):
        _skipped_for_gpu += 1
        pytest.skip(reason)


# What GPU kernels do not have yet: tests that come upon it on a GPU are skipped, and say so.
_NOT_BUILT_FOR_GPUS = ("the relative bias is not built for GPUs",)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    try:
        return (yield)
    except RuntimeError as error:
        missing = [reason for reason in _NOT_BUILT_FOR_GPUS if reason in str(error)]
        if missing and pyfuncitem.get_closest_marker("gpu"):
            pytest.skip(missing[0])
        raise


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _skipped_for_gpu:
        terminalreporter.write_line(f"{_skipped_for_gpu} tests skipped: {_why_no_gpu()}")


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """Fresh inputs in every run of the suite; each test's depend on the seed and its name alone."""
    torch.manual_seed(hash_of(os.environ[_SEED_VARIABLE] + request.node.nodeid))


def hash_of(text: str) -> int:
    """A hash that is the same in every process."""
    value = 0
    for byte in text.encode():
        value = (value * 1000003 + byte) % 2**63
    return value


@pytest.fixture
def deterministic() -> Iterator[None]:
    """For tests that compare gradients of two calls bit for bit; always so on a CPU."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# A GPU of compute capability 9.0 runs the kernels of both folders, and every test by both.
_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
_ARCHS = ["sm90", "sm80"] if _HOPPER else ["sm80"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("gpu")
    if marker and marker.kwargs.get("kernels", True) and "device" not in metafunc.fixturenames:
        metafunc.parametrize("_arch", _ARCHS, indirect=True)


@pytest.fixture(autouse=True)
def _arch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU kernels that a test runs."""
    if arch := getattr(request, "param", None):
        monkeypatch.setenv("HSTU_ATTN_FORCE_ARCH", arch.removeprefix("sm"))


@pytest.fixture(
    params=["cpu", *(pytest.param(f"cuda-{arch}", marks=pytest.mark.gpu) for arch in _ARCHS)]
)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test that asks for a device runs on the CPU and on a GPU."""
    name, _, arch = str(request.param).partition("-sm")
    if arch:
        monkeypatch.setenv("HSTU_ATTN_FORCE_ARCH", arch)
    return name
