"""Tests that the modules of the package, and of benchmarks, import each other in one direction, by
relative imports, and that no test module imports another one.
"""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.helpers.paths import ROOT


def module_name(path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    module_name(path): path
    for package in ("hstu_attn", "benchmarks")
    for path in (ROOT / package).rglob("*.py")
}


def imported_by(name: str) -> set[str]:
    """Returns the modules of `SOURCES` that a module imports: at its top, in functions, and
    for the type checker alone.
    """
    path = SOURCES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - node.level]
            source = ".".join([*(base if node.level else []), *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                found.add(inner if inner in SOURCES else source)
    return found & SOURCES.keys()


@pytest.mark.slow
def test_no_module_imports_itself_by_way_of_others():
    graph = {name: imported_by(name) for name in SOURCES}
    assert graph["hstu_attn.layer"] >= {"hstu_attn.cached", "hstu_attn.fused.operator"}
    assert graph["benchmarks.runner"] >= {"benchmarks.against", "benchmarks.timing"}
    assert graph["hstu_attn.fused.steps"] >= {"hstu_attn.fused.triton_steps"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_modules_import_each_other_by_relative_imports(name):
    for node in ast.walk(ast.parse(SOURCES[name].read_text())):
        if isinstance(node, ast.ImportFrom) and not node.level:
            assert (node.module or "").split(".")[0] != name.split(".")[0], f"line {node.lineno}"


@pytest.mark.slow
def test_no_test_module_imports_another():
    modules = list(ROOT.glob("tests/**/test_*.py"))
    names = {path.stem for path in modules}
    assert len(names) > 100
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text())):
            imported = []
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                imported = [getattr(node, "module", None) or "", *(a.name for a in node.names)]
            parts = {part for name in imported for part in name.split(".")}
            assert names.isdisjoint(parts), f"{path}:{node.lineno}"
