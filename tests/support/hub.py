"""A Hugging Face hub on this machine: an HTTP server with the few paths of its API that a download asks for."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves `models`, by name, from directories; `gated` ones show their names but no file.

    Attributes:
        requests: method and path of every request, in order.
    """

    def __init__(self, models: Mapping[str, Path], gated: tuple[str, ...] = ()) -> None:
        self.models, self.gated = dict(models), gated
        self.requests: list[str] = []
        self.endpoint = ""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body) of a GET or HEAD."""
        parts = unquote(urlsplit(path).path).strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        parts = parts[2:] if is_api else parts
        name, rest = "/".join(parts[:2]), parts[2:]
        if name not in self.models:
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        files = {file.name: file for file in self.models[name].iterdir()}
        revision = rest[1] if len(rest) > 1 else "main"
        if revision not in ("main", "v1", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if is_api and rest[:1] == ["tree"]:
            tree = [{"type": "file", "path": n, "size": f.stat().st_size, "oid": _etag(f)} for n, f in files.items()]
            return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
        if is_api:
            info = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files], "tags": []}
            return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()
        if name in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        file = files.get("/".join(rest[2:]))
        if file is None:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        return 200, {"ETag": f'"{_etag(file)}"', "X-Repo-Commit": COMMIT}, file.read_bytes()


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve it at `hub.endpoint` while this lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            status, headers, body = hub.answer(self.path)
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
