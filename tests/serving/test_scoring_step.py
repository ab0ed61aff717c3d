"""Tests of a scoring step as a function of tensors: as written, exported, and packaged, in
Python and in C++ without Python.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.profiler import profile

from hstu_attn import ops
from tests.helpers.documented import SHELL, make_checkout, save_some_model
from tests.helpers.documented import run as run_command

pytest.importorskip("hstu_attn._host", reason="_host has not been built")
from hstu_attn.serving import PagedKVCache, ScoringStep
from hstu_attn.serving.batch import Plan, Request, pack
from hstu_attn.serving.events import Change
from hstu_attn.serving.histories import History
from tests.helpers.serving_models import (
    DIM,
    HEADS,
    ITEMS,
    LAYERS,
    LONGEST,
    RANKING,
    RESEARCH,
    STU,
    RankingModel,
    Retrieval,
    RetrievalModel,
    ServedRetrieval,
    some_events,
    strengthen,
)

PAGES, PAGE_SIZE = 40, 16
# The users' new events and candidates in each step. Sizes go down to one row and no candidate, and
# users return, with and without new events, together with new users.
TRAFFIC: list[dict[int, tuple[int, int]]] = [
    {7: (20, 3), 8: (1, 5), 9: (16, 0)},
    {9: (5, 4), 7: (0, 2)},
    {5: (1, 0)},
    {7: (1, 1)},
    {8: (30, 2), 5: (2, 2), 9: (1, 1), 7: (13, 3)},
]


class Step(NamedTuple):
    """A step: the arguments of `PagedKVCache.step`, the inputs after the page tables, and the
    scores without a cache.
    """

    users: list[int]
    new_tokens: list[int]
    rewritten: list[int]
    inputs: dict[str, Tensor]
    expected: Tensor


def make_model(name: str) -> Any:
    if name == "retrieval":
        inner = RetrievalModel(ITEMS, RESEARCH, LAYERS, LONGEST, 0.2)
        strengthen(inner)
        return ServedRetrieval(inner)
    model = RankingModel(RANKING[name], LAYERS, ITEMS, 3, LONGEST).eval()
    strengthen(model)
    return model


def make_step(model: Any) -> ScoringStep:
    return ScoringStep(model, max_seq_len=LONGEST, max_key_len=LONGEST + 5)


def traffic(model: Any) -> Iterator[Step]:
    """Makes steps in which each user's last row is written again, as an engine does."""
    rng = random.Random(torch.initial_seed())
    whole = Retrieval.whole if isinstance(model, ServedRetrieval) else RankingModel.whole
    histories: dict[int, np.ndarray] = {}
    for turn, asked in enumerate(TRAFFIC):
        plans, cached, expected = [], [], []
        for user, (count, wanted) in asked.items():
            before = histories.get(user, np.empty((0, 3), np.int64))
            events = some_events(rng, turn * 10**6, count, model.num_actions)
            added = np.array(events, np.int64).reshape(-1, 3)
            after = histories[user] = np.concatenate([before, added])
            candidates = [rng.randrange(ITEMS) for _ in range(wanted)]
            at = (turn + 2) * 10**6
            request = Request(user, added, np.array(candidates, np.int64), 0, False, at, 0.0)
            change = Change(user, 0, len(before), added)
            plans.append(Plan(request, History(user, 0, after), change))
            cached.append(len(before))
            expected.append(whole(model, after, candidates, at))
        rewritten = [min(count, 1) for count in cached]
        kept = [count - again for count, again in zip(cached, rewritten, strict=True)]
        batch = pack(
            plans,
            kept,
            torch.device("cpu"),
            candidates_are_rows=model.candidates_are_rows,
            reads_times=model.reads_times,
        )
        inputs = {
            "seq_offsets": torch.from_numpy(batch.seq_offsets),
            **batch.rows._asdict(),
            "candidates": batch.candidates,
            "state_rows": batch.state_rows,
        }
        if model.candidates_are_rows:
            inputs["num_targets"] = torch.from_numpy(batch.num_targets)
        if model.reads_times:
            inputs |= {"key_times": batch.key_times, "row_times": batch.row_times}
        new = [count for count, _ in asked.values()]
        yield Step(list(asked), new, rewritten, inputs, torch.cat(expected))


def run(
    call: Any, steps: list[Step], dtype: torch.dtype = torch.float32
) -> Iterator[tuple[Tensor, Tensor]]:
    """Returns the scores of steps over one cache, and the expected scores."""
    cache = PagedKVCache(LAYERS, PAGES, PAGE_SIZE, HEADS, DIM, dtype, "cpu")
    scales = {} if cache.kv_scales is None else {"kv_scales": cache.kv_scales.unbind()}
    for step in steps:
        with cache.step(step.users, step.new_tokens, rewritten=step.rewritten) as open_step:
            scores = call(
                kv_caches=cache.kv_cache.unbind(),
                page_offsets=open_step.page_offsets,
                page_ids=open_step.page_ids,
                last_page_lens=open_step.last_page_lens,
                cached_lens=open_step.cached_lens,
                **step.inputs,
                **scales,
            )
        yield scores, step.expected


def assert_close(scores: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["retrieval", *(pytest.param(name, marks=pytest.mark.slow) for name in RANKING)],
)
def test_scores_are_those_of_whole_histories(name: str) -> None:
    """Checks the step itself and its graph with dynamic sizes, which also writes to the cache."""
    model = make_model(name)
    step, steps = make_step(model), list(traffic(model))
    for scores, expected in run(step, steps):
        assert_close(scores, expected)
    program = step.export(PAGE_SIZE)
    assert str(program.graph).count("hstu_attn.append_paged_kv") == LAYERS
    for scores, expected in run(program.module(), steps):
        assert_close(scores, expected)
    assert step.state_dict().keys() == program.state_dict.keys()


@pytest.mark.slow
def test_an_e4m3_cache() -> None:
    """The graph writes elements and scales, and gives the scores of the step itself."""
    model, dtype = make_model("ranking, times"), torch.float8_e4m3fn
    step, steps = make_step(model), list(traffic(model))
    program = step.export(PAGE_SIZE, dtype)
    error = size = 0.0
    for (scores, expected), (exported, _) in zip(
        run(step, steps, dtype), run(program.module(), steps, dtype), strict=True
    ):
        assert_close(exported, scores)
        error += (scores - expected).square().sum().item()
        size += expected.square().sum().item()
    assert 0 < error < 0.05 * size


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Step]]:
    """Makes a package that takes every input, and steps for it."""
    model = make_model("ranking, times")
    path = tmp_path_factory.mktemp("package") / "step.pt2"
    program = make_step(model).export(PAGE_SIZE)
    return (
        torch._inductor.aoti_compile_and_package(program, package_path=str(path)),
        list(traffic(model)),
    )


@pytest.mark.slow
def test_a_package_writes_the_cache_without_copying_it(packaged: tuple[str, list[Step]]) -> None:
    path, steps = packaged
    package = torch._inductor.aoti_load_package(path)
    with profile(profile_memory=True) as profiled:
        for scores, expected in run(package, steps):
            assert_close(scores, expected)
    sizes = [event.self_cpu_memory_usage for event in profiled.events()]
    layer = PAGES * 2 * PAGE_SIZE * HEADS * DIM * 4
    assert sorted(sizes)[-1] >= LAYERS * layer, "the cache itself"
    assert sorted(sizes)[-2] < layer


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Runs the documented commands of the C++ example; returns their folder and what they print."""
    [block] = [block for _, block in SHELL if "g++ " in block]
    folder = make_checkout(tmp_path_factory.mktemp("example"))
    save_some_model(folder / "runs/retrieval/best.pt", list(range(100)))
    return folder, run_command("bash", "-euc", block, cwd=folder).stdout.splitlines()


@pytest.mark.slow
@pytest.mark.documented
def test_the_commands_of_the_cpp_example_run(example: tuple[Path, list[str]]) -> None:
    """The program prints the scores that Python has printed."""
    _, lines = example
    scores = [
        torch.tensor(json.loads(line.removeprefix("tensor(").removesuffix(")"))) for line in lines
    ]
    assert len(scores) == 4
    for from_python, from_cpp in zip(scores[:2], scores[2:], strict=True):
        torch.testing.assert_close(from_cpp, from_python, rtol=0, atol=2e-4)  # 4 places are shown


@pytest.mark.slow
@pytest.mark.documented
def test_a_package_runs_without_python(
    packaged: tuple[str, list[Step]], example: tuple[Path, list[str]], tmp_path: Path
) -> None:
    """The example has its own page table."""
    program = example[0] / "score"
    path, steps = packaged
    shape = torch.tensor([LAYERS, PAGES, 2, PAGE_SIZE, HEADS, DIM])
    written = [
        [*map(torch.tensor, (s.users, s.new_tokens, s.rewritten)), *s.inputs.values()]
        for s in steps
    ]
    torch.save([shape, *written], tmp_path / "steps.pt")
    subprocess.run(
        [program, ops.LIBRARY_PATH, path, tmp_path / "steps.pt", tmp_path / "scores.pt"], check=True
    )
    scores = torch.load(tmp_path / "scores.pt")
    assert len(scores) == len(steps)
    for n, step in enumerate(steps):
        assert_close(scores[n], step.expected)


def test_wrong_arguments_are_refused() -> None:
    model = make_model("ranking")
    with pytest.raises(ValueError, match="max_seq_len: expected a positive count, got 0"):
        ScoringStep(model, 0, 5)
    with pytest.raises(ValueError, match="max_key_len: expected at least max_seq_len = 6, got 5"):
        ScoringStep(model, 6, 5)
    with pytest.raises(ValueError, match=r"page_size: expected one of .*, got 17"):
        make_step(model).export(17)
    unsound = RankingModel(replace(STU, contextual_seq_len=2), LAYERS, ITEMS, 3, LONGEST).eval()
    with pytest.raises(ValueError, match=r"contextual_seq_len: expected, for a cache, 0.*got 2"):
        make_step(unsound)
    with pytest.raises(ValueError, match=r"model: expected evaluation mode.*got training mode"):
        make_step(model.train())
    model.eval()

    steps = list(traffic(model))
    for change, message in (
        ({"num_targets": None}, "num_targets: expected a tensor for this model, got None"),
        ({"row_times": torch.zeros(1)}, "row_times: expected None for this model, got a tensor"),
        ({"kv_caches": []}, "kv_caches: expected 2 tensors, got 0"),
    ):
        step = make_step(model)

        def call(changes: Any = change, step: Any = step, **inputs: Any) -> Tensor:
            return step(**(inputs | changes))

        with pytest.raises(ValueError, match=message):
            next(run(call, steps))
