"""Builds the two libraries of hstu_attn with one ninja file.

    hstu_attn/_C.abi3.so   kernels and ops, on torch's stable ABI: for torch >= 2.10, any CPython
    hstu_attn/_host*.so    masks, scheduling and page tables, by pybind11: built per CPython

It reads torch's headers but does not import torch, and needs no GPU. Metadata: pyproject.toml.
Environment variables, all optional:

    CXX, CXXFLAGS, LDFLAGS   the C++ compiler (g++), and flags added to those below
    MAX_JOBS                 compile jobs; by default one a core, and for nvcc what memory allows
    HSTU_ATTN_SANITIZE       a list for -fsanitize=, such as "address"; built in its own folder
    HSTU_ATTN_CUDA           1: build the CUDA kernels, 0: do not; by default, if a GPU is visible
    HSTU_ATTN_ARCHS          which kernels: "80,90" (the default) or a part of it
    HSTU_ATTN_HEAD_DIMS      which head dims, such as "64,128"; by default all
    HSTU_ATTN_DTYPES         a part of "bf16,fp16,e4m3" (the default); e4m3 needs another one
    CUDA_HOME                the toolkit; by default nvcc's on PATH, /usr/local/cuda, or pip's
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import ninja as ninja_package
import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
PYTHON_INCLUDE = Path(sysconfig.get_path("include"))

TORCH_MINIMUM = (2, 10)  # as in pyproject.toml
TORCH_TARGET_VERSION = "0x020a000000000000"  # the same in torch's encoding: hides all newer API

# A CPU source named *_<key>.cpp is compiled for that instruction set, any other for the baseline.
# NOTE: this is also the link order, the baseline first. Of an inline function that several objects
# hold, the linker keeps the first copy: so none needs more than what its callers checked for.
X86_FLAGS = {
    "avx2": "-march=x86-64-v3",
    "avx512": "-march=x86-64-v4",
    "avx512bf16": "-march=x86-64-v4 -mavx512bf16",
    "amx": "-march=x86-64-v4 -mavx512bf16 -mamx-tile -mamx-bf16",
}

# What the CUDA kernels are built for. A head dim also needs its tiles, in csrc/sm80/tile_config.h
# and csrc/sm90/tile_config.h.
ARCHS = ("80", "90")
DTYPES = {"bf16": "kBFloat16", "fp16": "kFloat16"}  # names of the enum DType in csrc/params.h
FP8_DTYPES = {"e4m3": "kFloat8E4M3"}  # for the forward on sm90, at FP8_HEAD_DIMS
FP8_SECONDS = 20  # that one core needs for its source
HEAD_DIMS = ("32", "64", "128", "256")
FP8_HEAD_DIMS = ("64", "128", "256")
FP8_BACKWARD_HEAD_DIMS = ("128", "256")
# Divisors of 256. A layer's FP8 linear maps do not pad heads, so all of these are always built.
FP8_PROJECTION_HEAD_DIMS = ("64", "128", "256")
NVCC_GIB = 2  # memory of one nvcc: at most 1.4 GiB, measured with both dtypes at head dim 256


# The function templates that the build instantiates for each head dim and dtype, and that source.
KERNELS = {
    "forward": ("ForwardKernel forward", "ForwardKernel paged_forward"),
    "backward": ("BackwardKernel backward",),
    "backward_e4m3": ("BackwardKernel backward_e4m3",),
    "projection": ("ProjectionKernel projection", "ProjectionKernel output_map"),
}
INSTANTIATION = """\
// Written by setup.py.
#include "{arch}/launch_{direction}.h"

namespace hstu::{arch} {{

{kernels}
}}  // namespace hstu::{arch}
"""


class CudaTarget(NamedTuple):
    """How the CUDA sources of one kind are compiled."""

    gencode: str
    seconds: int  # that one core needs for both 16-bit dtypes at head dim 64, measured on an EPYC


# Hopper runs sm80 kernels, too (HSTU_ATTN_FORCE_ARCH=80), and later GPUs compile them from PTX;
# wgmma and TMA exist in sm_90a alone.
ANY_GPU = "-gencode=arch=compute_80,code=[sm_80,compute_80] -gencode=arch=compute_90,code=sm_90"
# FP8 attention is for Hopper alone, and before it, conversions to e4m3 are many instructions.
HOPPER_OR_LATER = "-gencode=arch=compute_90,code=[sm_90,compute_90]"
CUDA_TARGETS = {
    "sm80/backward": CudaTarget(ANY_GPU, 105),
    "sm80/forward": CudaTarget(ANY_GPU, 50),
    "sm90/forward": CudaTarget("-gencode=arch=compute_90a,code=sm_90a", 95),
    "sm90/backward": CudaTarget("-gencode=arch=compute_90a,code=sm_90a", 70),
    "sm90/backward_e4m3": CudaTarget("-gencode=arch=compute_90a,code=sm_90a", 30),
    "sm90/projection": CudaTarget("-gencode=arch=compute_90a,code=sm_90a", 20),
    "quantize": CudaTarget(HOPPER_OR_LATER, 10),
    "common": CudaTarget(ANY_GPU, 8),
}

OPTIMIZE = "-O3 -DNDEBUG"
SANITIZE = "-O1 -g -fno-omit-frame-pointer"  # in place of OPTIMIZE
CXX_FLAGS = (
    "-std=c++20 -fPIC -fvisibility=hidden -fno-math-errno -Wall -Wextra -Wno-psabi"
    " -Wno-maybe-uninitialized"  # gcc 12's own AVX-512 headers set it off
)
NVCC_FLAGS = (
    "-std=c++20 -O3 -DNDEBUG --expt-relaxed-constexpr --expt-extended-lambda"
    " -Xcompiler=-fPIC,-fvisibility=hidden -Xptxas=-v"
)

# --- what was asked for ---------------------------------------------------------------------------


def env_list(name: str, default: Iterable[str] = ()) -> list[str]:
    """Returns the comma-, semicolon- or space-separated values of an environment variable."""
    return re.findall(r"[^\s,;]+", os.environ.get(name, "")) or list(default)


def env_choice(name: str, known: Iterable[str]) -> list[str]:
    """Returns the values as `env_list` does; each must be known, and the default is all of them."""
    if unknown := set(chosen := env_list(name, known)) - set(known):
        raise CompileError(f"{name}: expected {', '.join(known)}; got {', '.join(sorted(unknown))}")
    return chosen


def max_jobs() -> int:
    """Returns MAX_JOBS, or 0 if it is not set."""
    return int(os.environ.get("MAX_JOBS") or 0)


def jobs() -> int:
    return max_jobs() or len(os.sched_getaffinity(0))


def nvcc_jobs() -> int:
    """Returns MAX_JOBS if it is set, else as many jobs as fit into memory."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    return max_jobs() or max(1, min(jobs(), memory_gib // NVCC_GIB))


def cuda_choice() -> str:
    """Returns the value of HSTU_ATTN_CUDA; empty if it is not set."""
    return os.environ.get("HSTU_ATTN_CUDA", "")


@cache
def cuda_wanted() -> bool:
    if choice := cuda_choice():
        return choice != "0"
    if not shutil.which("nvidia-smi"):
        return False
    return b"GPU" in subprocess.run(["nvidia-smi", "-L"], capture_output=True).stdout


# --- what is there --------------------------------------------------------------------------------


def installed(path: str) -> Path | None:
    """Returns the file or folder `path` of an installed package.

    Within pip's isolated build, the import path leads to the build requirements alone. `site` still
    names the environment that is installed into, so that its torch serves to build with, too.
    """
    roots = [*filter(None, sys.path), *site.getsitepackages()]
    return next((found for root in roots if (found := Path(root, path)).exists()), None)


@cache
def torch_dir() -> Path | None:
    """Returns the folder of a torch that is new enough, or None."""
    version_file = installed("torch/version.py")
    version = version_file and re.search(r"= '(\d+)\.(\d+)", version_file.read_text())
    if version_file and version and (int(version[1]), int(version[2])) >= TORCH_MINIMUM:
        return version_file.parent
    return None


@cache
def cuda_home() -> Path | None:
    """Returns the requested CUDA toolkit, else the system's, else the one of pip's packages."""
    asked_for, on_path = os.environ.get("CUDA_HOME"), shutil.which("nvcc")
    homes = [
        Path(asked_for) if asked_for else None,
        Path(on_path).resolve().parents[1] if on_path else None,
        Path("/usr/local/cuda"),
        installed("nvidia/cu13"),
    ]
    parts = ("bin/nvcc", "include/cuda_runtime.h")  # nvcc on PATH may be a script that calls nvcc
    return next((h for h in homes if h and all((h / part).exists() for part in parts)), None)


@cache
def cutlass_include() -> Path | None:
    checkout = ROOT / "third_party/cutlass/include"
    return checkout if checkout.exists() else installed("cutlass_library/source/include")


def missing_requirements() -> list[str]:
    """Returns the packages that the build needs besides those in pyproject.toml, and lacks."""
    missing = [] if torch_dir() else ["torch>={}.{}".format(*TORCH_MINIMUM)]
    if cuda_wanted():
        lines = (ROOT / "third_party/cuda-build.txt").read_text().splitlines()
        for package in filter(None, (line.partition("#")[0].strip() for line in lines)):
            found = cutlass_include() if "cutlass" in package else cuda_home()
            missing += [] if found else [package]
    return missing


def check_prerequisites() -> None:
    """Raises a one-line error where the compiler would print a page of them."""
    if not torch_dir():
        found = installed("torch/version.py") or "no torch"
        raise CompileError("torch: expected >= {}.{}; got {}".format(*TORCH_MINIMUM, found))
    if not (PYTHON_INCLUDE / "Python.h").exists():
        hint = "on Debian and Ubuntu: apt install python3-dev"
        raise CompileError(f"Python.h: expected in {PYTHON_INCLUDE}; got no such file ({hint})")
    if cuda_wanted() and not (cuda_home() and cutlass_include()):
        raise CompileError(
            f"HSTU_ATTN_CUDA: expected nvcc and CUTLASS; got {cuda_home()} and {cutlass_include()}"
            " (pip install -r third_party/cuda-build.txt, or HSTU_ATTN_CUDA=0)"
        )


# --- what is compiled, each with its flags --------------------------------------------------------


def cpp_sources() -> list[tuple[Path, str]]:
    """Returns the C++ sources of _C with their instruction-set flags, in link order."""
    cuda = ["cuda/*.cpp", "api/cuda/*.cpp"] if cuda_wanted() else []
    patterns = ("*.cpp", "api/*.cpp", "cpu/*.cpp", *cuda)
    paths = sorted(path for pattern in patterns for path in CSRC.glob(pattern))
    suffix = {path: path.stem.rpartition("_")[2] for path in paths}
    sources = [(path, "") for path in paths if suffix[path] not in X86_FLAGS]
    if platform.machine() == "x86_64":
        for isa, flags in X86_FLAGS.items():
            sources += [(path, flags) for path in paths if suffix[path] == isa]
    return sources


def head_dims() -> list[str]:
    """Returns the head dims of the kernels to build, in ascending order."""
    return sorted(env_choice("HSTU_ATTN_HEAD_DIMS", HEAD_DIMS), key=int)


def dtypes() -> list[str]:
    """Returns the dtypes of the kernels to build."""
    return env_choice("HSTU_ATTN_DTYPES", [*DTYPES, *FP8_DTYPES])


def dtype_groups(kind: str, head_dim: str) -> list[list[str]]:
    """Returns the dtypes that each object file of a source of `kind` holds.

    An object for each dtype halves the longest compilations, at the price of reading the headers
    twice: that pays for slow sources, where there are many cores.
    """
    plain = [dtype for dtype in dtypes() if dtype in DTYPES]
    has_fp8 = any(dtype in FP8_DTYPES for dtype in dtypes())
    if kind == "sm90/backward_e4m3" and not (has_fp8 and head_dim in FP8_BACKWARD_HEAD_DIMS):
        return []
    if kind == "sm90/projection":
        return [list(FP8_DTYPES)] if has_fp8 else []
    is_slow = CUDA_TARGETS[kind].seconds > 60 and nvcc_jobs() >= 8
    groups = [[dtype] for dtype in plain] if is_slow else [plain]
    if kind == "sm90/forward" and head_dim in FP8_HEAD_DIMS:
        groups += [[dtype] for dtype in dtypes() if dtype in FP8_DTYPES]
    return groups


class CudaSource(NamedTuple):
    """A CUDA source and how it is compiled."""

    name: str  # its path in csrc, or in the build folder if the build writes it
    gencode: str
    seconds: float  # that one core needs, roughly
    text: str = ""  # what the build writes

    @property
    def path(self) -> str | Path:
        return self.name if self.text else CSRC / self.name


def instantiation(arch: str, direction: str, head_dim: str, group: list[str]) -> str:
    """Returns the source with the kernels of one architecture, direction and head dim."""
    names = DTYPES | FP8_DTYPES
    kernels = "".join(
        f"template {kernel}<{head_dim}, DType::{names[dtype]}>();\n"
        for dtype in group
        for kernel in KERNELS[direction]
    )
    return INSTANTIATION.format(arch=arch, direction=direction, kernels=kernels)


def cuda_sources() -> list[CudaSource]:
    """Returns the CUDA sources of _C, the slowest first.

    The build writes one for each architecture, direction and head dim, such as
    sm90/forward_d64.bf16.cu. Those in csrc serve every architecture.
    """
    archs = env_choice("HSTU_ATTN_ARCHS", ARCHS)
    sources = []
    for kind, target in CUDA_TARGETS.items():
        arch, _, direction = kind.partition("/")
        if arch.removeprefix("sm") in archs:
            dims = FP8_PROJECTION_HEAD_DIMS if direction == "projection" else head_dims()
            for head_dim in reversed(dims):
                for group in dtype_groups(kind, head_dim):
                    name = f"{kind}_d{head_dim}.{'-'.join(group)}.cu"
                    text = instantiation(arch, direction, head_dim, group)
                    seconds = target.seconds * len(group) / len(DTYPES)
                    if group[0] in FP8_DTYPES:
                        seconds = FP8_SECONDS
                    sources.append(CudaSource(name, target.gencode, seconds, text))
    for path in CSRC.glob("*/*.cu"):
        name = path.relative_to(CSRC).as_posix()
        kind = path.parent.name if path.parent.name in CUDA_TARGETS else "common"
        sources.append(CudaSource(name, *CUDA_TARGETS[kind]))
    return sorted(sources, key=lambda source: -source.seconds)


def cuda_defines() -> str:
    """Returns the macros that tell the dispatch of the kernels what was built."""
    names = [f"SM{arch}" for arch in env_choice("HSTU_ATTN_ARCHS", ARCHS)]
    names += [f"DTYPE_{dtype.upper()}" for dtype in dtypes()]
    names.append(f"HEAD_DIMS={','.join(head_dims())}")
    for name, dims in (
        ("FP8_HEAD_DIMS", FP8_HEAD_DIMS),
        ("FP8_BACKWARD_HEAD_DIMS", FP8_BACKWARD_HEAD_DIMS),
    ):
        names.append(f"{name}={','.join(dim for dim in head_dims() if dim in dims)}")
    names.append(f"FP8_PROJECTION_HEAD_DIMS={','.join(FP8_PROJECTION_HEAD_DIMS)}")
    return " ".join(["-DUSE_CUDA", *(f"-DHSTU_ATTN_{name}" for name in names)])


def announcement() -> str:
    """Describes what is about to be compiled, and roughly how long that takes."""
    if not cuda_wanted():
        why = "HSTU_ATTN_CUDA=0" if cuda_choice() else "no GPU is visible here"
        return (
            f"hstu_attn: building without CUDA kernels, since {why}: about a minute."
            " HSTU_ATTN_CUDA=1 builds them, on a machine without a GPU, too."
        )
    sources = cuda_sources()
    seconds = max(sum(s.seconds for s in sources) / nvcc_jobs(), *(s.seconds for s in sources))
    archs = " and ".join(f"sm{arch}" for arch in env_choice("HSTU_ATTN_ARCHS", ARCHS))
    return (
        f"hstu_attn: building CUDA kernels for {archs}, head dims {', '.join(head_dims())},"
        f" {' and '.join(dtypes())}: about {seconds / 60:.0f} min, {nvcc_jobs()} compilers at once"
    )


class NinjaFile:
    """A ninja file: rules, then one edge an object (its headers are in its depfile), then links."""

    def __init__(self) -> None:
        sanitize = ",".join(env_list("HSTU_ATTN_SANITIZE"))
        mode = f"{SANITIZE} -fsanitize={sanitize}" if sanitize else OPTIMIZE
        ccache = shutil.which("ccache") or ""
        cxx = os.environ.get("CXX", "g++")
        cxxflags, ldflags = os.environ.get("CXXFLAGS", ""), os.environ.get("LDFLAGS", "")
        common = f"-I'{CSRC}' $flags -MF $out.d -c $in -o $out"
        self.sources: dict[str, str] = {}  # to write into the build folder, by path
        self.text = f"""\
pool nvcc
  depth = {nvcc_jobs()}
rule cxx
  command = {ccache} {cxx} {mode} {CXX_FLAGS} {cxxflags} -MMD {common}
  depfile = $out.d
  description = C++ $in
rule nvcc
  command = {ccache} {cuda_home()}/bin/nvcc -ccbin {cxx} {NVCC_FLAGS} -MD {common} > $out.log $
    2>&1; status=$$?; grep -vE "^ptxas info|bytes stack frame" $out.log; exit $$status
  depfile = $out.d
  description = nvcc $in
  pool = nvcc
rule link
  command = {cxx} -shared {mode} $in -o $out {ldflags} $flags
  description = link $out
"""

    def build(self, rule: str, output: str, inputs: Iterable[str | Path], flags: str = "") -> str:
        paths = " ".join(str(path).replace(" ", "$ ") for path in inputs)
        self.text += f"build {output}: {rule} {paths}\n  flags = {flags}\n"
        return output

    def compile(self, rule: str, source: Path, flags: str) -> str:
        return self.build(rule, source.relative_to(CSRC).as_posix() + ".o", [source], flags)

    def library(self, output: str, torch: Path | None) -> None:
        """Adds _C: ops and kernels, with the headers and libraries in the folder `torch`."""
        cuda = cuda_wanted()
        defines = cuda_defines() if cuda else ""
        includes = f"-isystem '{torch}/include'"
        # NOTE: libtorch.so holds no symbol itself but leads to the libraries that do, so without
        # --no-as-needed, a linker whose default is --as-needed (Ubuntu's) would drop it. libstdc++
        # goes first: torch's libraries refer to some of its symbols without their version.
        libraries = f"-lstdc++ -L'{torch}/lib' -Wl,--no-as-needed -ltorch"
        if cuda:
            includes += f" -isystem {cuda_home()}/include"
            libraries += f" -L{cuda_home()}/lib64 -L{cuda_home()}/lib -lcudart_static -lrt -ldl"
            libraries += " -lpthread -Wl,--exclude-libs,ALL"
        cpp_flags = f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION} {defines} {includes}"
        objects = [self.compile("cxx", path, f"{cpp_flags} {isa}") for path, isa in cpp_sources()]
        if cuda:
            for source in cuda_sources():
                flags = f"-isystem '{cutlass_include()}' {source.gencode}"
                objects.append(self.build("nvcc", f"{source.name}.o", [source.path], flags))
                if source.text:
                    self.sources[source.name] = source.text
        self.build("link", output, objects, libraries)

    def host_module(self, output: str, python_include: Path = PYTHON_INCLUDE) -> None:
        """Adds _host: the same masks and scheduler, for Python."""
        flags = f"-isystem '{pybind11.get_include()}' -isystem '{python_include}'"
        sources = [*sorted(CSRC.glob("host/*.cpp")), *sorted(CSRC.glob("serving/*.cpp"))]
        self.build("link", output, [self.compile("cxx", path, flags) for path in sources])

    def write(self, folder: Path) -> None:
        """Writes build.ninja and the generated sources into the build folder.

        A file that would not change keeps its time, so that ninja does not compile it again.
        """
        for name, text in {"build.ninja": self.text, **self.sources}.items():
            path = folder / name
            if not (path.exists() and path.read_text() == text):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)


def run_ninja(folder: Path, options: list[str]) -> None:
    """Runs ninja; the first error stops it, and is raised as a CompileError with its output.

    By itself, ninja would wait for the compilers that still run, and print what they say after it.
    """
    # NOTE: `python -m ninja` kills ninja when interrupted, and its compilers would run on.
    program = str(Path(ninja_package.BIN_DIR, "ninja"))
    command = [program, "-C", str(folder), f"-j{jobs()}", *options]
    error = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as ninja:
        assert ninja.stdout is not None
        for line in ninja.stdout:
            if line.startswith("FAILED:"):
                # NOTE: ninja has written the output of the failed command by then, or is about to.
                threading.Timer(1, ninja.send_signal, [signal.SIGINT]).start()
            elif error and line.startswith(("[", "ninja:", "FAILED:")):
                break
            if error or line.startswith("FAILED:"):
                error += line
            else:
                print(line, end="", flush=True)
        ninja.stdout.read()  # what other compilers say when they are stopped
    if ninja.returncode:
        what = error.rstrip() or "the error above"
        raise CompileError(f"ninja: expected {folder} to build; got\n{what}")


class NinjaBuild(build_ext):
    """Runs setuptools' build_ext, but leaves compiling to ninja."""

    def build_extensions(self) -> None:
        check_prerequisites()
        library, host_module = (self.get_ext_filename(ext.name) for ext in self.extensions)
        ninja = NinjaFile()
        ninja.library(Path(library).name, torch_dir())
        ninja.host_module(Path(host_module).name)

        cuda = ["cuda"] if cuda_wanted() else []
        config = [sys.implementation.cache_tag, *cuda, *env_list("HSTU_ATTN_SANITIZE")]
        folder = ROOT / "build" / "-".join(["ninja", *config])
        ninja.write(folder)
        print(announcement(), file=sys.stderr, flush=True)
        run_ninja(folder, ["-v"] * (self.verbose > 1))
        if cuda:
            subprocess.run([sys.executable, str(ROOT / "tools/kernel_table.py"), str(folder)])

        self.force = True  # a library of another configuration may be there, and be newer
        for ext in self.extensions:
            target = Path(self.get_ext_fullpath(ext.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(str(folder / target.name), str(target))


def package_readme() -> str:
    """Returns README.md with links that work outside of its repository, for a package index.

    No public address of the repository is known, so that a relative link would lead nowhere: it
    becomes its text and the path, which the source distribution has. Relative pictures are left
    out.
    """
    text = re.sub(r'<img src="(?!https?:)[^>]*>\n*', "", (ROOT / "README.md").read_text())

    def name_path(link: re.Match[str]) -> str:
        words, path = link[1], link[2].partition("#")[0]
        return f"`{path}`" if words == path else f"{words} (`{path}`)"

    return re.sub(r"\[([^\]]+)\]\((?!https?:|#)([^)]+)\)", name_path, text)


# The tools import this file for its flags; a build runs it.
if __name__ == "__main__":
    # NOTE: a build frontend asks for requirements by this command. In any other, setuptools would
    # itself download what is missing (torch, say), where check_prerequisites had better speak.
    asks_requirements = sys.argv[1:] == ["egg_info"]

    setup(
        ext_modules=[
            Extension("hstu_attn._C", sources=[], py_limited_api=True),
            Extension("hstu_attn._host", sources=[]),
        ],
        cmdclass={"build_ext": NinjaBuild},
        long_description=package_readme(),
        long_description_content_type="text/markdown",
        setup_requires=missing_requirements() if asks_requirements else [],
    )
