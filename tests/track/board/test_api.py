"""What the board's server answers, and to whom."""

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from tests.waiting import wait_until
from zero2all.common.errors import UsageError
from zero2all.track import MetricsWriter
from zero2all.track.api import Board, BoardOptions, make_app, open_roots, stream_changes
from zero2all.track.curves import Curve, pack_curves, unpack_curves
from zero2all.track.library import Root, RunLibrary, UnknownRunError

from .conftest import HOSTILE, SPIKE_STEP

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


# ---- runs and curves ----


def test_the_list_names_every_run_with_its_state_and_step_and_is_there_before_anybody_asks(client, runs, tmp_path):
    rows = {row["name"]: row for row in client.get("/api/runs").json()["rows"]}
    assert set(rows) == {"base", "other", HOSTILE, "torn"}
    assert (rows["base"]["state"], rows["base"]["step"], rows["base"]["total"]) == ("finished", 400, 400)
    assert client.get("/api/runs", params={"q": "OTH"}).json()["total"] == 1
    library = RunLibrary([Root("runs", runs)], tmp_path)
    with TestClient(make_app(library), base_url=LOCAL):
        wait_until(lambda: library.rows("", 9)[1])
        assert library.rows("", 9)[1] == 4


def test_a_run_that_just_began_is_found_however_long_listing_takes(tmp_path):
    library = RunLibrary([Root("r", tmp_path)], tmp_path / "cache")
    library.refresh_list()
    library._listing_took = 1000.0  # as on a slow disk with many runs: the next listing is hours away
    with MetricsWriter(tmp_path / "new") as run:
        run.log({"loss": 1.0}, step=1)
    with library.reading("0/new") as opened:
        assert opened.reader.status.last_step == 1
    for nowhere in ("0/none", "0/../new", "7/new", "0//etc"):
        with pytest.raises(UnknownRunError), library.reading(nowhere):
            pass


def test_a_spike_of_one_step_is_in_the_band_however_few_bins_there_are(client):
    (curve,) = curves(client, {"run": "0/base", "metric": "loss", "count": 10})
    assert len(curve.columns["x"]) == 10
    assert curve.columns["high"].max() > 6.5
    assert curve.columns["mean"].max() < 6.5
    assert curve.facts["total"] == 400


def test_the_end_of_a_curve_has_the_same_smoothed_values_as_the_whole(client):
    query = {"run": "0/base", "metric": "loss", "count": 4000, "smooth": "ema:20"}
    whole, end = curves(client, query, {**query, "after": 350})
    assert end.facts["before"] == 350
    assert end.columns["x"].tolist() == list(range(351, 401))
    np.testing.assert_allclose(end.columns["smooth"], whole.columns["smooth"][-50:], rtol=1e-5)


def test_the_difference_to_the_run_itself_is_nothing_on_every_axis(client):
    for axis in ("step", "tokens", "time"):
        (curve,) = curves(client, {"run": "0/base", "metric": "loss", "base": "0/base", "axis": axis})
        assert len(curve.columns["mean"]) == 400
        assert np.abs(curve.columns["mean"]).max() < 1e-6


def test_values_that_are_not_finite_are_left_out_and_told_and_a_curve_without_points_is_an_empty_answer(client):
    asked = [{"run": "0/torn", "metric": "loss"}, {"run": "0/base", "metric": "loss", "axis": "flops"}]
    curve, *empty = curves(client, *asked, {"run": "0/base", "metric": "no such metric"})
    assert curve.columns["x"].tolist() == [1, 3]
    assert curve.columns["bad"].tolist() == [2]
    assert curve.facts["nonfinite"] == 1
    nothing = {"total": 0, "before": 0, "start": None, "end": None, "nonfinite": 0, "last": None}
    assert [each.facts for each in empty] == [nothing] * 2
    facts = client.get("/api/run", params={"id": "0/torn"}).json()
    assert facts["skipped_lines"] >= 2  # and, once it is known not to grow, half a last line
    assert facts["problems"]


def test_steps_that_a_later_attempt_took_back_are_ghosts(tmp_path):
    for resumed, steps in ((None, range(1, 11)), (5, range(6, 9))):
        with MetricsWriter(tmp_path / "r", resumed_from=resumed) as run:
            for step in steps:
                run.log({"loss": float(step)}, step=step)
    client = client_of(tmp_path, cache=tmp_path / "cache")
    curve, ghosts = curves(client, {"run": "0/r", "metric": "loss"}, {"run": "0/r", "metric": "loss", "ghosts": True})
    assert curve.columns["x"].tolist() == list(range(1, 9))
    assert ghosts.columns["x"].tolist() == [6, 7, 8, 9, 10]


def test_packed_curves_come_out_as_they_went_in():
    given = Curve({"total": 3, "说明": "é"}, {"x": np.arange(3.0), "mean": np.array([1, np.nan, 3], np.float32)})
    (empty, found) = unpack_curves(pack_curves([Curve({}), given]))
    assert empty == Curve({}, {})
    assert found.facts == given.facts
    np.testing.assert_array_equal(found.columns["x"], given.columns["x"])
    np.testing.assert_array_equal(found.columns["mean"], given.columns["mean"])


@pytest.mark.parametrize(
    "odd",
    [
        *({"run": None}, {"axis": "weeks"}, {"count": 10**9}, {"low": "1"}, {"low": 10**400}, []),
        *({"smooth": each} for each in ("ema:-3", "spline:3", "ema:1e300", "ema:nan", ["ema", 5], {"ema": 10**400})),
    ],
    ids=range(12),
)
def test_a_bad_query_is_refused_with_a_reason(client, odd):
    query = {"run": "0/base", "metric": "loss", **odd} if odd else odd
    reply = client.post("/api/curves", json={"queries": [query]})
    assert reply.status_code == 400
    assert len(reply.json()["error"]) > 20


# ---- events ----


def test_recorded_spikes_are_marked_with_value_and_documents(client):
    marks = client.get("/api/events", params={"id": "0/base", "axis": "tokens"}).json()["marks"]
    (spike,) = [mark for mark in marks if mark["kind"] == "spike"]
    assert (spike["step"], spike["x"]) == (SPIKE_STEP, 100 * SPIKE_STEP)
    facts = client.get("/api/event", params={"id": "0/base", "i": spike["i"]}).json()
    assert facts["data"]["documents"] == [{"source": "web", "gid": 4242, "position": 17}]
    assert facts["around"]["loss/zh"] > 7


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


def test_an_evaluation_beside_the_training_is_no_restart_and_no_end_of_it(tmp_path):
    with MetricsWriter(tmp_path / "r") as run:
        run.log({"loss": 2.0}, step=1)
    for step in (1, 2):
        with MetricsWriter(tmp_path / "r", writer="eval") as late:
            late.log({"eval/probes/accuracy/en": 0.5}, step=step)
    client = client_of(tmp_path, cache=tmp_path / "cache")
    marks = client.get("/api/events", params={"id": "0/r"}).json()["marks"]
    assert [(mark["kind"], mark["writer"]) for mark in marks] == [("end", "train")]
    facts = client.get("/api/run", params={"id": "0/r"}).json()
    assert facts["attempt"] == 1
    assert [group["key"] for group in facts["groups"]] == ["loss", "eval"]


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
    for place in ("left", "right"):
        with MetricsWriter(tmp_path / place / "work" / "runs" / "small") as run:
            run.log({"loss": 2.0}, step=1)
    with MetricsWriter(tmp_path / "left" / "work" / "runs" / "alone") as run:
        run.log({"loss": 2.0}, step=1)
    with MetricsWriter(tmp_path / "right" / "work" / "runs" / "small", resumed_from=1) as run:
        run.log({"eval/valid/loss/en": 9.0}, step=1)
    client = client_of(*(tmp_path / place / "work" for place in ("left", "right")), cache=tmp_path / "cache")
    places = {row["id"]: row["place"] for row in client.get("/api/runs").json()["rows"]}
    assert places == {"0/runs/small": "left/work", "1/runs/small": "right/work", "0/runs/alone": ""}
    assert client.get("/api/run", params={"id": "1/runs/small"}).json()["place"] == "right/work"
    (right,) = client.get("/api/runs", params={"q": "right"}).json()["rows"]
    assert right["loss"] == 2.0, "an attempt without a loss of its own does not empty the list"


def test_short_curves_are_not_smoothed_and_new_points_move_the_smoothed_line_before_them(tmp_path):
    with MetricsWriter(tmp_path / "r") as run:
        for step in range(1, 201):
            run.log({"loss": 5 - step / 50, **({"rare": 1.0} if step % 5 == 0 else {})}, step=step)
    client = client_of(tmp_path, cache=tmp_path / "cache")
    query = {"run": "0/r", "metric": "loss", "smooth": "ema:10", "count": 4000}
    rare, whole, end = curves(client, {**query, "metric": "rare"}, query, {**query, "after": 190})
    assert "smooth" not in rare.columns
    assert whole.facts["last"] == 1.0
    drawn = dict(zip(whole.columns["x"].tolist(), whole.columns["smooth"].tolist(), strict=True))
    assert end.columns["again_x"].tolist() == list(range(161, 191))
    wanted = [drawn[x] for x in end.columns["again_x"].tolist()]
    np.testing.assert_allclose(end.columns["again"], wanted, rtol=1e-5)


def test_csv_has_every_point(client):
    reply = client.get("/api/csv", params=[("id", "0/base"), ("metric", "loss"), ("metric", "eval/wiki/bpb")])
    lines = reply.text.splitlines()
    assert lines[0] == "step,tokens,time,loss,eval/wiki/bpb"
    assert len(lines) == 401
    assert lines[1].endswith(",")
    assert not lines[100].endswith(",")


# ---- who may ask for what ----


def test_only_loopback_names_are_answered_on_any_port_since_tunnels_change_it(client):
    for host in ("evil.example", "127.0.0.1.evil.example", "evil.example:80", "", "192.168.0.9", "[::2]"):
        reply = client.get("/api/runs", headers={"Host": host})
        assert reply.status_code == 421, host
        assert "rows" not in reply.text
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:5"):
        assert client.get("/api/runs", headers={"Host": host}).status_code == 200, host
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}  # another site makes the browser send it
    assert client.get("/api/runs", headers=headers).status_code == 403
    assert client.get("/", headers={**headers, "Sec-Fetch-Mode": "navigate"}).status_code == 200  # a link to us is fine


def test_every_answer_forbids_inline_scripts_and_framing_and_files_of_the_page_are_not_sent_twice(client):
    for path in ("/", "/api/runs", "/api/run?id=nothing", "/no/such/file"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
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
    assert "httponly" in reply.headers["set-cookie"].lower()
    assert "samesite=strict" in reply.headers["set-cookie"].lower()
    assert client.get("/api/runs").status_code == 200  # by the cookie
    assert client.get("/api/runs", headers={"Host": "evil.example"}).status_code == 421  # the name still counts
    bare = TestClient(client.app, base_url="http://10.1.2.3")
    assert bare.get("/api/runs", headers={"Authorization": "Bearer secret-token"}).status_code == 200
    reply = bare.get("//evil.example/?token=secret-token", follow_redirects=False)
    assert reply.status_code in (303, 401)
    assert not reply.headers.get("location", "/").startswith("//")


def test_a_board_on_loopback_has_no_token_unless_asked_and_others_always(tmp_path):
    for options, has_token in [
        (BoardOptions(port=0), False),
        (BoardOptions(port=0, needs_token=True), True),
        (BoardOptions(host="0.0.0.0", port=0), True),
    ]:
        board = Board([str(tmp_path)], options, tmp_path / "cache")
        board.socket.close()
        assert ("?token=" in board.url) is has_token


def test_no_path_leaves_the_served_folders(client):
    paths = ["/../pyproject.toml", "/..%2fpyproject.toml", "/vendor/../../__init__.py", "/%2e%2e/api.py", "/main.js%00"]
    paths += ["/api/run?id=0/../../etc", "/api/run?id=../base", "/api/config?id=/etc/passwd"]
    for path in paths:
        reply = client.get(path)
        assert reply.status_code in (400, 404), path
        assert "zero2all" not in reply.text


# ---- live ----


class Tab:
    """Reads a stream of changes as a tab does, for as long as it is open."""

    def __init__(self, library: RunLibrary, ids: list[str]) -> None:
        self.pieces: list[bytes] = []
        self.times: list[float] = []
        self.came = threading.Condition()
        self.is_closed = threading.Event()
        self.thread = threading.Thread(target=self._read, args=(library, ids), daemon=True)
        self.thread.start()

    def _read(self, library: RunLibrary, ids: list[str]) -> None:
        import asyncio

        async def closed() -> bool:
            return self.is_closed.is_set()

        async def read() -> None:
            async for piece in stream_changes(library, "boot", ids, 0, closed):
                with self.came:
                    self.pieces.append(piece)
                    self.times.append(time.monotonic())
                    self.came.notify_all()

        asyncio.run(read())

    def wait_for(self, text: str) -> None:
        with self.came:
            assert self.came.wait_for(lambda: any(text in piece.decode() for piece in self.pieces), timeout=300), (
                self.pieces
            )

    def wait_for_silence(self, seconds: float) -> None:
        deadline, before = time.monotonic() + 60, -1
        while len(self.pieces) != before:
            assert time.monotonic() < deadline, self.pieces
            before = len(self.pieces)
            time.sleep(seconds)

    def close(self) -> None:
        self.is_closed.set()
        self.thread.join(60)


def test_a_stream_tells_what_moved_at_most_four_times_a_second_and_is_silent_while_idle(tmp_path):
    run = MetricsWriter(tmp_path / "r")
    run.log({"loss": 1.0}, step=1)
    library = RunLibrary([Root("r", tmp_path)], tmp_path / "cache")
    tab = Tab(library, ["0/r"])
    try:
        tab.wait_for('"step":1')
        for step in range(2, 40):
            run.log({"loss": 1.0}, step=step)
            time.sleep(0.02)  # a trainer that is faster than the limit
        run.close()
        tab.wait_for('"step":39')
        tab.wait_for('"finished"')
        # Not the smallest distance: a reader that was held up takes two pieces at once.
        assert len(tab.times) <= 4 * (tab.times[-1] - tab.times[0]) + 2
        tab.wait_for_silence(0.6)
    finally:
        tab.close()


def test_a_run_that_vanishes_or_never_was_does_not_end_the_stream(tmp_path):
    with MetricsWriter(tmp_path / "r") as run:
        run.log({"loss": 1.0}, step=1)
    library = RunLibrary([Root("r", tmp_path)], tmp_path / "cache")
    tab = Tab(library, ["0/r", "0/never"])
    try:
        tab.wait_for('"0/never":{"gone":true}')
        shutil.rmtree(tmp_path / "r")
        tab.wait_for('"gone":["0/r"]')
        assert re.search(rb'"0/r":\{[^}]*"gone":true', b"".join(tab.pieces))
        with library.reading("0/r") as still:
            assert len(still.reader.series("loss")) == 1
    finally:
        tab.close()


# ---- places ----


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


def test_ctrl_c_ends_the_command_calmly_while_a_page_is_open(runs, tmp_path):
    words = [sys.executable, "-c", "import sys; from zero2all.cli import main; sys.exit(main())"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen(
        [*words, "board", str(runs), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if "chart library is missing" in line:  # set-up without Node
            line = process.stdout.readline()
        port = int(re.search(r"127\.0\.0\.1:(\d+)/", line)[1])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        connection.request("GET", "/api/stream?run=0/base")
        assert connection.getresponse().readline().startswith(b"data: ")
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 0
        assert process.stdout.read() == ""
