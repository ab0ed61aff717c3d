"""Loads the example's server with the model that `make demo` has trained.

    python -m benchmarks.serving
    python -m benchmarks.serving --concurrency 1 64 --seconds 30 --json serving.json

Starts `examples/serve.py` as a process of its own, on the CPU of this machine, and drives it over
loopback by as many threads as requests are to be under way; each sends its next one when it has its
answer. A request brings one new event of a random user of the data, and asks for the best 10 items
that the user has not seen. The threads and the server share the processors, so the server alone
would be faster. `others` are the processors that other work kept busy in the second before the
start.
"""

from __future__ import annotations

import http.client
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from . import cli

PARSER = cli.parser("serving", __doc__, concurrency=(1, 8, 32))
MODEL, DATA = "runs/retrieval/best.pt", "runs/synthetic-movielens/ratings.dat"
_add = PARSER.add_argument
_add("--model", type=Path, default=Path(MODEL), help=f"(default: {MODEL})")
_add("--data", type=Path, default=Path(DATA), help=f"(default: {DATA})")

if __name__ == "__main__":
    PARSER.parse_args()  # --help or a wrong option ends here, before torch is imported

from hstu_attn.data import EventLog, open_event_log

from .load import CpuUse, Load, keep_under_way
from .record import ROOT, Record, rounded
from .runner import Benchmark, Run

__all__ = ["BENCHMARK", "drive", "main", "running_server"]

SERVER = ROOT / "examples/serve.py"
WARM_UP_SECONDS = 2.0
TOKENS = [f"hstu_engine_{kind}_tokens_total" for kind in ("hit", "new", "recomputed")]


def describe(run: Run) -> Record:
    """Returns the processors that other work keeps busy."""
    return {"others": rounded(other_work())}


@contextmanager
def running_server(model: Path, data: Path, arguments: Sequence[str] = ()) -> Iterator[int]:
    """Runs the server and ends it by SIGTERM; yields its port.

    Raises:
        RuntimeError: if it does not start.
    """
    files = ["--model", str(model), "--data", str(data)]
    command = [sys.executable, str(SERVER), "--port", "0", "--device", "cpu", *files]
    command += ["--store", "memory", *arguments]
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
    """Returns the server's metrics that have no labels."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return {name: float(value) for name, value in re.findall(r"^(\w+) (\S+)$", text, re.MULTILINE)}


def drive(port: int, log: EventLog, concurrency: int, seconds: float) -> Load[dict[str, float]]:
    """Keeps `concurrency` requests in flight for `seconds`."""
    users, items = log.source_user_ids, log.source_item_ids

    def connect(thread: int) -> Callable[[], bool]:
        rng = random.Random(f"{concurrency} {thread}")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

        def send() -> bool:
            event = {"item": rng.choice(items), "time": int(time.time())}
            body = {"user": rng.choice(users), "events": [event], "k": 10}
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/recommend", json.dumps(body), headers)
            response = connection.getresponse()
            response.read()
            return response.status == 200

        return send

    return keep_under_way(
        connect,
        lambda: counts(port),
        concurrency=concurrency,
        seconds=seconds,
        warm_up=WARM_UP_SECONDS,
    )


def other_work() -> float:
    """Returns how many processors other processes keep busy, over a second."""
    before = CpuUse.now()
    time.sleep(1)
    return before.others_since()


def measure(run: Run, case: str) -> Iterator[Record]:
    """Yields a record of each concurrency."""
    options = run.options
    if options.seconds <= 0 or min(options.concurrency) < 1:
        PARSER.error("--seconds and --concurrency must be positive")
    log = open_event_log(options.data)
    with running_server(options.model.resolve(), options.data.resolve()) as port:
        for concurrency in options.concurrency:
            load = drive(port, log, concurrency, options.seconds)
            change = {name: load.after[name] - load.before[name] for name in load.before}
            batches = change["hstu_engine_batch_size_count"]
            hits, *others = (change[name] for name in TOKENS)
            yield {
                "concurrency": concurrency,
                **load.figures(),
                "failed": load.failed,  # answers other than 200
                # The number of requests that the engine computed together.
                "mean_batch": rounded(change["hstu_engine_batch_size_sum"] / batches),
                # The fraction of the events' tokens that the cache had.
                "hit_share": rounded(hits / (hits + sum(others))),
            }


BENCHMARK = Benchmark("serving", PARSER, measure, describe=describe, needs_gpu=False)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
