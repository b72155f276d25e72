"""A server that answers as the hub does about one dataset, org/name, of which there are two commits."""

import hashlib
import io
import json
import os
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow as pa
import pyarrow.parquet as pq

COMMITS = {"a" * 40: 30, "b" * 40: 50}
"""Commit -> number of rows."""

NAMES = {"v1": "a" * 40, "main": "b" * 40}
FILE = "train.parquet"


def content(commit: str) -> bytes:
    """The only file of a commit."""
    file = io.BytesIO()
    rows = [f"the text of row {row} in commit {commit[:3]}" for row in range(COMMITS[commit])]
    pq.write_table(pa.table({"text": rows}), file)
    return file.getvalue()


class Hub(BaseHTTPRequestHandler):
    """Answers requests for the dataset, its files and their content."""

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def do_HEAD(self) -> None:
        """Answer without a body."""
        self.do_GET()

    def do_GET(self) -> None:
        """Answer a request."""
        parts = [*self.path.partition("?")[0].strip("/").split("/"), *[""] * 6]
        name = parts[5] if parts[0] == "api" else parts[4]
        commit, data = NAMES.get(name or "main", name), None
        headers = {"X-Error-Code": "EntryNotFound" if commit in COMMITS else "RevisionNotFound"}
        if parts[:2] == ["api", "datasets"] and commit in COMMITS and not parts[6]:
            whole = content(commit)
            entry = {"type": "file", "path": FILE, "size": len(whole), "oid": hashlib.sha1(whole).hexdigest()}
            described = {"id": "org/name", "sha": commit, "siblings": [{"rfilename": FILE}], "private": False}
            value = [entry] if parts[4] == "tree" else {**described, "tags": [], "downloads": 0, "likes": 0}
            data = json.dumps(value).encode()
        elif parts[3] == "resolve" and commit in COMMITS:
            data = content(commit) if parts[5] == FILE else None
            headers |= {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(data or b"").hexdigest()}"'}
        self._send(data, headers)

    def _send(self, data: bytes | None, headers: Mapping[str, str]) -> None:
        self.send_response(404 if data is None else 200)
        for name, value in {**headers, "Content-Length": str(len(data or b""))}.items():
            if data is None or name != "X-Error-Code":
                self.send_header(name, value)
        self.end_headers()
        if data is not None and self.command == "GET":
            self.wfile.write(data)


def start(cache: str) -> None:
    """Start the server, and let the libraries of this process ask it; call before these are imported."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
    os.environ["HF_HOME"] = cache
    os.environ["HF_HUB_DISABLE_XET"] = "1"
