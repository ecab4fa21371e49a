"""What stands beside the answers: tokens of texts, counts for Prometheus, pages of other sites."""

import contextlib
import http.client
from collections.abc import Iterator
from typing import Any

import pytest

from zero2all.serve.server import ServeOptions

from .conftest import SETTINGS, Served, serving
from .test_serve_refusals import ask

SITE = "https://example.org"
TEXT = "The capital 中国的首都"
KEY = {"Authorization": "Bearer a-token-of-this-test"}


@pytest.fixture(scope="module")
def open_to_site(loaded) -> Iterator[Served]:
    options = ServeOptions(port=0, grace_seconds=0, token="a-token-of-this-test", origins=[SITE])
    with serving(loaded, options, SETTINGS) as served:
        yield served


def send(served: Served, method: str, path: str, headers: dict[str, str]) -> tuple[int, Any, str]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)) as connection:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()


def test_a_text_becomes_ids_and_comes_back(served, loaded):
    ids = loaded.tokenizer.encode_text(TEXT)
    status, found = ask(served, "POST", "/tokenize", {"prompt": TEXT, "add_special_tokens": False})
    assert (status, found) == (200, {"tokens": ids, "count": len(ids), "max_model_len": 4096})
    assert ask(served, "POST", "/tokenize", {"prompt": TEXT})[1]["tokens"] == [loaded.tokenizer.begin_id, *ids]
    assert ask(served, "POST", "/detokenize", {"tokens": ids}) == (200, {"prompt": TEXT})
    for path, body, field in (
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {}, "prompt"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
    ):
        status, answer = ask(served, "POST", path, body)
        assert (status, answer["error"]["param"], answer["error"]["type"]) == (400, field, "invalid_request_error")


def test_prometheus_reads_what_has_happened(open_to_site):
    def metrics() -> dict[str, float]:
        status, headers, page = send(open_to_site, "GET", "/metrics", KEY)
        assert (status, headers["Content-Type"].partition(";")[0]) == (200, "text/plain")
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in page.splitlines())}

    before, body = metrics(), {"prompt": [1, 2, 3], "max_tokens": 4, "n": 2}
    assert ask(open_to_site, "POST", "/v1/completions", body, **KEY)[0] == 200
    now = metrics()
    grown = {name: value - before.get(name, 0) for name, value in now.items() if value != before.get(name, 0)}
    assert 0 < grown.pop("z2a_time_to_first_token_seconds_sum") < 60
    assert grown == {
        'z2a_requests_total{finish="length"}': 2,
        "z2a_prompt_tokens_total": 6,
        "z2a_generated_tokens_total": 8,
        "z2a_time_to_first_token_seconds_count": 2,
    }
    assert send(open_to_site, "GET", "/metrics", {})[0] == 401


def test_pages_of_a_named_site_may_ask_and_need_the_token_and_no_other_site_may(open_to_site, served):
    page = {"Origin": SITE, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}
    status, headers, _ = send(open_to_site, "OPTIONS", "/v1/completions", page)
    assert (status, headers["Access-Control-Allow-Origin"], headers["Vary"]) == (204, SITE, "Origin")
    assert "authorization" in headers["Access-Control-Allow-Headers"]
    assert "Access-Control-Allow-Credentials" not in headers
    status, headers, _ = send(open_to_site, "GET", "/v1/models", page | KEY)
    assert (status, headers["Access-Control-Allow-Origin"]) == (200, SITE)
    assert send(open_to_site, "GET", "/v1/models", page)[0] == 401
    for server, origin in ((open_to_site, "https://evil.example"), (open_to_site, "null"), (served, SITE)):
        for method in ("OPTIONS", "GET"):
            status, headers, _ = send(server, method, "/v1/models", page | KEY | {"Origin": origin})
            assert (status, "Access-Control-Allow-Origin" in headers) == (403, False)
