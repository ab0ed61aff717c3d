"""Tests of tools/make_venv.py: the build of torch that it requests from pip, and its output."""

from __future__ import annotations

import functools
import http.server
import os
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools import make_venv

pytest.importorskip("pip")  # pip of the environment that runs the tests

CONSTRAINTS = make_venv.ROOT / "constraints.txt"
(PINNED,) = (
    line.removeprefix("torch==")
    for line in CONSTRAINTS.read_text().splitlines()
    if line.startswith("torch==")
)


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Serves two package indexes, `pypi` with torch and `cpu` with its CPU build; yields
    addresses and folders.
    """
    folder = tmp_path_factory.mktemp("indexes")
    for index, version in (("pypi", PINNED), ("cpu", f"{PINNED}+cpu")):
        made = folder / index / "torch"
        made.mkdir(parents=True)
        info = f"torch-{version}.dist-info"
        with zipfile.ZipFile(made / f"torch-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(
                f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}"
            )
            wheel.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{info}/RECORD", "")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", folder
        server.shutdown()


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_venv, "gpu_visible", lambda: False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def installed(address: str, target: Path, *options: str, **environment: str) -> str:
    """Returns the version of torch that pip installs from the index `pypi` with these options."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    clean |= {"PIP_CONFIG_FILE": os.devnull, "NO_PROXY": "127.0.0.1", **environment}
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--no-cache-dir",
    ]
    usual = ["--target", str(target), "-c", str(CONSTRAINTS), "--index-url", f"{address}/pypi"]
    subprocess.run(
        [*command, *usual, *options, "torch>=2.10"], env=clean, check=True, capture_output=True
    )
    (info,) = target.glob("torch-*.dist-info")
    return info.name.removeprefix("torch-").removesuffix(".dist-info")


@pytest.mark.slow
@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_pip_takes_the_cpu_build(
    indexes: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, _ = indexes
    monkeypatch.setattr(make_venv, "TORCH_CPU_INDEX", f"{address}/cpu")
    options = make_venv.torch_index_options()
    assert options == ["--extra-index-url", f"{address}/cpu"]
    assert installed(address, tmp_path / "without") == PINNED
    assert installed(address, tmp_path / "with", *options) == f"{PINNED}+cpu"


@pytest.mark.slow
@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("path", ["", "/absent"], ids=["no answer", "no such page"])
def test_the_size_is_said_where_the_cpu_build_cannot_be_reached(
    indexes: tuple[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    path: str,
) -> None:
    address, folder = indexes
    with socket.socket() as unused:  # it is bound and does not listen, so connections are refused
        unused.bind(("127.0.0.1", 0))
        there = address + path if path else f"http://127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setattr(make_venv, "TORCH_CPU_INDEX", there)
        assert make_venv.torch_index_options() == []
    said = capsys.readouterr().out
    assert f"expected an answer from {there}" in said
    assert "a download of some 2.6 GiB" in said
    # A CPU build that pip's configuration finds is taken as well.
    links = str(folder / "cpu/torch")
    assert installed(address, tmp_path, PIP_FIND_LINKS=links) == f"{PINNED}+cpu"


@pytest.mark.parametrize(
    ("listed", "visible"), [("GPU 0: NVIDIA H200 (UUID: GPU-1)", True), ("No devices found", False)]
)
def test_a_visible_gpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    listed: str,
    visible: bool,
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{listed}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert make_venv.gpu_visible() == visible
    if visible:
        assert make_venv.torch_index_options() == []
        assert "pip takes the CUDA build" in capsys.readouterr().out


@pytest.mark.usefixtures("no_gpu")
def test_large_downloads_show_their_progress(
    indexes: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(stdout="needs torch>=2.10\n")

    monkeypatch.setattr(make_venv, "TORCH_CPU_INDEX", f"{indexes[0]}/cpu")
    monkeypatch.setattr(make_venv, "cuda_torch", lambda: None)
    monkeypatch.setattr(make_venv.subprocess, "run", run)
    make_venv.main(tmp_path)
    assert (tmp_path / "constraints.txt").read_text() == CONSTRAINTS.read_text()
    _, build, _, torch = commands
    assert "--quiet" in build
    assert "setuptools>=77" in build
    assert "--quiet" not in torch
    assert torch[-3:] == ["--extra-index-url", f"{indexes[0]}/cpu", "torch>=2.10"]
