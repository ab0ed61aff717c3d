"""Tests of the extras of pyproject.toml: each suffices for its purpose."""

from __future__ import annotations

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
    r"recommender\.(connections|http\w*|serve|server|serve_options|served\w*|models)$"
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


distributions_of_packages = cache(metadata.packages_distributions)


def import_with(extra: str, names: list[str]) -> subprocess.CompletedProcess[str]:
    """Imports modules in a process where packages that the extra does not bring are absent."""
    allowed = needed(f"{PROJECT['name']}[{extra}]" if extra else PROJECT["name"])
    absent = [
        name
        for name, distributions in distributions_of_packages().items()
        if name not in {PROJECT["name"], *VENDORED}
        and not allowed & set(map(canonicalize_name, distributions))
    ]
    program = """
import importlib, json, sys
from importlib.machinery import PathFinder

def find(name, *rest):
    return None if name.partition(".")[0] in absent else found(name, *rest)

absent, names = map(json.loads, sys.argv[1:])
found, PathFinder.find_spec = PathFinder.find_spec, find
for name in names:
    importlib.import_module(name)
"""
    paths = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(EXAMPLES)!r}]"
    command = [sys.executable, "-c", paths + program, json.dumps(absent), json.dumps(names)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("extra", WHAT_IT_IS_FOR)
def test_an_extra_suffices_for_what_it_is_named_after(extra: str) -> None:
    names = WHAT_IT_IS_FOR[extra]
    assert names
    ended = import_with(extra, names)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_what_an_extra_does_not_bring_is_absent() -> None:
    ended = import_with("serving", ["hstu_attn.data"])
    assert "No module named 'tqdm'" in ended.stderr


def test_documented_extras_exist() -> None:
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("hstu_attn/**/*.py")]
    for path in [*texts, ROOT / "Makefile"]:
        for extras in re.findall(r"(?:hstu_attn|\.)\[([a-z,]+)\]", path.read_text()):
            assert set(extras.split(",")) <= set(EXTRAS), path
