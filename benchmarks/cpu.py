"""The CPU kernels beside plain torch.

    python -m benchmarks.cpu --quick
    python -m benchmarks.cpu --json cpu.json --threads 8
    python -m benchmarks.cpu --only "D64 bfloat16"

For jagged causal batches it times the forward (without gradients) and the backward alone, of

    hstu_attn       this library
    per sequence    two torch products for each sequence
    padded          two torch products for the whole batch, padded to its longest sequence
    compiled        the same under torch.compile, compiled for the batch; compiling is not counted

Every one is first held against the fp64 reference. Then rounds are interleaved (in each, every
implementation runs once, on the next of several input sets), and the median counts. A round beside
which other processes kept the machine busy is repeated, within patience. Freed memory is kept for
the next call, for every implementation alike (see load.py). Beside the times stands the peak memory
that a call needs (see memory.py); that of the backward includes the forward that it follows and
what that has saved.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from pathlib import Path


class Options(argparse.Namespace):
    """The command line."""

    json: Path | None
    quick: bool = False
    threads: int | None
    rounds: int = 5
    seconds: float = 3
    patience: float = 10
    only: str = ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    parser.add_argument("--quick", action="store_true", help="two tiny cases, to see that it runs")
    parser.add_argument("--threads", type=int, help="of the kernels (default: torch's)")
    parser.add_argument("--rounds", type=int, default=5, help="at least so many (default 5)")
    parser.add_argument(
        "--seconds", type=float, default=3, help="more rounds of a case until then (default 3)"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=10,
        help="seconds for which rounds beside other work are repeated, per case (default 10)",
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help='cases whose "16 x 32..512 D64 float32" has TEXT'
    )
    return parser


if __name__ == "__main__":
    _parser().parse_args()  # --help or a wrong option ends here, before torch is imported

import torch
from torch import Tensor

from hstu_attn import Mask, reference

from .baselines import plain_torch
from .cases import Case, Inputs
from .load import CpuUse, keep_freed_memory
from .memory import MemoryProbe
from .report import Result, environment, print_environment, text_table, write_results

__all__ = ["main"]

DIRECTIONS = ("forward", "backward")
OURS, PER_SEQUENCE = "hstu_attn", "per sequence"
PADDED = ("padded", "compiled")

LENGTHS = ((16, 32, 512), (64, 32, 512), (256, 32, 128), (16, 32, 2048), (64, 32, 2048))
CASES = tuple(
    Case(*lengths, heads=4, head_dim=head_dim, dtype=dtype)
    for dtype in (torch.float32, torch.bfloat16)
    for head_dim in (64, 128)
    for lengths in LENGTHS
)
QUICK_CASES = (
    Case(3, 8, 48, heads=2, head_dim=16, dtype=torch.float32),
    Case(3, 8, 48, heads=2, head_dim=16, dtype=torch.bfloat16),
)

INPUT_SETS = 3
MOST_ROUNDS = 21
OTHERS_ALLOWED = 0.1  # processors that other work may keep busy in a round that counts
PADDED_LIMIT = 6e9  # bytes of score matrices
# Largest error, relative to the exact result, both in the Frobenius norm.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}


# ---------------------------------------------------------------------------------------------
# Correctness
# ---------------------------------------------------------------------------------------------


def exact_results(case: Case, inputs: Inputs) -> list[Tensor]:
    """The output and the gradients of q, k and v, by the fp64 reference."""
    pieces: list[tuple[Tensor, ...]] = []
    packed = (inputs.q, inputs.k, inputs.v, inputs.dout)
    for sequence in zip(*(x.split(case.lengths) for x in packed), strict=True):
        *leaves, dout = (x.double() for x in sequence)
        q, k, v = (x.requires_grad_() for x in leaves)
        out = reference.hstu_attention(
            q,
            k,
            v,
            cu_seqlens_q=torch.tensor([0, len(q)]),
            max_seqlen_q=len(q),
            scaling_seqlen=max(case.lengths),
            mask=Mask.causal(),
            alpha=case.alpha,
        )
        pieces.append((out.detach(), *torch.autograd.grad(out, (q, k, v), dout)))
    return [torch.cat(parts) for parts in zip(*pieces, strict=True)]


def check(case: Case, name: str, results: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    """Raise AssertionError if a result is further from the exact one than rounding explains."""
    for what, result, truth in zip(("out", "dq", "dk", "dv"), results, exact, strict=True):
        error = ((result.double() - truth).norm() / truth.norm()).item()
        if not error < TOLERANCE[case.dtype]:
            raise AssertionError(
                f"{name}, {case.name}, {case.dtype_name}: {what} has a relative error of "
                f"{error:.2e}, more than {TOLERANCE[case.dtype]:.0e}"
            )


# ---------------------------------------------------------------------------------------------
# Time
# ---------------------------------------------------------------------------------------------


def run_once(
    attention: plain_torch.Attention, inputs: Inputs
) -> tuple[dict[str, float], list[Tensor]]:
    """Milliseconds of each direction, and what was computed."""
    leaves = inputs.leaves()
    start = time.perf_counter()
    with torch.no_grad():
        out = attention(inputs.q, inputs.k, inputs.v)
    forward = time.perf_counter() - start

    recorded = attention(*leaves)
    start = time.perf_counter()
    gradients = torch.autograd.grad(recorded, leaves, inputs.dout)
    backward = time.perf_counter() - start
    return {"forward": 1e3 * forward, "backward": 1e3 * backward}, [out, *gradients]


def time_case(
    case: Case, names: Sequence[str], options: Options
) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of every round that counts, by implementation and direction."""
    input_sets = [Inputs.random(case, seed) for seed in range(INPUT_SETS)]
    exact = exact_results(case, input_sets[0])
    attentions = {}
    for name in names:
        attentions[name] = plain_torch.make(name, case)
        check(case, name, run_once(attentions[name], input_sets[0])[1], exact)
    del exact
    for attention in attentions.values():  # warm-up
        run_once(attention, input_sets[-1])

    rounds: list[dict[str, dict[str, float]]] = []
    disturbed: list[dict[str, dict[str, float]]] = []
    start = time.perf_counter()
    while len(rounds) < MOST_ROUNDS:
        elapsed = time.perf_counter() - start
        if len(rounds) >= options.rounds and elapsed > options.seconds:
            break
        if elapsed > options.patience and len(rounds) + len(disturbed) >= options.rounds:
            break
        number = len(rounds) + len(disturbed)
        first = number % len(names)
        before = CpuUse.now()
        round_ = {
            name: run_once(attentions[name], input_sets[number % INPUT_SETS])[0]
            for name in (*names[first:], *names[:first])
        }
        if before.others_since() <= OTHERS_ALLOWED:
            rounds.append(round_)
        else:
            disturbed.append(round_)
            time.sleep(0.5)
    if len(rounds) < options.rounds:
        print(f"{case.name}: {len(disturbed)} rounds beside other work, which count", flush=True)
        rounds += disturbed
    return {
        name: {direction: [r[name][direction] for r in rounds] for direction in DIRECTIONS}
        for name in names
    }


def measure(case: Case, probe: MemoryProbe, options: Options) -> list[Result]:
    """All results of a case."""
    names = list(plain_torch.NAMES)
    results = []
    needed = plain_torch.padded_bytes(case)
    if needed > PADDED_LIMIT:
        names = [name for name in names if name not in PADDED]
        reason = f"its score matrices take {needed / 1e9:.0f} GB"
        for direction in DIRECTIONS:
            results += [Result.of(case, direction, name, skipped=reason) for name in PADDED]
    times = time_case(case, names, options)
    memory = probe.peak_mib(case, names)
    for name in names:
        for direction in DIRECTIONS:
            peak = memory[name][direction] if memory else None
            ms = times[name][direction]
            results.append(Result.of(case, direction, name, ms=ms, peak_mib=peak))
    return results


# ---------------------------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------------------------


_COLUMNS = (
    *("sequences", "D", "dtype", "pass"),
    *plain_torch.NAMES,
    *(PER_SEQUENCE, "best other"),
    *plain_torch.NAMES,
)
_GROUPS = {4: "milliseconds", 8: "speedup over", 10: "peak extra MiB"}  # by first column
_WIDEST = ("256 x 32..2048", "128", "bfloat16", "backward", *["12345.6"] * 10)


def table_row(results: Sequence[Result]) -> list[str]:
    """The cells of one case and direction."""
    by_name = {result.impl: result for result in results}
    first = results[0]
    ms = {name: by_name[name].ms for name in plain_torch.NAMES}
    ours = ms[OURS] or float("nan")
    others = [x for name, x in ms.items() if name != OURS and x]
    return [
        first.case,
        str(first.head_dim),
        first.dtype,
        first.direction,
        *(_cell(ms[name], 2 if ours < 1 else 1) for name in plain_torch.NAMES),
        _cell((ms[PER_SEQUENCE] or float("nan")) / ours, 2),
        _cell(min(others, default=float("nan")) / ours, 2),
        *(_cell(by_name[name].peak_mib, 1) for name in plain_torch.NAMES),
    ]


def _cell(x: float | None, digits: int) -> str:
    return "-" if x is None else f"{x:.{digits}f}"


def print_case(results: Sequence[Result], header: bool) -> None:
    """The two rows of a case, under the names of the columns if asked for."""
    rows = [[r for r in results if r.direction == direction] for direction in DIRECTIONS]
    _, columns, *lines = text_table([_WIDEST, _COLUMNS, *map(table_row, rows)])
    if header:
        groups = ""
        ends = [match.end() for match in re.finditer(r"\S+( \S+)*", columns)]
        for first, title in _GROUPS.items():
            groups = groups.ljust(ends[first - 1] + 2) + f"| {title} "
        lines = [groups, columns, *lines]
    print("\n".join(lines), flush=True)


def print_summary(results: Sequence[Result]) -> None:
    """The range of the speedups, and what was left out."""
    rows: dict[tuple[object, ...], dict[str, float]] = {}
    for result in results:
        if result.ms is not None:
            key = (result.case, result.head_dim, result.dtype, result.direction)
            rows.setdefault(key, {})[result.impl] = result.ms
    per_sequence = [ms[PER_SEQUENCE] / ms[OURS] for ms in rows.values()]
    best = [min(x for name, x in ms.items() if name != OURS) / ms[OURS] for ms in rows.values()]
    print(
        f"\nSpeedup over the per-sequence form: {min(per_sequence):.2f} to {max(per_sequence):.2f};"
        f" over the best other column: {min(best):.2f} to {max(best):.2f}."
    )
    for skipped in sorted({f"{r.case}, {r.dtype}: {r.skipped}" for r in results if r.skipped}):
        print(f"Padded forms skipped for {skipped} (limit {PADDED_LIMIT / 1e9:.0f} GB).")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints, and writes what was asked for."""
    parser = _parser()
    options = parser.parse_args(arguments, Options())
    options.threads = options.threads or torch.get_num_threads()
    torch.set_num_threads(options.threads)
    if options.quick:
        options.seconds = options.patience = 0
    cases = [
        case
        for case in (QUICK_CASES if options.quick else CASES)
        if options.only in f"{case.name} D{case.head_dim} {case.dtype_name}"
    ]
    if not cases:
        parser.error(f"--only: expected a part of a case's name, got {options.only!r}")

    described = environment("python -m benchmarks.cpu")
    print_environment(described)
    print(
        f"jagged causal, {cases[0].heads} heads, lengths uniform, "
        f"medians of at least {options.rounds} rounds\n",
        flush=True,
    )
    results: list[Result] = []
    with MemoryProbe() as probe:
        for case in cases:
            found = measure(case, probe, options)
            print_case(found, header=not results)
            results += found
    print_summary(results)
    if options.json:
        write_results(options.json, described, results)
        print(f"written to {options.json}")


if __name__ == "__main__":
    keep_freed_memory()
    main()
