"""The check against the headers of other torch releases."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pybind11", reason="setup.py needs it")

import setup
from tools import check_headers


def test_header_check_sees_a_macro_that_is_too_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # Two releases of torch: the macro of the newer one is missing in the older one.
    for version, text in ("old", ""), ("new", "#define STABLE_TORCH_ERROR_CODE_CHECK(call) (call)"):
        header = tmp_path / version / "torch/include/torch/csrc/stable/macros.h"
        header.parent.mkdir(parents=True)
        header.write_text(f"{text}\n")
    source = tmp_path / "csrc/cuda/ops.cpp"
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
