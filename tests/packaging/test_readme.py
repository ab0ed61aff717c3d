"""README.md: its code and its commands run as they are typed, its tables are those of the stored
results, its links lead to files."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hstu_attn
from benchmarks import readme
from tests.helpers.paths import ROOT
from tools import draw_masks

TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
SHELL_BLOCKS = re.findall(r"^```sh\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
COMMANDS = "".join(SHELL_BLOCKS).replace("\\\n", "").splitlines()
# What the text itself shows, such as `python -m benchmarks.paged`.
INLINE = re.findall(r"`((?:python|make) [^`]+)`", TEXT.replace("\n", " "))

# Runs a block as a program of its own, and only then looks at what it has computed.
RUN = """
import runpy, sys
names = runpy.run_path(sys.argv[1], run_name="__main__")
import torch
tensors = {name: value for name, value in names.items() if isinstance(value, torch.Tensor)}
assert tensors
for name, value in tensors.items():
    assert value.isfinite().all(), name
    assert not value.is_leaf or not value.requires_grad or value.grad.any(), name
"""


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process where this tree's package is installed; its output."""
    variables = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    ended = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """This tree as after `make install`, where .venv is the environment of this process."""
    for name in ("Makefile", "benchmarks", "csrc", "examples", "hstu_attn"):
        (tmp_path / name).symlink_to(ROOT / name)
    programs = tmp_path / ".venv/bin"
    programs.mkdir(parents=True)
    python = programs / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    (programs / "activate").write_text(f'PATH={shlex.quote(str(programs))}:"$PATH"\n')
    return tmp_path


def save_some_model(path: Path, items: list[int]) -> None:
    """An untrained model of a catalogue, as train_retrieval.py saves its best."""
    from recommender.model import RetrievalModel
    from recommender.saved import save_model

    config = hstu_attn.HSTULayerConfig.research(
        embedding_dim=32, num_heads=2, linear_dim=16, attention_dim=16, max_sequence_len=30
    )
    path.parent.mkdir(parents=True)
    model = RetrievalModel(len(items), config, 2, 30, 0.2)
    save_model(path, model, items, [f"item {item}" for item in items])


def test_there_are_blocks_that_print() -> None:
    assert len(BLOCKS) >= 7
    assert all("print(" in block for block in BLOCKS)


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, marks=[pytest.mark.slow] if "torch.compile" in block else [])
        for block in BLOCKS
    ],
    ids=range(len(BLOCKS)),
)
def test_a_python_block_runs_by_itself(block: str, tmp_path: Path) -> None:
    """It prints what the comments after its calls of print say."""
    program = tmp_path / "block.py"
    program.write_text(block)
    ended = run(sys.executable, "-c", RUN, str(program), cwd=tmp_path)
    assert ended.stdout.splitlines() == re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)


def test_every_command_is_one_that_is_tested() -> None:
    """What commands there are, and that the environment is active where they need it."""
    assert COMMANDS
    for block in SHELL_BLOCKS:
        active = False
        for line in block.replace("\\\n", "").splitlines():
            first = line.split()[0]
            if first in ("python", "tensorboard", "torchrun", "TORCH=$(python"):
                assert active, line
            elif first == "pip" or line.startswith("python3 -m venv "):
                active = True  # an environment of the reader's own
            else:
                assert first in (".", "make", "curl", "g++", "./score"), line
                active |= line == ". .venv/bin/activate"


@pytest.mark.parametrize("command", [c for c in [*COMMANDS, *INLINE] if c.startswith("make ")])
def test_a_target_exists(command: str) -> None:
    run("make", "--dry-run", *shlex.split(command, comments=True)[1:], cwd=ROOT)


OPTIONS = [
    found[1]
    for command in [*COMMANDS, *INLINE]
    if (found := re.match(r"(?:python|torchrun .*?) ?((?:examples/|-m benchmarks\.).*)", command))
]


@pytest.mark.parametrize("words", OPTIONS)
def test_a_program_takes_these_options(words: str) -> None:
    """It has taken the values before it comes to --help."""
    run(sys.executable, *shlex.split(words, comments=True), "--help", cwd=ROOT)


def test_no_command_is_refused_because_of_one_above_it() -> None:
    outputs = set()
    for words in OPTIONS:
        if found := re.search(r"--out (\S+)", words):
            assert ("--resume" in words) == (found[1] in outputs), words
            outputs.add(found[1])
    assert len(outputs) >= 4


def test_the_request_is_answered(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the server as `make serve` starts it, with the data of `make demo`; more than once."""
    pytest.importorskip("hstu_attn._host", reason="_host has not been built")
    pytest.importorskip("fastapi")
    from recommender.serve_options import parse_arguments

    from hstu_attn.data.synthetic import write_synthetic_movielens
    from tests.examples.test_serve import process

    [command] = [line for line in COMMANDS if line.startswith("curl ")]
    curl, option, header, url, data, body = shlex.split(command)
    assert (curl, option, header, data) == ("curl", "-H", "Content-Type: application/json", "-d")
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


@pytest.mark.slow
def test_the_commands_of_the_cpp_example_run(checkout: Path) -> None:
    """As they are typed; the program prints the scores that Python has printed."""
    [block] = [block for block in SHELL_BLOCKS if "g++ " in block]
    save_some_model(checkout / "runs/retrieval/best.pt", list(range(100)))
    lines = run("bash", "-euc", block, cwd=checkout).stdout.splitlines()
    scores = [
        torch.tensor(json.loads(line.removeprefix("tensor(").removesuffix(")"))) for line in lines
    ]
    assert len(scores) == 4
    for from_python, from_cpp in zip(scores[:2], scores[2:], strict=True):
        torch.testing.assert_close(from_cpp, from_python, rtol=0, atol=2e-4)  # 4 places are shown


def test_the_first_example_is_right():
    namespace: dict[str, Any] = {}
    exec(compile(BLOCKS[0], "README.md", "exec"), namespace)
    exact = hstu_attn.reference.hstu_attention(
        *(namespace[name].detach().double() for name in "qkv"),
        cu_seqlens_q=namespace["offsets"],
        max_seqlen_q=8,
        mask=hstu_attn.Mask.causal(num_targets=torch.tensor([2, 1, 3])),
        alpha=namespace["dim"] ** -0.5,
    )
    torch.testing.assert_close(namespace["out"].double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("path", readme.DOCUMENTS, ids=lambda path: path.name)
def test_the_tables_are_those_of_the_results(path):
    assert readme.render(path) == path.read_text(), "run `python -m benchmarks.readme`"


def test_every_mask_has_its_picture():
    shown = re.findall(r'<img src="docs/img/mask-([\w-]+)\.png"', TEXT)
    assert shown == list(draw_masks.pictures())
    there = {path.name for path in (ROOT / "docs/img").iterdir()}
    assert there == {f"mask-{name}.png" for name in shown}


def test_a_picture_is_drawn(tmp_path):
    path = tmp_path / "mask.png"
    draw_masks.draw(draw_masks.pictures()["context-target"], path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_links_and_pictures_lead_to_files():
    targets = [*re.findall(r"\]\(([^)#]+)\)", TEXT), *re.findall(r'src="([^"]+)"', TEXT)]
    missing = [t for t in targets if not t.startswith("http") and not (ROOT / t).exists()]
    assert targets
    assert not missing


def test_the_variables_of_the_build_are_all_listed():
    build = re.findall(r"^    ([A-Z][A-Z_, ]+?)  ", (ROOT / "setup.py").read_text(), re.MULTILINE)
    names = {name for group in build for name in group.split(", ")}
    assert "HSTU_ATTN_CUDA" in names
    assert not {name for name in names if f"`{name}`" not in TEXT}


def test_public_names_are_all_listed():
    public = set(hstu_attn.__all__) - {"__version__"}
    assert not {name for name in public if not re.search(rf"`(\w+\.)*{name}(\.\w+)*`", TEXT)}
