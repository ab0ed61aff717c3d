"""README.md: its code runs, its tables are those of the stored results, its links lead to files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_models import RANKING, RankingModel

import hstu_attn
from benchmarks import readme
from tools import draw_masks

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_the_code_runs(capsys, monkeypatch):
    """Block after block, as a reader would type them who has a model to serve."""
    model = RankingModel(RANKING["ranking"], layers=1, items=10, actions=2, max_history=40).eval()
    namespace: dict[str, Any] = {"model": model}
    packages = []
    # A package takes long to compile; tests of its own do it.
    monkeypatch.setattr(
        torch._inductor,
        "aoti_compile_and_package",
        lambda program, package_path: packages.append((program, package_path)),
    )
    for block in BLOCKS:
        # The eager backend: the compiler's own code generation is tested elsewhere.
        code = block.replace("dynamic=True)", 'dynamic=True, backend="aot_eager")')
        exec(compile(code, "README.md", "exec"), namespace)
        assert namespace["out"].isfinite().all()
    assert "torch.Size([16, 4, 64]) torch.Size([16, 4, 64])" in capsys.readouterr().out
    assert namespace["pos_weight"].grad.any()
    assert namespace["ts_weight"].grad.any()
    assert packages == [(namespace["program"], "step.pt2")]


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
