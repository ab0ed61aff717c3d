"""Tests of the check against other torch headers and of the tool that builds wheels."""

from __future__ import annotations

import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pybind11", reason="setup.py needs it")

import setup
from tools import build_wheels, check_headers


def test_header_check_sees_a_macro_that_is_too_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # In these two releases of torch, the older one lacks the macro of the newer one.
    for version, text in ("old", ""), ("new", "#define STABLE_TORCH_ERROR_CODE_CHECK(call) (call)"):
        header = tmp_path / version / "torch/include/torch/csrc/stable/macros.h"
        header.parent.mkdir(parents=True)
        header.write_text(f"{text}\n")
    source = tmp_path / "csrc/api/cuda/ops.cpp"
    source.parent.mkdir(parents=True)
    source.write_text(
        "#include <torch/csrc/stable/macros.h>\n"
        "int check(int code) { return STABLE_TORCH_ERROR_CODE_CHECK(code); }\n"
    )
    monkeypatch.setattr(setup, "CSRC", tmp_path / "csrc")
    monkeypatch.setattr(setup, "cuda_wanted", lambda: True)
    assert check_headers.compiles(tmp_path / "new/torch")
    assert not check_headers.compiles(tmp_path / "old/torch")
    assert "STABLE_TORCH_ERROR_CODE_CHECK" in capfd.readouterr().out


# The program calls each function that tools/manylinux.S has in the place of a newer one.
USES_NEW_SYMBOLS = """\
#include <cmath>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>

extern "C" const char* problem(int n, double x) {
  std::stringstream both;
  both << n << ' ' << x;
  int read = 0;
  double second = 0;
  both >> read >> second;
  if (read != n || second != x || both.str() != "3 0.5") return "std::stringstream";
  if (std::move(both).str() != "3 0.5") return "std::stringstream, moved from";

  std::ostringstream out;
  out << "written " << n;
  const std::string copied = out.str();
  const std::string moved = std::move(out).str();
  if (copied != "written 3" || moved != copied) return "std::ostringstream";

  std::exception_ptr first;
  try {
    throw std::runtime_error("kept");
  } catch (...) {
    first = std::current_exception();
  }
  std::exception_ptr second_owner = first;
  first = nullptr;
  std::string message;
  try {
    std::rethrow_exception(second_owner);
  } catch (const std::runtime_error& error) {
    message = error.what();
  }
  if (message != "kept" || first) return "std::exception_ptr";

  bool refused = false;
  try {
    std::ignore = std::allocator<int>().allocate(static_cast<size_t>(-1));
  } catch (const std::bad_alloc&) {
    refused = true;
  }
  if (!refused) return "std::bad_array_new_length";

  std::once_flag once;
  int calls = 0;
  for (int i = 0; i < n; ++i) std::call_once(once, [&] { ++calls; });
  if (calls != 1) return "std::call_once";

  auto shared = std::make_shared<int>(n);
  auto other = shared;
  if (shared.use_count() != 2) return "std::shared_ptr";
  return std::abs(std::exp(x) - 1.6487212707001282) < 1e-15 ? "" : "std::exp";
}
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="tools/manylinux.S is for x86-64")
def test_library_for_old_systems(tmp_path: Path) -> None:
    source, library = tmp_path / "uses.cpp", tmp_path / "uses.so"
    source.write_text(USES_NEW_SYMBOLS)
    flags = shlex.split(build_wheels.old_system_flags())
    # -O0: the compiler calls the functions rather than inlining them.
    command = ["g++", "-std=c++20", "-O0", "-fPIC", "-shared", str(source), "-o", str(library)]
    subprocess.run([*command, *flags], check=True)
    versions = subprocess.run(
        ["readelf", "--version-info", str(library)], check=True, capture_output=True, text=True
    ).stdout
    # The newest symbol versions of glibc 2.28 and of gcc 8's libstdc++.
    for name, newest in ("GLIBC", (2, 28)), ("GLIBCXX", (3, 4, 25)), ("CXXABI", (1, 3, 11)):
        asked = re.findall(rf"Name: {name}_([\d.]+)", versions)
        assert max(tuple(map(int, version.split("."))) for version in asked) <= newest, name
    call = (
        f"import ctypes; problem = ctypes.CDLL({str(library)!r}).problem\n"
        "problem.restype = ctypes.c_char_p; problem.argtypes = [ctypes.c_int, ctypes.c_double]\n"
        "print(problem(3, 0.5).decode(), end='')"
    )
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done


def test_wheel_for_a_python_that_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert build_wheels.interpreter("python3.99") is None
    assert capsys.readouterr().out == "python3.99: not found, so there is no wheel for it\n"
