"""Checks the undefined symbols of a built operator library: `check_symbols.py LIBRARY`.

One file has to load into every torch >= 2.10, with and without CUDA, and under any CPython. So it
may only use torch's stable C interface and the C and C++ run-time libraries, and every symbol that
it uses must exist. Symbols that only a CUDA build of torch has must be weak references.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

# The C interface that torch keeps stable: torch/csrc/inductor/aoti_torch/c and torch/csrc/stable/c.
STABLE_SYMBOL = re.compile(r"(aoti_torch|torch)_\w+")
# The C and C++ run-time libraries version their symbols.
RUNTIME_SYMBOL = re.compile(r".+@(GLIBC|GLIBCXX|CXXABI|GCC)_[\d.]+")
# Weak references that the compiler adds: hooks for optional tools.
COMPILER_SYMBOL = re.compile(r"_ITM_\w+|__gmon_start__")
WEAK_SYMBOLS = {
    "aoti_torch_get_current_cuda_stream",
    "torch_exception_get_what_without_backtrace",
}

RUNTIME_LIBRARY = re.compile(r"(ld-linux.*|lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+))\.so\.\d+")
TORCH_LIBRARY = "libtorch.so"  # it leads to the libraries that hold torch's symbols:
TORCH_HOLDERS = ("libtorch_cpu.so", "libc10.so")


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _torch_symbols() -> set[str]:
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise SystemExit("torch: expected an installed torch to compare with; got none")
    folder = Path(torch.origin).parent / "lib"
    listings = [_output("nm", "-D", "--defined-only", str(folder / name)) for name in TORCH_HOLDERS]
    return {line.split()[-1] for listing in listings for line in listing.splitlines()}


def problems(library: Path) -> list[str]:
    """Returns a line for each dependency that the library must not have."""
    dynamic = _output("readelf", "-d", str(library))
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    foreign = [n for n in needed if n != TORCH_LIBRARY and not RUNTIME_LIBRARY.fullmatch(n)]
    found = [f"needs the library {name}" for name in foreign]
    paths = re.findall(r"\(R\w*PATH\).*\[(.+)\]", dynamic)
    found += [f"looks for libraries in {path}" for path in paths]
    torch_symbols = _torch_symbols()
    for line in _output("nm", "-D", "--undefined-only", str(library)).splitlines():
        kind, name = line.split()
        if RUNTIME_SYMBOL.fullmatch(name) or COMPILER_SYMBOL.fullmatch(name):
            continue
        if kind == "U":
            if not STABLE_SYMBOL.fullmatch(name):
                found.append(f"{name} is not of torch's stable interface")
            elif name not in torch_symbols:
                found.append(f"{name} is not in {' or '.join(TORCH_HOLDERS)}")
        elif name not in WEAK_SYMBOLS:
            found.append(f"{name} is referred to weakly, and is none of {sorted(WEAK_SYMBOLS)}")
    return found


def main(library: Path) -> None:
    found = problems(library)
    for problem in found:
        print(f"{library}: {problem}")
    if found:
        sys.exit(1)
    print(f"{library}: needs torch's stable interface and the run-time libraries alone")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
