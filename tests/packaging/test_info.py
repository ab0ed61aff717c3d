"""Tests of `python -m hstu_attn.info`: its report is correct, and each failure names a remedy."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hstu_attn
from hstu_attn import info, ops

PACKAGE = Path(hstu_attn.__file__).parent
BUILD = {
    "archs": "sm80 sm90",
    "dtypes": "bfloat16 and float16",
    "fp8": "sm90",
    "head_dims": "32, 64, 128, 256",
    "runtime": "13000",
    "driver": "13010",
}
# Bounds of the printed error relative to the largest value: 16 eps of fp32, and 4 of bf16.
FLOAT32_TOLERANCE, BFLOAT16_TOLERANCE = 2**-19, 2**-5
H200 = [("NVIDIA H200", "580.65.06")]
REINSTALL_CUDA = (
    "`HSTU_ATTN_CUDA=1 pip install --no-cache-dir --force-reinstall --no-deps .`"  # as in README.md
)


def lines_of(out: str) -> dict[str, str]:
    """Returns the report as a dict; "FAILED" and "OK" hold its last lines."""
    found = dict(re.split(r":\s+", line, maxsplit=1) for line in out.splitlines())
    assert len(found) == len(out.splitlines()), out
    return found


def check_forward(line: str, tolerance: float) -> None:
    """Checks a line about a forward: both times are positive, and the relative error is small."""
    number = r"(\d[\d.e+-]*)"
    match = re.match(
        rf"{number} us, torch's (?:flash )?attention {number} us \(causal, .*\); "
        rf"largest error {number} in values up to {number}, which is within the tolerance$",
        line,
    )
    assert match, line
    ours, theirs, error, largest = map(float, match.groups())
    assert 0 < ours < 1e6
    assert 0 < theirs < 1e6
    assert 0 < error < tolerance * largest


@pytest.fixture
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "nvidia_smi", list)
    monkeypatch.setattr(info, "gpu_count", lambda: 0)


# ---------------------------------------------------------------------------------------------
# On a CPU
# ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_no_gpu")
def test_the_report_of_a_machine_without_a_gpu(capsys, monkeypatch):
    monkeypatch.delenv("HSTU_ATTN_CPU_ISA", raising=False)
    assert info.main() == 0
    report = lines_of(capsys.readouterr().out)
    assert report["hstu_attn"] == f"{hstu_attn.__version__} in {PACKAGE}"
    assert report["Python"] == "{}.{}.{}".format(*sys.version_info)
    assert report["torch"].startswith(f"{torch.__version__}, CUDA ")
    assert report["GPUs"] == "none"
    levels = {dtype: isa for isa, dtype in re.findall(r"(\w+) for (\w+)", report["cpu kernels"])}
    assert set(levels) == {"float32", "bfloat16", "float16"}
    assert set(levels.values()) <= {"baseline", "avx2", "avx512", "avx512bf16", "amx"}
    assert "HSTU_ATTN_CPU_ISA" not in report["cpu kernels"]
    assert (report["CUDA kernels"] == "none in this build") != ops.has_cuda_kernels()
    check_forward(report["cpu forward"], FLOAT32_TOLERANCE)
    assert not any(name.startswith(("cuda", "FAILED")) for name in report)


@pytest.mark.slow
@pytest.mark.usefixtures("_no_gpu")
def test_the_instruction_set_is_the_one_asked_for(capsys, monkeypatch):
    monkeypatch.setenv("HSTU_ATTN_CPU_ISA", "baseline")
    assert info.main() == 0
    text = lines_of(capsys.readouterr().out)["cpu kernels"]
    assert text.startswith("baseline for float32, baseline for bfloat16, baseline for float16; ")
    assert text.endswith("; HSTU_ATTN_CPU_ISA=baseline")


@pytest.mark.usefixtures("_no_gpu")
def test_an_unknown_instruction_set_fails(capsys, monkeypatch):
    monkeypatch.setenv("HSTU_ATTN_CPU_ISA", "avx1024")
    assert info.main() == 1
    failure = lines_of(capsys.readouterr().out)["FAILED"]
    assert failure.startswith(
        "HSTU_ATTN_CPU_ISA: expected baseline, avx2, avx512, avx512bf16 or amx"
    )
    assert failure.endswith("got avx1024")


@pytest.mark.usefixtures("_no_gpu")
def test_without_flash_attention_torch_uses_what_it_has(capsys, monkeypatch):
    def refuse(*backends: object) -> None:
        raise RuntimeError("No available kernel")

    monkeypatch.setattr(info, "sdpa_kernel", refuse)
    assert info.main() == 0
    line = lines_of(capsys.readouterr().out)["cpu forward"]
    check_forward(line, FLOAT32_TOLERANCE)
    assert " us, torch's attention " in line


@pytest.mark.usefixtures("_no_gpu")
def test_a_wrong_result_fails(capsys, monkeypatch):
    def doubled(*args: Any, **options: Any) -> torch.Tensor:
        return 2 * hstu_attn.hstu_attention(*args, **options)

    monkeypatch.setattr(info, "hstu_attention", doubled)
    assert info.main() == 1
    report = lines_of(capsys.readouterr().out)
    assert report["cpu forward"] == "FAILED, see below"
    assert report["FAILED"].startswith("cpu: the forward fails: out: error ")


@pytest.mark.slow
def test_it_runs_as_a_module_with_torch_alone():
    script = """
import runpy, sys
for name in ("numpy", "tqdm", "triton", "matplotlib"):
    sys.modules[name] = None
runpy.run_module("hstu_attn.info", run_name="__main__")
"""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1].startswith("OK: ")


# ---------------------------------------------------------------------------------------------
# The library
# ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("checkout", [True, False], ids=["in a checkout", "installed"])
def test_a_missing_library(tmp_path, checkout):
    """Python imports the sources without a library, as in a checkout after `pip install .`."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "hstu_attn", ignore=ignored)
    if checkout:
        (tmp_path / "setup.py").touch()
    command = [sys.executable, "-m", "hstu_attn.info"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    failure = result.stdout.splitlines()[-1]
    library = tmp_path / "hstu_attn/_C.abi3.so"
    assert failure.startswith(
        f"FAILED: hstu_attn: the operator library {library} does not exist. "
        + (f"This is the checkout in {tmp_path}, " if checkout else "In a checkout, ")
    )
    assert ("`pip install -e .`" if checkout else f"`{ops.REINSTALL}`") in failure


def test_a_library_that_does_not_load(tmp_path):
    library = tmp_path / "_C.abi3.so"
    library.write_text("no ELF file")
    with pytest.raises(ImportError, match=re.escape(ops.REINSTALL)) as caught:
        ops.load(library)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"hstu_attn: the operator library {library} does not load into torch ")
    assert str(caught.value.__cause__) in line


@pytest.mark.usefixtures("_no_gpu")
def test_a_library_of_an_older_checkout(capsys, monkeypatch):
    (host_module,) = PACKAGE.glob("_host*.so")  # a library without the operators
    monkeypatch.setattr(ops, "LIBRARY_PATH", host_module)
    assert info.main() == 1
    failure = lines_of(capsys.readouterr().out)["FAILED"]
    assert failure.startswith(f"{host_module}: expected a library of hstu_attn ")
    assert failure.endswith(f"`{ops.REINSTALL}`")


# ---------------------------------------------------------------------------------------------
# Made-up GPUs
# ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_no_gpu")
def test_a_cpu_build_of_torch_beside_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(info, "nvidia_smi", lambda: H200)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert info.main() == 1
    report = lines_of(capsys.readouterr().out)
    assert report["driver"] == "580.65.06"
    assert report["torch"].endswith("CUDA not built in")
    check_forward(report["cpu forward"], FLOAT32_TOLERANCE)
    failure = report["FAILED"]
    assert failure.startswith("torch: expected a CUDA build, since nvidia-smi lists NVIDIA H200; ")
    assert "`pip install --force-reinstall torch`" in failure
    assert failure.endswith(REINSTALL_CUDA)


@pytest.mark.usefixtures("_no_gpu")
def test_a_driver_that_is_too_old_for_torch(monkeypatch):
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\nand more")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(info.Failure) as caught:
        info.gpu_access(H200)
    assert str(caught.value) == (
        f"torch {torch.__version__} (CUDA 13.0) cannot use NVIDIA H200, which nvidia-smi lists "
        "with driver 580.65.06: The NVIDIA driver on your system is too old. Update the driver, or "
        "install a torch that is built for an older CUDA"
    )


@pytest.mark.usefixtures("_no_gpu")
def test_hidden_gpus_are_no_failure(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert info.gpu_access(H200) == "hidden by CUDA_VISIBLE_DEVICES=-1"


@pytest.fixture
def kernels(monkeypatch):
    """Calls `gpu_kernels` for a fake GPU and a fake build, in the real environment."""
    library = ctypes.CDLL(str(ops.LIBRARY_PATH))

    def call(capability: tuple[int, int], build: dict[str, str], gpu: str = "arch 80") -> str:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        text = gpu if gpu.startswith("error") else f"{gpu}\nshared_memory 101376"
        library.hstu_attn_describe_gpu = lambda index: text.encode()
        monkeypatch.setattr(info.ctypes, "CDLL", lambda path: library)
        return info.gpu_kernels(0, build)

    monkeypatch.delenv("HSTU_ATTN_FORCE_ARCH", raising=False)
    return call


SHARED = "; 101376 bytes of shared memory a block"
GPU = "a GPU of compute capability"


@pytest.mark.parametrize(
    ("capability", "build", "arch", "forced", "expected"),
    [
        ((9, 0), {}, "90", None, f"sm90: {GPU} 9.0, and sm80 for what sm90 lacks{SHARED}"),
        ((9, 0), {"archs": "sm90"}, "90", None, f"sm90: {GPU} 9.0{SHARED}"),
        ((9, 0), {"archs": "sm80"}, "80", None, f"sm80: sm90 is not in this build{SHARED}"),
        ((9, 0), {}, "80", "80", f"sm80: HSTU_ATTN_FORCE_ARCH=80{SHARED}"),
        ((8, 6), {}, "80", None, f"sm80: {GPU} 8.6; sm90 is for 9.0 alone{SHARED}"),
        ((12, 0), {}, "80", None, f"sm80: {GPU} 12.0; sm90 is for 9.0 alone{SHARED}"),
    ],
)
def test_which_kernels_and_why(kernels, monkeypatch, capability, build, arch, forced, expected):
    if forced:
        monkeypatch.setenv("HSTU_ATTN_FORCE_ARCH", forced)
    assert kernels(capability, BUILD | build, f"arch {arch}") == expected


def test_what_the_build_holds():
    start = "sm80 sm90 for bfloat16 and float16, head dims up to 32, 64, 128, 256; "
    without_fp8 = info.cuda_build(BUILD | {"fp8": "none"})
    assert without_fp8.startswith(f"{start}torch's functions for float32")
    start += "sm90 for float8_e4m3fn; torch's functions for float32 and float64; "
    assert info.cuda_build(BUILD) == f"{start}built with CUDA 13.0; the driver is for CUDA 13.1"
    no_driver = info.cuda_build(BUILD | {"runtime": "12080", "driver": "0"})
    assert no_driver == f"{start}built with CUDA 12.8; the driver is absent"


def test_a_gpu_that_is_too_old_is_no_failure(kernels):
    for build in (BUILD, {}):
        text = kernels((7, 5), build)
        assert text.startswith(f"none: {GPU} 7.5 is older than 8.0")


def test_a_build_without_cuda_kernels(kernels):
    with pytest.raises(info.Failure) as caught:
        kernels((8, 9), {})
    assert str(caught.value) == (
        f"torch sees {GPU} 8.9, but this build of hstu_attn has no CUDA kernels. "
        f"In a checkout, run {REINSTALL_CUDA}"
    )


def test_a_driver_that_is_too_old_for_the_library(kernels):
    with pytest.raises(info.Failure) as caught:
        kernels((8, 9), BUILD | {"driver": "12080"})
    assert str(caught.value).startswith(
        "driver: expected one for CUDA 13.0 or later, because hstu_attn was built with CUDA 13.0; "
        "got one for CUDA 12.8. Update the driver, or build with an older CUDA toolkit"
    )
    assert kernels((8, 9), BUILD | {"runtime": "13010", "driver": "13000"}).startswith("sm80: ")


def test_kernels_that_are_not_built(kernels, monkeypatch):
    error = "error NotImplementedError: no sm80 kernels for a GPU of compute capability 8.9"
    with pytest.raises(info.Failure) as caught:
        kernels((8, 9), BUILD | {"archs": "sm90"}, error)
    assert str(caught.value) == (
        f"cuda:0: no sm80 kernels for {GPU} 8.9. In a checkout, run {REINSTALL_CUDA}"
    )
    monkeypatch.setenv("HSTU_ATTN_FORCE_ARCH", "90")
    with pytest.raises(info.Failure, match=r"8\.9\. Unset HSTU_ATTN_FORCE_ARCH=90$"):
        kernels((8, 9), BUILD, error)


@pytest.mark.usefixtures("_no_gpu")
def test_many_gpus_fail_with_one_line(capsys, monkeypatch):
    properties = SimpleNamespace(name="NVIDIA L4", major=8, minor=9, multi_processor_count=58)
    monkeypatch.setattr(info, "gpu_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(
        info, "describe", lambda what, *index: {"float32": "avx2"} if what == "cpu" else {}
    )
    assert info.main() == 1
    out = capsys.readouterr().out
    assert out.count("FAILED: ") == 1
    report = lines_of(out)
    assert report["GPUs"] == "2 visible to torch"
    assert report["cuda:1"] == "NVIDIA L4, compute capability 8.9, 58 multiprocessors"
    assert report["cuda:1 kernels"] == "FAILED, see below"
    assert "cuda:1 forward" not in report


def test_what_nvidia_smi_says(monkeypatch):
    answers = iter(
        [
            SimpleNamespace(returncode=0, stdout="NVIDIA L4, 550.54\nNVIDIA L4, 550.54\n"),
            SimpleNamespace(returncode=9, stdout="NVIDIA-SMI has failed, because\n"),
        ]
    )
    monkeypatch.setattr(info.subprocess, "run", lambda *args, **options: next(answers))
    assert info.nvidia_smi() == [("NVIDIA L4", "550.54")] * 2
    assert info.nvidia_smi() == []
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "/nonexistent")
    assert info.nvidia_smi() == []


# ---------------------------------------------------------------------------------------------
# Real GPUs
# ---------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_the_report_of_a_gpu(capfd, monkeypatch):
    """The report is right with the kernels that the fixture forces, and by default."""
    monkeypatch.setenv("HSTU_ATTN_DEBUG", "1")
    forced = os.environ["HSTU_ATTN_FORCE_ARCH"]
    major, minor = torch.cuda.get_device_capability()
    for arch in (f"HSTU_ATTN_FORCE_ARCH={forced}", f"{GPU} {major}.{minor}"):
        assert info.main() == 0, capfd.readouterr().out
        out, err = capfd.readouterr()
        report = lines_of(out)
        used = re.findall(r"^hstu_attn: forward by (sm\d0)$", err, re.MULTILINE)
        assert len(set(used)) == 1, err
        kernels = report["cuda:0 kernels"]
        assert kernels.startswith(f"{used[0]}: {arch}"), kernels
        assert int(re.search(r"(\d+) bytes of shared memory", kernels)[1]) >= 99 * 1024
        assert report["cuda:0"] == (
            f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}, "
            f"{torch.cuda.get_device_properties(0).multi_processor_count} multiprocessors"
        )
        assert re.match(
            r"sm\d0.* for \w*float16.*; built with CUDA \d+\.\d+;", report["CUDA kernels"]
        )
        check_forward(report["cuda:0 forward"], BFLOAT16_TOLERANCE)
        check_forward(report["cpu forward"], FLOAT32_TOLERANCE)
        monkeypatch.delenv("HSTU_ATTN_FORCE_ARCH", raising=False)
    assert report["CUDA kernels"].split(" for ")[0] in ("sm80", "sm90", "sm80 sm90")
