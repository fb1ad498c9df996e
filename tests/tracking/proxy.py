"""An HTTP proxy before a real MLflow server that acts as a bad network does."""

from __future__ import annotations

import base64
import http.client
import itertools
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

SLOW = 2.0  # seconds a request


class Proxy:
    """Listens on a free port of 127.0.0.1 until `close`.

    Args:
        server: its address.

    Attributes:
        mode: `up`; `slow`; `failing`, which answers 500 to every third request, in turn
            before and after the server has done it; `cutting`, which lets the server do
            every second request and closes the connection; `hanging`.
        password: of the user `me`; None for a server that asks for none.
        harmed: requests that did not get the server's answer.
    """

    def __init__(self, server: str):
        self.mode = "up"
        self.password = None
        self.harmed = 0
        self._server = urlsplit(server).netloc
        self._count = itertools.count(1)
        self._closed = threading.Event()
        self._listener: ThreadingHTTPServer | None = None
        self.port = 0
        self.up()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def up(self) -> None:
        """Listen on the port of the first time."""
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def handle_one_request(self) -> None:
                with suppress(OSError):  # the client has gone
                    super().handle_one_request()

            def __getattr__(self, name: str) -> object:
                if name.startswith("do_"):
                    return lambda: proxy._pass_on(self)
                raise AttributeError(name)

            def log_message(self, *_: object) -> None:
                pass

        self._listener = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._listener.daemon_threads = True
        self._listener.block_on_close = False
        self.port = self._listener.server_port
        threading.Thread(
            target=self._listener.serve_forever, args=[0.05], daemon=True
        ).start()

    def down(self) -> None:
        """Refuse connections."""
        if self._listener is not None:
            self._listener.shutdown()
            self._listener.server_close()
            self._listener = None

    def harm(self, mode: str) -> None:
        """Refuse connections if the mode is `down`; else set the mode."""
        if mode == "down":
            self.down()
        else:
            self.mode = mode

    def heal(self) -> None:
        """Undo `harm`."""
        self.mode = "up"
        if self._listener is None:
            self.up()

    def close(self) -> None:
        self._closed.set()
        self.down()

    def _pass_on(self, request: BaseHTTPRequestHandler) -> None:
        body = _body(request)
        number = next(self._count)
        mode = self.mode
        if mode == "hanging":
            self.harmed += 1
            self._closed.wait(120)
            return
        if mode == "slow":
            self._closed.wait(SLOW)
        if self.password is not None and request.headers.get("Authorization") != _basic(
            self.password
        ):
            self.harmed += 1
            _answer(request, 401, {}, b"You are not authenticated.")
            return
        if mode == "failing" and number % 6 == 3:
            self.harmed += 1
            _answer(request, 500, {}, b"before the work")
            return
        status, headers, content = self._ask(request, body)
        if mode == "failing" and number % 6 == 0:
            self.harmed += 1
            _answer(request, 500, {}, b"after the work")
        elif mode == "cutting" and number % 2:
            self.harmed += 1
        else:
            _answer(request, status, headers, content)

    def _ask(
        self, request: BaseHTTPRequestHandler, body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self._server, timeout=60)
        try:
            dropped = ("host", "connection", "content-length", "transfer-encoding")
            headers = {
                key: value
                for key, value in request.headers.items()
                if key.lower() not in dropped
            }
            connection.request(
                request.command, request.path, body, {**headers, "Connection": "close"}
            )
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()


def _body(request: BaseHTTPRequestHandler) -> bytes:
    if "chunked" not in request.headers.get("Transfer-Encoding", ""):
        return request.rfile.read(int(request.headers.get("Content-Length") or 0))
    body = b""
    while size := int(request.rfile.readline(), 16):
        body += request.rfile.read(size)
        request.rfile.readline()
    request.rfile.readline()
    return body


def _basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"me:{password}".encode()).decode()


def _answer(
    request: BaseHTTPRequestHandler,
    status: int,
    headers: dict[str, str],
    content: bytes,
) -> None:
    request.send_response(status)
    for key, value in headers.items():
        if key.lower() not in (
            "content-length",
            "transfer-encoding",
            "connection",
            "date",
            "server",
        ):
            request.send_header(key, value)
    request.send_header("Content-Length", str(len(content)))
    request.end_headers()
    request.wfile.write(content)
