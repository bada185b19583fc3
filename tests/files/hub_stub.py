"""The part of the hub's protocol that a download needs, on a port of this machine."""

import hashlib
import json
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def hash_on_hub(name: str, data: bytes) -> str:
    """The SHA-256 of a large file, and git's hash of a small one."""
    if name.endswith((".safetensors", ".parquet")):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Hub(BaseHTTPRequestHandler):
    root: Path
    fails_at = ""
    """Name of a file that the server cannot read."""

    def log_message(self, *_):
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self):
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[0] == "api" and len(parts) > 3:
            return self.describe(*parts[2:])
        if len(parts) < 4:
            return self.answer(404)
        organisation, name, _, _, *file = parts[parts[0] == "datasets" :]
        path = self.root / organisation / name / "/".join(file)
        if path.name == self.fails_at:
            return self.answer(500)
        if not path.is_file():
            return self.answer(404, X_Error_Code="EntryNotFound")
        data = path.read_bytes()
        return self.answer(200, data, ETag=f'"{hash_on_hub(path.name, data)}"', X_Repo_Commit=COMMIT)

    do_HEAD = do_GET

    def describe(self, organisation: str, name: str, what: str = "revision", revision: str = "main", *_):
        folder = self.root / organisation / name
        if name == "gated":
            return self.answer(403, b"{}", X_Error_Code="GatedRepo")
        if not folder.is_dir():
            return self.answer(404, b"{}", X_Error_Code="RepoNotFound")
        if revision not in ("main", COMMIT):
            return self.answer(404, b"{}", X_Error_Code="RevisionNotFound")
        files = {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
        tree = [{"type": "file", "path": name, "size": size, "oid": "0" * 40} for name, size in files.items()]
        described = {"id": f"{organisation}/{name}", "sha": COMMIT, "siblings": [{"rfilename": f} for f in files]}
        body = json.dumps(tree if what == "tree" else described).encode()
        return self.answer(200, body, Content_Type="application/json")


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_):
        if not isinstance(sys.exception(), ConnectionError):  # a client that has its answer may go
            raise


@contextmanager
def served(root: Path, fails_at: str = ""):
    """Serve the repositories ROOT/ORGANISATION/NAME, but for a file; yields the endpoint."""
    handler = type("Hub", (_Hub,), {"root": root, "fails_at": fails_at})
    with _Server(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


BROKEN = {
    "silent": b"",
    "closed": b"",
    "cut": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc",
    "huge headers": b"HTTP/1.1 200 OK\r\n" + 20 * (b"X-A: " + 60_000 * b"a" + b"\r\n") + b"\r\n",
    "not JSON": b'HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n{"id":',
    "a login page": b"HTTP/1.1 200 OK\r\nContent-Length: 13\r\nContent-Type: text/html\r\n\r\n<html></html>",
    "another object": b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Type: application/json\r\n\r\n[1]",
}
"""Answers of servers that are no hub and close the connection; a silent one keeps it open."""


@contextmanager
def broken(kind: str):
    """Serve one of `BROKEN`, a status, or a redirection to itself; yields the endpoint."""

    class Handler(BaseRequestHandler):
        def handle(self):
            while not self.server.ended.is_set():
                request = self.request.recv(65536)
                if not request:
                    return
                if kind == "silent":
                    self.server.ended.wait(60)
                elif kind == "a loop":
                    path = request.split(b" ")[1]
                    answer = b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: " + path + b"\r\n\r\n"
                    self.request.sendall(answer)
                    continue
                else:
                    status = f"HTTP/1.1 {kind} X\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode()
                    self.request.sendall(BROKEN.get(kind, status))
                return

    with _BrokenServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.ended.set()
            server.shutdown()


class _BrokenServer(ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.ended = threading.Event()

    def handle_error(self, *_):
        if not isinstance(sys.exception(), ConnectionError):
            raise
