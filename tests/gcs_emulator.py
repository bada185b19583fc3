"""Google Cloud Storage on loopback, as far as tensorstore's client asks: its JSON API for objects of one bucket.

What a caller needs besides: `objects`, to look and to damage; `refuse`, to fail as a store does.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


class Emulator:
    def __init__(self):
        self.objects: dict[str, bytes] = {}
        self.refuse: Callable[[str, str], int | None] = lambda method, name: None
        """The status with which a method on an object is refused; None: it is not."""
        self.requests: list[tuple[str, str]] = []
        self._generations: dict[str, int] = {}
        self._lock = threading.Lock()

    def answer(self, method: str, url: str, body: bytes) -> tuple[int, bytes]:
        """The status and the content of an answer."""
        parts = urlsplit(url)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        _, _, place = parts.path.partition("/b/bucket/o")
        name = unquote(place.removeprefix("/")) or query.get("name", "")
        with self._lock:
            self.requests.append((method, name))
            if status := self.refuse(method, name):
                return status, json.dumps({"error": {"code": status, "message": "refused"}}).encode()
            if method == "POST":
                self.objects[name] = body
                self._generations[name] = self._generations.get(name, 0) + 1
                return 200, json.dumps(self._described(name)).encode()
            if method == "DELETE":
                return (204, b"") if self.objects.pop(name, None) is not None else (404, b"")
            if name:
                return (200, self.objects[name]) if name in self.objects else (404, b"")
            start, end = query.get("startOffset", ""), query.get("endOffset", "\U0010ffff")
            found = [name for name in sorted(self.objects) if start <= name < end]
            first = int(query.get("pageToken", 0))
            page = {"items": [self._described(name) for name in found[first : first + 50]]}  # in pages, as the real one
            if first + 50 < len(found):
                page["nextPageToken"] = str(first + 50)
            return 200, json.dumps(page).encode()

    def _described(self, name: str) -> dict[str, str]:
        return {"name": name, "generation": str(self._generations[name]), "size": str(len(self.objects[name]))}


@contextmanager
def emulated() -> Iterator[tuple[Emulator, str]]:
    """An emulator, and the address that TENSORSTORE_GCS_HTTP_URL names; its bucket is `bucket`."""
    emulator = Emulator()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize, disable_nagle_algorithm = -1, True  # an answer in one packet

        def _any(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, content = emulator.answer(self.command, self.path, body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            if self.command == "GET":
                self.send_header("x-goog-generation", "1")
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_DELETE = _any

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield emulator, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
