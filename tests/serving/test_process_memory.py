"""Tests that the memory of the process grows neither with the number of calls nor with N^2.

Results do not depend on the contents of fresh memory either.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

# Prints resident memory after a number of calls. Outputs are smaller than the blocks that
# glibc maps separately and larger than those of its thread caches, so that a leak or
# a fragmented heap shows.
_LOOP = """
import resource, torch
from hstu_attn import hstu_attention
from hstu_attn.testing import make_batch
from tests.helpers import raw_ops

torch.set_num_threads(1)

def resident() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20

batch = make_batch([100, 60, 40], heads=2, dim=64, mask="causal", bias="BIAS" or None)
dout = torch.randn_like(batch.q)
leaves = {n: t.clone().requires_grad_() for n, t in batch.differentiable().items()}
differentiable = batch.with_tensors(leaves)

def forward():
    raw_ops.forward(batch)

def backward():
    raw_ops.backward(batch, dout, has_drab="BIAS" == "rab", has_dtables=True)

def train():
    out = hstu_attention(
        differentiable.q, differentiable.k, differentiable.v, **differentiable.options()
    )
    torch.autograd.grad(out, list(leaves.values()), dout)

call = {"forward": forward, "backward": backward, "train": train}["CALL"]
for _ in range(300):
    call()
before = resident()
for _ in range(CALLS):
    call()
print(resident() - before)
"""


def growth_in_mib(call: str, calls: int, bias: str = "") -> float:
    script = _LOOP.replace("CALLS", str(calls)).replace("CALL", call).replace("BIAS", bias)
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return float(result.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "bias"),
    [("forward", ""), ("backward", ""), ("backward", "rab"), ("train", "position-time")],
    ids=["forward", "backward", "backward-rab", "train"],
)
def test_calls_in_a_loop_do_not_grow_the_process(call, bias):
    """1500 calls allocate about 150 MiB (forward) to 450 MiB (backward) of results in all."""
    assert growth_in_mib(call, 1500, bias) < 8


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
    result = subprocess.run(
        [sys.executable, "-c", _LONG.replace("LENGTH", "20000")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert float(result.stdout) < 100


_FINITE = """
import torch
from hstu_attn import hstu_attention
from hstu_attn.testing import make_batch, run

for length in (16, 48, 112):  # whole vectors, half a tile of AMX
    batch = make_batch([length], heads=2, dim=32, mask="full", dtype=torch.DTYPE)
    for result in run(hstu_attention, batch, torch.ones_like(batch.q)).values():
        assert result.isfinite().all(), length
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scratch_may_hold_anything(dtype):
    """glibc fills new memory with bytes of 0x7f, which are huge numbers and give NaN if read."""
    result = subprocess.run(
        [sys.executable, "-c", _FINITE.replace("DTYPE", dtype)],
        env={**os.environ, "MALLOC_PERTURB_": "128"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
