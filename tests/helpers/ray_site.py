"""Replicas on Ray Serve that tests run as an operator does, and their users."""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from prometheus_client.parser import text_string_to_metric_families
from recommender.saved import load_model

from hstu_attn.serving.client import Client, RequestError
from tests.helpers import http_client
from tests.helpers.paths import EXAMPLES, ROOT
from tests.helpers.ray_processes import processes_below, processes_of_ray
from tests.helpers.saved_models import ITEMS, save, whole

CPU = torch.device("cpu")
NOW = int(time.time()) - 10**6
LATER = [*range(90, 100), *ITEMS, *range(160, 165)]  # the items of the later model
RAY_TOKEN = secrets.token_hex(32)
REPLICA = "ServeReplica:default:Replica"
SERVE = [sys.executable, "-m", "ray.serve.scripts"]
Events = list[tuple[int, int]]


class Site:
    """Applications on Ray Serve, as an operator runs them by its commands.

    Args:
        folder: where the files go.
        redis_url: the store of the first application, which recommends.
        variables: of the environment of Ray.
        arguments: options of `serve.py` for the first application.

    Attributes:
        address: where its proxy listens.
        saved: the models whose files are `first.pt`, `later.pt` and `retrained.pt`.
        process: that of `serve run`, which has started all others.
    """

    process: subprocess.Popen[bytes]

    def __init__(
        self, folder: Path, redis_url: str, variables: Mapping[str, str], **arguments: Any
    ) -> None:
        self.folder = folder
        self.started: dict[int, str] = {}
        save(folder / "first.pt", 1)
        save(folder / "later.pt", 2, LATER)
        save(folder / "retrained.pt", 4)
        names = ("first.pt", "later.pt", "retrained.pt")
        self.saved = [load_model(folder / name, CPU) for name in names]
        for name in names[1:]:
            (folder / f"truncated-{name}").write_bytes((folder / name).read_bytes()[:-500])
            state = torch.load(folder / name, weights_only=True)
            next(iter(state["model"].values())).fill_(math.nan)
            torch.save(state, folder / f"nan-{name}")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        self.config = yaml.safe_load((EXAMPLES / "serve_ray.yaml").read_text())
        self.config["http_options"]["port"] = port
        (one,) = self.config["applications"]
        one["args"] = {"store": redis_url, "device": "cpu", **arguments}
        (options,) = one["deployments"]
        options["ray_actor_options"]["num_cpus"] = 0.25  # two processors have room for two models
        self.environment = os.environ | {
            "PYTHONPATH": f"{ROOT}:{EXAMPLES}:{folder}",
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": RAY_TOKEN,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # 5 s suits an idle machine
            "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
            **variables,
        }

    def write(self, model: str, retrained: str | None = None) -> Path:
        """Writes the configuration with a model of the folder, and one that takes over from it."""
        application = self.config["applications"][0]
        application["args"]["model"] = str(self.folder / model)
        (options,) = application["deployments"]
        options.pop("user_config", None)
        if retrained is not None:
            options["user_config"] = {"model": str(self.folder / retrained)}
        path = self.folder / "site.yaml"
        path.write_text(yaml.safe_dump(self.config))
        return path

    def start(self) -> None:
        """Runs `serve run`; returns when all replicas answer."""
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [*SERVE, "run", "--address", "local", str(self.write("first.pt"))],
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.dashboard, end = "", time.monotonic() + 180
        try:
            while not self.dashboard or set(self.statuses()) != {"RUNNING"}:
                assert self.process.poll() is None, self.log()
                assert time.monotonic() < end, self.log()
                time.sleep(0.5)
                if found := re.search(r"dashboard at \S*?(http://[\d.:]+)", self.log()):
                    self.dashboard = found[1]
            plain = http_client.Client(self.address)
            while (status := plain.send("GET", "/ready")[0]) != 200:
                assert time.monotonic() < end, status
                time.sleep(0.1)
        except BaseException:
            self.stop()
            raise
        self.started = processes_below(self.process.pid)

    def stop(self) -> None:
        """Ends `serve run`, and what it has not ended of what it had started, as an operator."""
        started = self.started | processes_below(self.process.pid)
        self.process.terminate()
        self.process.wait(60)
        for pid, command in processes_below(1).items():
            if started.get(pid) == command:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def applications(self) -> dict[str, Any]:
        """Returns what `serve status` tells of each application, which takes longer.

        Ray's dashboard, seldom and while it starts, closes a connection without an answer. It is
        then asked again.
        """
        plain = http_client.Client(self.dashboard)
        headers = {"Authorization": f"Bearer {RAY_TOKEN}"}
        for pause in (0.5, 1, 2, 4, None):
            try:
                status, _, answer = plain.send("GET", "/api/serve/applications/", headers=headers)
                break
            except ConnectionResetError:
                assert pause is not None, self.log()
                time.sleep(pause)
        assert status == 200, answer
        found: dict[str, Any] = answer["applications"]
        return found

    def statuses(self) -> list[str]:
        return [one["status"] for one in self.applications().values()]

    def deploy(
        self,
        model: str,
        until: Callable[[dict[str, Any]], bool],
        retrained: str | None = None,
        by_command: bool = False,
    ) -> None:
        """Deploys a model; returns when the application's status is as is asked for.

        `by_command` is by `serve deploy`, which takes seconds to start, and otherwise by what it
        sends.
        """
        path = self.write(model, retrained)
        if by_command:
            command = [*SERVE, "deploy", "--address", self.dashboard, str(path)]
            subprocess.run(command, env=self.environment, check=True, timeout=60)
        else:
            headers = {"Authorization": f"Bearer {RAY_TOKEN}"}
            plain = http_client.Client(self.dashboard)
            found = plain.send("PUT", "/api/serve/applications/", self.config, headers)
            assert found[0] == 200, found
        end = time.monotonic() + 180
        while not until(told := self.applications()["default"]):
            assert time.monotonic() < end, told
            time.sleep(0.5)

    def ask(self, call: Callable[[Client], Any], path: str = "", **options: Any) -> Any:
        async def run() -> Any:
            async with Client(self.address + path, timeout=60.0, attempts=40, **options) as client:
                return await call(client)

        return asyncio.run(run())

    def expected(self, number: int, events: Events, candidates: list[int]) -> Any:
        """Returns the scores of one of the models, which leaves out what it does not know."""
        known = set(self.saved[number].item_ids.tolist())
        read = [event for event in events if event[0] in known]
        scores = whole(self.saved[number], read, candidates)
        return pytest.approx(scores, rel=1e-4, abs=1e-5)


def replicas_of(site: Site, family: str, **labels: str) -> dict[str, float]:
    """Returns a metric of each replica of the first application."""
    status, _, text = http_client.Client(site.address).send("GET", "/metrics")
    assert status == 200
    (found,) = [one for one in text_string_to_metric_families(text) if one.name == family]
    return {
        one.labels["replica"]: one.value
        for one in found.samples
        if "_created" not in one.name and labels.items() <= one.labels.items()
    }


def is_running(told: dict[str, Any]) -> bool:
    """Returns whether an application has all of its replicas."""
    return bool(told["status"] == "RUNNING")


class Users:
    """Users who send events in one request after another, and what they are answered.

    Attributes:
        events: each user's acknowledged events.
        used: the models that have answered each user since the last call of `meanwhile` began.
    """

    def __init__(self, site: Site, users: range) -> None:
        self.site = site
        self.events: dict[int, Events] = {user: [] for user in users}
        self.used: dict[int, list[int]] = {user: [] for user in users}
        self.done = False

    async def write(self, client: Client, user: int) -> None:
        rng, events = random.Random(user), self.events[user]
        while not self.done:
            at = NOW + len(events)
            late = [(rng.choice(LATER), at)] if user % 2 else []
            new = [*dict.fromkeys([*late, (rng.choice(ITEMS), at)])]
            try:
                scores = await client.score(user, new, ITEMS[:5])
            except RequestError as error:  # the first model does not know the item
                if error.status == 422 and {item for item, _ in new} - set(ITEMS):
                    continue
                raise
            events += new
            numbers = range(len(self.site.saved))
            right = [n for n in numbers if scores == self.site.expected(n, events, ITEMS[:5])]
            assert len(right) == 1
            self.used[user] += right
            await asyncio.sleep(0.3)  # The checks of answers take processors, too.

    def meanwhile(self, call: Callable[[], object], attempts: int = 1) -> list[list[int]]:
        """Lets all users write until something is done, and somewhat longer.

        Returns:
            The models that have answered each user meanwhile, in their order.
        """

        async def run() -> None:
            async with Client(self.site.address, timeout=120.0, attempts=attempts) as client:
                tasks = [asyncio.create_task(self.write(client, user)) for user in self.events]
                try:
                    await asyncio.to_thread(call)
                    await asyncio.sleep(0.5)
                finally:
                    self.done = True
                    await asyncio.gather(*tasks)

        self.done = False
        self.used = {user: [] for user in self.events}
        asyncio.run(run())
        return [*self.used.values()]


def wait_for_another(site: Site, replica: int) -> None:
    """Returns when another replica has taken the place of a process that has been killed."""
    end, found = time.monotonic() + 60, 0
    while found < 2 or replica in processes_of_ray(REPLICA):
        assert time.monotonic() < end, "no new replica came"
        time.sleep(0.2)
        with suppress(OSError, AssertionError):  # the request was at the dead one
            found = len(replicas_of(site, "hstu_ready"))
