"""Tests of README.md, CONTRIBUTING.md and docs/: code and commands run as they are written,
tables match the stored results, and the named files and identifiers exist.
"""

from __future__ import annotations

import fnmatch
import importlib
import json
import re
import runpy
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import hstu_attn
from benchmarks import report
from tests.helpers.documented import (
    COMPLETE,
    DOCS,
    SHELL,
    TEXTS,
    found_in,
    make_checkout,
    run,
    save_some_model,
)
from tests.helpers.paths import ROOT
from tools import draw_masks


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def commands_of(block: str) -> list[str]:
    return block.replace("\\\n", "").splitlines()


PYTHON = list(found_in(COMPLETE, r"^```python\n(.*?)^```$").values())
COMMANDS = [command for _, block in SHELL for command in commands_of(block)]
# Commands within sentences, such as `python -m benchmarks.paged`.
INLINE = [
    command.replace("\n", " ") for command in found_in(COMPLETE, r"`((?:python|make) [^`]+)`")
]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return make_checkout(tmp_path)


# --- code -----------------------------------------------------------------------------------------


def test_there_are_blocks_that_print() -> None:
    assert len(PYTHON) >= 10
    assert all("print(" in block for _, block in PYTHON)


@pytest.mark.slow
@pytest.mark.documented
@pytest.mark.parametrize(
    "block",
    [
        pytest.param(
            block,
            id=f"{name_of(page)}-{n}",
            marks=[pytest.mark.slow] if "torch.compile" in block else [],
        )
        for n, (page, block) in enumerate(PYTHON)
    ],
)
def test_a_python_block_runs_by_itself(
    block: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A block's output matches the comments after its print calls, and its tensors are finite."""
    if "hstu_attn.serving" in block:
        pytest.importorskip("hstu_attn._host", reason="_host has not been built")
    monkeypatch.chdir(tmp_path)
    Path("block.py").write_text(block)
    names = runpy.run_path("block.py", run_name="__main__")
    printed = capsys.readouterr().out.splitlines()
    assert printed == re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)
    tensors = {name: value for name, value in names.items() if isinstance(value, torch.Tensor)}
    assert tensors
    for name, value in tensors.items():
        assert value.isfinite().all(), name
        assert not value.is_leaf or not value.requires_grad or value.grad.any(), name


def test_the_first_example_is_right() -> None:
    namespace: dict[str, Any] = {}
    page, block = PYTHON[[name_of(page) for page, _ in PYTHON].index("README.md")]
    exec(compile(block, str(page), "exec"), namespace)
    exact = hstu_attn.reference.hstu_attention(
        *(namespace[name].detach().double() for name in "qkv"),
        cu_seqlens_q=namespace["offsets"],
        max_seqlen_q=8,
        mask=hstu_attn.Mask.causal(num_targets=torch.tensor([2, 1, 3], device=namespace["device"])),
        alpha=64**-0.5,
    )
    tolerance = {torch.float32: (1e-5, 1e-6), torch.bfloat16: (2e-2, 2e-2)}[namespace["dtype"]]
    torch.testing.assert_close(
        namespace["out"].double(), exact, rtol=tolerance[0], atol=tolerance[1]
    )


# --- commands -------------------------------------------------------------------------------------


def test_every_command_is_one_that_is_tested() -> None:
    """The commands call only these programs, and the environment is active where they need it."""
    assert COMMANDS
    for _, block in SHELL:
        active = False
        for line in commands_of(block):
            first = next(word for word in line.split() if not re.match(r"[A-Z_]+=", word))
            if first in ("python", "tensorboard", "torchrun") or line.startswith("TORCH=$(python"):
                assert active, line
            elif first == "pip" or line.startswith("python3 -m venv "):
                active = True  # the reader has an environment
            else:
                known = (
                    ".",
                    "export",
                    "make",
                    "curl",
                    "g++",
                    "./score",
                    "cuobjdump",
                    "redis-server",
                    "serve",
                    "set",
                )
                assert first in known or first.startswith(".venv/bin/"), line
                active |= line == ". .venv/bin/activate"


@pytest.mark.parametrize("command", [c for c in [*COMMANDS, *INLINE] if c.startswith("make ")])
def test_a_target_exists(command: str) -> None:
    run("make", "--dry-run", *shlex.split(command, comments=True)[1:], cwd=ROOT)


def test_workflows_call_make_targets_and_nothing_else() -> None:
    text = (ROOT / ".github/workflows/ci.yml").read_text()
    assert re.findall(r"\brun: (.*)", text) == ["make ci-packages", "make ${{ matrix.target }}"]
    targets = re.findall(r"target: \[(.*)\]", text)[0].split(", ")
    # The others have what the first leaves out.
    assert {"test", "test-docs", "test-faults"} <= set(targets)
    targets += ["ci-packages", *re.findall(r"target: (\w+),", text)]
    rules = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(targets) <= set(rules)


def test_the_version_is_the_same_everywhere() -> None:
    version = re.escape(hstu_attn.__version__)
    assert re.search(rf"^version: {version}$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    released = re.findall(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert re.fullmatch(version, released[0])


OPTIONS = [
    found[1]
    for command in [*COMMANDS, *INLINE]
    if (found := re.match(r"(?:python|torchrun .*?) ?((?:examples/|-m benchmarks\.).*)", command))
]


@pytest.mark.slow
@pytest.mark.documented
@pytest.mark.parametrize("words", dict.fromkeys(w for w in OPTIONS if "FILE" not in w))
def test_a_program_takes_these_options(words: str) -> None:
    """The parser reads the values before it reads --help."""
    run(sys.executable, *shlex.split(words, comments=True), "--help", cwd=ROOT)


@pytest.mark.slow
@pytest.mark.documented
def test_pytest_commands_find_tests() -> None:
    """A single process collects the tests of all commands, so that modules are imported once."""
    commands = [shlex.split(c, comments=True) for c in COMMANDS if "-m pytest " in c]
    assert len(commands) >= 3
    assert all(words[:3] == ["python", "-m", "pytest"] for words in commands)
    program = """
import json, pytest, sys
for words in json.loads(sys.argv[1]):
    print("status", int(pytest.main([*words, "--collect-only"])))
"""
    ended = run(sys.executable, "-c", program, json.dumps([w[3:] for w in commands]), cwd=ROOT)
    assert re.findall(r"^status (\d+)$", ended.stdout, re.MULTILINE) == ["0"] * len(commands)
    counts = re.findall(r"^[1-9]\d*(?:/\d+)? tests collected", ended.stdout, re.MULTILINE)
    assert len(counts) == len(commands)


def test_the_build_of_one_head_dim_compiles_that_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import setup

    [command] = [c for c in COMMANDS if "HSTU_ATTN_HEAD_DIMS=" in c]
    assignments = dict(word.split("=") for word in command.split() if "=" in word)
    for name, value in assignments.items():
        monkeypatch.setenv(name, value)
    names = [source.name for source in setup.cuda_sources() if source.name.startswith("sm")]
    [arch] = setup.env_list("HSTU_ATTN_ARCHS")
    [head_dim], [dtype] = setup.head_dims(), setup.dtypes()
    kinds = ("forward", "backward")
    assert sorted(names) == sorted(f"sm{arch}/{kind}_d{head_dim}.{dtype}.cu" for kind in kinds)
    [disassembly] = [c for c in COMMANDS if c.startswith("cuobjdump ")]
    compiled = f"build/ninja-some-cuda/sm{arch}/forward_d{head_dim}.{dtype}.cu.o"
    assert fnmatch.fnmatch(compiled, disassembly.split()[-1])


@pytest.mark.parametrize("page", dict.fromkeys(page for page, _ in SHELL), ids=name_of)
def test_no_command_is_refused_because_of_one_above_it(page: Path) -> None:
    outputs = set()
    for block in (block for where, block in SHELL if where == page):
        for words in commands_of(block):
            if found := re.search(r"--out (\S+)", words):
                assert ("--resume" in words) == (found[1] in outputs), words
                outputs.add(found[1])


@pytest.mark.slow
@pytest.mark.documented
def test_the_request_is_answered(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of `make serve` answers the curl command twice, with the data of `make demo`."""
    pytest.importorskip("hstu_attn._host", reason="_host has not been built")
    pytest.importorskip("fastapi")
    from recommender.serve_options import parse_arguments

    from hstu_attn.data.synthetic import write_synthetic_movielens
    from tests.helpers.http_client import process

    asked = [shlex.split(line) for line in COMMANDS if line.startswith("curl ")]
    [(url, data, body)] = {tuple(words[-3:]) for words in asked}  # one server, and replicas
    assert data == "-d"
    for words in asked:
        assert words[:3] == ["curl", "-H", "Content-Type: application/json"]
    monkeypatch.chdir(checkout)
    save_some_model(checkout / "runs/retrieval/best.pt", list(range(1, 1001)))
    ratings = write_synthetic_movielens("runs/synthetic-movielens")
    newest = max(int(line.split("::")[3]) for line in ratings.read_text("latin-1").splitlines())
    assert all(event["time"] > newest for event in json.loads(body)["events"])
    options = parse_arguments("", [])
    assert url == f"http://{options.host}:{options.port}/recommend"
    serve = re.search(r"^SERVE_ARGS \?= (.*)$", Path("Makefile").read_text(), re.MULTILINE)
    with process(*shlex.split(serve[1])) as (_, client):
        for _ in range(2):
            answer = client.post("/recommend", **json.loads(body))
            assert len(answer["items"]) == json.loads(body)["k"]


# --- tables, pictures and links -------------------------------------------------------------------


@pytest.mark.parametrize("path", report.DOCUMENTS, ids=name_of)
def test_the_tables_are_those_of_the_results(path: Path) -> None:
    assert report.render(path) == path.read_text(), "run `python -m benchmarks.report`"


@pytest.mark.slow
def test_every_stored_record_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables show each group of each file, except for groups that pages describe in their text."""
    # In `FIGURES` of performance.md, and in docs/kernels/paged.md.
    shown: set[tuple[str, str | None]] = {("stack", "stack"), ("paged against", None)}
    stored = report.stored

    def noted(benchmark: str, group: str | None = None) -> list[list[dict[str, Any]]]:
        files = stored(benchmark, group)
        shown.update((r["benchmark"], r.get("group")) for records in files for r in records)
        return files

    monkeypatch.setattr(report, "stored", noted)
    for path in report.DOCUMENTS:
        report.render(path)
    files = [json.loads(path.read_text()) for path in report.RESULTS.glob("*/*.json")]
    assert {(r["benchmark"], r.get("group")) for records in files for r in records} == shown


def record(file: str, **wanted: object) -> dict[str, Any]:
    """Returns the first stored record with these values; by default, of an H200."""
    path = file if "/" in file else f"h200/{file}"
    records = json.loads((ROOT / f"benchmarks/results/{path}.json").read_text())
    return next(r for r in records if all(r.get(name) == x for name, x in wanted.items()))


def layer_ms(impl: str) -> float:
    return record("layer", impl=impl, **{"pass": "forward and backward"})["ms"]


def layer_gib(impl: str) -> float:
    both = record("layer-8", impl=impl, **{"pass": "forward and backward"})
    return both["peak_memory_bytes"] / 2**30


def engine_ms(graphs: bool) -> float:
    return record("engine", concurrency=1, graphs=graphs)["p50_ms"]


def engine_qps(graphs: bool) -> float:
    return record("engine", concurrency=64, graphs=graphs)["qps"]


def paged_us(head_dim: int, batch: int) -> str:
    """Returns the time of the default request as a CUDA graph, and the target derived from it."""
    usual = {"history": 4096, "new": 128, "candidates": 256, "page_size": 128}
    found = record("paged", impl="graph", head_dim=head_dim, batch=batch, **usual)
    return f"{found['us']:.1f} of {1.5 * found['needs_us'] + 5:.1f}"


def stack_ms(impl: str) -> float:
    return record("paged-stack", impl=impl, batch=8)["us"] / 1e3


def host_us() -> list[float]:
    wanted = {"group": "host", "impl": "hstu_attn_sm80", "pass": "host"}
    return [record("attention", head_dim=dim, **wanted)["host_us"] for dim in (64, 128, 256)]


def layer_speedups(impl: str) -> str:
    """Returns how many times as fast as in bf16 a layer's forward, and both passes, are."""
    passes = ("forward", "forward and backward")
    of_bf16, own = (
        [record("layer", impl=n, **{"pass": p})["ms"] for p in passes] for n in ("fused", impl)
    )
    return " | ".join(f"{a / b:.2f}" for a, b in zip(of_bf16, own, strict=True))


FUSED = record("layer", impl="fused", **{"pass": "forward and backward"})
FIGURES = {
    "docs/log/paged.md": [
        f"| {dim} | {paged_us(dim, 1)} | {paged_us(dim, 8)} |" for dim in (64, 128, 256)
    ],
    "docs/kernels/fp8.md": [
        f"FP8 attention | {layer_speedups('fused_fp8_attention')} |",
        f"and FP8 products | {layer_speedups('fused_fp8')} |",
        f"attention in e4m3 | {layer_speedups('fused_fp8_backward')} |",
    ],
    "docs/kernels/sm80.md": [f"took the host {min(host_us()):.0f} to {max(host_us()):.0f} us, and"],
    "docs/layers.md": [
        f"{FUSED['ms']:.1f} ms fused ({FUSED['tflops']:.0f} TFLOP/s, "
        f"{FUSED['share_of_matmul']:.2f} of",
        f"{layer_ms('compiled'):.1f} ms composed under `torch.compile`",
        f"{layer_ms('composed'):.1f} ms composed.",
        f"{layer_gib('fused'):.1f} GiB fused, {layer_gib('fused_recompute'):.1f} with the first "
        f"three flags, {layer_gib('fused_recompute_all'):.1f} with all four, and "
        f"{layer_gib('composed'):.1f} composed",
    ],
    "docs/performance.md": [
        f"{stack_ms('graph'):.2f} ms as a replayed graph",
        f"{stack_ms('cached'):.2f} ms launched from Python",
        f"{stack_ms('recompute'):.1f} ms without a cache",
    ],
    "docs/quickstart/serving.md": [
        f"takes {engine_ms(True):.1f} ms instead of {engine_ms(False):.1f} (medians",
        f"the engine answers {engine_qps(True):,.0f} a second instead of {engine_qps(False):,.0f}",
    ],
    "docs/quickstart/training.md": [
        f"{record('train', case='equal', gpus=1)['tflops_per_gpu']:.0f} TFLOP/s on sequences",
        f"{record('train', case='equal', gpus=4)['scaling']:.2f} of that each",
        f"1 / {record('context-4', gpus=4, **{'pass': 'both'})['speedup']:.2f} of the time",
    ],
}


@pytest.mark.parametrize("page", FIGURES)
def test_figures_in_the_text_are_those_of_the_results(page: str) -> None:
    text = " ".join((ROOT / page).read_text().split()).replace(" .", " 0.")
    assert not [figure for figure in FIGURES[page] if figure not in text]


def test_every_mask_has_its_picture() -> None:
    shown = re.findall(r'<img src="img/mask-([\w-]+)\.png"', (ROOT / "docs/masks.md").read_text())
    assert shown == list(draw_masks.pictures())
    there = {path.name for path in (ROOT / "docs/img").iterdir()}
    assert there == {f"mask-{name}.png" for name in shown}


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "mask.png"
    draw_masks.draw(draw_masks.pictures()["context-target"], path)
    assert path.read_bytes().startswith(b"\x89PNG")


def anchors(page: Path) -> set[str]:
    """Returns the anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", TEXTS, ids=name_of)
def test_links_and_pictures_lead_to_files(page: Path) -> None:
    text = page.read_text()
    targets = [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r'src="([^"]+)"', text)]
    for target in targets:
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        leads_to = page.parent / path if path else page
        assert leads_to.exists(), target
        assert not anchor or anchor in anchors(leads_to), target


@pytest.mark.parametrize("page", [page for page in TEXTS if "log" not in page.parts], ids=name_of)
def test_the_sources_that_are_named_exist(page: Path) -> None:
    """These are paths below the repository's folders, and names of C++ files in backticks."""
    text = re.sub(r"\[[^]]+\]\(https?://[^)]+\)", "", page.read_text())
    paths = re.findall(r"(?<![\w/.-])((?:csrc|hstu_attn|tests|tools|examples)/[\w/.-]*\w)", text)
    built = ("hstu_attn/_C.abi3.so",)
    assert not [path for path in paths if path not in built and not (ROOT / path).exists()]
    sources = {
        path.name for folder in ("csrc", "examples/cpp") for path in (ROOT / folder).rglob("*.*")
    }
    assert not set(re.findall(r"`(\w+\.(?:h|cu|cuh|cpp))`", text)) - sources


@pytest.mark.parametrize("page", TEXTS, ids=name_of)
def test_an_identifier_is_in_the_file_that_is_said_to_hold_it(page: Path) -> None:
    """The pattern is "`name` in [file](path)"."""
    said = re.findall(r"`([\w:]+)`\s+in\s+\[[^\]]+\]\(([^)#]+)\)", page.read_text())
    for name, path in said:
        text = (page.parent / path).read_text()
        missing = [part for part in name.split("::") if not re.search(rf"\b{part}\b", text)]
        assert not missing, f"{name} in {path}"


def test_the_files_of_an_operator_argument_have_the_one_that_is_followed() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text.partition("## Add an operator argument")[2].partition("\n## ")[0]
    [name] = re.findall(r"Follow an existing one, `(\w+)`", section)
    steps, _, kernels = section.partition("\nThen the kernels")
    links = re.compile(r"\]\((.*?)\)")
    handed_on, read = links.findall(steps), links.findall(kernels)
    assert len(re.findall(r"^\d+\. ", steps, re.MULTILINE)) == len(handed_on) == 8
    # Nothing else has the argument but tests, and the interfaces of other libraries.
    sources = [path for folder in ("csrc", "hstu_attn") for path in (ROOT / folder).rglob("*.*")]
    found = [
        path.relative_to(ROOT).as_posix()
        for path in sources
        if path.suffix in (".py", ".h", ".cpp", ".cu") and name in path.read_text()
    ]
    tests = [path for path in handed_on if path.startswith("tests/")]
    assert all(name in (ROOT / path).read_text() for path in tests)
    expected = [path for path in found if not path.startswith("hstu_attn/compat/")] + tests
    assert sorted(handed_on + read) == sorted(expected)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 250


def test_the_description_on_a_package_index_has_no_relative_links(tmp_path: Path) -> None:
    run(sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path), cwd=ROOT)
    metadata, _, text = (tmp_path / "hstu_attn.egg-info/PKG-INFO").read_text().partition("\n\n")
    assert "Description-Content-Type: text/markdown" in metadata
    assert text.startswith("# hstu_attn\n")
    targets = [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r'src="([^"]+)"', text)]
    assert targets
    assert not [x for x in targets if not x.startswith(("https:", "#"))]
    paths = re.findall(r"\(`([\w/]+\.\w+)`\)", text)
    assert "docs/quickstart/cpu.md" in paths
    assert not [path for path in paths if not (ROOT / path).exists()]


# --- names ----------------------------------------------------------------------------------------


def test_every_environment_variable_is_listed() -> None:
    build = re.findall(r"^    ([A-Z][A-Z_, ]+?)  ", (ROOT / "setup.py").read_text(), re.MULTILINE)
    names = {name for group in build for name in group.split(", ")}
    assert "HSTU_ATTN_CUDA" in names
    sources = [
        *(ROOT / "csrc").rglob("*.*"),
        *(ROOT / "hstu_attn").rglob("*.py"),
        *(ROOT / "examples").rglob("*.py"),
        ROOT / "setup.py",
    ]
    for path in sources:
        names |= set(re.findall(r'"(HSTU_ATTN_[A-Z_]+)"', path.read_text()))
    text = (ROOT / "docs/environment.md").read_text()
    assert not {name for name in names if f"`{name}`" not in text}


API = "\n".join(page.read_text() for page in DOCS if page.parent.name == "api")
SHOWN = re.findall(r"^::: (\S+)$", API, re.MULTILINE)


def shown_object(path: str) -> Any:
    """Returns the module, or the member of a module, that an API page shows."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("package", ["", ".serving", ".data", ".distributed", ".compat"])
def test_every_public_name_is_in_the_api_pages(package: str) -> None:
    shown = [shown_object(path) for path in SHOWN]
    modules = [x for x in shown if isinstance(x, ModuleType)]
    in_modules = [value for module in modules for value in vars(module).values()]
    public = importlib.import_module(f"hstu_attn{package}")
    missing = []
    for name in public.__all__:
        value = getattr(public, name)
        if isinstance(value, ModuleType):
            there = any(path.startswith(value.__name__) for path in SHOWN)
        else:
            there = any(value is other for other in [*shown, *in_modules])
        if not there and name != "__version__":
            missing.append(name)
    assert not missing
