"""Servers that do not behave: none may hold the command, crash it, or learn the token."""

from __future__ import annotations

import json
import socketserver
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from cift_probe.models import ModelError, hub, load_model

HUB_ID = "somebody/a-model"
TOKEN = "hf_" + "x" * 20
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
BODY = json.dumps(CONFIG).encode()
VARIABLES = ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN", "http_proxy", "HTTP_PROXY")
Answer = Callable[[bytes, Any], None]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let there be no cache and no settings of the machine."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))


@contextmanager
def serving(answer: Answer) -> Iterator[tuple[str, list[bytes]]]:
    """Serve on this machine; yields the address and what was asked."""
    asked: list[bytes] = []

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            text = self.request.recv(65536)
            asked.append(text)
            with suppress(OSError):  # the caller goes away from some of these, as it should
                answer(text, self.request)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()


def saying(content: bytes) -> Answer:
    return lambda _, line: line.sendall(content)


def good(body: bytes = BODY) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def refusal() -> str:
    with pytest.raises(ModelError) as caught:
        load_model(HUB_ID)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_good_answer_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(saying(good())) as (address, asked):
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("HF_TOKEN", f" {TOKEN}\r\n")  # as a file with Windows lines gives it
        assert load_model(HUB_ID).num_hidden_layers == 4
    assert f"Authorization: Bearer {TOKEN}\r\n".encode() in asked[0]


@pytest.mark.parametrize(
    "content",
    [
        b"garbage\r\n\r\n",
        b"",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n",
    ],
)
def test_what_is_no_answer_is_one_line(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    with serving(saying(content)) as (address, _):
        monkeypatch.setenv("HF_ENDPOINT", address)
        assert "name a local config.json" in refusal()


def test_an_answer_that_was_cut_is_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n" + BODY[:40]
    with serving(saying(cut)) as (address, _):
        monkeypatch.setenv("HF_ENDPOINT", address)
        refusal()


def test_an_answer_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "MAX_FILE_BYTES", 1000)
    with serving(saying(good(b" " * 200_000))) as (address, _):
        monkeypatch.setenv("HF_ENDPOINT", address)
        assert "no config.json" in refusal()


def test_a_server_that_drips_does_not_hold_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def drip(_: bytes, line: Any) -> None:
        line.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 4000\r\n\r\n")
        for _second in range(100):
            line.sendall(b" ")
            time.sleep(0.02)

    monkeypatch.setattr(hub, "_PATIENCE_S", 0.2)
    with serving(drip) as (address, _):
        monkeypatch.setenv("HF_ENDPOINT", address)
        assert "took more than" in refusal()


def test_the_token_does_not_follow_to_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(saying(good())) as (elsewhere, seen):
        moved = (
            f"HTTP/1.1 302 Found\r\nLocation: {elsewhere}/x\r\nContent-Length: 0\r\n\r\n".encode()
        )
        with serving(saying(moved)) as (address, asked):
            monkeypatch.setenv("HF_ENDPOINT", address)
            monkeypatch.setenv("HF_TOKEN", TOKEN)
            assert load_model(HUB_ID).num_hidden_layers == 4
    assert TOKEN.encode() in asked[0]
    assert TOKEN.encode() not in seen[0]


@pytest.mark.parametrize("token", [f"{TOKEN}\nX: y", f"{TOKEN}\r{TOKEN}", "hf_é", "hf_\x01"])
def test_a_token_that_is_none_is_not_printed(monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", token)
    text = refusal()
    assert "HF_TOKEN holds" in text
    assert "hf_" not in text


@pytest.mark.parametrize("address", ["http://[::1", "http://a b", "http://", "ftp://a", "x"])
def test_an_endpoint_that_is_none_is_one_line(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    assert refusal()


def test_a_home_of_nobody_is_an_empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "~nobody-of-that-name/x")
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: pytest.fail("asked"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "not in the local cache" in refusal()


@pytest.mark.parametrize(
    "name", ["~nobody-of-that-name/config.json", "a" * 5000, "a" * 300 + "/config.json", "a\x00b"]
)
def test_a_name_that_is_no_place_is_one_short_line(name: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(name)
    assert len(str(caught.value)) < 5000
    assert "\n" not in str(caught.value)
