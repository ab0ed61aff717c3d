"""Tests of context parallelism: ranks that share sequences get the same results as one process."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hstu_attn import Mask, RelativeBias, hstu_attention
from hstu_attn.distributed import context_parallel
from hstu_attn.distributed.context_parallel import (
    ContextBatch,
    chunk_bounds,
    context_parallel_attention,
    gather_rows,
    shard_index,
    shard_rows,
)
from hstu_attn.layer import HSTULayerConfig, HSTUStack
from hstu_attn.mask import clip_to_keys, dense_mask, select_rows
from hstu_attn.testing import MASK_NAMES, Batch, assert_matches, make_batch, make_mask, offsets
from tests.helpers.distributed_runs import run_ranks

LENGTHS = [0, 1, 2, 3, 37, 0, 8, 64, 5]


# ---------------------------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_chunks_are_nearly_even_and_never_grow(world):
    lengths = [*LENGTHS, *torch.randint(200, (20,)).tolist()]
    bounds = chunk_bounds(offsets(lengths), world)
    assert bounds.shape == (len(lengths), 2 * world + 1)
    assert bounds[:, 0].eq(0).all()
    assert bounds[:, -1].tolist() == lengths
    sizes = bounds.diff(dim=1)
    assert (sizes.diff(dim=1) <= 0).all()
    assert (sizes[:, 0] - sizes[:, -1] <= 1).all()


@pytest.mark.parametrize("world", [1, 2, 5])
def test_each_row_is_on_one_rank(world):
    seq_offsets = offsets(LENGTHS)
    x = torch.randn(sum(LENGTHS), 3)
    shards = [shard_index(seq_offsets, rank, world) for rank in range(world)]
    assert torch.cat(shards).sort().values.tolist() == list(range(len(x)))
    for rank, rows in enumerate(shards):
        assert torch.equal(shard_rows(x, seq_offsets, rank, world), x[rows])
        chunks = []
        for begin, length in zip(seq_offsets.tolist(), LENGTHS, strict=False):
            cut = torch.arange(begin, begin + length).tensor_split(2 * world)
            chunks += [cut[rank], cut[2 * world - 1 - rank]]
        assert rows.tolist() == torch.cat(chunks).tolist()


def test_no_sequences():
    assert shard_index(offsets([]), 0, 2).shape == (0,)


def test_a_rank_outside_the_group():
    with pytest.raises(ValueError, match=r"rank: expected 0 to world - 1 = 1, got 2"):
        shard_index(offsets([4]), 2, 2)


def test_causal_work_is_even():
    length, world = 10007, 4
    seq_offsets = offsets([length])
    pairs = [int((shard_index(seq_offsets, rank, world) + 1).sum()) for rank in range(world)]
    assert sum(pairs) == length * (length + 1) // 2
    assert max(pairs) / min(pairs) < 1.002


# ---------------------------------------------------------------------------------------------
# Masks
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MASK_NAMES)
def test_chosen_rows_of_a_mask_and_a_range_of_its_keys(name):
    lengths, heads = [0, 9, 1, 23], 2
    mask = make_mask(name, lengths, heads=heads)
    seq_offsets = offsets(lengths)
    rows = torch.randperm(sum(lengths))[:20].sort().values
    chosen = select_rows(mask, seq_offsets, rows, sum(lengths))
    first, count, shift = (torch.randint(high, (len(rows),)) for high in (15, 12, 5))
    part = clip_to_keys(chosen, first, count, shift)
    sequence = torch.searchsorted(seq_offsets, rows, right=True) - 1
    width = 64
    for head in range(heads):
        by_row = dense_mask(part, len(rows), width, head=head)
        for n, (row, b) in enumerate(zip(rows.tolist(), sequence.tolist(), strict=True)):
            length, start = lengths[b], int(seq_offsets[b])
            counts = {
                key: int(tensor[b])
                for key, tensor in (
                    ("num_contexts", mask.num_contexts),
                    ("num_targets", mask.num_targets),
                )
                if tensor is not None
            }
            whole = dense_mask(mask, length, length, first_row=start, head=head, **counts)
            expected = torch.zeros(width, dtype=torch.bool)
            seen = whole[row - start, int(first[n]) : int(first[n] + count[n])]
            expected[int(shift[n]) : int(shift[n]) + len(seen)] = seen
            # The operator ignores keys past the sequence's end.
            end = int(shift[n]) + len(seen)
            found = by_row[n] & (torch.arange(width) < end)
            assert torch.equal(found, expected), (head, n)


# ---------------------------------------------------------------------------------------------
# Attention
# ---------------------------------------------------------------------------------------------


ROWS = ("out", "q", "k", "v")  # tensors whose rows are divided among the ranks


def _results(batch: Batch, dout: Tensor, context: ContextBatch | None = None) -> dict[str, Tensor]:
    """Returns output and gradients: of the operator in one process, or of a rank's rows.

    A rank's gradients of a bias must still be summed over the ranks.
    """
    tensors = {name: x.detach() for name, x in batch.differentiable().items()}
    if context is not None:
        tensors |= {name: context.shard(tensors[name]) for name in ("q", "k", "v")}
        dout = context.shard(dout)
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    made = batch.with_tensors(leaves)
    qkv = made.q, made.k, made.v
    if context is None:
        out = hstu_attention(*qkv, **made.options())
    else:
        names = ("mask", "bias", "alpha", "scaling_seqlen")
        out = context.attention(*qkv, **{name: getattr(made, name) for name in names})
    gradients = dict(zip(leaves, torch.autograd.grad(out, [*leaves.values()], dout), strict=True))
    return {"out": out, **gradients}


def _in_double(batch: Batch) -> Batch:
    """Returns the batch on the CPU, in fp64."""

    def on_cpu(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.cpu()

    def tensors_on_cpu(value: Any) -> Any:
        if not isinstance(value, (Mask, RelativeBias)):
            return value
        tensors = {n: x for n, x in vars(value).items() if isinstance(x, Tensor)}
        return replace(value, **{name: on_cpu(x) for name, x in tensors.items()})

    double = batch.with_tensors({n: x.double().cpu() for n, x in batch.differentiable().items()})
    return replace(
        double,
        mask=tensors_on_cpu(double.mask),
        bias=tensors_on_cpu(double.bias),
        cu_seqlens_q=on_cpu(batch.cu_seqlens_q),
        cu_seqlens_k=on_cpu(batch.cu_seqlens_k),
    )


def _check_masks(
    names: list[str],
    lengths: list[int],
    dtypes: list[torch.dtype],
    device: str = "cpu",
    bias: str | None = None,
    heads: int = 2,
) -> None:
    for name in names:
        for dtype in dtypes:
            batch = make_batch(
                lengths,
                heads=heads,
                dim=16,
                dim_v=8,
                dtype=dtype,
                device=device,
                mask=name,
                bias=bias,
                alpha=0.4,
                scaling_seqlen=(-1, 18)[int(torch.randint(2, ()))],
            )
            dout = torch.randn_like(batch.v)
            context = ContextBatch(batch.cu_seqlens_q, batch.max_seqlen_q)
            same_dtype_reference = _results(batch, dout)
            exact = _results(_in_double(batch), dout.double().cpu())
            rows = context.rows.cpu()
            for key, found in _results(batch, dout, context).items():
                label = f"{name}, {bias}, {heads} heads, {dtype}, rank {context.rank}: {key}"
                assert found.dtype == batch.differentiable().get(key, batch.q).dtype, label
                of_rank = rows if key in ROWS else slice(None)
                wanted = exact[key][of_rank].double()
                references = [same_dtype_reference[key].cpu()[of_rank]]
                if key not in ROWS:
                    found, with_rounded_parts = _sum_of_parts(found, wanted)
                    references.append(with_rounded_parts)
                assert_matches(label, found.cpu(), wanted, *references)


def _sum_of_parts(part: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum over the ranks, and `exact` plus half a rounding error of each part."""
    total, sizes = part.double(), part.double().abs()
    dist.all_reduce(total)
    dist.all_reduce(sizes)
    return total.to(part.dtype), exact + torch.finfo(part.dtype).eps / 2 * sizes.cpu()


@pytest.mark.slow
def test_two_ranks_compute_what_one_does():
    dtypes = [torch.float64, torch.float32, torch.bfloat16]
    run_ranks(2, _check_masks, list(MASK_NAMES), LENGTHS, dtypes)


@pytest.mark.slow
def test_four_ranks_compute_what_one_does():
    names = ["causal", "full", "local-left", "context-target", "spans-by-head", "func-5-causal"]
    run_ranks(4, _check_masks, names, [0, 131, 1, 3, 7, 6, 64], [torch.float64])


def _check_biases(
    biases: list[str],
    all_heads: list[int],
    masks: list[str],
    lengths: list[int],
    dtypes: list[torch.dtype],
    device: str = "cpu",
) -> None:
    for bias in biases:
        for heads in all_heads:
            _check_masks(masks, lengths, dtypes, device, bias, heads)


BIASED = ["rab", "rab-1-head", "position", "time", "position-time-fp32", "position-row-time"]


@pytest.mark.slow
def test_two_ranks_compute_biases_of_whole_sequences():
    """Checks equal and unequal numbers of heads on the ranks, and one head that both share."""
    masks = ["full", "context-target", "spans-by-head", "func-5-causal"]
    lengths = [0, 1, 3, 37, 8]
    run_ranks(2, _check_biases, BIASED, [1, 2, 3], masks, lengths, [torch.float64])
    some = ["rab-fp32", "position-time-fp32"]
    run_ranks(2, _check_biases, some, [4], ["local-target"], lengths, [torch.bfloat16])
    run_ranks(2, _check_biases, BIASED[-1:], [2], list(MASK_NAMES), LENGTHS, [torch.float64])


@pytest.mark.slow
def test_four_ranks_compute_biases_of_whole_sequences():
    masks, lengths = ["causal", "local", "func-9-by-head"], [0, 61, 1, 3, 18]
    some = ["rab-1-head", "position-row-time"]
    run_ranks(4, _check_biases, some, [1, 2, 3, 6], masks, lengths, [torch.float64])


@pytest.mark.gpu
@pytest.mark.parametrize("bias", ["rab", "rab-1-head", "position-time-fp32"])
def test_gpus_compute_biases_of_whole_sequences(bias):
    masks, lengths = ["causal", "context-target", "spans-by-head"], [0, 1, 3, 700, 129]
    run_ranks(
        2, _check_biases, [bias], [1, 4], masks, lengths, [torch.bfloat16], "cuda", backend="nccl"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4])
def test_gpus_compute_what_one_process_does(world):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    names = ["causal", "full", "local", "min-full-context-target", "spans-by-head", "func-5"]
    lengths = [0, 1, 3, 700, 129, 2048]
    run_ranks(world, _check_masks, names, lengths, [torch.bfloat16], "cuda", backend="nccl")


# ---------------------------------------------------------------------------------------------
# Gathering, refusals and layers
# ---------------------------------------------------------------------------------------------


def _check_gather() -> None:
    seq_offsets = offsets(LENGTHS)
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.randn(sum(LENGTHS), 3, 2, dtype=torch.float64)
    local = shard_rows(x, seq_offsets, rank, world)
    assert torch.equal(gather_rows(local, seq_offsets), x)
    numbers = torch.arange(len(x))
    context = ContextBatch(seq_offsets, max(LENGTHS))
    assert torch.equal(context.gather(context.shard(numbers)), numbers)
    assert torch.equal(context.rows, shard_index(seq_offsets, rank, world))
    starts = seq_offsets[:-1].repeat_interleave(torch.tensor(LENGTHS))
    assert torch.equal(context.positions, context.shard(numbers - starts))
    assert context.offsets[-1] == len(context.rows)
    # Rank r weights the gradient of each row by r + 1, and gather adds up the ranks' gradients.
    weights = torch.randn_like(x)
    local.requires_grad_()
    ((rank + 1) * weights * context.gather(local)).sum().backward()
    assert local.grad is not None
    expected = sum(range(1, world + 1)) * context.shard(weights)
    torch.testing.assert_close(local.grad, expected)


def _check_calls_alone() -> None:
    """Checks a group of some ranks, the function for a single call, and the order of sums."""
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    group = groups[dist.get_rank() % 2]
    for bias in (None, "rab", "position-time"):
        batch = make_batch([50, 3], mask="causal", dtype=torch.float32, bias=bias)
        context = ContextBatch(batch.cu_seqlens_q, batch.max_seqlen_q, group)
        assert context.world == 2
        dout = torch.randn_like(batch.v)
        whole, found = _results(batch, dout), _results(batch, dout, context)
        for name in ROWS:
            torch.testing.assert_close(found[name], context.shard(whole[name]))
        again = _results(batch, dout, context)
        assert all(torch.equal(found[name], again[name]) for name in found)
        alone = context_parallel_attention(
            *map(context.shard, (batch.q, batch.k, batch.v)),
            cu_seqlens=batch.cu_seqlens_q,
            max_seqlen=batch.max_seqlen_q,
            mask=batch.mask,
            bias=batch.bias,
            alpha=batch.alpha,
            group=group,
        )
        assert torch.equal(alone, found["out"])


def _check_skipping() -> None:
    """Checks that no operator call is made for chunks of keys that no local row sees."""
    lengths = [70, 0, 131]
    for name in ("local-left", "local-target", "context", "spans", "func-5"):
        mask = make_mask(name, lengths)
        context = ContextBatch(offsets(lengths), max(lengths))
        batch = make_batch(lengths, mask=mask)
        wanted = 0
        for source in range(context.world):
            for chunk in (source, 2 * context.world - 1 - source):
                v = torch.zeros_like(batch.v)
                for b, start in enumerate(batch.cu_seqlens_q[:-1].tolist()):
                    begin, end = context.bounds[b, chunk : chunk + 2].tolist()
                    v[start + begin : start + end] = 1
                one = torch.ones_like(batch.q)
                out = hstu_attention(one, one, v, **batch.options())
                wanted += bool(context.shard(out).any())
        plan = context.calls.of_mask(mask)
        assert sum(map(len, plan)) == wanted, name
        assert context.calls.of_mask(replace(mask)) is plan
        if name == "local-left":
            assert wanted < 2 * context.world
    causal = [len(calls) for calls in context.calls.of_mask(Mask.causal())]
    assert causal == [1] * context.world


def _check_layers_share_calls() -> None:
    """Checks that contextual rows given by the configuration are computed once for all layers."""
    config = HSTULayerConfig(
        embedding_dim=8, num_heads=2, hidden_dim=8, attention_dim=8, contextual_seq_len=2
    )
    stack = HSTUStack(config, 3)
    seq_offsets = offsets(LENGTHS)
    context = ContextBatch(seq_offsets, max(LENGTHS))
    x = torch.randn(sum(LENGTHS), 8)
    dist.broadcast(x, 0)
    for parameter in stack.parameters():
        dist.broadcast(parameter.data, 0)
    found = stack(context.shard(x), seq_offsets, max(LENGTHS), context=context)
    wanted = context.shard(stack(x, seq_offsets, max(LENGTHS)))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert len(context.masks) == 1


def _check_refusals() -> None:
    context = ContextBatch(offsets([6, 5]), 6)
    q = torch.zeros(len(context.rows), 2, 8)
    with pytest.raises(ValueError, match=r"k: expected the .* rows of rank"):
        context.attention(q, q[1:], q)
    with pytest.raises(ValueError, match=r"v: expected torch.float32 .* got torch.float64"):
        context.attention(q, q, q.double())
    with pytest.raises(ValueError, match=r"mask: expected a Mask or None, got str"):
        context.attention(q, q, q, mask="causal")
    with pytest.raises(ValueError, match=r"local: expected the .* rows of rank"):
        context.gather(q[1:])
    for name, bias in (
        ("rab", torch.zeros(2, 3, 6, 6)),
        ("pos_weight", RelativeBias(torch.zeros(3, 5))),
        ("ts_weight", RelativeBias(None, torch.zeros(3, 5), torch.zeros(11, dtype=torch.int64))),
    ):
        with pytest.raises(ValueError, match=rf"{name}: expected .* heads that divides 2"):
            context.attention(q, q, q, bias=bias)
    for mask in (
        Mask.from_row_spans(torch.zeros(1, 11, 4, dtype=torch.int32)),
        Mask.from_func(torch.zeros(3, 1, 11, dtype=torch.int32)),
    ):
        with pytest.raises(ValueError, match=r"(row_spans|func): expected 2 heads, got shape"):
            context.attention(q, q, q, mask=mask, bias=RelativeBias(torch.zeros(2, 5)))
    times = torch.zeros(len(q), dtype=torch.int64)  # not the times of the whole sequences
    with pytest.raises(ValueError, match=r"timestamps: expected shape \(total_k\) = \(11\)"):
        context.attention(q, q, q, bias=RelativeBias(None, torch.zeros(2, 5), times))


def _check_errors_in_the_ring() -> None:
    """Checks that ranks stay synchronized after an error in any call of the ring."""
    batch = make_batch([37, 0, 8], mask="causal", dtype=torch.float64)
    context = ContextBatch(batch.cu_seqlens_q, batch.max_seqlen_q)
    q, k, v = (context.shard(x).requires_grad_() for x in (batch.q, batch.k, batch.v))
    for name in ("attention", "attention_gradients"):
        for failing in range(context.world):
            calls, computes = count(), getattr(context_parallel.ops, name)

            def compute(*arguments: Any, failing: int = failing, calls=calls, computes=computes):
                if next(calls) == failing:
                    raise MemoryError("an error of every rank")
                return computes(*arguments)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(context_parallel.ops, name, compute)
                with pytest.raises(MemoryError, match="an error of every rank"):
                    context.attention(q, k, v, mask=batch.mask).sum().backward()
            answers = torch.ones(1)
            dist.all_reduce(answers)
            assert answers == context.world, (name, failing)


def test_ranks_go_on_after_errors_in_the_ring():
    run_ranks(2, _check_errors_in_the_ring)


def _check_training(config: HSTULayerConfig) -> None:
    lengths = [0, 61, 1, 18]
    seq_offsets = offsets(lengths)
    targets = torch.tensor([0, 5, 0, 3]) if config.target_aware else None
    stack = HSTUStack(config, 2, dtype=torch.float64)
    x = torch.randn(sum(lengths), config.embedding_dim, dtype=torch.float64, requires_grad=True)
    wanted = torch.randn_like(x)
    times = None
    if config.enable_relative_attention_bias:
        times = torch.randint(10**6, (len(x),)).cumsum(0)
    arguments = (seq_offsets, max(lengths), targets, None, times)
    out = stack(x, *arguments)
    (out - wanted).square().mean().backward()
    expected = {name: p.grad for name, p in stack.named_parameters()}
    stack.zero_grad(set_to_none=True)

    context = ContextBatch(seq_offsets, max(lengths))
    local = context.shard(x.detach()).requires_grad_()
    found = stack(local, *arguments, context=context)
    torch.testing.assert_close(found, context.shard(out))
    assert len(context.masks) == 1
    ((found - context.shard(wanted)).square().sum() / x.numel()).backward()
    torch.testing.assert_close(local.grad, context.shard(x.grad))
    for name, parameter in stack.named_parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        # The operator sums the gradients of tables in fp32.
        close = {"rtol": 1e-5, "atol": 1e-6} if name.endswith(("n_weight", "e_weight")) else {}
        torch.testing.assert_close(parameter.grad, expected[name], **close, msg=name)


def _check_nothing() -> None:
    for lengths in ([], [0, 0]):
        batch = make_batch(lengths, mask="causal")
        context = ContextBatch(batch.cu_seqlens_q, batch.max_seqlen_q)
        assert _results(batch, batch.v, context)["k"].shape == (0, 2, 32)
        assert context.gather(batch.q).shape == batch.q.shape
        context = ContextBatch(batch.cu_seqlens_q, 0)
        assert context.attention(batch.q, batch.k, batch.v).shape == (0, 2, 32)


def _check_around() -> None:
    _check_nothing()
    _check_gather()
    _check_calls_alone()
    _check_skipping()
    _check_layers_share_calls()
    _check_refusals()
    widths = {"embedding_dim": 16, "num_heads": 2, "hidden_dim": 8, "attention_dim": 8}
    _check_training(HSTULayerConfig.stu(**widths, output_dropout_ratio=0.0, max_attn_len=9))
    # With one rank the layer is fused, since the rank has whole sequences.
    fused = HSTULayerConfig(**widths, target_aware=False, scaling_seqlen=40, fused=True)
    _check_training(fused)
    for heads in (1, 2):
        biased = {"enable_relative_attention_bias": True, "relative_bias_heads": heads}
        config = HSTULayerConfig(**widths, **biased, relative_bias_max_seq_len=30, num_buckets=40)
        _check_training(config)


@pytest.mark.slow
def test_rows_groups_refusals_and_training():
    run_ranks(4, _check_around)


def test_one_rank_is_the_operator():
    batch = make_batch([7, 0, 30], mask="context-target", dtype=torch.float64)
    dout = torch.randn_like(batch.v)
    context = ContextBatch(batch.cu_seqlens_q, batch.max_seqlen_q)
    whole, found = _results(batch, dout), _results(batch, dout, context)
    assert all(torch.equal(found[name], whole[name]) for name in ROWS)
    assert torch.equal(context.gather(batch.q), batch.q)


def test_what_a_batch_is_made_of():
    with pytest.raises(ValueError, match=r"seq_offsets: expected int32 or int64 .*float32"):
        ContextBatch(torch.zeros(3), 1)
    with pytest.raises(ValueError, match=r"max_seq_len: expected 0 or more, got -1"):
        ContextBatch(offsets([1]), -1)
