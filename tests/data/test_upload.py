"""Tests of copying tensors to a device in one copy, and of making batches while a step runs."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest
import torch
from torch import Tensor

from hstu_attn.data import JaggedBatch
from hstu_attn.upload import ALIGNMENT, Prefetcher, pack, upload

GPU = [pytest.param("cuda", marks=pytest.mark.gpu(kernels=False))]


def some_tensors() -> list[Tensor]:
    return [
        torch.randint(2**62, (3,)),
        torch.rand(5, 3, dtype=torch.float64).T,
        torch.randint(2, (7,)).bool(),
        torch.empty(0, 4, dtype=torch.bfloat16),
        torch.tensor(2.5),
        torch.randint(2**31, (9,), dtype=torch.int32),
    ]


def test_packed_tensors_of_any_shape_and_dtype():
    tensors = some_tensors()
    together, sizes = pack(tensors)
    assert together.data_ptr() % ALIGNMENT == 0
    assert sum(sizes) == together.nbytes
    for tensor, part in zip(tensors, together.split(sizes)[::2], strict=True):
        assert part.storage_offset() % ALIGNMENT == 0
        assert torch.equal(part.view(tensor.dtype).view(tensor.shape), tensor)


def test_on_a_cpu_nothing_is_copied():
    tensors = some_tensors()
    for tensor, result in zip(tensors, upload(tensors, torch.device("cpu")), strict=True):
        assert result is tensor


@pytest.mark.parametrize("device", GPU)
def test_copies_of_any_shape_and_dtype_are_one_allocation(device):
    tensors = some_tensors()
    copies = upload(tensors, torch.device(device))
    for tensor, copy in zip(tensors, copies, strict=True):
        assert copy.device.type == device
        assert copy.dtype == tensor.dtype
        assert copy.is_contiguous()
        assert copy.data_ptr() % ALIGNMENT == 0
        assert torch.equal(copy.cpu(), tensor)
    assert len({copy.untyped_storage().data_ptr() for copy in copies}) == 1
    copies[0].zero_()
    assert tensors[0].all()
    assert torch.equal(copies[-1].cpu(), tensors[-1])


def test_nothing_to_upload():
    assert upload([], torch.device("cpu")) == []
    (empty,) = upload([torch.empty(0, 2)], torch.device("cpu"))
    assert empty.shape == (0, 2)


def test_a_batch_without_actions():
    rows = torch.arange(6)
    batch = JaggedBatch(
        torch.arange(2), torch.tensor([0, 2, 6]), rows, rows + 1, rows + 2, rows + 3
    )
    moved = batch.to(torch.device("cpu"))
    assert moved.actions is None
    for field in fields(batch)[:6]:
        assert torch.equal(getattr(moved, field.name), getattr(batch, field.name)), field.name


@dataclass(frozen=True)
class Numbers:
    """A batch of two tensors and a count."""

    values: Tensor
    absent: Tensor | None = None

    def to(self, device: torch.device) -> Numbers:
        return Numbers(*upload([self.values], device))


def test_one_batch_is_made_ahead():
    made = 0

    def draw() -> Numbers:
        nonlocal made
        made += 1
        if made == 3:
            raise ValueError("the third")
        return Numbers(torch.full((2,), made))

    prefetcher = Prefetcher(draw, torch.device("cpu"))
    assert made == 0
    for number in (1, 2):
        on_cpu, copy = prefetcher.take()
        assert made == number
        assert on_cpu.values.tolist() == copy.values.tolist() == [number, number]
        prefetcher.start()
        prefetcher.start()
        assert made == number + 1
    with pytest.raises(ValueError, match="the third"):
        prefetcher.take()
    assert prefetcher.take()[0].values.tolist() == [4, 4]


@pytest.mark.gpu(kernels=False)
def test_copies_go_on_beside_kernels_and_stay_whole():
    """The host frees each batch before the kernels that read it start, and makes the next one."""
    device, count = torch.device("cuda"), 2**18
    numbers = iter(range(1, 100))
    prefetcher = Prefetcher(lambda: Numbers(torch.full((count,), next(numbers))), device)
    sums = torch.zeros(20, dtype=torch.int64, device=device)
    for step in range(len(sums)):
        _, batch = prefetcher.take()
        torch.cuda._sleep(5_000_000)  # cycles, some milliseconds
        sums[step] = batch.values.sum()
        del batch
        prefetcher.start()
        torch.empty(count, dtype=torch.int64, device=device).fill_(-1)
    assert sums.tolist() == [count * (step + 1) for step in range(len(sums))]


@pytest.mark.gpu(kernels=False)
def test_a_copy_does_not_wait_for_the_kernels_queued_before():
    device = torch.device("cuda")
    prefetcher = Prefetcher(lambda: Numbers(torch.arange(1000)), device)
    for _ in range(2):
        prefetcher.take()  # allocates memory
        prefetcher.start()
    torch.cuda.synchronize()
    prefetcher.take()
    done = torch.cuda.Event()
    torch.cuda._sleep(1_000_000_000)  # about half a second
    done.record()
    prefetcher.start()
    assert prefetcher._stream is not None
    prefetcher._stream.synchronize()
    assert not done.query()
    assert torch.equal(prefetcher.take()[1].values.cpu(), torch.arange(1000))
