"""Builds the two libraries of hstu_attn with one ninja file.

    hstu_attn/_C.abi3.so   every kernel and op, on torch's stable ABI: one file for torch >= 2.10 and any CPython
    hstu_attn/_host*.so    masks, scheduling and page tables for Python, by pybind11: built per CPython

Neither torch nor a GPU is needed to run this file, only torch's headers. Metadata is in pyproject.toml.
Environment variables, all optional:

    CXX, CXXFLAGS, LDFLAGS   C++ compiler (g++), and flags added to this file's own
    MAX_JOBS                 compile jobs; the default is every core, and for nvcc what the memory allows
    HSTU_ATTN_SANITIZE       comma-separated -fsanitize= list, e.g. "address", into a build folder of its own
    HSTU_ATTN_CUDA           1: build the CUDA kernels, 0: do not; the default is whether a GPU is visible
    HSTU_ATTN_ARCHS          kernels to build: "80,90" (the default) or a part of it
    HSTU_ATTN_HEAD_DIMS      head dims to build, e.g. "64,128"; the default is all
    HSTU_ATTN_DTYPES         "bf16,fp16" (the default) or one of them
    CUDA_HOME                CUDA toolkit; the default is the one of nvcc on PATH, /usr/local/cuda, or pip's packages
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pybind11
from ninja.ninja_syntax import Writer
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"

TORCH_MINIMUM = (2, 10)  # as in pyproject.toml
TORCH_TARGET_VERSION = "0x020a000000000000"  # the same in torch's encoding: newer API stays hidden

# A CPU source named *_<key>.cpp is compiled for that instruction set, any other for the baseline.
# NOTE: this is also the link order, baseline first. Of an inline function that several objects hold
# the linker keeps the first copy, so no copy asks for more than its callers have already checked.
X86_FLAGS = {
    "avx2": "-march=x86-64-v3",
    "avx512": "-march=x86-64-v4",
    "amx": "-march=x86-64-v4 -mavx512bf16 -mamx-tile -mamx-bf16",
}

# Device code of csrc/sm<key>/. Hopper gets sm80 kernels too (HSTU_ATTN_FORCE_ARCH=80), and later
# GPUs compile them from PTX; wgmma and TMA exist in sm_90a alone.
GENCODE = {
    "80": "-gencode=arch=compute_80,code=[sm_80,compute_80] -gencode=arch=compute_90,code=sm_90",
    "90": "-gencode=arch=compute_90a,code=sm_90a",
}
DTYPES = ("bf16", "fp16")
NVCC_GIB = 5  # memory that one nvcc may take on a CuTe kernel

OPTIMIZE = "-O3 -DNDEBUG"
SANITIZE = "-O1 -g -fno-omit-frame-pointer"
CXX_FLAGS = "-std=c++20 -fPIC -fvisibility=hidden -fno-math-errno -Wall -Wextra -Wno-psabi"
NVCC_FLAGS = (
    "-std=c++20 -O3 -DNDEBUG --expt-relaxed-constexpr --expt-extended-lambda "
    "-Xcompiler=-fPIC,-fvisibility=hidden"
)


def env_list(name: str, default: Iterable[str] = ()) -> list[str]:
    """The comma- or semicolon-separated values of an environment variable."""
    return re.findall(r"[^\s,;]+", os.environ.get(name, "")) or list(default)


def env_choice(name: str, known: Iterable[str]) -> list[str]:
    """As `env_list`, where every value must be a known one; by default all of them."""
    if unknown := set(chosen := env_list(name, known)) - set(known):
        sys.exit(f"{name}: expected some of {', '.join(known)}; got {', '.join(sorted(unknown))}")
    return chosen


def installed(path: str) -> Path | None:
    """A file that some installed package holds.

    Within pip's isolated build the import path leads only to the build requirements;
    `site` still names the environment that the wheel is for, so that its torch serves here too.
    """
    roots = [*filter(None, sys.path), *site.getsitepackages()]
    return next((found for root in roots if (found := Path(root, path)).exists()), None)


@cache
def torch_dir() -> Path | None:
    """The folder of a torch that is new enough, or None."""
    version_file = installed("torch/version.py")
    match = version_file and re.search(r"= '(\d+)\.(\d+)", version_file.read_text())
    if not version_file or not match or (int(match[1]), int(match[2])) < TORCH_MINIMUM:
        return None
    return version_file.parent


@cache
def cuda_wanted() -> bool:
    if choice := os.environ.get("HSTU_ATTN_CUDA"):
        return choice != "0"
    if not cuda_sources() or not shutil.which("nvidia-smi"):
        return False
    return b"GPU" in subprocess.run(["nvidia-smi", "-L"], capture_output=True).stdout


@cache
def cuda_home() -> Path | None:
    """The CUDA toolkit: the one asked for, else the system's, else the one of pip's packages."""
    on_path = shutil.which("nvcc")
    candidates = [
        Path(os.environ["CUDA_HOME"]) if "CUDA_HOME" in os.environ else None,
        Path(on_path).resolve().parent.parent if on_path else None,
        Path("/usr/local/cuda"),
        installed("nvidia/cu13"),
    ]
    parts = ("bin/nvcc", "include/cuda_runtime.h")  # nvcc on PATH may be a script of another home
    return next((h for h in candidates if h and all((h / part).exists() for part in parts)), None)


@cache
def cutlass_include() -> Path | None:
    checkout = ROOT / "third_party/cutlass/include"
    return checkout if checkout.exists() else installed("cutlass_library/source/include")


def missing_requirements() -> list[str]:
    """What the build needs beside pyproject.toml's list and is not installed yet."""
    missing = [] if torch_dir() else ["torch>={}.{}".format(*TORCH_MINIMUM)]
    if cuda_wanted():
        listed = (ROOT / "third_party/cuda-build.txt").read_text().split("\n")
        packages = [line for line in listed if line and not line.startswith("#")]
        have = {"nvidia-cutlass": cutlass_include(), "nvidia-cuda": cuda_home()}
        have["nvidia-nvvm"] = have["nvidia-cuda"]
        missing += [p for p in packages if not any(p.startswith(k) for k, v in have.items() if v)]
    return missing


def host_sources() -> list[Path]:
    return sorted(CSRC.glob("host/*.cpp"))


def cpu_sources() -> list[tuple[Path, str]]:
    """Each C++ source of _C with its instruction-set flags, in link order."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    order = ["", *X86_FLAGS]
    sources = []
    for path in sorted([*CSRC.glob("*.cpp"), *CSRC.glob("cpu/*.cpp")]):
        suffix = path.stem.rpartition("_")[2]
        isa = suffix if suffix in X86_FLAGS else ""
        if x86 or not isa:
            sources.append((order.index(isa), path, X86_FLAGS.get(isa, "")))
    return [(path, flags) for _, path, flags in sorted(sources)]


def cuda_sources() -> list[tuple[Path, str]]:
    """Each CUDA source with its -gencode flags.

    csrc/sm<arch>/instantiations/ holds kernels, one head dim a file (*_d<head dim>*.cu);
    sources in other folders are small and serve every architecture.
    """
    archs = env_choice("HSTU_ATTN_ARCHS", GENCODE)
    head_dims = env_list("HSTU_ATTN_HEAD_DIMS")
    sources = []
    for path in sorted([*CSRC.glob("sm*/instantiations/*.cu"), *CSRC.glob("*/*.cu")]):
        arch = re.match(r"sm(\d+)/", path.relative_to(CSRC).as_posix())
        head_dim = re.search(r"_d(\d+)", path.stem)
        if arch and arch[1] not in archs:
            continue
        if head_dims and head_dim and head_dim[1] not in head_dims:
            continue
        sources.append((path, GENCODE[arch[1] if arch else "80"]))
    return sources


def cuda_defines() -> str:
    """What csrc/dispatch.h may dispatch to."""
    chosen = [f"SM{arch}" for arch in env_choice("HSTU_ATTN_ARCHS", GENCODE)]
    chosen += [f"HEAD_DIM_{dim}" for dim in env_list("HSTU_ATTN_HEAD_DIMS", ["ALL"])]
    chosen += [f"DTYPE_{dtype.upper()}" for dtype in env_choice("HSTU_ATTN_DTYPES", DTYPES)]
    return " ".join(["-DUSE_CUDA", *(f"-DHSTU_ATTN_{name}=1" for name in chosen)])


class NinjaBuild(build_ext):
    """setuptools' build_ext, with the compiling left to ninja."""

    def build_extensions(self) -> None:
        self.check_headers()
        sanitize = "-".join(env_list("HSTU_ATTN_SANITIZE"))
        name = "-".join(filter(None, ["ninja", sys.implementation.cache_tag, sanitize]))
        folder = ROOT / "build" / name
        folder.mkdir(parents=True, exist_ok=True)
        files = {ext.name: Path(self.get_ext_filename(ext.name)).name for ext in self.extensions}
        with open(folder / "build.ninja", "w") as stream:
            write_ninja(Writer(stream, width=100), files["hstu_attn._C"], files["hstu_attn._host"])

        verbose = ["-v"] if self.verbose > 1 else []
        command = [sys.executable, "-m", "ninja", "-C", str(folder), f"-j{jobs()}", *verbose]
        if subprocess.run(command).returncode:
            raise CompileError(f"ninja: a target of {folder}/build.ninja failed; see the output above")
        self.force = True  # a library of another configuration may lie there, and be newer
        for ext_name, file in files.items():
            target = self.get_ext_fullpath(ext_name)
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(str(folder / file), target)

    @staticmethod
    def check_headers() -> None:
        """Says now, in one line, what would otherwise be a compiler's page of errors."""
        if not torch_dir():
            found = installed("torch/version.py") or "none"
            raise CompileError(f"torch: expected >= {TORCH_MINIMUM} on the import path; got {found}")
        if not (python_include() / "Python.h").exists():
            raise CompileError(
                f"Python.h: expected in {python_include()}; not found (Debian: apt install python3-dev)"
            )
        if cuda_wanted() and not cuda_sources():
            raise CompileError("HSTU_ATTN_CUDA: expected CUDA sources under csrc/; none is chosen")
        if cuda_wanted() and not (cuda_home() and cutlass_include()):
            raise CompileError(
                f"CUDA build: expected nvcc and CUTLASS; got {cuda_home()} and {cutlass_include()} "
                "(pip install -r third_party/cuda-build.txt, or set HSTU_ATTN_CUDA=0)"
            )


def python_include() -> Path:
    return Path(sysconfig.get_path("include"))


def jobs() -> int:
    return int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))


def nvcc_jobs() -> int:
    """MAX_JOBS where it is set, else as many as fit into memory."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    return jobs() if os.environ.get("MAX_JOBS") else max(1, min(jobs(), memory_gib // NVCC_GIB))


def write_ninja(ninja: Writer, library: str, host_module: str) -> None:
    """Two libraries, each from its objects; every object's headers are in its depfile."""
    torch, cuda = torch_dir(), cuda_home() if cuda_wanted() else None
    sanitize = ",".join(env_list("HSTU_ATTN_SANITIZE"))
    mode = f"{SANITIZE} -fsanitize={sanitize}" if sanitize else OPTIMIZE
    ccache = shutil.which("ccache") or ""
    cxx = os.environ.get("CXX", "g++")

    ninja.variable("cxx", f"{ccache} {cxx}")
    ninja.variable("cxxflags", f"{mode} {CXX_FLAGS} -I{CSRC} {os.environ.get('CXXFLAGS', '')}")
    ninja.variable("ldflags", f"-shared {mode} {os.environ.get('LDFLAGS', '')}")
    ninja.rule("cxx", "$cxx $cxxflags $flags -MMD -MF $out.d -c $in -o $out", "C++ $name", "$out.d")
    ninja.rule("link", "$cxx $in -o $out $ldflags $libs", "link $out")
    if cuda:
        ninja.pool("nvcc", nvcc_jobs())
        ninja.rule(
            "nvcc",
            f"{ccache} {cuda}/bin/nvcc -ccbin {cxx} {NVCC_FLAGS} -I{CSRC} -isystem {cutlass_include()} "
            "$flags -MD -MF $out.d -c $in -o $out",
            "CUDA $name",
            "$out.d",
            pool="nvcc",
        )

    def compile(rule: str, source: Path, flags: str) -> str:
        name = source.relative_to(CSRC).as_posix()
        variables = {"flags": flags, "name": name}
        return ninja.build(f"{name}.o", rule, str(source), variables=variables)[0]

    defines = cuda_defines() if cuda else ""
    flags = f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION} {defines} -isystem {torch}/include"
    # NOTE: libtorch.so only leads to the libraries that hold the symbols, so Ubuntu's default,
    # --as-needed, would drop it; and what those are called is torch's business, not ours.
    libs = f"-L{torch}/lib -Wl,--no-as-needed -ltorch"
    if cuda:
        flags += f" -isystem {cuda}/include"
        libs += f" -Wl,--exclude-libs,ALL -L{cuda}/lib64 -L{cuda}/lib -lcudart_static -ldl -lrt -lpthread"
    objects = [compile("cxx", path, f"{flags} {isa}") for path, isa in cpu_sources()]
    if cuda:
        objects += [compile("nvcc", path, f"{defines} {arch}") for path, arch in cuda_sources()]
    ninja.build(library, "link", objects, variables={"libs": libs})

    flags = f"-isystem {pybind11.get_include()} -isystem {python_include()}"
    objects = [compile("cxx", path, flags) for path in host_sources()]
    ninja.build(host_module, "link", objects)


setup(
    ext_modules=[
        Extension("hstu_attn._C", sources=[], py_limited_api=True),
        Extension("hstu_attn._host", sources=[]),
    ],
    cmdclass={"build_ext": NinjaBuild},
    setup_requires=missing_requirements(),
)
