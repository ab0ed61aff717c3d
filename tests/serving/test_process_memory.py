"""Tests that the memory of the process grows neither with the number of calls nor with N^2.

Results do not depend on the contents of fresh memory either.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# Prints by how many MiB the resident memory grows in 1500 calls, for each kind of call and bias.
# Outputs are smaller than the blocks that glibc maps separately and larger than those of its thread
# caches, so that a leak or a fragmented heap shows.
_LOOP = """
import json, resource, torch
from hstu_attn import hstu_attention
from hstu_attn.testing import make_batch
from tests.helpers import raw_ops

torch.set_num_threads(1)

def resident() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20

def growth(kind, bias):
    batch = make_batch([100, 60, 40], heads=2, dim=64, mask="causal", bias=bias)
    dout = torch.randn_like(batch.q)
    leaves = {n: t.clone().requires_grad_() for n, t in batch.differentiable().items()}
    differentiable = batch.with_tensors(leaves)

    def forward():
        raw_ops.forward(batch)

    def backward():
        raw_ops.backward(batch, dout, has_drab=bias == "rab", has_dtables=True)

    def train():
        out = hstu_attention(
            differentiable.q, differentiable.k, differentiable.v, **differentiable.options()
        )
        torch.autograd.grad(out, list(leaves.values()), dout)

    call = {"forward": forward, "backward": backward, "train": train}[kind]
    for _ in range(300):
        call()
    before = resident()
    for _ in range(1500):
        call()
    return resident() - before

kinds = (("forward", None), ("backward", None), ("backward", "rab"), ("train", "position-time"))
print(json.dumps({f"{kind}, {bias}": growth(kind, bias) for kind, bias in kinds}))
"""


def printed_by(script: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


@pytest.mark.slow
def test_calls_in_a_loop_do_not_grow_the_process():
    """1500 calls allocate about 150 MiB (forward) to 450 MiB (backward) of results in all."""
    growth = json.loads(printed_by(_LOOP))
    assert len(growth) == 4
    assert max(growth.values()) < 8, growth


_LONG = """
import resource, torch
from hstu_attn import hstu_attention
from hstu_attn.testing import make_batch, run

def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10

torch.set_num_threads(2)
run(hstu_attention, make_batch([64], heads=1, dim=32, mask="causal"), torch.ones(64, 1, 32))
batch = make_batch([LENGTH], heads=1, dim=32, mask="local", bias="position-time")
dout = torch.ones_like(batch.q)
before = peak()
run(hstu_attention, batch, dout)
print(peak() - before)
"""


@pytest.mark.slow
def test_no_matrix_of_n_by_n():
    """At length 20000 one fp32 matrix of scores would take 1526 MiB; the results take 10."""
    assert float(printed_by(_LONG.replace("LENGTH", "20000"))) < 100


_FILLED = """
import torch
from hstu_attn import hstu_attention
from hstu_attn.testing import assert_matches_reference, make_batch, run

for dtype in (torch.float32, torch.bfloat16):
    for length in (16, 48, 112):  # whole vectors, half a tile of AMX
        batch = make_batch([length], heads=2, dim=32, mask="full", dtype=dtype)
        dout = torch.randn_like(batch.q)
        assert_matches_reference(run(hstu_attention, batch, dout), batch, dout)
"""


@pytest.mark.slow
def test_scratch_may_hold_anything():
    """glibc fills new memory with bytes of 0x7f, which are huge numbers and give NaN if read."""
    printed_by(_FILLED, MALLOC_PERTURB_="128")
