"""A report that may be shown around: without serials, UUIDs, host, user and home-folder names.

What was equal stays equal (one serial gets one stand-in everywhere), so that a redacted report
is judged like the original. PCI bus ids stay: they name a slot, not a machine or a person.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from cift_probe.evidence import Evidence, Known
from cift_probe.report.canonical import storable
from cift_probe.report.schema import Report
from cift_probe.report.writer import signed

GONE = "redacted"
_UUID = re.compile(
    r"(?<![0-9a-f])[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?![0-9a-f])", re.IGNORECASE
)
# nvidia-smi and CUDA_VISIBLE_DEVICES take the beginning of a UUID for the whole
_SHORT_UUID = re.compile(r"\b(GPU|MIG|DLA)-[0-9a-f]{4,}[0-9a-f-]*(?![\w-])", re.IGNORECASE)
_HOME = re.compile(
    r"(?:[A-Z]:)?[/\\]+(?:home|users|homes|Documents and Settings)[/\\]+([^/\\\s:;,'\"<>|]+)",
    re.IGNORECASE,
)
_ROOT_HOME = re.compile(r"(?<![\w.~/-])/root(?![\w.-])")
_SERIAL_NAMES = ("serial", "serial_number", "board_serial", "asset_tag")
_ID_NAMES = ("uuid", "machine_id")
_HOST_NAMES = ("hostname", "fqdn", "nodename")
_HOST_KEYS = ("host.name", "host.node")
_USER_NAMES = ("user", "username", "login")
# names of accounts, machines and folders that say nothing of anybody
_COMMON = (
    *("", "root", "user", "users", "ubuntu", "admin", "runner", "jovyan", "localhost", "public"),
    *("cache", "cift", "data", "shared", "test", "work"),
)
# a word shorter than this stands in too many texts by chance; its own field is emptied all the same
_SHORTEST_WORD = 3
_SHORTEST_SERIAL = 5
# fields whose text is the suite's own, or a name that others point to
_OURS = (
    *("schema_version", "digest", "name", "version", "outcome", "relation", "check", "family"),
    *("severity", "domain", "executed", "verdict", "tier", "is", "unit", "case", "blocked_by"),
    *("requirement", "why", "fix", "plan", "device", "failed", "undecided", "advice"),
)


class Names(msgspec.Struct, frozen=True):
    """Names to leave out, of the machine where a report was made or is redacted."""

    hosts: tuple[str, ...] = ()
    users: tuple[str, ...] = ()


def read_names() -> Names:
    """Return host and user name of this machine, since many reports are redacted at home."""
    users = (os.environ.get("USER", ""), os.environ.get("LOGNAME", ""))
    return Names((socket.gethostname(),), users)


def redact(report: Report, names: Names | None = None) -> Report:
    """Return the report without what identifies a machine, a device or a person; with its digest.

    Found by evidence key (`device.serial`, `host.name`), by shape (UUIDs, home folders) and, as
    whole words, in every other text. `names` are left out as well; those of this machine when
    it is None. Redacting twice changes nothing.
    """
    stand_ins = _StandIns(report, read_names() if names is None else names)
    return signed(msgspec.convert(_document(storable(report), stand_ins), Report))


class _StandIns:
    """Which text stands in for which, in the order of first appearance."""

    def __init__(self, report: Report, names: Names) -> None:
        self._uuids: dict[str, str] = {}
        self._words: dict[str, str] = {}
        for entries in (report.machine, report.software, *report.evidence.values()):
            for key, evidence in entries.items():
                self._learn(key, evidence)
        for host in names.hosts:
            self._add_host(host)
        users = [match[1] for text in _texts(storable(report)) for match in _HOME.finditer(text)]
        for user in (*names.users, *users):
            self._add(user, f"user-{GONE}", _SHORTEST_WORD)
        self._pattern = _words_pattern(self._words)

    def shapes(self, text: str) -> str:
        """Replace what is known by its shape."""
        text = _UUID.sub(lambda match: self._uuid(match[0]), text)
        text = _SHORT_UUID.sub(lambda match: f"{match[1]}-{GONE}", text)
        return _ROOT_HOME.sub("~", _HOME.sub("~", text))

    def everything(self, text: str) -> str:
        """Replace shapes, and known names as whole words."""
        text = self.shapes(text)
        if self._pattern is not None:
            text = self._pattern.sub(lambda match: self._words[match[0].lower()], text)
        return text

    def own_field(self, key: str, text: str) -> str:
        """Return what stands in a field that is an identity by its key, however short it was."""
        told = self.everything(text)
        return told if told != text or GONE in text else f"{_kind(key)}-{GONE}"

    def _learn(self, key: str, evidence: Evidence) -> None:
        kind = _kind(key)
        if not kind or not isinstance(evidence, Known) or evidence.absent:
            return
        text = str(evidence.value)
        uuid = _UUID.search(text)
        if kind == "host":
            self._add_host(text)
        elif kind == "user":
            self._add(text, f"user-{GONE}", _SHORTEST_WORD)
        elif uuid is not None:
            self._uuid(uuid[0])
        else:
            number = sum(word.startswith(f"{kind}-") for word in self._words.values()) + 1
            self._add(text, f"{kind}-{number}-{GONE}", _SHORTEST_SERIAL)

    def _add_host(self, name: str) -> None:
        # "node17.cluster.example" is also written "node17"
        for form in (name, name.partition(".")[0]):
            self._add(form, f"host-{GONE}", _SHORTEST_WORD)

    def _add(self, word: str, stand_in: str, shortest: int) -> None:
        known = word.lower() in self._words or word.lower() in _COMMON or GONE in word
        if not known and len(word) >= shortest:
            self._words[word.lower()] = stand_in

    def _uuid(self, text: str) -> str:
        plain = text.lower()
        if plain not in self._uuids:
            self._uuids[plain] = f"uuid-{len(self._uuids) + 1}-{GONE}"
            self._words.setdefault(plain.replace("-", ""), self._uuids[plain])
        return self._uuids[plain]


def _kind(key: str) -> str:
    """Return what an evidence key identifies: serial, id, host, user or nothing."""
    name = key.partition("[")[0]
    last = name.rpartition(".")[2]
    if last in _SERIAL_NAMES:
        return "serial"
    if last in _ID_NAMES:
        return "id"
    if last in _HOST_NAMES or name in _HOST_KEYS:
        return "host"
    return "user" if last in _USER_NAMES else ""


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for item in content:
            yield from _texts(item)
    elif isinstance(content, dict):
        yield from _texts(list(content))
        yield from _texts(list(content.values()))


def _words_pattern(words: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted(words, key=len, reverse=True)
    options = "|".join(re.escape(word) for word in longest_first)
    whole = rf"(?<![A-Za-z0-9])(?:{options})(?![A-Za-z0-9])"
    return re.compile(whole, re.IGNORECASE) if options else None


def _document(document: Mapping[str, Any], names: _StandIns) -> dict[str, Any]:
    """Return a report's document without names; evidence keys keep everything but shapes."""
    named = ("machine", "software", "evidence", "findings", "plans")
    rest = {key: item for key, item in document.items() if key not in named}
    return {
        **_walk(rest, names),
        "machine": _ledger(document["machine"], names),
        "software": _ledger(document["software"], names),
        "plans": [_plan(plan, names) for plan in document["plans"]],
        "evidence": {key: _ledger(item, names) for key, item in document["evidence"].items()},
        "findings": [_finding(finding, names) for finding in document["findings"]],
    }


def _plan(plan: dict[str, Any], names: _StandIns) -> dict[str, Any]:
    # answers and cases point to a plan by its name
    own = {"name": names.shapes(plan["name"])} if isinstance(plan.get("name"), str) else {}
    return {**{key: _value(item, names) for key, item in plan.items()}, **own}


def _finding(finding: dict[str, Any], names: _StandIns) -> dict[str, Any]:
    keys = [names.shapes(key) for key in finding.get("evidence", [])]
    sides = {
        side: _evidence(finding[side], names)
        for side in ("found", "limit")
        if finding.get(side) is not None
    }
    return {**_walk(finding, names), **sides, "evidence": keys}


def _ledger(entries: dict[str, Any], names: _StandIns) -> dict[str, Any]:
    return {names.shapes(key): _entry(key, item, names) for key, item in entries.items()}


def _entry(key: str, evidence: dict[str, Any], names: _StandIns) -> dict[str, Any]:
    walked = _evidence(evidence, names)
    if _kind(key) and evidence.get("value") is not None:
        walked["value"] = names.own_field(key, str(evidence["value"]))
    return walked


def _evidence(evidence: dict[str, Any], names: _StandIns) -> dict[str, Any]:
    walked: dict[str, Any] = _walk(evidence, names)
    if "value" in evidence:
        walked["value"] = _value(evidence["value"], names)
    return walked


def _walk(content: Any, names: _StandIns, field: str = "") -> Any:
    """Return the document's own structure without names."""
    if isinstance(content, str):
        return names.shapes(content) if field in _OURS else names.everything(content)
    if isinstance(content, list):
        return [_walk(item, names, field) for item in content]
    if isinstance(content, dict):
        return {
            names.shapes(key): _walk(item, names, field if field in _OURS else key)
            for key, item in content.items()
        }
    return content


def _value(content: Any, names: _StandIns) -> Any:
    """Return a value that the machine told without names, whatever its fields are called."""
    if isinstance(content, str):
        return names.everything(content)
    if isinstance(content, int) and not isinstance(content, bool):
        told = names.everything(str(content))
        return content if told == str(content) else told
    if isinstance(content, list):
        return [_value(item, names) for item in content]
    if isinstance(content, dict):
        return {names.everything(key): _value(item, names) for key, item in content.items()}
    return content
