"""Makes the virtual environment of the Makefile: `python3 tools/make_venv.py FOLDER`.

If this python3 has a CUDA build of torch and sees a GPU, the environment uses that torch and pins
nothing else; otherwise it gets the versions of constraints.txt. FOLDER/constraints.txt records the
choice. If no NVIDIA GPU is visible, torch's CPU build is installed, provided that torch's own index
can be reached or pip is configured to find that build elsewhere.
"""

from __future__ import annotations

import http.client
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_BUILD = "the CUDA build and its libraries, a download of some 2.6 GiB"
PROBE_SECONDS = 5


def check_prerequisites() -> None:
    """Exits with a one-line message if the machine lacks a prerequisite."""
    if sys.version_info < (3, 10):  # noqa: UP036
        version = "{}.{}".format(*sys.version_info)
        sys.exit(f"python3: expected 3.10 or later; got {version} (make PYTHON=python3.12 ...)")
    missing = []
    try:
        import ensurepip  # noqa: F401  (Debian ships venv without it)
    except ImportError:
        missing.append("python3-venv")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        missing.append("python3-dev")
    if not shutil.which(os.environ.get("CXX", "g++")):
        missing.append("g++")
    if missing:
        sys.exit(
            f"{', '.join(missing)}: expected; not found (sudo apt install {' '.join(missing)})"
        )


def cuda_torch() -> tuple[Path, str] | None:
    """Returns the site-packages folder and version of a torch that can use this machine's GPU."""
    try:
        import torch
    except ImportError:
        return None
    version = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])
    if version < (2, 10) or not torch.cuda.is_available():
        return None
    return Path(torch.__file__).parents[1], torch.__version__


def gpu_visible() -> bool:
    """Returns whether the driver lists an NVIDIA GPU."""
    if not shutil.which("nvidia-smi"):
        return False
    return b"GPU" in subprocess.run(["nvidia-smi", "-L"], capture_output=True).stdout


def torch_index_options() -> list[str]:
    """Returns pip's options to install torch's CPU build if no GPU is visible.

    With them, pip prefers the CPU build to a CUDA build: 2.13.0+cpu is later than 2.13.0.
    """
    if gpu_visible():
        print(f"torch: an NVIDIA GPU is visible, so pip takes {CUDA_BUILD}", flush=True)
        return []
    try:
        urllib.request.urlopen(f"{TORCH_CPU_INDEX}/torch/", timeout=PROBE_SECONDS).close()
    except (OSError, http.client.HTTPException) as error:
        print(
            f"torch: expected an answer from {TORCH_CPU_INDEX}, its CPU builds; got {error}. "
            f"Unless pip is configured to find a CPU build elsewhere, it takes {CUDA_BUILD}",
            flush=True,
        )
        return []
    return ["--extra-index-url", TORCH_CPU_INDEX]


def main(folder: Path) -> None:
    check_prerequisites()
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin/python"
    pins = (ROOT / "constraints.txt").read_text()
    if found := cuda_torch():
        site_packages, version = found
        print(f"using torch {version} of {site_packages}")
        # NOTE: --system-site-packages does not work from within another venv, which it skips.
        where = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        purelib = subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip()
        Path(purelib, "torch-of-this-machine.pth").write_text(f"{site_packages}\n")
        pins = f"torch=={version}\n"
    (folder / "constraints.txt").write_text(pins)

    def install(*packages: str) -> None:
        options = ["--disable-pip-version-check", "-c", str(folder / "constraints.txt")]
        subprocess.run([str(python), "-m", "pip", "install", *options, *packages], check=True)

    # setup.py lists the other packages: torch, and CUDA packages if a GPU is visible.
    build = ("setuptools>=77", "wheel", "ninja>=1.11", "pybind11>=2.13")  # as in pyproject.toml
    install("--quiet", *build)
    ask = (
        "import setuptools.build_meta as backend\n"
        "for name in backend.get_requires_for_build_wheel(): print('needs', name)"
    )
    command = [str(python), "-W", "ignore", "-c", ask]
    answer = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    if names := re.findall(r"^needs (.+)$", answer, re.MULTILINE):
        print("installing", *names, flush=True)
        needs_torch = any(name.startswith("torch") for name in names)
        install(*(torch_index_options() if needs_torch else []), *names)  # large: shows progress


if __name__ == "__main__":
    main(Path(sys.argv[1]))
