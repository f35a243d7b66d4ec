"""The config.json of a Hub id: from the Hub's local cache, or over the network."""

from __future__ import annotations

import http.client
import os
import time
import urllib.error
import urllib.request
from pathlib import Path

MAX_FILE_BYTES = 4 << 20
_TIMEOUT_S = 10.0  # of one wait for the network
_PATIENCE_S = 30.0  # of the whole answer: a server that drips must not hold the command
_CHUNK_BYTES = 1 << 16


class HubError(Exception):
    """A model that the Hub did not give; one line that says what to change."""


def find_cached(name: str) -> Path | None:
    """Return the config.json in the Hub's own cache, the newest snapshot; None without one."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    try:
        place = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
        folder = place / f"models--{name.replace('/', '--')}" / "snapshots"
        found = sorted(folder.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    except (OSError, RuntimeError):  # RuntimeError: the home folder of a user that is none
        return None
    return found[-1] if found else None


def download(name: str) -> bytes:
    """Return the bytes of a model's config.json from the Hub; raises HubError."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        message = f"{name}: is not in the local cache, and HF_HUB_OFFLINE forbids the network"
        raise HubError(message)
    base = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    if not base.startswith(("https://", "http://")):
        message = f"HF_ENDPOINT = {base[:80]!r} is no http address"
        raise HubError(message)
    try:
        request = _request(f"{base}/{name}/resolve/main/config.json")
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - the scheme was checked above
            return _read(answer, name)
    except urllib.error.HTTPError as error:
        hint = "; a gated model needs HF_TOKEN" if error.code in {401, 403} else ""
        message = f"{name}: the Hub answered {error.code} {error.reason}{hint}"
        raise HubError(message) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = " ".join(str(getattr(error, "reason", error)).split()) or type(error).__name__
        message = f"{name}: the Hub cannot be reached ({reason[:120]}); name a local config.json"
        raise HubError(message) from error


def _request(address: str) -> urllib.request.Request:
    """Return the request; the token is for this host alone and never part of a message."""
    request = urllib.request.Request(address)  # noqa: S310 - the scheme was checked by the caller
    token = os.environ.get("HF_TOKEN", "").strip()
    if not token:
        return request
    if not token.isascii() or not token.isprintable():
        message = "HF_TOKEN holds characters that no token has; set it anew"
        raise HubError(message)
    # what is added unredirected does not follow the Hub's answer to another host
    request.add_unredirected_header("Authorization", f"Bearer {token}")
    return request


def _read(answer: http.client.HTTPResponse, name: str) -> bytes:
    parts: list[bytes] = []
    size, until = 0, time.monotonic() + _PATIENCE_S
    while part := answer.read1(_CHUNK_BYTES):
        parts.append(part)
        size += len(part)
        if size > MAX_FILE_BYTES:
            message = f"{name}: the Hub's answer is above 4 MiB, and no config.json"
            raise HubError(message)
        if time.monotonic() > until:
            message = (
                f"{name}: the Hub took more than {_PATIENCE_S:.0f} s; name a local config.json"
            )
            raise HubError(message)
    return b"".join(parts)
