"""Tests of the extras of pyproject.toml: each has all packages for its purpose."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.helpers.paths import EXAMPLES, ROOT

tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]

# These are imported only on a GPU, with the triton that a CUDA build of torch brings.
FOR_GPUS = re.compile(r"\.triton_")
VENDORED = ("colorama", "psutil", "setproctitle")  # ray brings its own
SERVER = re.compile(
    r"recommender\.(connections|http\w*|serve|server|serve_options|served\w*|models|ray_proxy)$"
)


def modules(folder: Path, root: Path = ROOT) -> list[str]:
    """Returns the names of the modules below a folder."""
    paths = sorted(path.relative_to(root).with_suffix("") for path in folder.rglob("*.py"))
    names = [".".join(path.parts).removesuffix(".__init__") for path in paths]
    return [name for name in names if not FOR_GPUS.search(name) and "__main__" not in name]


LIBRARY = modules(ROOT / "hstu_attn")
RECOMMENDER = modules(EXAMPLES / "recommender", EXAMPLES)
OF_OTHER_EXTRAS = {"hstu_attn.serving.client", "hstu_attn.serving.ray"}
WHAT_IT_IS_FOR = {
    "": [name for name in LIBRARY if not re.match(r"hstu_attn\.(data|serving)\b", name)],
    "data": [name for name in LIBRARY if name.startswith("hstu_attn.data")],
    "serving": [
        name
        for name in LIBRARY
        if name.startswith("hstu_attn.serving") and name not in OF_OTHER_EXTRAS
    ],
    "client": ["hstu_attn.serving.client"],
    "ray": ["hstu_attn.serving.ray"],
    "ray,serve": ["serve_ray"],
    "train": [
        *("train_retrieval", "train_ranking"),
        *(name for name in RECOMMENDER if not SERVER.match(name)),
    ],
    "serve": ["serve", *filter(SERVER.match, RECOMMENDER)],
    "bench": modules(ROOT / "benchmarks"),
}


@cache
def needed(requirement: str) -> frozenset[str]:
    """Returns the installed distributions that a requirement brings, itself included, by name."""
    parsed = Requirement(requirement)
    if parsed.marker and not parsed.marker.evaluate({"extra": ""}):
        return frozenset()
    name = canonicalize_name(parsed.name)
    if name == canonicalize_name(PROJECT["name"]):
        below = [wanted for extra in parsed.extras for wanted in EXTRAS[extra]]
        return frozenset().union(*map(needed, [*PROJECT["dependencies"], *below]))
    try:
        below = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        pytest.skip(f"needs {name}")
    found = {name}
    for wanted in below:
        marker = Requirement(wanted).marker
        if marker is None or any(marker.evaluate({"extra": e}) for e in ("", *parsed.extras)):
            found |= needed(wanted.partition(";")[0])
    return frozenset(found)


def brought_by(extra: str) -> frozenset[str]:
    """Returns the distributions that the package brings with an extra."""
    return needed(f"{PROJECT['name']}[{extra}]" if extra else PROJECT["name"])


def absent_with(extra: str) -> list[str]:
    """Returns the installed packages that an extra does not bring."""
    allowed = brought_by(extra)
    return [
        name
        for name, distributions in distributions_of_packages().items()
        if name not in {PROJECT["name"], *VENDORED}
        and not allowed & set(map(canonicalize_name, distributions))
    ]


distributions_of_packages = cache(metadata.packages_distributions)

# Imports each case in a fork of a process that has imported torch, with the packages hidden that
# any case lacks. Prints the error of each case, or "".
IMPORTS = """
import importlib, json, os, sys, traceback
from importlib.machinery import PathFinder

def find(name, *rest):
    return None if name.partition(".")[0] in absent else found(name, *rest)

paths, cases = json.load(sys.stdin)
sys.path[:0] = paths
absent = set().union(*(case[0] for case in cases))
found, PathFinder.find_spec = PathFinder.find_spec, find
import torch

errors = []
for absent, names in cases:
    reads, writes = os.pipe()
    if not os.fork():
        try:
            for name in names:
                importlib.import_module(name)
            error = ""
        except BaseException:
            error = traceback.format_exc()
        with open(writes, "w") as file:
            file.write(error or "imported")
        os._exit(0)
    os.close(writes)
    with open(reads) as file:
        errors.append(file.read())
    os.wait()
print(json.dumps(errors))
"""
WHAT_IS_TRIED = {**WHAT_IT_IS_FOR, "serving, but data": ["hstu_attn.data"]}


@cache
def results_of_imports(with_numpy: bool) -> dict[str, str]:
    """Returns "imported" or the error of each case with numpy, or of each case without it.

    torch imports numpy if it is installed, and no other package of an extra.
    """
    cases = {}
    for what, names in WHAT_IS_TRIED.items():
        extra = what.partition(", but")[0]
        with contextlib.suppress(pytest.skip.Exception):
            if ("numpy" in brought_by(extra)) == with_numpy:
                cases[what] = absent_with(extra), names
    ended = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        cwd=ROOT,
        input=json.dumps([[str(ROOT), str(EXAMPLES)], list(cases.values())]),
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    return dict(zip(cases, json.loads(ended.stdout.splitlines()[-1]), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("extra", WHAT_IT_IS_FOR)
def test_an_extra_suffices_for_what_it_is_named_after(extra: str) -> None:
    assert WHAT_IT_IS_FOR[extra]
    result = results_of_imports("numpy" in brought_by(extra))[extra]
    assert result == "imported", result


@pytest.mark.slow
def test_what_an_extra_does_not_bring_is_absent() -> None:
    result = results_of_imports("numpy" in brought_by("serving"))["serving, but data"]
    assert "No module named 'tqdm'" in result


def test_documented_extras_exist() -> None:
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("hstu_attn/**/*.py")]
    for path in [*texts, ROOT / "Makefile"]:
        for extras in re.findall(r"(?:hstu_attn|\.)\[([a-z,]+)\]", path.read_text()):
            assert set(extras.split(",")) <= set(EXTRAS), path
