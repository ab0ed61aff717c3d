"""Loads the example's server with the model that `make demo` has trained.

    python -m benchmarks.serving
    python -m benchmarks.serving --concurrency 1 64 --seconds 30 --json serving.json
    python -m benchmarks.serving --concurrency 32 --loads 0.5 0.8 0.95 --seconds 20
    python -m benchmarks.serving --concurrency 32 --loads 0.5 0.8 0.95 1.5 --seconds 20 --replicas 2
    python -m benchmarks.serving --device cuda --loads 0.5 0.8 0.95 --seconds 20

Starts `examples/serve.py` in a separate process, on this machine's CPU or GPU, and sends requests
over loopback from `--concurrency` threads; each sends its next request when it has an answer. A
request has one new event of a random user of the data, and asks for the best 10 items that the user
has not seen. The threads and the server share the processors, so the server alone would be faster.
`others` is the number of processors that other work kept busy in the second before the start.

With `--loads` requests arrive at random instead, as in `benchmarks.engine`. First the throughput
with `--concurrency` requests in flight (the last of these numbers) is measured. Then 1.5 times as
many requests arrive, an overload that measures the capacity; then the given fractions of the
capacity. Users are drawn from a Zipf distribution; their histories are those of the data, and each
event is new. A request that is not answered within a second counts as failed. During the overload,
so does a request that becomes due while as many are in flight as are answered in a fifth of a
second; other loads, even above 1, have no such limit. Events are stored in SQLite or, with
`--replicas`, in a Redis server shared by this number of replicas on Ray Serve, in the environment
of examples/serve_ray.env. In the middle of a further run at the first load, the model is replaced;
the run goes on for half of `--seconds` after that. In the middle of `--kills` more runs, a replica
is killed by SIGKILL; each run begins when all replicas serve. `pause` is the longest time in which
requests waited and none was answered. `fsync_ms` is the longest `fsync` of Redis in the run; each
answer that stores an event waits for an `fsync`.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from . import cli

PARSER = cli.parser("serving", __doc__, concurrency=(1, 8, 32))
MODEL, DATA = "runs/retrieval/best.pt", "runs/synthetic-movielens/ratings.dat"
_add = PARSER.add_argument
_add("--model", type=Path, default=Path(MODEL), help=f"(default: {MODEL})")
_add("--data", type=Path, default=Path(DATA), help=f"(default: {DATA})")
_add("--device", choices=("cpu", "cuda"), default="cpu", help="of the server (default: cpu)")
_add("--replicas", type=int, default=0, help="on Ray Serve (default: one process without Ray)")
_add("--kills", type=int, default=1, help="runs in which a replica is killed (default: 1)")

if __name__ == "__main__":
    PARSER.parse_args()  # --help or a wrong option ends here, before torch is imported

from torch.cuda import device_count

from hstu_attn.data import EventLog, open_event_log
from hstu_attn.serving.client import Client

from .load import (
    OVERLOAD,
    PATIENCE,
    CpuUse,
    Load,
    arrive_at_random,
    at_loads,
    keep_under_way,
    no_collections,
    rate_under_way,
    zipf,
)
from .record import ROOT, Record, rounded
from .runner import Benchmark
from .timing import Run, environment

__all__ = ["BENCHMARK", "drive", "main", "redis_server", "running_server", "variables_of_ray"]

SERVER = ROOT / "examples/serve.py"
WARM_UP_SECONDS = 2.0
PAUSE_SECONDS = 1.0  # between loads
CONNECTIONS = 400
REDIS_SECONDS = 10.0  # timeout for the start of Redis
POLL_SECONDS = 0.2  # between two questions whether replicas serve
READY_SECONDS = 180.0  # timeout for a replica that replaces a killed one
TOKENS = [f"hstu_engine_{kind}_tokens_total" for kind in ("hit", "new", "recomputed")]
CHANGE, KILL = "the model changes", "a replica is killed"


def describe(run: Run) -> Record:
    """Returns the server's device, and the processors that other work keeps busy."""
    return {"device": run.options.device, "others": rounded(other_work())}


@contextmanager
def running_server(
    model: Path, data: Path, device: str, arguments: Sequence[str] = ()
) -> Iterator[int]:
    """Runs the server and ends it by SIGTERM; yields its port.

    Raises:
        RuntimeError: if it does not start.
    """
    files = ["--model", str(model), "--data", str(data)]
    command = [sys.executable, str(SERVER), "--port", "0", "--device", device, *files]
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


class Serving(NamedTuple):
    """A running server or deployment, to which a load test sends requests.

    Attributes:
        address: the address to which requests are sent.
        servers: its name in the records.
        events: the names and actions of `benchmarks.load.at_loads`.
        longest_fsync: returns the longest fsync of the store since the last call, in ms; None if it
            is not known.
        wait_until_ready: returns when all replicas serve.
    """

    address: str
    servers: str
    events: Sequence[tuple[str, Callable[[], object]]]
    longest_fsync: Callable[[], float | None] = lambda: None
    wait_until_ready: Callable[[], object] = lambda: None


@contextmanager
def one_process(model: Path, data: Path, device: str) -> Iterator[Serving]:
    """Runs the server over an SQLite store."""
    token = secrets.token_urlsafe()

    def change() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", "/admin/model", headers={"Authorization": f"Bearer {token}"})
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        if response.status != 200:
            raise RuntimeError(f"the model has not changed: {response.status} {text}")

    with (
        tempfile.TemporaryDirectory() as folder,
        environment("HSTU_ATTN_ADMIN_TOKENS", token),
        running_server(model, data, device, ["--store", f"{folder}/events.sqlite"]) as port,
    ):
        yield Serving(f"http://127.0.0.1:{port}", "one process", [(CHANGE, change)])


def free_port() -> int:
    """Returns a port of loopback that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextmanager
def redis_server() -> Iterator[str]:
    """Runs a durable Redis server; yields its URL when it accepts clients.

    Raises:
        OSError: if `redis-server` is missing or does not accept clients within `REDIS_SECONDS`.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1"]
        command += ["--dir", folder, "--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            end = time.monotonic() + REDIS_SECONDS
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except ConnectionRefusedError:
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.02)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            server.terminate()
            server.wait()


def fsyncs_of_redis(url: str) -> Callable[[], float]:
    """Enables the recording of fsyncs in a Redis server; returns `Serving.longest_fsync`."""
    import redis

    server = redis.Redis.from_url(url)
    server.config_set("latency-monitor-threshold", 1)

    def longest() -> float:
        events = server.execute_command("LATENCY", "LATEST")
        server.execute_command("LATENCY", "RESET")
        found = [ms for name, _, _, ms in events if name == b"aof-fsync-always"]
        return float(max(found, default=0))  # Redis records only those of at least 1 ms

    return longest


def variables_of_ray() -> dict[str, str]:
    """Returns the variables of examples/serve_ray.env, changed to work from any folder."""
    lines = (SERVER.parent / "serve_ray.env").read_text().splitlines()
    found = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    plain = {name: value.strip("'") for name, value in found.items()}
    return plain | {"PYTHONPATH": f"{ROOT}:{SERVER.parent}"}


def start_replicas(wanted: dict[str, Any], port: int) -> str:
    """Starts a Ray cluster owned by this process, and replicas that serve at a loopback port.

    Args:
        wanted: the `configuration` of the replicas.
        port: a free port.

    Returns:
        The address of Ray's REST API.
    """
    import ray
    from ray import serve

    # Without log_to_driver=False, this process would print the replicas' log of each request.
    here = ray.init("local", include_dashboard=True, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    dashboard = f"http://{here.dashboard_url}"
    deploy(dashboard, wanted)
    pid_of_replica()  # the first call is slow, and would slow down requests if made later
    return dashboard


def configuration(
    arguments: Mapping[str, object], replicas: int, taking_over: Path | None = None
) -> dict[str, Any]:
    """Returns the configuration that `serve deploy` would read from a YAML file.

    Args:
        arguments: options of serve.py, by name.
        replicas: the number of replicas. On GPUs, each has its own, or they share what there is.
        taking_over: the file of a model that replaces the model of the arguments.
    """
    gpus = min(1, device_count() / replicas) if arguments["device"] == "cuda" else 0
    options = {
        "name": "Replica",
        "num_replicas": replicas,
        "ray_actor_options": {
            "num_cpus": 0.5,
            "num_gpus": gpus,
            "runtime_env": {"env_vars": {"RAY_worker_niceness": "15"}},  # as in serve_ray.yaml
        },
        "user_config": {} if taking_over is None else {"model": str(taking_over)},
    }
    application = {
        "name": "default",
        "route_prefix": "/",
        "import_path": "serve_ray:app",
        "args": {name: str(value) for name, value in arguments.items()},
        "deployments": [options],
    }
    return {"applications": [application]}


def application(dashboard: str, wanted: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the state of the application from Ray's REST API; deploys what is `wanted` before.

    Raises:
        RuntimeError: if Ray refuses.
    """
    url = urlsplit(dashboard)
    headers = {"Authorization": f"Bearer {os.environ['RAY_AUTH_TOKEN']}"}
    connection = http.client.HTTPConnection(url.netloc)
    for method, body in ([("PUT", json.dumps(wanted))] if wanted else []) + [("GET", None)]:
        connection.request(method, "/api/serve/applications/", body, headers)
        response = connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise RuntimeError(f"{method}: {response.status} {answer.decode()}")
    connection.close()
    found: dict[str, Any] = json.loads(answer)["applications"]["default"]
    return found


def deploy(dashboard: str, wanted: dict[str, Any]) -> None:
    """Deploys a configuration, as `serve deploy` does; returns when all replicas serve it.

    Raises:
        RuntimeError: if the deployment fails.
    """
    state = application(dashboard, wanted)
    while state["status"] == "DEPLOYING":
        time.sleep(POLL_SECONDS)
        state = application(dashboard)
    if state["status"] != "RUNNING":
        raise RuntimeError(f"the replicas do not serve: {state['status']} {state['message']}")


def running_replicas(dashboard: str) -> set[int]:
    """Returns the process ids of the replicas that Ray regards as running."""
    replicas = application(dashboard)["deployments"]["Replica"]["replicas"]
    return {replica["pid"] for replica in replicas if replica["state"] == "RUNNING"}


def pid_of_replica() -> int:
    """Returns the process id of one of the replicas that `start_replicas` has started."""
    from ray import serve

    handle = serve.get_deployment_handle("Replica", "default")
    pid: int = handle.broadcast("stats").results()[0]["pid"]
    return pid


def kill_replica() -> int:
    """Kills one of the replicas that `start_replicas` has started; returns its process id."""
    pid = pid_of_replica()
    os.kill(pid, signal.SIGKILL)
    return pid


def stop_replicas() -> None:
    """Stops the replicas and Ray."""
    import ray

    ray.shutdown()


@contextmanager
def several_replicas(
    model: Path, data: Path, device: str, replicas: int, kills: int
) -> Iterator[Serving]:
    """Runs replicas on a separate Ray cluster, with a separate Redis server.

    Another process deploys them, because deploying in this one would delay the load generator.

    Args:
        model: the file of a model.
        data: the file of its events.
        device: "cpu" or "cuda".
        replicas: the number of replicas.
        kills: the number of events in which a replica is killed.
    """
    port = free_port()
    with (
        tempfile.TemporaryDirectory() as folder,
        redis_server() as url,
        environment("RAY_AUTH_MODE", "token"),
        environment("RAY_AUTH_TOKEN", secrets.token_hex(32)),
        ExitStack() as stack,
        ProcessPoolExecutor(1, get_context("spawn")) as operator,
    ):
        for name, value in variables_of_ray().items():
            stack.enter_context(environment(name, value))
        killed: set[int] = set()
        copy = Path(folder, "another.pt")
        shutil.copy(model, copy)
        arguments = {"model": model, "data": data, "device": device, "store": url}

        def change() -> None:
            operator.submit(deploy, dashboard, configuration(arguments, replicas, copy)).result()

        def kill() -> None:
            killed.add(operator.submit(kill_replica).result())

        def wait_until_ready() -> None:
            end = time.monotonic() + READY_SECONDS
            while len(found := running_replicas(dashboard) - killed) < replicas:
                if time.monotonic() > end:
                    raise RuntimeError(f"expected {replicas} replicas to serve, got {len(found)}")
                time.sleep(POLL_SECONDS)

        try:
            wanted = configuration(arguments, replicas)
            dashboard = operator.submit(start_replicas, wanted, port).result()
            address = f"http://127.0.0.1:{port}"
            events = [(CHANGE, change), *kills * [(KILL, kill)]]
            name = f"{replicas} replicas"
            if device == "cuda":
                name += " on a GPU each" if device_count() >= replicas else " that share GPUs"
            yield Serving(address, name, events, fsyncs_of_redis(url), wait_until_ready)
        finally:
            operator.submit(stop_replicas).result()


def counts(port: int) -> dict[str, float]:
    """Returns the server's metrics that have no labels."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return {name: float(value) for name, value in re.findall(r"^(\w+) (\S+)$", text, re.MULTILINE)}


def drive(port: int, log: EventLog, concurrency: int, seconds: float) -> Load[dict[str, float]]:
    """Keeps `concurrency` requests in flight for `seconds`.

    Each thread has users of its own, if there are enough. Otherwise a thread could send an event
    of a user with an earlier time than another thread's, which the server refuses.
    """
    items = log.source_item_ids

    def connect(thread: int) -> Callable[[], bool]:
        users = log.source_user_ids[thread % len(log.source_user_ids) :: concurrency]
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


class NewEvents:
    """Draws events that are distinct for each user, so that the server stores each.

    An event has the current time. While events of a user are in flight, further ones get the same
    time and other items, because their requests may be reordered.

    Args:
        items: the ids to draw from, with equal probability.
        rng: the random generator.
    """

    def __init__(self, items: Sequence[int | str], rng: random.Random) -> None:
        self._items, self._rng = items, rng
        self._times: dict[int | str, int] = {}
        self._drawn: defaultdict[int | str, set[int | str]] = defaultdict(set)  # at that time
        self._under_way: Counter[int | str] = Counter()

    @contextmanager
    def draw(self, user: int | str) -> Iterator[tuple[int | str, int]]:
        """Yields an item and a time; the event is under way until the context ends."""
        now, drawn = int(time.time()), self._drawn[user]
        if not self._under_way[user] and now > self._times.get(user, 0):
            self._times[user] = now
            drawn.clear()
        if len(drawn) == len(self._items):
            drawn.clear()
        while (item := self._rng.choice(self._items)) in drawn:
            pass
        drawn.add(item)
        self._under_way[user] += 1
        try:
            yield item, self._times[user]
        finally:
            self._under_way[user] -= 1


def sender(
    client: Client, log: EventLog, exponent: float, rng: random.Random
) -> Callable[[], Awaitable[bool]]:
    """Returns a function that sends a request of a random user."""
    draw = zipf(log.source_user_ids, exponent, rng)
    events = NewEvents(log.source_item_ids, rng)

    async def send() -> bool:
        user = draw()
        with events.draw(user) as event:
            try:
                await client.recommend(user, [event], 10)
            except (RuntimeError, TimeoutError):
                return False
        return True

    return send


def arrivals(serving: Serving, log: EventLog, options: Any) -> Iterator[Record]:
    """Yields the records of an overload (the capacity), and of the loads."""
    rng = random.Random(0)
    concurrency: int = options.concurrency[-1]
    times = {"seconds": options.seconds, "warm_up": min(WARM_UP_SECONDS, options.seconds)}

    async def under_way() -> float:
        async with Client(serving.address, connections=concurrency) as client:
            send = sender(client, log, options.zipf, rng)
            return await rate_under_way(send, concurrency=concurrency, **times)

    async def at_random(rate: float, middle: Callable[[], object] | None) -> Load[None]:
        connect: dict[str, Any] = {"timeout": PATIENCE, "connections": CONNECTIONS}
        async with Client(serving.address, **connect) as client:
            send = sender(client, log, options.zipf, rng)
            how: dict[str, Any] = {**times, "rng": random.Random(0), "middle": middle}
            how["most"] = most if rate == OVERLOAD * answered else None
            return await arrive_at_random(send, rate=rate, **how)

    def run(rate: float, middle: Callable[[], object] | None) -> Load[None]:
        serving.wait_until_ready()
        time.sleep(PAUSE_SECONDS)  # lets the server drop requests left over from the last load
        serving.longest_fsync()
        return asyncio.run(at_random(rate, middle))

    answered = asyncio.run(under_way())
    print(f"{answered:.0f} requests/s, {concurrency} under way", flush=True)
    # Under overload, requests beyond this number would be answered too late.
    most = max(concurrency, round(PATIENCE / 5 * answered))
    names = {"servers": serving.servers, "zipf": options.zipf, "most_under_way": most}
    for record, found in at_loads(answered, run, options.loads, serving.events):
        fsync = {"fsync_ms": serving.longest_fsync()}
        yield {**names, **record, **found.figures(), **fsync, "failed": found.failed}


def measure(run: Run, case: str) -> Iterator[Record]:
    """Yields a record of each concurrency or of each load."""
    options = run.options
    if options.seconds <= 0 or min(*options.concurrency, *options.loads, options.kills) <= 0:
        PARSER.error("--seconds, --concurrency, --loads and --kills must be positive")
    if options.replicas and not options.loads:
        PARSER.error("--replicas needs --loads")
    if options.kills > 1 and not options.replicas:
        PARSER.error("--kills needs --replicas")
    log = open_event_log(options.data)
    model, data, device = options.model.resolve(), options.data.resolve(), options.device
    if options.loads:
        several = several_replicas(model, data, device, options.replicas, options.kills)
        started = several if options.replicas else one_process(model, data, device)
        with started as serving, no_collections():
            yield from arrivals(serving, log, options)
        return
    with running_server(model, data, device) as port:
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
