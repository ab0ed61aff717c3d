"""What the build promises: one library for any CPython and torch >= 2.10, and a whole sdist."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import hstu_attn

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = Path(hstu_attn.__file__).with_name("_C.abi3.so")

# The C interface that torch keeps stable: torch/csrc/inductor/aoti_torch/c and torch/csrc/stable/c.
STABLE_SYMBOL = re.compile(r"(aoti_torch|torch)_[a-z0-9_]+")
# The C and C++ run-time libraries version their symbols.
RUNTIME_SYMBOL = re.compile(r".+@(GLIBC|GLIBCXX|CXXABI|GCC)_[\d.]+")


def output_of(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def undefined_symbols() -> list[str]:
    """What the library asks of others; weak symbols may stay undefined and do not count."""
    lines = output_of("nm", "--dynamic", "--undefined-only", str(LIBRARY)).splitlines()
    kinds_and_names = [line.split() for line in lines]
    return [name for kind, name in kinds_and_names if kind == "U"]


def test_library_needs_torch_alone() -> None:
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", output_of("readelf", "--dynamic", str(LIBRARY)))
    system = r"(ld-linux.*|lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+))\.so\.\d+"
    assert [name for name in needed if not re.fullmatch(system, name)] == ["libtorch.so"]


def test_library_uses_the_stable_interface_only() -> None:
    symbols = undefined_symbols()
    foreign = [name for name in symbols if not RUNTIME_SYMBOL.fullmatch(name)]
    assert any(name.startswith("aoti_torch_") for name in foreign)
    assert [name for name in foreign if not STABLE_SYMBOL.fullmatch(name)] == []


def test_library_does_not_depend_on_the_python_version() -> None:
    assert not [name for name in undefined_symbols() if name.startswith(("Py", "_Py"))]


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
    for pattern in ("csrc/**/*.h", "csrc/**/*.cpp", "csrc/**/*.cu*", "hstu_attn/**/*.py"):
        wanted |= {path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern)}
    assert wanted <= held, f"expected in the sdist: {sorted(wanted - held)}"
    assert not [name for name in held if name.endswith(".so")]
