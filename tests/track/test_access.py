"""Where a server of ours listens, and whom its gate lets through."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from zero2all.common.errors import UsageError
from zero2all.track.access import Gate, listen


def behind_a_gate(token: str | None = None) -> TestClient:
    async def answer(_):
        return PlainTextResponse("inside")

    gate = Middleware(Gate, host="127.0.0.1", token=token, allowed_hosts=["proxy.example"])
    routes = [Route(path, answer, methods=["GET", "POST"]) for path in ("/", "/health")]
    return TestClient(Starlette(routes=routes, middleware=[gate]), base_url="http://127.0.0.1:6107")


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://evil.example", 403),
        ("http://localhost:3000", 403),  # another program of this machine
        ("http://127.0.0.1:6107.evil.example", 403),
        ("null", 403),
        ("", 403),
        ("http://127.0.0.1:6107", 200),
        ("https://proxy.example", 200),
    ],
)
def test_another_site_is_known_by_its_origin(origin, status):
    assert behind_a_gate().post("/", headers={"Origin": origin}).status_code == status


def test_a_browser_that_calls_its_request_our_own_is_believed_without_an_origin():
    headers = {"Origin": "null", "Sec-Fetch-Site": "same-origin"}
    assert behind_a_gate().post("/", headers=headers).status_code == 200


def test_a_wrong_token_is_told_from_none_and_open_paths_need_none():
    client = behind_a_gate("right")
    assert "token is wrong" not in client.get("/").text
    for wrong in (client.get("/?token=left"), client.get("/", headers={"Authorization": "Bearer left"})):
        assert wrong.status_code == 401
        assert "token is wrong" in wrong.text
    assert client.get("/health").text == "inside"
    assert client.get("/health", headers={"Origin": "http://evil.example"}).status_code == 403


def test_health_is_answered_under_any_name_and_the_rest_is_not():
    headers = {"Host": "z2a-serve.default.svc.cluster.local:6107"}
    assert behind_a_gate("right").get("/health", headers=headers).text == "inside"
    assert behind_a_gate("right").get("/", headers=headers).status_code == 421


def test_an_address_that_this_machine_does_not_have_is_named_as_the_mistake():
    with pytest.raises(UsageError, match=r"`--host 192\.0\.2\.1` is not an address of this machine") as refusal:
        listen("192.0.2.1", 0, 6107)
    assert "--port" not in str(refusal.value)
