"""Tests of the build: one library for any CPython and torch >= 2.10, and complete distributions."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import hstu_attn
import setup
from tests.helpers.paths import ROOT
from tools import check_symbols, kernel_table

LIBRARY = Path(hstu_attn.__file__).with_name("_C.abi3.so")


def test_library_needs_the_stable_interface_alone() -> None:
    assert check_symbols.problems(LIBRARY) == []


def test_symbol_check_sees_what_is_foreign() -> None:
    # The other library is built for one CPython, so there must be an error.
    (host_module,) = LIBRARY.parent.glob("_host*.so")
    found = check_symbols.problems(host_module)
    assert any(line.startswith("Py") and "stable interface" in line for line in found), found


def test_symbol_check_sees_a_search_path(tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    command = ["g++", "-shared", "-x", "c++", "/dev/null", "-o", str(library), "-Wl,-rpath,/opt/x"]
    subprocess.run(command, check=True)
    assert "looks for libraries in /opt/x" in check_symbols.problems(library)


# The output of nvcc 13.0 -Xptxas=-v, with other numbers.
PTXAS_LOG = """\
ptxas info    : 11 bytes gmem, 88 bytes cmem[4]
ptxas info    : Compiling entry function '_ZN4hstu5firstEv' for 'sm_80'
ptxas info    : Function properties for _ZN4hstu5firstEv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 1024 bytes smem, 968 bytes cmem[0]
ptxas info    : Compile time = 2.410 ms
ptxas info    : Compiling entry function '_ZN4hstu6secondEv' for 'sm_90'
ptxas info    : Function properties for _ZN4hstu6secondEv
    16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers
"""
MAY_SPILL = "_ZN4hstu6secondINS_17RelativeScoreBiasILi1EEEEEvv"


@pytest.mark.parametrize(
    ("source", "symbol", "fails"),
    [
        ("sm80/forward_d64.bf16.cu", "_ZN4hstu6secondEv", True),
        ("sm90/forward_d64.bf16.cu", "_ZN4hstu6secondEv", True),
        ("sm90/forward_d64.bf16.cu", MAY_SPILL, False),
        ("paged/append.cu", "_ZN4hstu6secondEv", False),
    ],
)
def test_kernel_table(
    source: str,
    symbol: str,
    fails: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = tmp_path / f"{source}.o.log"
    log.parent.mkdir(parents=True)
    log.write_text(PTXAS_LOG.replace("_ZN4hstu6secondEv", symbol))
    (tmp_path / "build.ninja").write_text(f"build {source}.o: nvcc {source}\n")
    assert kernel_table.read_logs(tmp_path) == [
        (source, "_ZN4hstu5firstEv", "sm_80", 168, 1024, 0, 0, False),
        (source, symbol, "sm_90", 255, 0, 16, 32, False),
    ]
    monkeypatch.setattr(sys, "argv", ["kernel_table.py", str(tmp_path)])
    kernel_table.main()
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.split()[-4:] for row in rows] == [
        ["168", "1024", "0", "0"],
        ["255", "0", "16", "32"],
    ]
    monkeypatch.setattr(sys, "argv", ["kernel_table.py", "--check", str(tmp_path)])
    with pytest.raises(SystemExit, match="no spill") if fails else contextlib.nullcontext():
        kernel_table.main()
    assert ("spills 32 bytes on sm_90" in capsys.readouterr().out) == fails


def test_kernels_with_serialized_products_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "sm90/forward_d64.bf16.cu"
    log = tmp_path / f"{source}.o.log"
    log.parent.mkdir(parents=True)
    warning = (
        "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are "
        f"serialized due to insufficient register resources for the function '{MAY_SPILL}'\n"
    )
    log.write_text(warning + PTXAS_LOG.replace("_ZN4hstu6secondEv", MAY_SPILL))
    (tmp_path / "build.ninja").write_text(f"build {source}.o: nvcc {source}\n")
    monkeypatch.setattr(sys, "argv", ["kernel_table.py", "--check", str(tmp_path)])
    with pytest.raises(SystemExit, match="serialized"):
        kernel_table.main()
    assert f"{MAY_SPILL} waits for each wgmma" in capsys.readouterr().out


def test_version_is_in_one_place() -> None:
    version = hstu_attn.__version__
    assert importlib.metadata.version("hstu_attn") == version
    files = [ROOT / "pyproject.toml", ROOT / "setup.py", *ROOT.glob("hstu_attn/**/*.py")]
    assert [f.name for f in files if f'"{version}"' in f.read_text()] == ["_version.py"]


@pytest.mark.slow
def test_sdist_holds_every_source(tmp_path: Path) -> None:
    # Continuous integration also builds the wheel from the sdist, so here its contents suffice.
    build = f"import setuptools.build_meta as backend; backend.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    assert archive.name == f"hstu_attn-{hstu_attn.__version__}.tar.gz"
    with tarfile.open(archive) as tar:
        held = {name.partition("/")[2] for name in tar.getnames()}
    wanted = {"setup.py", "pyproject.toml", "LICENSE", "constraints.txt", "hstu_attn/py.typed"}
    wanted |= {"Makefile", "README.md", "third_party/cuda-build.txt", "tools/manylinux.S"}
    sources = ("csrc/**/*.h", "csrc/**/*.cpp", "csrc/**/*.cu*", "hstu_attn/**/*.py", "tools/*.py")
    for pattern in sources:
        wanted |= {path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern)}
    assert wanted <= held, f"expected in the sdist: {sorted(wanted - held)}"
    assert not [name for name in held if name.endswith(".so")]


@pytest.mark.slow
def test_the_first_error_stops_the_build_and_is_said_last(tmp_path: Path) -> None:
    (tmp_path / "build.ninja").write_text(
        "rule run\n  command = $run\n"
        "build slow.o: run\n  run = sleep 60\n"
        "build bad.o: run\n  run = echo 'bad.cu(3): error: no such name' >&2; exit 1\n"
    )
    begin = time.monotonic()
    with pytest.raises(setup.CompileError) as raised:
        setup.run_ninja(tmp_path, ["-j2"])
    assert time.monotonic() - begin < 30
    assert str(raised.value).endswith("bad.cu(3): error: no such name")


@pytest.fixture
def build_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Simulates a build with default settings on a machine without a GPU."""
    for name in [name for name in os.environ if name.startswith("HSTU_ATTN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(setup.shutil, "which", lambda name: None)
    setup.cuda_wanted.cache_clear()
    yield monkeypatch
    setup.cuda_wanted.cache_clear()


def test_the_build_says_that_it_has_no_cuda_kernels(build_machine: pytest.MonkeyPatch) -> None:
    text = setup.announcement()
    assert "without CUDA kernels, since no GPU is visible here" in text
    assert "HSTU_ATTN_CUDA=1 builds them" in text


def test_the_build_writes_its_kernels_from_the_lists(
    build_machine: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    build_machine.setenv("HSTU_ATTN_CUDA", "1")
    build_machine.setenv("MAX_JOBS", "1")
    for lists in ("HEAD_DIMS", "FP8_HEAD_DIMS"):
        build_machine.setattr(setup, lists, (*getattr(setup, lists), "96"))
    build_machine.setenv("HSTU_ATTN_HEAD_DIMS", "96")
    ninja = setup.NinjaFile()
    ninja.library("_C.so", Path("torch"))
    ninja.write(tmp_path)
    wanted = {
        f"{arch}/{direction}_d96.bf16-fp16.cu"
        for arch in ("sm80", "sm90")
        for direction in ("forward", "backward")
    } | {"sm90/forward_d96.e4m3.cu"}
    wanted |= {f"sm90/projection_d{dim}.e4m3.cu" for dim in setup.FP8_PROJECTION_HEAD_DIMS}
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.cu")} == wanted
    source = tmp_path / "sm90/forward_d96.bf16-fp16.cu"
    assert source.read_text() == (
        "// Written by setup.py.\n"
        '#include "sm90/launch_forward.h"\n\n'
        "namespace hstu::sm90 {\n\n"
        "template ForwardKernel forward<96, DType::kBFloat16>();\n"
        "template ForwardKernel paged_forward<96, DType::kBFloat16>();\n"
        "template ForwardKernel forward<96, DType::kFloat16>();\n"
        "template ForwardKernel paged_forward<96, DType::kFloat16>();\n\n"
        "}  // namespace hstu::sm90\n"
    )
    e4m3 = (tmp_path / "sm90/forward_d96.e4m3.cu").read_text()
    assert "template ForwardKernel forward<96, DType::kFloat8E4M3>();\n" in e4m3
    assert "template ForwardKernel paged_forward<96, DType::kFloat8E4M3>();\n\n}" in e4m3
    # An unchanged file keeps its time, so that ninja does not compile it again.
    os.utime(source, (1, 1))
    ninja.write(tmp_path)
    assert source.stat().st_mtime == 1


@pytest.mark.parametrize(
    ("arch", "function", "arguments"),
    [
        ("sm80", "forward_tiles", "Tiling::kLarge, false"),
        ("sm80", "backward_tiles", "Tiling::kLarge, false"),
        ("sm90", "forward_tiles", "true, false, false, false"),  # with a bias
        ("sm90", "forward_tiles", "false, false, true, false"),  # paged
        ("sm90", "fp8_tiles", "false, false"),
    ],
)
def test_the_compiler_names_the_file_that_lacks_a_head_dim(
    arch: str, function: str, arguments: str, tmp_path: Path
) -> None:
    source = tmp_path / "tiles.cpp"
    source.write_text(
        f'#include "{arch}/tile_config.h"\n'
        f"using namespace hstu::{arch};\n"
        f"auto tiles = {function}<{', '.join(filter(None, ('96', arguments)))}>();\n"
    )
    command = ["g++", "-std=c++20", "-fsyntax-only", "-I", str(setup.CSRC), str(source)]
    errors = subprocess.run(command, capture_output=True, text=True).stderr
    assert f"{arch}/tile_config.h: {function} has no entry for this head dim" in errors


@pytest.mark.parametrize(("compilers", "objects"), [(2, 24), (16, 36)])
def test_the_build_says_what_it_compiles(
    build_machine: pytest.MonkeyPatch, compilers: int, objects: int
) -> None:
    build_machine.setenv("HSTU_ATTN_CUDA", "1")
    build_machine.setenv("MAX_JOBS", str(compilers))
    sources = setup.cuda_sources()
    everything = set(setup.CSRC.rglob("*.cu"))
    assert {source.path for source in sources if not source.text} == everything
    written = [source.name for source in sources if source.text]
    assert len(set(written)) == objects  # with many cores, slow sources have one object per dtype
    assert [s.seconds for s in sources] == sorted((s.seconds for s in sources), reverse=True)
    minutes = max(sum(s.seconds for s in sources) / compilers, sources[0].seconds) / 60
    assert setup.announcement() == (
        "hstu_attn: building CUDA kernels for sm80 and sm90, head dims 32, 64, 128, 256,"
        f" bf16 and fp16 and e4m3: about {minutes:.0f} min, {compilers} compilers at once"
    )


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", setup.HEAD_DIMS)
def test_the_dispatch_compiles_with_one_head_dim(
    build_machine: pytest.MonkeyPatch, head_dim: str
) -> None:
    """Some kernels do not exist for it, so that their lists of head dims may be empty."""
    home, cutlass = setup.cuda_home(), setup.cutlass_include()
    if home is None or cutlass is None:
        pytest.skip("needs the headers of CUDA and CUTLASS")
    build_machine.setenv("HSTU_ATTN_HEAD_DIMS", head_dim)
    command = ["g++", "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    command += [f"-I{setup.CSRC}", f"-isystem{home / 'include'}", f"-isystem{cutlass}"]
    command += [*setup.cuda_defines().split(), str(setup.CSRC / "dispatch.cpp")]
    subprocess.run(command, check=True)
