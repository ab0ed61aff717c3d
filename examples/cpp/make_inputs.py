"""Makes the inputs of score.cpp: a package of the model that train_retrieval.py saved, and steps.

    python examples/cpp/make_inputs.py                              # of runs/retrieval/best.pt
    python examples/cpp/make_inputs.py --model runs/ml/best.pt

It writes step.pt2, the package, and steps.pt, two batches of made-up requests, into the current
directory, and prints the scores of both batches, computed without a cache. The program computes the
same scores with a cache: its second step computes new events and each user's last cached event.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # recommender


def parse_arguments() -> Path:
    """Returns the path of the saved model, from the command line."""
    description, _, examples = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", type=Path, default=Path("runs/retrieval/best.pt"), help="what make demo leaves"
    )
    model: Path = parser.parse_args().model
    if not model.is_file():
        parser.error(f"--model: expected a file that train_retrieval.py saved; got {model}")
    return model


if __name__ == "__main__":
    parse_arguments()  # --help or a wrong option ends here, before torch is imported

import torch
from recommender.saved import load_model
from recommender.served import ServedRetrieval
from torch import Tensor

from hstu_attn.data import JaggedBatch
from hstu_attn.serving import ScoringStep

PAGES, PAGE_SIZE = 16, 64
USERS = [7, 8]
NEW_EVENTS = [[5, 3], [1, 2]]  # in each batch, for each user
CANDIDATES = 4
DAY = 86_400  # seconds


def packed(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the concatenated rows of all users, and the offsets of each user's rows."""
    lengths = torch.tensor([len(row) for row in rows])
    return torch.cat(rows), torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def step_inputs(
    items: list[Tensor], times: list[Tensor], cached: list[int], candidates: Tensor, now: int
) -> list[Tensor]:
    """Returns the tensors of one batch in steps.pt.

    Each user's last cached event is computed again, because its state depends on the time of the
    request.

    Args:
        items, times: the items and times of all events of each user, int64 `(n,)`.
        cached: how many events of each user were in earlier batches.
        candidates: int64 `(m,)`, scored for every user.
        now: the time of the request.
    """
    rewritten = [min(count, 1) for count in cached]
    kept = [count - again for count, again in zip(cached, rewritten, strict=True)]
    new = [len(own) - count for own, count in zip(items, cached, strict=True)]
    asked = [torch.cat([own[1:], torch.tensor([now])]) for own in times]
    rows, offsets = packed([own[k:] for own, k in zip(items, kept, strict=True)])
    positions = torch.cat([torch.arange(k, len(own)) for own, k in zip(items, kept, strict=True)])
    return [
        torch.tensor(USERS),
        torch.tensor(new),
        torch.tensor(rewritten),
        offsets,
        rows,
        torch.zeros_like(rows),  # actions
        positions,
        torch.zeros_like(rows, dtype=torch.bool),  # is_candidate
        candidates.repeat(len(items)),
        (offsets[1:] - 1).repeat_interleave(len(candidates)),  # state_rows: the last events
        torch.cat(times),  # key_times
        torch.cat([own[k:] for own, k in zip(asked, kept, strict=True)]),  # row_times
    ]


@torch.no_grad()
def main() -> None:
    torch.set_printoptions(sci_mode=False)  # one line per batch, as score.cpp prints them
    saved = load_model(parse_arguments(), torch.device("cpu"), torch.float32, fp8=False)
    model = ServedRetrieval(saved.model)
    step = ScoringStep(model, max_seq_len=model.max_history, max_key_len=model.max_history)
    program = step.export(PAGE_SIZE)
    torch._inductor.aoti_compile_and_package(program, package_path="step.pt2")

    config = model.stack.config
    heads, head_dim = config.num_heads, config.attention_dim
    layers = len(model.stack.layers)
    steps: list[Tensor | list[Tensor]] = [
        torch.tensor([layers, PAGES, 2, PAGE_SIZE, heads, head_dim])
    ]
    candidates = torch.randperm(model.num_items)[:CANDIDATES]
    items = [torch.empty(0, dtype=torch.int64) for _ in USERS]
    for counts in NEW_EVENTS:
        cached = [len(own) for own in items]
        items = [
            torch.cat([own, torch.randint(model.num_items, (count,))])
            for own, count in zip(items, counts, strict=True)
        ]
        times = [torch.arange(len(own)) * DAY for own in items]
        now = max(len(own) for own in items) * DAY
        steps.append(step_inputs(items, times, cached, candidates, now))

        rows, offsets = packed(items)
        later = torch.cat([torch.cat([own[1:], torch.tensor([now])]) for own in times])
        batch = JaggedBatch(torch.tensor(USERS), offsets, rows, torch.cat(times), rows, later)
        print(model.model.scores(batch)[:, candidates].flatten())
    torch.save(steps, "steps.pt")


if __name__ == "__main__":
    main()
