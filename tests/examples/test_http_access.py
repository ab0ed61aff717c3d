"""Tests of access to the example's server: tokens of clients and of administrators."""

from __future__ import annotations

import hmac
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hstu_attn._host", reason="_host has not been built")
pytest.importorskip("fastapi")
from recommender import http_access
from recommender.http_access import Access, read_tokens
from recommender.serve_options import ADMIN_TOKENS, TOKENS
from recommender.server import is_loopback

from hstu_attn.serving import StoreError
from tests.helpers.http_app import Running, body, running

OLD, NEW, ADMIN = "the-old-token-0123", "the-new-token-4567", "the-admin-token-89"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as server:
        yield server


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "tokens").write_text(f"{OLD}\n{NEW}\n")
    (folder / "admin").write_text(f"{ADMIN}\n")
    files = ["--token-file", str(folder / "tokens"), "--admin-token-file", str(folder / "admin")]
    with running(*files) as server:
        yield server


def with_token(token: str, scheme: str = "Bearer") -> dict[str, str]:
    return {"Authorization": f"{scheme} {token}"}


def test_any_of_the_tokens_admits(guarded: Running) -> None:
    for headers in (with_token(OLD), with_token(NEW), with_token(NEW, "bearer")):
        status, _, answer = guarded.client.send("POST", "/score", body(1), headers)
        assert (status, answer["user"]) == (200, 1)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        with_token(""),
        with_token("another-token-0000"),
        with_token(OLD[:-1]),
        with_token(OLD + "0"),
        with_token(f" {OLD}"),
        with_token(OLD, "Basic"),
        with_token(ADMIN),
        {"Authorization": OLD},
        {"Authorization": "Bearer " + "\xff" * 100},
        {"X-Authorization": f"Bearer {OLD}"},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["/score", "/recommend", "/metrics", "/nothing", "/redoc"])
def test_others_are_refused_before_their_bodies_are_read(
    guarded: Running, path: str, headers: dict[str, str]
) -> None:
    before = guarded.engine.stats().requests
    status, answered, answer = guarded.client.send("POST", path, body(1), headers)
    assert (status, answered["WWW-Authenticate"]) == (401, "Bearer")
    assert answer == {"detail": "A client's token is needed"}
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=10) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 401 ")
    assert guarded.engine.stats().requests == before


def test_health_and_types_need_no_token(guarded: Running) -> None:
    for path in ("/health", "/live", "/ready", "/openapi.json", "/docs"):
        assert guarded.client.send("GET", path)[0] == 200
    assert guarded.client.send("GET", "/metrics", None, with_token(OLD))[0] == 200


def test_tokens_are_not_told(
    guarded: Running, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Tokens are not logged, even if a request fails."""
    guarded.engine.model.embed, embed = lambda rows: 1 / 0, guarded.engine.model.embed
    try:
        assert guarded.client.send("POST", "/score", body(1), with_token(NEW))[0] == 500
    finally:
        guarded.engine.model.embed = embed
    assert guarded.client.send("POST", "/score", b"{", with_token(NEW))[0] == 422
    assert (
        guarded.client.send("POST", "/score", body(1), with_token("a-wrong-token-0000"))[0] == 401
    )
    told = "".join([caplog.text, *capfd.readouterr(), repr(guarded.server.app.state._state)])
    told += guarded.client.send("GET", "/metrics", None, with_token(NEW))[2]
    told += repr(vars(guarded.options))
    assert "ZeroDivisionError" in told
    for token in (OLD, NEW, ADMIN, "a-wrong-token-0000"):
        assert token not in told


def test_all_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    access = Access([OLD, NEW], [ADMIN])
    compared: list[int] = []

    equal = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(len(one))
        return equal(one, other)

    monkeypatch.setattr(http_access.hmac, "compare_digest", compare)
    for token, expected in ((OLD, "token 0"), (NEW, "token 1"), (ADMIN, None), ("", None)):
        compared.clear()
        assert access.client_of(token.encode(), "1.2.3.4") == expected
        assert compared == [32, 32]  # hashes, of equal lengths
    assert access.is_admin(ADMIN.encode())
    assert not access.is_admin(OLD.encode())
    assert Access().client_of(b"", "1.2.3.4") == "1.2.3.4"
    assert not Access().is_admin(b"")


def test_tokens_of_files_and_of_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"{OLD}\n\n  {NEW}\n")
    assert read_tokens(path, TOKENS, {}) == [OLD, NEW]
    assert read_tokens(None, TOKENS, {TOKENS: f"{ADMIN} {OLD}"}) == [ADMIN, OLD]
    assert read_tokens(path, TOKENS, {TOKENS: ADMIN, ADMIN_TOKENS: "x"}) == [OLD, NEW, ADMIN]
    assert read_tokens(None, TOKENS, {}) == []
    for text, message in (
        ("", "expected at least one token, got none"),
        (f"{OLD}\nshort", r"expected tokens of at least 16 .*got another one \(number 2\)"),
        ("a-token-with-\xe4-0123", r"printable ASCII .*got another one \(number 1\)"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message) as refused:
            read_tokens(path, TOKENS, {})
        assert not [word for word in text.split() if word in str(refused.value)]
    with pytest.raises(OSError, match="absent"):
        read_tokens(tmp_path / "absent", TOKENS, {})


def test_administrators_have_tokens_of_their_own(guarded: Running) -> None:
    app = guarded.server.app
    for headers, expected in (
        ({}, 401),
        (with_token(OLD), 403),
        (with_token("another-token-0000"), 403),
    ):
        status, _, answer = guarded.client.send("POST", "/admin/drain", None, headers)
        assert status == expected
        assert "token is needed" in answer["detail"]
        assert not app.state.draining
    status, _, answer = guarded.client.send("POST", "/admin/drain", None, with_token(ADMIN))
    try:
        assert (status, answer["status"]) == (200, "draining")
        status, _, answer = guarded.client.send("GET", "/ready")
        assert (status, answer["status"]) == (503, "draining")
        for path in ("/health", "/live"):
            assert guarded.client.send("GET", path)[0] == 200
        assert guarded.client.send("POST", "/score", body(1), with_token(OLD))[0] == 200
    finally:
        app.state.draining = False
    assert guarded.client.send("GET", "/ready")[0] == 200


def test_a_user_is_forgotten_by_an_id_of_the_kind_of_the_data(guarded: Running) -> None:
    """No user has an id of the other type (int or str), so status 200 would be wrong for it."""
    assert guarded.client.send("POST", "/score", body(7), with_token(OLD))[0] == 200
    for user, expected, left in (("7", 422, 1), (7.0, 422, 1), (7, 200, 0)):
        status, _, answer = guarded.client.send(
            "POST", "/admin/forget", {"user": user}, with_token(ADMIN)
        )
        assert status == expected
        assert expected == 200 or answer["detail"][0]["loc"] == ["body", "user"]
        assert (guarded.engine.store.read([7], [0])[0] is not None) == bool(left)


def test_what_an_administrator_cannot_do_is_in_the_log(
    guarded: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise StoreError("the disk is full")

    store = guarded.engine.store
    for name in ("forget", "compact"):
        monkeypatch.setattr(store, name, broken)
        asked = {"user": 1} if name == "forget" else {}
        status, headers, _ = guarded.client.send("POST", f"/admin/{name}", asked, with_token(ADMIN))
        assert (status, headers["Retry-After"]) == (503, "1")
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("ERROR", "An administrator's request failed: the disk is full")
    ] * 2


def test_without_tokens_there_are_no_administrators(server: Running) -> None:
    for headers, expected in (({}, 401), (with_token(ADMIN), 403), (with_token(""), 401)):
        assert server.client.send("POST", "/admin/drain", None, headers)[0] == expected
    assert not server.server.app.state.draining


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *(("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True)),
        *(("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("example.org", False)),
    ],
)
def test_loopback_addresses(host: str, expected: bool) -> None:
    assert is_loopback(host) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [((), "127.0.0.1"), (("--trusted-proxies", "127.0.0.1"), "10.1.2.3")],
    ids=["none", "one"],
)
def test_a_client_is_named_by_proxies_that_are_trusted(
    arguments: tuple[str, ...], expected: str
) -> None:
    with running(*arguments) as server:
        submit, clients = server.engine.submit_score, []

        def note(*asked: Any, **how: Any) -> Any:
            clients.append(how["client"])
            return submit(*asked, **how)

        server.engine.submit_score = note  # type: ignore[method-assign]
        headers = {"X-Forwarded-For": "10.1.2.3"}
        assert server.client.send("POST", "/score", body(1), headers)[0] == 200
        assert clients == [expected]


def test_an_open_server_that_others_reach_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with running("--host", "0.0.0.0"):
        assert "NOTE: whoever reaches 0.0.0.0 may ask" in capsys.readouterr().err


def test_what_needs_a_token_is_documented(guarded: Running) -> None:
    paths = guarded.client.send("GET", "/openapi.json")[2]["paths"]
    needed = {"/score": "post", "/recommend": "post", "/admin/drain": "post"}
    for path, method in needed.items():
        assert paths[path][method]["security"] == [{"HTTPBearer": []}]
    for path in ("/live", "/ready", "/health"):
        assert "security" not in paths[path]["get"]
