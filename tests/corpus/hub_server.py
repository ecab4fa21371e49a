"""A small hub on this machine that answers like the real one, and misbehaves on demand.

    with HubServer() as hub:
        hub.put("me/texts", {"a.bin": b"…"})
        hub.drop_after["a.bin"] = [1000]  # the first answer breaks off after 1000 bytes, the next do not

Every request is logged with its range and the bytes of content it was sent.
"""

import hashlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

CHUNK_BYTES = 16 << 10
LFS_FROM_BYTES = 1000
"""Larger files are stated with a sha256, as hubs do for LFS; smaller ones with the checksum of git's blob."""


@dataclass
class Request:
    path: str
    range: str | None
    authorization: str | None
    bytes_sent: int = 0

    @property
    def name(self) -> str:
        """The file that was asked for; empty for a question to the API."""
        return self.path.split("/resolve/", 1)[1].split("/", 1)[1] if "/resolve/" in self.path else ""


@contextmanager
def hub_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator["HubServer"]:
    """A hub without files, and no hub of the machine in the way."""
    for name in ("HF_ENDPOINT", "HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    with HubServer() as server:
        yield server


@dataclass
class Repo:
    """The commits of one repo; the last is `main`."""

    kind: str = "dataset"
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)

    @property
    def head(self) -> str:
        return list(self.commits)[-1]


class HubServer:
    """The hub: its content, its moods and its log."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[Request] = []
        self.drop_after: dict[str, list[int]] = {}
        """File -> for each answer to come, after how many bytes the connection breaks."""
        self.silent_after: dict[str, int] = {}
        """File -> after how many bytes the next answer falls silent, until the file is asked for again."""
        self.corrupt: dict[str, int] = {}
        """File -> how many answers to come have a wrong byte."""
        self.statuses: dict[str, list[tuple[int, dict[str, str]]]] = {}
        """File, or `api` -> statuses and headers to answer with before answering properly."""
        self.has_ranges = True
        self.redirects = False
        """Whether files lie on another host, as those of the real hub do."""
        self.seconds_per_chunk = 0.0
        self.may_send = threading.Event()
        """While it is not set, answers stand still."""
        self.may_send.set()
        self.needs_token: str | None = None
        self.page_entries = 1000
        self.stated_sizes: dict[str, Any] = {}
        """File -> the size it is listed with, whatever it has."""
        self.endless_listing = False
        """Whether every page of the listing leads to itself."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def put(self, name: str, files: Mapping[str, bytes], kind: str = "dataset") -> str:
        repo = self.repos.setdefault(name, Repo(kind))
        commit = hashlib.sha1(f"{name} {len(repo.commits)}".encode()).hexdigest()
        repo.commits[commit] = dict(files)
        return commit

    def asked(self, name: str) -> list[Request]:
        return [request for request in self.requests if request.name == name]

    @property
    def content_bytes_sent(self) -> int:
        return sum(request.bytes_sent for request in self.requests)

    def __enter__(self) -> "HubServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def checksum_entry(name: str, content: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": blob}
    if len(content) >= LFS_FROM_BYTES:
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        path = unquote(address.path)
        log = Request(path, self.headers.get("Range"), self.headers.get("Authorization"))
        self.hub.requests.append(log)
        if planned := self.hub.statuses.get(log.name or "api"):
            status, headers = planned.pop(0)
            self._error(status, "planned", **headers)
            return
        if self.hub.needs_token and "/cdn/" not in path and log.authorization != f"Bearer {self.hub.needs_token}":
            self._error(401, "gated", **{"X-Error-Code": "GatedRepo"})
        elif self.hub.redirects and log.name and "/cdn/" not in path:
            self._error(302, "elsewhere", Location=f"http://localhost:{self.server.server_port}/cdn{address.path}")
        elif path.startswith("/api/"):
            self._answer_api(path, parse_qs(address.query))
        else:
            self._answer_file(path.removeprefix("/cdn"), log)

    def _answer_api(self, path: str, query: dict[str, list[str]]) -> None:
        _, _, kind, owner, name, verb, revision = path.split("/")
        found = self._find(kind, f"{owner}/{name}", revision)
        if found is None:
            return
        commit, files = found
        if verb == "revision":
            self._json({"id": f"{owner}/{name}", "sha": commit})
            return
        assert query["recursive"] == ["true"]
        start = int(query.get("cursor", ["0"])[0])
        folders = sorted({file.rpartition("/")[0] for file in files if "/" in file})
        entries: list[dict[str, Any]] = [{"type": "directory", "path": folder, "oid": "0" * 40} for folder in folders]
        entries += [checksum_entry(file, content) for file, content in files.items()]
        for entry in entries:
            if entry["path"] in self.hub.stated_sizes:
                (entry.get("lfs") or entry)["size"] = self.hub.stated_sizes[entry["path"]]
        end = start + self.hub.page_entries
        # as mirrors do that hand on what the hub said: an address that is not theirs
        cursor = 0 if self.hub.endless_listing else end
        link = f'<https://elsewhere.invalid{path}?recursive=true&cursor={cursor}>; rel="next"'
        has_more = self.hub.endless_listing or end < len(entries)
        self._json(entries[start:end], **({"Link": link} if has_more else {}))

    def _answer_file(self, path: str, log: Request) -> None:
        kind = "datasets" if path.startswith("/datasets/") else "models"
        owner, name, _, revision, file = path.removeprefix("/datasets").strip("/").split("/", 4)
        found = self._find(kind, f"{owner}/{name}", revision)
        if found is None:
            return
        content = found[1].get(file)
        if content is None:
            self._error(404, "no such file", **{"X-Error-Code": "EntryNotFound"})
            return
        if self.hub.corrupt.get(file, 0) > 0:
            self.hub.corrupt[file] -= 1
            content = bytes([content[0] ^ 1]) + content[1:]
        start, end = 0, len(content)
        if log.range and self.hub.has_ranges:
            first, last = log.range.removeprefix("bytes=").split("-")
            start, end = int(first), int(last) + 1 if last else end
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        self._send(content[start:end], file, log)

    def _send(self, content: bytes, file: str, log: Request) -> None:
        drops = self.hub.drop_after.get(file)
        silent_after = self.hub.silent_after.pop(file, None)
        limit = drops.pop(0) if drops else len(content) if silent_after is None else silent_after
        for start in range(0, min(limit, len(content)), CHUNK_BYTES):
            piece = content[start : min(start + CHUNK_BYTES, limit)]
            self.hub.may_send.wait()
            try:
                self.wfile.write(piece)
            except OSError:  # the other side was killed
                break
            log.bytes_sent += len(piece)
            time.sleep(self.hub.seconds_per_chunk)
        while silent_after is not None and self.hub.asked(file)[-1] is log:
            time.sleep(0.01)
        if log.bytes_sent < len(content):
            self.close_connection = True

    def _find(self, kind: str, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        repo = self.hub.repos.get(name)
        if repo is None or f"{repo.kind}s" != kind:
            self._error(404, "no such repo", **{"X-Error-Code": "RepoNotFound"})
            return None
        commit = repo.head if revision == "main" else revision
        if commit not in repo.commits:
            self._error(404, "no such revision", **{"X-Error-Code": "RevisionNotFound"})
            return None
        return commit, repo.commits[commit]

    def _error(self, status: int, message: str, **headers: str) -> None:
        self._json({"error": message}, status, **headers)

    def _json(self, value: Any, status: int = 200, **headers: str) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, text in headers.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: Any) -> None:
        """Be quiet; the log is `requests`."""
