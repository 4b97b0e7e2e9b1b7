"""A page that follows runs, served on this machine alone: the page, and what is new on it. No file is served."""

from __future__ import annotations

import errno
import hashlib
import re
import socket
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from meristem.errors import InputError, Remedy
from meristem.limits import check_integer
from meristem.report.page.file import json_text, page_from
from meristem.watch.runs import State, Watch

ADDRESS = "127.0.0.1"
PORT = 8642
# Names by which a browser on this machine, or at the other end of a tunnel, asks for the page. A page from elsewhere
# whose name was made to lead here asks by its own.
HOSTS = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?")
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class LivePage:
    """The page of runs that go on: made once for every change of them, however often it is asked for."""

    def __init__(self, watch: Watch) -> None:
        self._watch, self._lock = watch, threading.Lock()
        self._states: list[State] | None = None
        self._data: dict[str, Any] = {}
        self._tag, self._text = "", ""

    def answer(self) -> tuple[str, str]:
        """The tag of the present state of things, and the data as JSON."""
        with self._lock:
            self._refresh()
            return self._tag, self._text

    def document(self) -> str:
        """The page, with the data that there are now."""
        with self._lock:
            self._refresh()
            return page_from({**self._data, "tag": self._tag}, live=True)

    def _refresh(self) -> None:
        new = self._watch.look()
        states = self._watch.states
        if new or states != self._states:
            self._states, self._data = states, self._watch.page(states)
            self._text = json_text(self._data)
            self._tag = f'"{hashlib.sha256(self._text.encode()).hexdigest()[:32]}"'


class Server(ThreadingHTTPServer):
    """A server of one page on this machine; 0 is any port that is free."""

    daemon_threads = True

    def __init__(self, page: LivePage, port: int = PORT) -> None:
        check_integer("port", port, 0, 65535)
        self.page = page
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL):
                raise
            why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
            expected = f"{why}; take another port, or 0 for any that is free"
            raise InputError("port", port, expected, Remedy(arguments=("port=0",))) from None

    @property
    def url(self) -> str:
        """Where a browser finds the page."""
        return f"http://{ADDRESS}:{self.server_address[1]}/"

    def handle_error(self, request: socket.socket | tuple[bytes, socket.socket], client_address: Any) -> None:
        """A browser that has gone away in the middle of an answer is no error."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD for the page and its data, and nothing else; a connection is for one question."""

    timeout = 60  # seconds that a question may take to arrive
    server: Server

    def do_GET(self) -> None:
        if HOSTS.fullmatch(self.headers.get("Host", "")) is None:
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "this page is for browsers on the same machine")
        elif self.path == "/":
            self._send("text/html; charset=utf-8", self.server.page.document())
        elif self.path == "/data":
            tag, text = self.server.page.answer()
            if tag in re.split(r"\s*,\s*", self.headers.get("If-None-Match", "")):
                self._begin(HTTPStatus.NOT_MODIFIED, {"ETag": tag})
            else:
                self._send("application/json; charset=utf-8", text, {"ETag": tag})
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is only /")

    do_HEAD = do_GET

    def _refused_method(self) -> None:
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD", {"Allow": "GET, HEAD"})

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_CONNECT = do_TRACE = _refused_method

    def _refuse(self, status: HTTPStatus, text: str, more: dict[str, str] | None = None) -> None:
        self._send("text/plain; charset=utf-8", f"{text}\n", more, status)

    def _send(
        self, kind: str, text: str, more: dict[str, str] | None = None, status: HTTPStatus = HTTPStatus.OK
    ) -> None:
        content = text.encode()
        self._begin(status, {"Content-Type": kind, "Content-Length": str(len(content)), **(more or {})})
        if self.command != "HEAD":
            self.wfile.write(content)

    def _begin(self, status: HTTPStatus, more: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, **more}.items():
            self.send_header(name, value)
        self.end_headers()

    def version_string(self) -> str:
        return "meristem"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is said of single requests."""


def serve(watch: Watch, port: int = PORT, say: Callable[[str], None] = print) -> None:
    """Serve the page of some runs until an interrupt (KeyboardInterrupt); `say` is told the address first.

    serve(Watch([Path("runs/first")]), port=0)
    """
    with Server(LivePage(watch), port) as server:
        names = ", ".join(str(run.path) for run in watch.runs)
        say(f"watching {names} at {server.url} (Ctrl-C ends it; the run is not touched)")
        server.serve_forever()
