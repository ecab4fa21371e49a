"""What the board's server answers, and to whom."""

import asyncio
import http.client
import json
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from tests.track.logged import logged
from tests.waiting import wait_until
from zero2all.common.errors import UsageError
from zero2all.track import MetricsWriter
from zero2all.track.api import Board, BoardOptions, make_app, open_roots, stream_changes
from zero2all.track.curves import Curve, unpack_curves
from zero2all.track.library import Root, RunLibrary

from .conftest import HOSTILE

LOCAL = "http://127.0.0.1"


def client_of(*roots: Path, cache: Path, **gate: Any) -> TestClient:
    library = RunLibrary([Root(str(root), root) for root in roots], cache)
    return TestClient(make_app(library, **gate), base_url=LOCAL)


@pytest.fixture(scope="module")
def client(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with client_of(runs, cache=tmp_path_factory.mktemp("cache")) as client:
        yield client


def curves(client: TestClient, *queries: dict[str, Any]) -> list[Curve]:
    reply = client.post("/api/curves", json={"queries": list(queries)})
    assert reply.status_code == 200, reply.text
    return unpack_curves(reply.content)


def test_the_list_names_every_run_with_its_state_and_step_and_is_there_before_anybody_asks(client, runs, tmp_path):
    rows = {row["name"]: row for row in client.get("/api/runs").json()["rows"]}
    assert set(rows) == {"base", "other", HOSTILE, "torn"}
    assert (rows["base"]["state"], rows["base"]["step"], rows["base"]["total"]) == ("finished", 400, 400)
    assert client.get("/api/runs", params={"q": "OTH"}).json()["total"] == 1
    library = RunLibrary([Root("runs", runs)], tmp_path)
    with TestClient(make_app(library), base_url=LOCAL):
        wait_until(lambda: library.rows("", 9)[1] == 4)


def test_the_difference_to_the_run_itself_is_nothing_on_every_axis(client):
    for axis in ("step", "tokens", "time"):
        (curve,) = curves(client, {"run": "0/base", "metric": "loss", "base": "0/base", "axis": axis})
        assert len(curve.columns["mean"]) == 400
        assert np.abs(curve.columns["mean"]).max() < 1e-6


def test_values_that_are_not_finite_are_left_out_and_told_and_a_curve_without_points_is_an_empty_answer(client):
    asked = [{"run": "0/torn", "metric": "loss"}, {"run": "0/base", "metric": "loss", "axis": "flops"}]
    curve, *empty = curves(client, *asked, {"run": "0/base", "metric": "no such metric"})
    assert (curve.columns["x"].tolist(), curve.columns["bad"].tolist(), curve.facts["nonfinite"]) == ([1, 3], [2], 1)
    nothing = {"total": 0, "before": 0, "start": None, "end": None, "nonfinite": 0, "last": None}
    assert [each.facts for each in empty] == [nothing] * 2
    facts = client.get("/api/run", params={"id": "0/torn"}).json()
    assert facts["skipped_lines"] >= 2  # and, once it is known not to grow, half a last line
    assert facts["problems"]


def test_a_bad_query_is_refused_with_a_reason(client):
    bad = [{"run": None}, {"axis": "weeks"}, {"count": 10**9}, {"low": "1"}, {"low": 10**400}, []]
    bad += [{"smooth": each} for each in ("ema:-3", "ema:1e300", ["ema", 5])]
    for odd in bad:
        query = {"run": "0/base", "metric": "loss", **odd} if odd else odd
        reply = client.post("/api/curves", json={"queries": [query]})
        assert (reply.status_code, len(reply.json()["error"]) > 20) == (400, True), odd


def test_a_spike_of_the_trainers_guards_shows_limit_channels_and_documents_of_its_incident(tmp_path):
    finding = {"kind": "grad_spike", "value": 9.3, "usual": 1.1, "limit": 4.0, "text": "gradient norm 9.3, above 4"}
    finding |= {"details": {"channel_losses": {"en": 2.1, "zh": 3.3, "odd": None}}, "page": "20-grad_spike.html"}
    with MetricsWriter(tmp_path / "r") as run:
        for step in range(1, 30):
            run.log({"loss": 2.0, "grad_norm": 1.0}, step=step)
        run.event("spike", 20, finding)
        run.event("spike", 21, {**finding, "page": "../../secret.html"})
    (tmp_path / "secret.json").write_text('{"samples": [{"documents": [{"gid": 1}]}]}')
    (tmp_path / "r" / "incidents").mkdir()
    sample = {"source": "web", "loss": 7.5, "documents": [{"gid": 4242, "title": "", "text": "bad words", "tokens": 3}]}
    (tmp_path / "r" / "incidents" / "20-grad_spike.json").write_text(json.dumps({"samples": [sample]}))
    client = client_of(tmp_path, cache=tmp_path / "cache")
    first, second = (m for m in client.get("/api/events", params={"id": "0/r"}).json()["marks"] if m["kind"] == "spike")
    assert first["metric"] == "grad_norm", "its ring belongs on that curve, not on the loss"
    assert first["note"] == finding["text"]
    facts = client.get("/api/event", params={"id": "0/r", "i": first["i"]}).json()
    assert facts["measures"] == [["value", 9.3], ["usual", 1.1], ["limit", 4.0]]
    assert facts["losses"] == [["zh", 3.3], ["en", 2.1]]
    assert facts["documents"] == [{"source": "web", "loss": 7.5, "gid": 4242, "title": "", "text": "bad words"}]
    assert client.get("/api/event", params={"id": "0/r", "i": second["i"]}).json()["documents"] == []


def test_the_fields_of_an_event_are_rows_to_read(tmp_path):
    notes = ["disk: 12 checkpoints fit", "memory: 10 of 80 GB"]
    environment = {"device": "cpu", "threads": 2}
    data = {"notes": notes, "environment": environment, "ok": True, "none": None, "list": [{"a": 1}]}
    with MetricsWriter(tmp_path / "r") as run:
        run.log({"loss": 2.0}, step=1)
        run.event("sanity", 0, data)
    client = client_of(tmp_path, cache=tmp_path / "cache")
    (mark,) = [m for m in client.get("/api/events", params={"id": "0/r"}).json()["marks"] if m["kind"] == "sanity"]
    assert mark["note"] == "; ".join(notes)
    fields = client.get("/api/event", params={"id": "0/r", "i": mark["i"]}).json()["fields"]
    shown = {"notes": "\n".join(notes), "environment.device": "cpu", "environment.threads": "2"}
    assert fields == [*map(list, {**shown, "ok": "true", "none": "–", "list 1.a": "1"}.items())]


def test_runs_of_the_same_name_say_in_which_place_they_are(tmp_path):
    for name in ("left/work/runs/small", "right/work/runs/small", "left/work/runs/alone"):
        logged(tmp_path / name, {"loss": 2.0})
    logged(tmp_path / "right" / "work" / "runs" / "small", {"eval/valid/loss/en": 9.0}, resumed_from=1)
    client = client_of(*(tmp_path / place / "work" for place in ("left", "right")), cache=tmp_path / "cache")
    places = {row["id"]: row["place"] for row in client.get("/api/runs").json()["rows"]}
    assert places == {"0/runs/small": "left/work", "1/runs/small": "right/work", "0/runs/alone": ""}
    assert client.get("/api/run", params={"id": "1/runs/small"}).json()["place"] == "right/work"
    (right,) = client.get("/api/runs", params={"q": "right"}).json()["rows"]
    assert right["loss"] == 2.0, "an attempt without a loss of its own does not empty the list"


def test_short_curves_are_not_smoothed_and_new_points_move_the_smoothed_line_before_them(tmp_path):
    rows = ({"loss": 5 - step / 50, **({"rare": 1.0} if step % 5 == 0 else {})} for step in range(1, 201))
    client = client_of(logged(tmp_path / "r", *rows).parent, cache=tmp_path / "cache")
    query = {"run": "0/r", "metric": "loss", "smooth": "ema:10", "count": 4000}
    rare, whole, end = curves(client, {**query, "metric": "rare"}, query, {**query, "after": 190})
    assert "smooth" not in rare.columns
    assert (whole.facts["last"], end.facts["before"]) == (1.0, 190)
    assert end.columns["x"].tolist() == list(range(191, 201))
    np.testing.assert_allclose(end.columns["smooth"], whole.columns["smooth"][-10:], rtol=1e-5)
    drawn = dict(zip(whole.columns["x"].tolist(), whole.columns["smooth"].tolist(), strict=True))
    assert end.columns["again_x"].tolist() == list(range(161, 191))
    wanted = [drawn[x] for x in end.columns["again_x"].tolist()]
    np.testing.assert_allclose(end.columns["again"], wanted, rtol=1e-5)


def test_only_loopback_names_are_answered_on_any_port_since_tunnels_change_it(client):
    for host in ("evil.example", "127.0.0.1.evil.example", "evil.example:80", "", "192.168.0.9", "[::2]"):
        reply = client.get("/api/runs", headers={"Host": host})
        assert (reply.status_code, "rows" in reply.text) == (421, False), host
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:5"):
        assert client.get("/api/runs", headers={"Host": host}).status_code == 200, host
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}  # another site makes the browser send it
    assert client.get("/api/runs", headers=headers).status_code == 403
    assert client.get("/", headers={**headers, "Sec-Fetch-Mode": "navigate"}).status_code == 200  # a link to us is fine


def test_every_answer_forbids_inline_scripts_and_framing_and_files_of_the_page_are_not_sent_twice(client):
    for path in ("/", "/api/runs", "/api/run?id=nothing", "/no/such/file"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert [part for part in ("default-src 'none'", "script-src 'self'") if part not in policy] == []
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
    first = client.get("/main.js")
    again = client.get("/main.js", headers={"If-None-Match": first.headers["etag"]})
    assert (first.status_code, again.status_code, again.content) == (200, 304, b"")


def test_beyond_loopback_nothing_is_shown_without_the_token(runs, tmp_path):
    library = RunLibrary([Root("runs", runs)], tmp_path)
    client = TestClient(make_app(library, host="0.0.0.0", token="secret-token"), base_url="http://10.1.2.3:6106")
    for path in ("/", "/api/runs", "/main.js", "/?token=wrong", "/api/runs?token="):
        assert client.get(path).status_code == 401
    reply = client.get("/?token=secret-token&x=1", follow_redirects=False)
    assert (reply.status_code, reply.headers["location"]) == (303, "/?x=1")
    cookie = reply.headers["set-cookie"].lower()
    assert ("httponly" in cookie, "samesite=strict" in cookie) == (True, True)
    assert client.get("/api/runs").status_code == 200  # by the cookie
    assert client.get("/api/runs", headers={"Host": "evil.example"}).status_code == 421  # the name still counts
    bare = TestClient(client.app, base_url="http://10.1.2.3")
    assert bare.get("/api/runs", headers={"Authorization": "Bearer secret-token"}).status_code == 200
    reply = bare.get("//evil.example/?token=secret-token", follow_redirects=False)
    assert reply.status_code in (303, 401)
    assert not reply.headers.get("location", "/").startswith("//")


def test_a_board_on_loopback_has_no_token_unless_asked_and_others_always(tmp_path):
    for options, has_token in (({}, False), ({"needs_token": True}, True), ({"host": "0.0.0.0"}, True)):
        board = Board([str(tmp_path)], BoardOptions(port=0, **options), tmp_path / "cache")
        board.socket.close()
        assert ("?token=" in board.url) is has_token


def test_no_path_leaves_the_served_folders(client):
    paths = ["/../pyproject.toml", "/..%2fpyproject.toml", "/vendor/../../__init__.py", "/%2e%2e/api.py", "/main.js%00"]
    paths += ["/api/run?id=0/../../etc", "/api/run?id=../base", "/api/config?id=/etc/passwd"]
    for path in paths:
        reply = client.get(path)
        assert reply.status_code in (400, 404), path
        assert "zero2all" not in reply.text


class Tab:
    """Reads a stream of changes as a tab does, for as long as it is open."""

    def __init__(self, library: RunLibrary, ids: list[str]) -> None:
        self.pieces: list[str] = []
        self.times: list[float] = []
        self.is_closed = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._read(library, ids)), daemon=True)
        self.thread.start()

    async def _read(self, library: RunLibrary, ids: list[str]) -> None:
        async def closed() -> bool:
            return self.is_closed.is_set()

        async for piece in stream_changes(library, "boot", ids, 0, closed):
            self.pieces.append(piece.decode())
            self.times.append(time.monotonic())

    def wait_for(self, text: str) -> None:
        wait_until(lambda: any(text in piece for piece in self.pieces), why=lambda: str(self.pieces))


@pytest.fixture
def open_tab() -> Iterator[Callable[..., Tab]]:
    tabs: list[Tab] = []

    def start(library: RunLibrary, *ids: str) -> Tab:
        tabs.append(Tab(library, list(ids)))
        return tabs[-1]

    yield start
    for tab in tabs:
        tab.is_closed.set()
        tab.thread.join(60)


def test_a_stream_tells_what_moved_at_most_four_times_a_second_and_is_silent_while_idle(open_tab, tmp_path):
    run = MetricsWriter(tmp_path / "r")
    run.log({"loss": 1.0}, step=1)
    tab = open_tab(RunLibrary([Root("r", tmp_path)], tmp_path / "cache"), "0/r")
    tab.wait_for('"step":1')
    for step in range(2, 40):
        run.log({"loss": 1.0}, step=step)
        time.sleep(0.02)  # a trainer that is faster than the limit
    run.close()
    tab.wait_for('"step":39')
    tab.wait_for('"finished"')
    # Not the smallest distance: a reader that was held up takes two pieces at once.
    assert len(tab.times) <= 4 * (tab.times[-1] - tab.times[0]) + 2
    before = -1
    while len(tab.pieces) != before:  # until it is silent
        before = len(tab.pieces)
        time.sleep(0.6)


def test_a_run_that_vanishes_or_never_was_does_not_end_the_stream(open_tab, tmp_path):
    logged(tmp_path / "r", {"loss": 1.0})
    library = RunLibrary([Root("r", tmp_path)], tmp_path / "cache")
    tab = open_tab(library, "0/r", "0/never")
    tab.wait_for('"0/never":{"gone":true}')
    shutil.rmtree(tmp_path / "r")
    tab.wait_for('"gone":["0/r"]')
    assert re.search(r'"0/r":\{[^}]*"gone":true', "".join(tab.pieces))
    with library.reading("0/r") as still:
        assert len(still.reader.series("loss")) == 1


def test_places_may_be_folders_or_hosts_and_nothing_else_and_a_port_in_use_is_an_error(tmp_path):
    local, remote = open_roots([str(tmp_path), "ssh://me@box.example/home/me/runs"], tmp_path / "cache")
    assert local.facts()["state"] == "live"
    assert remote.facts() == {"label": "me@box.example/home/me/runs", "remote": True, "state": "connecting"}
    with pytest.raises(UsageError, match="ssh://user@host"):
        open_roots(["http://x/y"], tmp_path / "cache")
    board = Board([str(tmp_path)], BoardOptions(port=0), tmp_path / "cache")
    port = board.socket.getsockname()[1]
    with pytest.raises(UsageError, match="--port"):
        Board([str(tmp_path)], BoardOptions(port=port), tmp_path / "cache")
    board.socket.close()


def test_ctrl_c_ends_the_command_calmly_while_a_page_is_open(runs, start):
    board = start("board", runs, "--port", "0")
    board.wait_until(lambda: "Ctrl-C" in board.text())
    said = board.text()
    port = int(re.search(r"127\.0\.0\.1:(\d+)/", said)[1])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("GET", "/api/stream?run=0/base")
    assert connection.getresponse().readline().startswith(b"data: ")
    board.signal(signal.SIGINT)
    assert (board.wait(), board.text()) == (0, said)


def test_reports_of_studies_are_listed_and_shown_by_name_without_scripts(tmp_path: Path) -> None:
    report = tmp_path / "studies/rates/report.html"
    report.parent.mkdir(parents=True)
    report.write_text("<p>which rate</p>")
    (tmp_path / "runs").mkdir()
    with client_of(tmp_path / "runs", cache=tmp_path / "cache") as client:
        (address,) = re.findall(r'href="(studies\?name=[^"]+)"', client.get("/studies").text)
        shown = client.get(f"/{address}")
        assert shown.text == "<p>which rate</p>"
        assert "default-src 'none'" in shown.headers["content-security-policy"]
        assert "script-src" not in shown.headers["content-security-policy"]
        for name in ("../../etc/passwd", str(report), ""):
            assert client.get("/studies", params={"name": name}).status_code == 404
        with open(report, "ab") as file:
            file.truncate(5_000_001)
        refused = client.get(f"/{address}")
        assert (refused.status_code, "5,000,001 bytes; the limit is 5,000,000" in refused.text) == (413, True)
        report.unlink()
        report.symlink_to("/etc/passwd")  # in a workspace of somebody else
        assert client.get(f"/{address}").status_code == 404
        assert "no studies yet" in client.get("/studies").text
