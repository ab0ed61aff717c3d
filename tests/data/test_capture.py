"""Tests of training steps as CUDA graphs, and of batches padded to few shapes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hstu_attn import capture
from hstu_attn.capture import CapturedStep, pad_offsets, pad_rows, padded_size
from hstu_attn.data import JaggedBatch
from hstu_attn.upload import upload

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu(kernels=False))]


@dataclass(frozen=True)
class Pairs:
    """A batch."""

    x: Tensor
    y: Tensor
    absent: Tensor | None = None

    def to(self, device: torch.device) -> Pairs:
        return Pairs(*upload([self.x, self.y], device))


class Training:
    """A small model, and a step of it that may be captured."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(5, 1).to(device)
        self.rate = torch.zeros((), device=device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.rate, fused=True, capturable=device != "cpu"
        )

    def step(self, pairs: Pairs) -> Tensor:
        self.optimizer.zero_grad()
        kept = nn.functional.dropout(pairs.x, 0.25)
        loss = (self.model(kept)[:, 0] - pairs.y).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def losses(self, step: Callable[[Pairs], Tensor], steps: int = 30) -> list[float]:
        device = self.rate.device
        generator = np.random.default_rng(0)
        torch.manual_seed(1)
        found = []
        for number in range(steps):
            x = torch.from_numpy(generator.random((4 + number % 3, 5), np.float32))
            self.rate.fill_(0.1 / (1 + number))
            found.append(step(Pairs(x, x.sum(dim=1)).to(device)))
        return torch.stack(found).tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_captured_steps_are_those_without_a_graph(device: str) -> None:
    """Checks batches of three shapes, dropout, and a changing learning rate."""
    expected, training = Training(device), Training(device)
    step = CapturedStep(training.step, torch.device(device))
    losses = expected.losses(expected.step)
    assert training.losses(step) == pytest.approx(losses, rel=1e-5)
    assert losses[-1] < losses[0] / 2
    assert len(step._graphs) == 3
    assert all(graph is not None for graph in step._graphs.values())
    for found, parameter in zip(
        training.model.parameters(), expected.model.parameters(), strict=True
    ):
        torch.testing.assert_close(found, parameter)


@pytest.mark.gpu(kernels=False)
def test_garbage_does_not_break_a_capture() -> None:
    """An unreferenced graph is destroyed after a capture, not during it."""
    x = torch.zeros(8, device="cuda:0")
    new_capture = capture.CudaCapture(x.device, warm_ups=0)
    gc.collect()
    gc.disable()
    cycle: list[object] = [capture.CudaCapture(x.device)(lambda: x.add_(1))]
    cycle.append(cycle)
    graph = weakref.ref(cycle[0])
    gc.enable()
    del cycle
    lives = []

    def call() -> None:
        lives.append(graph() is not None)
        x.add_(1)
        containers: list[list[int]] = [[] for _ in range(1000)]  # the collector would run here
        lives.append(graph() is not None and len(containers) > 0)
        x.mul_(2)

    replay = new_capture(call)
    assert lives == [True, True]
    assert gc.isenabled()
    before = x.clone()
    replay()
    assert torch.equal(x, (before + 1) * 2)


def test_a_step_that_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(call: Callable[[], None]) -> Callable[[], None]:
        raise NotImplementedError("no graph of this")

    monkeypatch.setattr(capture, "capture_on", lambda *_, **__: broken)
    step = CapturedStep(lambda pairs: pairs.x * 2, torch.device("cpu"))
    pairs = Pairs(torch.ones(2, 5), torch.ones(2))
    assert step(pairs).sum() == 20
    message = "step: expected one that a CUDA graph can capture, got NotImplementedError.*no graph"
    with pytest.raises(RuntimeError, match=message):
        step(pairs)


@given(st.integers(0, 10**6), st.sampled_from([1, 2, 8]))
def test_padded_sizes_are_few_and_near(count: int, sizes_per_octave: int) -> None:
    size = padded_size(count, sizes_per_octave)
    assert count <= size < count * (1 + 1 / sizes_per_octave) + 1
    assert padded_size(size, sizes_per_octave) == size


def test_there_are_so_many_sizes_in_an_octave() -> None:
    for sizes_per_octave in (1, 2, 8):
        found = {padded_size(count, sizes_per_octave) for count in range(65, 129)}
        assert len(found) == sizes_per_octave
        assert max(found) == 128


def test_rows_and_offsets_are_padded() -> None:
    rows = torch.arange(6).view(3, 2)
    assert pad_rows(rows, 5).tolist() == [[0, 1], [2, 3], [4, 5], [0, 0], [0, 0]]
    assert torch.equal(pad_rows(rows, 3), rows)
    assert pad_offsets(torch.tensor([0, 2, 5]), 4).tolist() == [0, 2, 5, 5, 5]


@pytest.mark.parametrize("has_actions", [False, True])
def test_a_padded_batch_has_the_same_sequences(has_actions: bool) -> None:
    offsets = torch.tensor([0, 7, 7, 40])
    columns = [torch.randint(1, 100, (40,)) for _ in range(6 if has_actions else 4)]
    batch = JaggedBatch(torch.tensor([3, 1, 2]), offsets, *columns)
    padded = batch.padded()
    assert padded.total == batch.total == 40
    assert padded.seq_offsets.tolist() == [0, 7, 7, 40, 40]
    assert padded.users.tolist() == [3, 1, 2, 0]
    for field in fields(batch)[2:]:
        before, after = getattr(batch, field.name), getattr(padded, field.name)
        if before is None:
            assert after is None
        else:
            assert torch.equal(after, pad_rows(before, 40))
    longer = JaggedBatch(batch.users, offsets, *(torch.cat([c, c[:10]]) for c in columns)).padded()
    assert len(longer.items) == 56
    assert not longer.items[50:].any()
