"""Prints the ptxas statistics of each compiled kernel: `kernel_table.py [--check] BUILD_FOLDER`.

The build leaves the output of `nvcc -Xptxas=-v` next to each object, as *.cu.o.log. The table has a
line for each kernel and GPU: registers per thread, static shared memory (without dynamic shared
memory), stack, and bytes spilled. --check instead fails if an attention kernel spills that is not
in MAY_SPILL, or if ptxas serializes wgmma, because the accumulators of the wgmmas in flight do not
fit into the registers.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

NAME_COLUMNS = 72

# Parts of the names of attention kernels that may spill, by the folder of their sources.
MAY_SPILL = {
    "sm80": (
        # The backward with a relative bias keeps sums for the time table's gradient in registers
        # across steps, and spills up to 36 bytes.
        "BackwardILi64EN7cutlass10bfloat16_tELNS0_6TilingE0ELNS0_9ScoreBiasE2E",
        "BackwardILi64EN7cutlass6half_tELNS0_6TilingE0ELNS0_9ScoreBiasE2E",
        "BackwardILi256EN7cutlass10bfloat16_tELNS0_6TilingE0ELNS0_9ScoreBiasE2E",
        "BackwardILi256EN7cutlass6half_tELNS0_6TilingE0ELNS0_9ScoreBiasE2E",
        # The backward by clusters with a dense bias spills up to 8 bytes.
        "BackwardILi64EN7cutlass10bfloat16_tELNS0_6TilingE5ELNS0_9ScoreBiasE1E",
        "BackwardILi64EN7cutlass6half_tELNS0_6TilingE5ELNS0_9ScoreBiasE1E",
        "BackwardILi128EN7cutlass10bfloat16_tELNS0_6TilingE5ELNS0_9ScoreBiasE1E",
        "BackwardILi128EN7cutlass6half_tELNS0_6TilingE5ELNS0_9ScoreBiasE1E",
        "BackwardILi256EN7cutlass10bfloat16_tELNS0_6TilingE5ELNS0_9ScoreBiasE1E",
        "BackwardILi256EN7cutlass6half_tELNS0_6TilingE5ELNS0_9ScoreBiasE1E",
    ),
    "sm90": (
        # Consumers compute the bias in addition to their accumulators (forward), or an additional
        # warpgroup takes registers (backward).
        "RelativeScoreBias",
        # In the backward, the additional warpgroup has 56 registers if it only sums dS, and the
        # consumers have 216.
        "17PositionScoreBiasELb",
        # A converter warpgroup takes registers, so that the others spill some per work tile.
        "ForwardILi128EN7cutlass10bfloat16_tENS0_18QuantizedPagedKeys",
        "ForwardILi128EN7cutlass6half_tENS0_18QuantizedPagedKeys",
        "ForwardILi256EN7cutlass10bfloat16_tENS0_18QuantizedPagedKeys",
        "ForwardILi256EN7cutlass6half_tENS0_18QuantizedPagedKeys",
        # Consumers keep the address of a bias tile in addition to their accumulators.
        "AddedDenseBias",
        # Three consumers leave 56 registers to producers that look up pages.
        "ForwardILi128EN7cutlass12float_e4m3_tENS0_13E4m3PagedKeys",
        # Four consumers have 112 registers each, and spill some before the main loop.
        "ForwardILi64EN7cutlass12float_e4m3_tENS0_8E4m3KeysINS3_6half_t",
        # The consumers leave 24 registers to the producer, which spills once per work tile.
        "ForwardILi256EN7cutlass12float_e4m3_t",
        # The producer of the backward has 24 registers, too, and spills once per work tile where
        # it finds work tiles without a list (kIsClosedForm). Other forms, which always have a list,
        # have the same consumers and may not spill. Up to head dim 128, only the form in which a
        # block takes whole sequences (kStoresDq) may.
        *(
            f"BackwardILi{head_dim}EN7cutlass{dtype}ENS0_11NoScoreBiasELb0ES4_Lb1E{stores_dq}"
            for head_dim, stores_dq in ((96, "Lb1E"), (128, "Lb1E"), (192, ""), (256, ""))
            for dtype in ("10bfloat16_t", "6half_t")
        ),
    ),
}

_KERNEL = re.compile(r"Compiling entry function '(?P<symbol>\w+)' for '(?P<gpu>\w+)'")
_FUNCTION = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads"
)
_SERIALIZED = re.compile(r"wgmma\S* instructions are serialized .* function '(\w+)'")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


class Kernel(NamedTuple):
    """One kernel, compiled for one GPU architecture."""

    source: str  # such as sm80/forward_d64.bf16.cu
    symbol: str
    gpu: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int
    is_serialized: bool

    @property
    def is_attention(self) -> bool:
        return self.source.startswith("sm")

    @property
    def may_spill(self) -> bool:
        parts = MAY_SPILL.get(self.source.split("/")[0], ())
        return not self.is_attention or any(part in self.symbol for part in parts)


def read_log(source: str, text: str) -> Iterator[Kernel]:
    """Yields the kernels of one source file, from the output of its compiler."""
    serialized = _SERIALIZED.findall(text)
    for part in re.split(r"(?=Compiling entry function)", text)[1:]:
        kernel, used, shared = (r.search(part) for r in (_KERNEL, _USED, _SHARED))
        functions = list(_FUNCTION.finditer(part))  # the kernel, and functions that it calls
        if not (kernel and used and functions):
            raise ValueError(f"{source}: expected the output of ptxas -v, got {part[:200]!r}")
        yield Kernel(
            source,
            kernel["symbol"],
            kernel["gpu"],
            int(used[1]),
            int(shared[1]) if shared else 0,
            sum(int(function["stack"]) for function in functions),
            sum(int(function["stores"]) + int(function["loads"]) for function in functions),
            kernel["symbol"] in serialized,
        )


def read_logs(folder: Path) -> list[Kernel]:
    """Returns the kernels of a build, by source, name and GPU."""
    # NOTE: listing the folder would also find logs of deleted sources.
    sources = re.findall(r"^build (\S+)\.o: nvcc", (folder / "build.ninja").read_text(), re.M)
    logs = {source: (folder / f"{source}.o.log").read_text() for source in sources}
    return sorted(kernel for source in sources for kernel in read_log(source, logs[source]))


def demangle(symbols: list[str]) -> list[str]:
    """Returns C++ names without their parameters; without binutils, returns the symbols as is."""
    if not (symbols and shutil.which("c++filt")):
        return symbols
    command = ["c++filt", "--no-params", *symbols]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [re.sub(r"^void |hstu::|cutlass::", "", name) for name in names]


def print_table(kernels: list[Kernel]) -> None:
    names = [name[:NAME_COLUMNS] for name in demangle([kernel.symbol for kernel in kernels])]
    width = max(map(len, names), default=0)
    sources = max((len(kernel.source) for kernel in kernels), default=0)
    header = ("registers", "shared", "stack", "spilled")
    print(f"{'source':{sources}}  {'kernel':{width}}  GPU     " + "  ".join(header))
    for kernel, name in zip(kernels, names, strict=True):
        figures = zip(header, kernel[3:7], strict=True)
        cells = "  ".join(f"{figure:>{len(title)}}" for title, figure in figures)
        print(f"{kernel.source:{sources}}  {name:{width}}  {kernel.gpu:6}  {cells}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail where attention spills")
    parser.add_argument("folder", type=Path, help="where the build's build.ninja is")
    options = parser.parse_args()
    kernels = read_logs(options.folder)
    if not options.check:
        print_table(kernels)
        return
    if not kernels:
        raise SystemExit(f"{options.folder}: expected logs of compiled kernels, got none")
    spilling = [kernel for kernel in kernels if kernel.spill_bytes and not kernel.may_spill]
    for kernel in spilling:
        print(f"{kernel.source}: {kernel.symbol} spills {kernel.spill_bytes} bytes on {kernel.gpu}")
    if spilling:
        raise SystemExit("expected no spill in an attention kernel")
    serialized = [kernel for kernel in kernels if kernel.is_serialized]
    for kernel in serialized:
        print(f"{kernel.source}: {kernel.symbol} waits for each wgmma")
    if serialized:
        raise SystemExit("expected no kernel whose wgmma are serialized")
    print(f"{len(kernels)} kernels, no spill in those of attention that may not")


if __name__ == "__main__":
    main()
