"""A pytest plugin for the processes that run tests: the device, threads, seeds and skipping."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.conftest import NO_GPU, NO_KERNELS, SEED_VARIABLE


def pytest_configure(config: pytest.Config) -> None:
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, min(torch.get_num_threads() // workers, 4)))
    if workers > 1:  # also for programs that tests start, since workers share the processors
        os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # triton reads it when it is first imported


def _why_no_gpu(kernels: bool = True) -> str | None:
    if not torch.cuda.is_available():
        return NO_GPU
    from hstu_attn import ops

    return None if ops.has_cuda_kernels() or not kernels else NO_KERNELS


def _release_gpu_memory() -> None:
    """Releases the GPU memory that this process no longer uses."""
    for name in ("last_exc", "last_value", "last_traceback"):
        vars(sys).pop(name, None)  # pytest keeps the last failure, whose frames hold tensors
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()


def why_no_memory(gib: float) -> str | None:
    """Returns why a test that takes `gib` GiB of GPU memory cannot run, or None."""
    _release_gpu_memory()
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free >= gib:
        return None
    return f"needs {gib} GiB free, cuda:{torch.cuda.current_device()} has {free:.1f} GiB"


@pytest.hookimpl(trylast=True)  # after the choice of -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU, keeps one case of each test that needs one, whose skip stands for all."""
    if torch.cuda.is_available():
        return
    first: dict[str, pytest.Item] = {}
    others = []
    for item in items:
        name = item.nodeid.partition("[")[0]
        if item.get_closest_marker("gpu") and first.setdefault(name, item) is not item:
            others.append(item)
    config.hook.pytest_deselected(items=others)
    dropped = set(others)
    items[:] = [item for item in items if item not in dropped]


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if marker and (reason := _why_no_gpu(**marker.kwargs)):
        pytest.skip(reason)
    marker = item.get_closest_marker("gpu_memory")
    if marker and (reason := why_no_memory(*marker.args)):
        pytest.skip(reason)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu_memory") and torch.cuda.is_initialized():
        _release_gpu_memory()


@pytest.fixture(autouse=True, scope="module")
def _no_search_of_what_stays() -> None:
    """Makes garbage collection skip objects older than the module: imports and all tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """Seeds the random generators from the seed of the run and the test's name alone."""
    seed = hash_of(os.environ[SEED_VARIABLE] + request.node.nodeid)
    if torch.cuda.is_available():
        torch.manual_seed(seed)
    else:  # faster than torch.manual_seed, which records its stack for each kind of device
        torch.default_generator.manual_seed(seed)


def hash_of(text: str) -> int:
    """Returns a hash that is the same in every process."""
    value = 0
    for byte in text.encode():
        value = (value * 1000003 + byte) % 2**63
    return value


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Makes gradients on a GPU bitwise deterministic, for tests that compare two calls."""
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
