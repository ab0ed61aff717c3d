"""Loads the example's server with the model that `make demo` has trained.

    python -m benchmarks.serving
    python -m benchmarks.serving --concurrency 1 64 --seconds 30 --json serving.json

Starts `examples/serve.py` as a process of its own, on this machine, and drives it over loopback by
as many threads as requests are to be under way; each sends its next one when it has its answer. A
request brings one new event of a random user of the data, and asks for the best 10 items that the
user has not seen. The threads and the server share the processors, so the server alone would be
faster. `others` are the processors that other work kept busy in the second before the start.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    model, data = "runs/retrieval/best.pt", "runs/synthetic-movielens/ratings.dat"
    parser.add_argument("--model", type=Path, default=Path(model), help=f"(default {model})")
    parser.add_argument("--data", type=Path, default=Path(data), help=f"(default {data})")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="of each concurrency (default 10)"
    )
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[1, 8, 32], metavar="REQUESTS",
        help="under way at a time (default 1 8 32)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="(default 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    return parser


if __name__ == "__main__":
    _parser().parse_args()  # --help or a wrong option ends here, before torch is imported

import numpy as np

from hstu_attn.data import EventLog, open_event_log

from .load import CpuUse
from .report import ROOT, environment, print_environment, rounded, text_table, write_records

__all__ = ["Load", "drive", "main", "running_server"]

SERVER = ROOT / "examples/serve.py"
WARM_UP_SECONDS = 2.0


@dataclass(frozen=True)
class Load:
    """What one concurrency came to; times in milliseconds, as the threads saw them."""

    concurrency: int
    seconds: float
    answered: int
    failed: int  # other answers than 200
    qps: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    mean_batch: float  # requests that the engine computed together
    hit_share: float  # of the rows of events, those that the cache had


@contextmanager
def running_server(model: Path, data: Path, arguments: Sequence[str] = ()) -> Iterator[int]:
    """The server, as its port; ended by SIGTERM.

    Raises:
        RuntimeError: it does not start.
    """
    files = ["--model", str(model), "--data", str(data)]
    command = [sys.executable, str(SERVER), "--port", "0", *files, *arguments]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        found = (re.search(r"at http://\S+:(\d+)$", line) for line in server.stdout)
        port = next((match[1] for match in found if match), None)
        if port is None:
            raise RuntimeError(f"{' '.join(command)} ended with status {server.wait()}")
        yield int(port)
    finally:
        server.terminate()
        server.wait()


def counts(port: int) -> dict[str, float]:
    """The server's metrics that have no labels."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return {name: float(value) for name, value in re.findall(r"^(\w+) (\S+)$", text, re.MULTILINE)}


def drive(port: int, log: EventLog, concurrency: int, seconds: float, seed: int) -> Load:
    """Keeps that many requests under way for that long, after a warm-up."""
    start = time.perf_counter() + min(WARM_UP_SECONDS, seconds)
    end = start + seconds
    users, items = log.source_user_ids, log.source_item_ids
    latencies: list[list[float]] = [[] for _ in range(concurrency)]
    failed = [0] * concurrency

    def send(thread: int) -> None:
        rng = random.Random(f"{seed} {concurrency} {thread}")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        while (sent := time.perf_counter()) < end:
            event = {"item": rng.choice(items), "time": int(time.time())}
            body = {"user": rng.choice(users), "events": [event], "k": 10}
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/recommend", json.dumps(body), headers)
            response = connection.getresponse()
            response.read()
            now = time.perf_counter()
            if start <= sent and now <= end:
                if response.status == 200:
                    latencies[thread].append(now - sent)
                else:
                    failed[thread] += 1
        connection.close()

    threads = [threading.Thread(target=send, args=(n,)) for n in range(concurrency)]
    for thread in threads:
        thread.start()
    time.sleep(max(0.0, start - time.perf_counter()))
    before = counts(port)
    for thread in threads:
        thread.join()
    after = counts(port)
    change = {name: after[name] - before[name] for name in before}
    rows = [change[f"hstu_engine_{kind}_tokens_total"] for kind in ("hit", "new", "recomputed")]
    together = np.concatenate([np.array(times) for times in latencies])
    if not len(together):
        raise RuntimeError(f"no request was answered in {seconds} s ({sum(failed)} failed)")
    p50, p95, p99 = 1e3 * np.percentile(together, [50, 95, 99])
    batches = change["hstu_engine_batch_size_count"]
    return Load(
        concurrency=concurrency,
        seconds=seconds,
        answered=len(together),
        failed=sum(failed),
        qps=_rounded(len(together) / seconds),
        p50_ms=_rounded(p50),
        p95_ms=_rounded(p95),
        p99_ms=_rounded(p99),
        mean_batch=_rounded(change["hstu_engine_batch_size_sum"] / batches),
        hit_share=_rounded(rows[0] / sum(rows)),
    )


def _rounded(value: float) -> float:
    return rounded(float(value)) or 0.0


def other_work() -> float:
    """Processors that other processes keep busy, over a second."""
    before = CpuUse.now()
    time.sleep(1)
    return before.others_since()


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table, and writes it."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.seconds <= 0 or min(options.concurrency) < 1:
        parser.error("--seconds and --concurrency must be positive")

    log = open_event_log(options.data)
    described = environment("python -m benchmarks.serving")
    described["others"] = rounded(other_work())
    print_environment(described)
    with running_server(options.model.resolve(), options.data.resolve()) as port:
        loads = [
            drive(port, log, concurrency, options.seconds, options.seed)
            for concurrency in options.concurrency
        ]
    records = [asdict(load) for load in loads]
    table = [[*records[0]], *([str(value) for value in record.values()] for record in records)]
    print("\n".join(text_table(table)))
    if options.json:
        write_records(options.json, [{**described, **record} for record in records])


if __name__ == "__main__":
    main()
