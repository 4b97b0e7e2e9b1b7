"""The server: on this machine alone, two paths, nothing from the disk, and data only when they are new."""

from __future__ import annotations

import http.client
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from commands import Call
from meristem.report.page.data import run_data
from meristem.watch.server import Server
from watch.helpers import append, begun, birth, served, timed


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    """Status, headers and text of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def data_in(page: str) -> Any:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found)


def test_it_listens_on_this_machine_alone(tmp_path: Path) -> None:
    with served(tmp_path / "run") as server:
        assert server.socket.getsockname()[0] == "127.0.0.1"
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", server.url)
        with socket.create_connection(server.server_address[:2], timeout=30) as other:  # type: ignore[arg-type]
            assert other.getpeername()[0] == "127.0.0.1"


def test_the_page_holds_the_data_of_the_run(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    with served(run) as server:
        status, headers, page = ask(server, "/")
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        data = data_in(page)
        assert data["runs"] == [json.loads(json.dumps(run_data(run)))]
        assert [state["word"] for state in data["watch"]] == ["at work"]
        status, headers, text = ask(server, "/data")
        assert (status, headers["ETag"]) == (200, data["tag"])
        assert json.loads(text) == {name: value for name, value in data.items() if name != "tag"}
        assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)


def test_data_are_sent_only_when_they_are_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, made = begun(tmp_path / "run"), []

    def counted(path: Path, points: int) -> dict[str, Any]:
        made.append(path)
        return run_data(path, points)

    monkeypatch.setattr("meristem.watch.runs.run_data", counted)
    with served(run) as server:
        _, headers, _ = ask(server, "/data")
        tag = headers["ETag"]
        for _ in range(5):
            status, headers, text = ask(server, "/data", If_None_Match=tag)
            assert (status, headers["ETag"], text) == (304, tag, "")
        assert len(made) == 1
        append(run, "metrics", timed(11))
        append(run, "events", birth(11))
        status, headers, text = ask(server, "/data", If_None_Match=tag)
        assert status == 200
        assert headers["ETag"] != tag
        assert json.loads(text)["runs"][0]["last_step"] == 11
        assert len(made) == 2


def test_a_run_that_is_not_there_is_waited_for(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with served(run) as server:
        data = json.loads(ask(server, "/data")[2])
        assert (data["runs"], data["watch"][0]["word"]) == ([], "waiting")
        assert ask(server, "/")[0] == 200
        begun(run)
        assert json.loads(ask(server, "/data")[2])["runs"][0]["last_step"] == 10


def test_several_runs_share_a_page(tmp_path: Path) -> None:
    one, two = begun(tmp_path / "one"), tmp_path / "two"
    with served(one, two) as server:
        data = json.loads(ask(server, "/data")[2])
        assert [state["word"] for state in data["watch"]] == ["at work", "waiting"]
        assert len(data["runs"]) == 1
        begun(two, 5)
        data = json.loads(ask(server, "/data")[2])
        assert [(run["name"], run["last_step"]) for run in data["runs"]] == [("one", 10), ("two", 5)]
        assert data["table"][1] == {"label": "steps done", "values": ["10", "5 (\u22125)"]}


@pytest.mark.parametrize("path", ["/metrics.jsonl", "/config.toml", "/..", "/data/", "/?x", "/data?x", "*", "/%2e"])
def test_nothing_else_is_served(tmp_path: Path, path: str) -> None:
    with served(begun(tmp_path / "run")) as server:
        status, _, text = ask(server, path)
        assert (status, text) == (404, "there is only /\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_only_get_and_head_are_answered(tmp_path: Path, method: str) -> None:
    with served(begun(tmp_path / "run")) as server:
        status, headers, _ = ask(server, "/data", method)
        assert (status, headers["Allow"]) == (405, "GET, HEAD")
        assert ask(server, "/data", "BREW")[0] == 501


def test_head_is_get_without_a_body(tmp_path: Path) -> None:
    with served(begun(tmp_path / "run")) as server:
        for path in ("/", "/data", "/other"):
            status, headers, text = ask(server, path)
            assert int(headers["Content-Length"]) == len(text.encode())
            head = ask(server, path, "HEAD")
            assert (head[0], head[1]["Content-Length"], head[2]) == (status, headers["Content-Length"], "")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:80", 200), ("localhost", 200), ("localhost:9000", 200), ("[::1]:1", 200), ("evil.example", 421),
        ("evil.example:8642", 421), ("127.0.0.1.evil.example", 421), ("localhost.", 421), ("", 421), ("127.0.0.2", 421),
    ],
)  # fmt: skip
def test_other_names_do_not_lead_here(tmp_path: Path, host: str, status: int) -> None:
    """A page from elsewhere whose name was made to lead to this machine is told nothing."""
    with served(begun(tmp_path / "run")) as server:
        for path in ("/", "/data"):
            answer = ask(server, path, Host=host)
            assert answer[0] == status
            assert ("last_step" in answer[2]) == (status == 200)


def test_answers_are_not_kept_and_not_embedded(tmp_path: Path) -> None:
    with served(begun(tmp_path / "run")) as server:
        for path in ("/", "/data", "/other"):
            _, headers, _ = ask(server, path)
            assert headers["Cache-Control"] == "no-store"
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["X-Frame-Options"] == "DENY"
            assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
            assert headers["Content-Security-Policy"].startswith("default-src 'none'")
            assert "Access-Control-Allow-Origin" not in headers
            assert "Python" not in headers["Server"]


def test_a_port_in_use_is_named_with_a_remedy(tmp_path: Path, call: Call) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = call("watch", tmp_path / "run", "--port", str(port))
    assert said.code == 2
    expected = f"error: port = {port}: is in use; take another port, or 0 for any that is free (--port 0)\n"
    assert said.err == expected


@pytest.mark.parametrize("port", ["-1", "65536"])
def test_ports_that_cannot_be_are_refused(tmp_path: Path, call: Call, port: str) -> None:
    said = call("watch", tmp_path / "run", "--port", port)
    assert said.code == 2
    assert f"port = {port}: must be at" in said.err


def test_an_interrupt_ends_it_with_its_status(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Server) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "serve_forever", interrupted)
    said = call("watch", tmp_path / "run", "--port", "0")
    assert said.code == 130
    assert re.search(r"watching .*run at http://127\.0\.0\.1:\d+/ \(Ctrl-C ends it", said.out)
    assert said.err == ""
