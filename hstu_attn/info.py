"""Says what this machine gets from hstu_attn, and checks it: `python -m hstu_attn.info`.

It prints the versions, the kernels that each device gets and why, and for each device the time of
one small forward next to torch's attention, after that forward has been compared with
`hstu_attn.reference`. The exit status is 0 if everything works that this machine should be able to
do, else 1; in the latter case the last lines name each failure and its remedy.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import itertools
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from . import ops, reference
from ._version import __version__
from .interface import hstu_attention
from .testing import Batch, check_against_reference, make_batch, run

__all__ = ["main"]

OLDEST_CAPABILITY = (8, 0)
WARM_UP, ROUNDS = 5, 21
SPIN_CYCLES = 20_000_000  # about 10 ms, in which the host enqueues all rounds
REINSTALL_CUDA = f"In a checkout, run `HSTU_ATTN_CUDA=1 {ops.REINSTALL}`"


class Failure(Exception):
    """A problem and its remedy, in one line."""


# ---------------------------------------------------------------------------------------------
# The environment
# ---------------------------------------------------------------------------------------------


def nvidia_smi() -> list[tuple[str, str]]:
    """Returns the name and driver version of each GPU of this machine; empty without a driver."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if result.returncode:
        return []
    rows = (line.rpartition(",") for line in result.stdout.splitlines())
    return [(name.strip(), driver.strip()) for name, comma, driver in rows if comma]


def describe(what: str, *index: int) -> dict[str, str]:
    """Returns what csrc/api/describe.cpp reports about "cpu", "environment", "build" or "gpu".

    Args:
        what: one of these four names.
        index: the index of the GPU, for "gpu".
    """
    try:
        function = getattr(ctypes.CDLL(str(ops.LIBRARY_PATH)), f"hstu_attn_describe_{what}")
    except AttributeError:
        raise Failure(
            f"{ops.LIBRARY_PATH}: expected a library of hstu_attn {__version__}; got an older one. "
            f"In a checkout, run `{ops.REINSTALL}`"
        ) from None
    function.restype = ctypes.c_char_p
    text: str = function(*index).decode()
    if text.startswith("error "):
        raise Failure(text.removeprefix("error ").removeprefix("NotImplementedError: "))
    return dict(line.split(" ", 1) for line in text.splitlines())


def cuda_version(number: str | int) -> str:
    """Converts CUDA's version number, such as 12080, to text: 12.8."""
    return f"{int(number) // 1000}.{int(number) % 1000 // 10}"


def gpu_count() -> int:
    """Returns the number of NVIDIA GPUs that torch can use; a ROCm build of torch has none."""
    return torch.cuda.device_count() if torch.version.cuda and torch.cuda.is_available() else 0


def triton_version() -> str:
    """Returns the version of Triton, which the fused layers need on a GPU."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "not installed; HSTULayer then composes torch's functions"


# ---------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------


def gpu_access(gpus: list[tuple[str, str]]) -> str:
    """Reports how many GPUs torch can use, or why it can use none of those in `gpus`."""
    if count := gpu_count():
        return f"{count} visible to torch"
    if not gpus:
        return "none"
    name, driver = gpus[0]
    version = torch.__version__
    if not torch.version.cuda:
        raise Failure(
            f"torch: expected a CUDA build, since nvidia-smi lists {name}; got {version}. "
            "Run `pip install --force-reinstall torch`, whose default on PyPI is a CUDA build "
            f"(https://pytorch.org lists others). {REINSTALL_CUDA}"
        )
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return f"hidden by CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']}"
    try:
        torch.cuda.init()
        reason = "torch.cuda.is_available() is False"
    except (AssertionError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
    raise Failure(
        f"torch {version} (CUDA {torch.version.cuda}) cannot use {name}, which nvidia-smi "
        f"lists with driver {driver}: {reason}. Update the driver, or install a torch "
        "that is built for an older CUDA"
    )


def gpu_kernels(index: int, build: dict[str, str]) -> str:
    """Returns which kernels a GPU gets, and why."""
    major, minor = torch.cuda.get_device_capability(index)
    gpu = f"a GPU of compute capability {major}.{minor}"
    if (major, minor) < OLDEST_CAPABILITY:
        return f"none: {gpu} is older than 8.0, the oldest that has kernels; use the CPU"
    if not build:
        raise Failure(
            f"torch sees {gpu}, but this build of hstu_attn has no CUDA kernels. {REINSTALL_CUDA}"
        )
    runtime, driver = int(build["runtime"]), int(build["driver"])
    if driver // 1000 < runtime // 1000:
        raise Failure(
            f"driver: expected one for CUDA {runtime // 1000}.0 or later, because hstu_attn was "
            f"built with CUDA {cuda_version(runtime)}; got one for CUDA {cuda_version(driver)}. "
            f"Update the driver, or build with an older CUDA toolkit, to which CUDA_HOME leads. "
            f"{REINSTALL_CUDA}"
        )
    forced = describe("environment").get("HSTU_ATTN_FORCE_ARCH")
    try:
        device = describe("gpu", index)
    except Failure as failure:
        advice = f"Unset HSTU_ATTN_FORCE_ARCH={forced}" if forced else REINSTALL_CUDA
        raise Failure(f"cuda:{index}: {failure}. {advice}") from None
    if forced:
        reason = f"HSTU_ATTN_FORCE_ARCH={forced}"
    elif device["arch"] == "90":
        reason = gpu + (", and sm80 for what sm90 lacks" if "sm80" in build["archs"] else "")
    elif (major, minor) == (9, 0):
        reason = "sm90 is not in this build"
    else:
        reason = f"{gpu}; sm90 is for 9.0 alone"
    return f"sm{device['arch']}: {reason}; {device['shared_memory']} bytes of shared memory a block"


# ---------------------------------------------------------------------------------------------
# One forward
# ---------------------------------------------------------------------------------------------


def small_batch(device: str, build: dict[str, str]) -> Batch:
    """Makes 4 causal sequences of one length, in a dtype and head dim that the build supports."""
    dtype, dim, length = torch.float32, 64, 256
    if device != "cpu":
        dtype = torch.bfloat16 if "bfloat16" in build["dtypes"] else torch.float16
        dim, length = min(64, max(map(int, build["head_dims"].split(", ")))), 1024
    return make_batch([length] * 4, heads=4, dim=dim, dtype=dtype, device=device, mask="causal")


def median_us(function: Callable[[], object], device: str) -> float:
    """Returns the median time of a call in microseconds; on a GPU, host time is excluded."""
    for _ in range(WARM_UP):
        function()
    if device == "cpu":
        times = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e6
    with torch.cuda.device(device):
        stamps = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS + 1)]
        torch.cuda._sleep(SPIN_CYCLES)
        stamps[0].record()
        for stamp in stamps[1:]:
            function()
            stamp.record()
        torch.cuda.synchronize()
    times = [start.elapsed_time(end) for start, end in itertools.pairwise(stamps)]
    return statistics.median(times) * 1e3


def torch_attention_us(batch: Batch, device: str) -> tuple[str, float]:
    """Times causal softmax attention of the same shape, by flash attention where torch has it."""
    sequences = batch.cu_seqlens_q.shape[0] - 1
    q, k, v = (
        tensor.unflatten(0, (sequences, -1)).transpose(1, 2)
        for tensor in (batch.q, batch.k, batch.v)
    )

    def attend() -> object:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    try:
        with warnings.catch_warnings(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            warnings.simplefilter("ignore")  # torch says why flash attention cannot be used
            return "torch's flash attention", median_us(attend, device)
    except RuntimeError:
        return "torch's attention", median_us(attend, device)


def try_forward(device: str, build: dict[str, str]) -> str:
    """Compares a forward with the reference, then times it next to torch's attention."""
    torch.manual_seed(0)
    try:
        batch = small_batch(device, build)
        out = check_against_reference(hstu_attention, batch, backward=False)["out"]
        exact = run(reference.hstu_attention, batch, dtype=torch.float64)["out"]
        error, largest = (out - exact).abs().max().item(), exact.abs().max().item()
        options = batch.options()
        ours = median_us(lambda: hstu_attention(batch.q, batch.k, batch.v, **options), device)
        name, theirs = torch_attention_us(batch, device)
    except (AssertionError, RuntimeError, ValueError) as problem:
        first_line = str(problem).partition("\n")[0]
        raise Failure(f"{device}: the forward fails: {first_line}") from None
    dtype = str(batch.q.dtype).removeprefix("torch.")
    return (
        f"{ours:.1f} us, {name} {theirs:.1f} us (causal, 4 sequences of {batch.max_seqlen_q}, "
        f"4 heads of {batch.q.shape[2]}, {dtype}); largest error {error:.1e} in values up to "
        f"{largest:.1e}, which is within the tolerance"
    )


# ---------------------------------------------------------------------------------------------
# The report
# ---------------------------------------------------------------------------------------------


def say(name: str, text: str) -> None:
    """Prints a line of the report."""
    print(f"{name + ':':<16}{text}", flush=True)


def cuda_build(build: dict[str, str]) -> str:
    """Returns the CUDA kernels that the library holds, whether or not there is a GPU."""
    if not build:
        return "none in this build"
    driver = (
        f"is for CUDA {cuda_version(build['driver'])}" if build["driver"] != "0" else "is absent"
    )
    fp8 = "" if build["fp8"] == "none" else f"; {build['fp8']} for float8_e4m3fn"
    return (
        f"{build['archs']} for {build['dtypes']}, head dims up to {build['head_dims']}{fp8}; "
        "torch's functions for float32 and float64; built with CUDA "
        f"{cuda_version(build['runtime'])}; the driver {driver}"
    )


def cpu_kernels() -> str:
    """Returns the instruction set of the kernel that each dtype gets."""
    levels = ", ".join(f"{isa} for {dtype}" for dtype, isa in describe("cpu").items())
    cap = describe("environment").get("HSTU_ATTN_CPU_ISA")
    return f"{levels}; {torch.get_num_threads()} threads" + (
        f"; HSTU_ATTN_CPU_ISA={cap}" if cap else ""
    )


def report() -> list[str]:
    """Prints the report line by line; returns a line for each failure."""
    failures: list[str] = []

    def attempt(name: str, function: Callable[..., str], *arguments: object) -> bool:
        try:
            say(name, function(*arguments))
        except Failure as failure:
            say(name, "FAILED, see below")
            failures.append(str(failure))
            return False
        return True

    gpus = nvidia_smi()
    say("hstu_attn", f"{__version__} in {Path(__file__).parent}")
    say("Python", platform.python_version())
    say("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}")
    say("Triton", triton_version())
    say("driver", gpus[0][1] if gpus else "none: nvidia-smi finds no GPU")
    attempt("GPUs", gpu_access, gpus)
    try:
        if ops._load_error:
            raise Failure(ops._load_error)
        build = describe("build")
    except Failure as failure:
        return [*failures, str(failure)]

    say("CUDA kernels", cuda_build(build))
    if attempt("cpu kernels", cpu_kernels):
        attempt("cpu forward", try_forward, "cpu", build)
    for index in range(gpu_count()):
        device, properties = f"cuda:{index}", torch.cuda.get_device_properties(index)
        capability = properties.major, properties.minor
        say(
            device,
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.multi_processor_count} multiprocessors",
        )
        usable = attempt(f"{device} kernels", gpu_kernels, index, build)
        if usable and capability >= OLDEST_CAPABILITY:
            attempt(f"{device} forward", try_forward, device, build)
    return list(dict.fromkeys(failures))


def main() -> int:
    """Prints the report; returns 0 if everything that should work on this machine does, else 1."""
    failures = report()
    for failure in failures:
        print(f"FAILED: {failure}")
    if not failures:
        print("OK: everything works that this machine should be able to do")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
