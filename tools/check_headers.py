"""Compiles the host-side C++ against the headers of other torch releases, without generating code.

    python -m tools.check_headers [VERSION ...]

A build sees the headers of one torch only, but the package supports a range of releases. This check
finds macros and functions that the headers of some releases lack. By default it tries the oldest
and the newest release. The headers come from the wheels on PyPI and are cached in build/headers.
CUDA's own headers are those that the build finds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from setuptools.errors import CompileError

import setup

CACHE = setup.ROOT / "build/headers"
OLDEST = "{}.{}.0".format(*setup.TORCH_MINIMUM)
NEWEST = "2.15.0"  # the newest release that the README names

# The wheel for macOS has the same headers as the one for Linux, and is 80 MB instead of 530. The
# second choice is the wheel for this machine.
WHEELS: tuple[list[str], ...] = (["--platform", "macosx_14_0_arm64"], [])


def headers(version: str) -> Path:
    """Returns the folder `torch` with the headers of a release; the first call downloads them."""
    folder = CACHE / version
    if folder.exists():
        return folder / "torch"
    CACHE.mkdir(parents=True, exist_ok=True)
    print(f"torch {version}: downloading a wheel for its headers (80 MB)", flush=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    # NOTE: constraints on this machine's packages do not apply to the downloaded headers.
    environment = {**os.environ, "PIP_CONSTRAINT": os.devnull}
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        for choice in WHEELS:
            options = ["--no-deps", "--only-binary=:all:", "--dest", scratch, *choice]
            command = [*pip, *options, f"torch=={version}"]
            if subprocess.run(command, env=environment).returncode == 0:
                break
        else:
            sys.exit(f"torch=={version}: expected a wheel to download; pip found none (see above)")
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith("torch/include/")]
            archive.extractall(Path(scratch, "unpacked"), names)
        Path(scratch, "unpacked").rename(folder)
    return folder / "torch"


class SyntaxCheck(setup.NinjaFile):
    """The C++ part of the build, with its flags, but with the compiler only checking syntax."""

    def __init__(self) -> None:
        super().__init__()
        self.text = self.text.replace(setup.CXX_FLAGS, f"{setup.CXX_FLAGS} -fsyntax-only")

    def build(self, rule: str, output: str, inputs: Iterable[str | Path], flags: str = "") -> str:
        return super().build(rule, output, inputs, flags) if rule == "cxx" else output


def compiles(torch: Path) -> bool:
    """Returns whether every C++ source compiles against the headers in `torch`/include.

    The first errors go to the standard output.
    """
    ninja = SyntaxCheck()
    ninja.library("_C.so", torch)
    ninja.host_module("_host.so")
    with tempfile.TemporaryDirectory() as folder:
        ninja.write(Path(folder))
        try:
            setup.run_ninja(Path(folder), ["--quiet"])
        except CompileError as error:
            print(error, flush=True)
            return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description="Compiles the C++ against other torch headers.")
    parser.add_argument("versions", nargs="*", default=[OLDEST, NEWEST], metavar="VERSION")
    versions = parser.parse_args().versions
    os.environ["HSTU_ATTN_CUDA"] = "1"  # the C++ that calls CUDA is checked too
    setup.check_prerequisites()
    failed = [version for version in versions if not compiles(headers(version))]
    if failed:
        sys.exit(f"headers: the C++ does not compile with torch {', '.join(failed)} (see above)")
    print(f"headers: the C++ compiles with torch {', '.join(versions)}")


if __name__ == "__main__":
    main()
