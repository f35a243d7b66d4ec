"""Kinds of several GPUs and their links, and of a device's health."""

from __future__ import annotations

import re
from collections.abc import Mapping
from statistics import median
from typing import Any

from cift_probe.compat.case import Case, Judgement

_CLOSENESS = ("NVLINK", "PIX", "PXB", "PHB", "NODE", "SYS")  # nvidia-smi topo -m, best first
_BAD_SHARE = 0.7  # of the neighbours' bandwidth
_OK = frozenset({"ok", "pass", "passed", "success", "true", "completed"})
_HOT = re.compile(r"therm", re.IGNORECASE)
_CLOCK_SHARE = 0.9  # of the clock that a cool device sustains


def launcher_rule(case: Case) -> Judgement | None:
    """Hold what a launcher decides by product name against peer access itself."""
    peer = case.flag("peer", "peer_access", "can_access_peer", "p2p_ok")
    if peer is None or not case.has("gpus", "gpu", "names", "launcher", "launcher_disables_p2p"):
        return None
    disables = case.flag(
        "launcher_disables_p2p", "disables_p2p", "launcher_disables", "p2p_disabled"
    )
    if peer:
        reason = "peer access is good: keep it, whatever the name"
        return Judgement("p2p_name_rule", "warn" if disables else "pass", reason)
    if disables is False:
        return Judgement(
            "p2p_name_rule", "warn", "no peer access, and the launcher keeps peer-to-peer on"
        )
    return Judgement("p2p_name_rule", "pass", "no peer access: going without it is right")


def collective(case: Case) -> Judgement | None:
    """Read a collective with a time-out, with the peer-to-peer path and without it."""
    on, off = (
        case.get("p2p_on", "with_p2p", "p2p_enabled_result"),
        case.get("p2p_off", "without_p2p", "p2p_disabled_result"),
    )
    if on is None:
        return None
    if str(on).lower() in _OK:
        return Judgement("p2p_unusable", "pass", "the collective runs over peer-to-peer")
    if off is None:
        return Judgement(
            "p2p_unusable", "unknown", f"with peer-to-peer: {on}; without it nothing was tried"
        )
    if str(off).lower() in _OK:
        return Judgement("p2p_unusable", "fail", f"with peer-to-peer: {on}; without it: {off}")
    return Judgement("p2p_unusable", "unknown", f"the collective fails either way ({on}, {off})")


def checksum(case: Case) -> Judgement | None:
    """Compare what was sent with what was received; bandwidth proves nothing."""
    sent, received = (
        case.get("sent", "source", "checksum_sent"),
        case.get("received", "destination", "checksum_received"),
    )
    if sent is None or received is None:
        same = case.flag("checksum_ok", "data_ok", "checksums_match")
        wrong = case.number("mismatches", "num_mismatches", "wrong_elements")
        same = wrong == 0 if same is None and wrong is not None else same
        if same is None:
            return None
    else:
        same = sent == received
    text = "as it was sent" if same else "changed"
    return Judgement("p2p_corrupt", "pass" if same else "fail", f"peer copies arrive {text}")


def links(case: Case) -> Judgement | None:
    """Tell a path that is slower than its neighbours, or than the topology suggests."""
    pairs = case.get("pairs", "links", "devices", "bandwidths", "per_device_gbps")
    if isinstance(pairs, list):
        pairs = {str(index): row for index, row in enumerate(pairs)}
    if not isinstance(pairs, Mapping):
        return _one_link(case)
    rates = {str(name): (_topology(row), _rate(row)) for name, row in pairs.items()}
    known = {name: (topology, rate) for name, (topology, rate) in rates.items() if rate is not None}
    if len(known) < 2:  # noqa: PLR2004 - one has no neighbour
        return None
    for name, (topology, rate) in known.items():
        for other, (place, faster) in known.items():
            nearer = topology is not None and place is not None and topology <= place
            if nearer and rate < _BAD_SHARE * faster:
                reason = f"{name} moves {rate:g} GB/s, {other}, no nearer, {faster:g}"
                return Judgement("pcie_link_slow", "warn", reason)
    middle = median(rate for _, rate in known.values())
    slow = [
        name
        for name, (place, rate) in known.items()
        if place is None and rate < _BAD_SHARE * middle
    ]
    if slow:
        return Judgement("pcie_link_slow", "warn", f"{slow[0]} is slower than its neighbours")
    return Judgement("pcie_link_slow", "pass", "no path is slower than it should be")


def _topology(row: Any) -> int | None:
    name = (
        str(row.get("topo") or row.get("topology") or "").upper()
        if isinstance(row, Mapping)
        else ""
    )
    name = "NVLINK" if name.startswith("NV") else name
    return _CLOSENESS.index(name) if name in _CLOSENESS else None


def _rate(row: Any) -> float | None:
    if isinstance(row, Mapping):
        row = next(
            (
                row[key]
                for key in ("gbps", "gb_s", "bandwidth", "gbs", "rate", "h2d_gbps", "d2h_gbps")
                if key in row
            ),
            None,
        )
    return float(row) if isinstance(row, int | float) and not isinstance(row, bool) else None


def _one_link(case: Case) -> Judgement | None:
    """Hold a link under load against what device and slot can do; an idle one proves nothing."""
    now, most = (
        case.number("link_gen", "gen_current", "pcie_gen", "gen"),
        case.number("link_gen_max", "gen_max", "pcie_gen_max"),
    )
    width, widest = (
        case.number("link_width", "width_current", "pcie_width", "width"),
        case.number("link_width_max", "width_max", "pcie_width_max"),
    )
    loaded = case.flag("under_load", "loaded", "during_copy")
    if loaded is None and case.flag("idle"):
        loaded = False
    if (now is None or most is None) and (width is None or widest is None):
        return None
    narrow = width is not None and widest is not None and width < widest
    slow = now is not None and most is not None and now < most
    if (slow or narrow) and loaded is not True and not narrow:
        return Judgement(
            "pcie_link_slow",
            "unknown" if loaded is None else "pass",
            "an idle link lowers its generation",
        )
    reason = f"generation {now} of {most}, width {width} of {widest}"
    return Judgement("pcie_link_slow", "warn" if slow or narrow else "pass", reason)


def memory_errors(case: Case) -> Judgement | None:
    """Count uncorrectable errors, and row remaps that are pending or failed."""
    count = case.number(
        "volatile_uncorrected",
        "ecc_uncorrected",
        "uncorrectable",
        "volatile_uncorrectable",
        "ecc_volatile_uncorrected",
        "uncorrected",
    )
    pending, failed = (
        case.flag("remap_pending", "row_remap_pending", "pending"),
        case.flag("remap_failed", "row_remap_failed", "remap_failure", "failure"),
    )
    if count is None and pending is None and failed is None:
        raw = case.get("ecc", "ecc_mode", "volatile_uncorrected", "ecc_uncorrected")
        if raw is None:
            return None
        if isinstance(raw, str) and re.search(r"n/?a|not supported", raw, re.IGNORECASE):
            return Judgement("ecc_uncorrectable", "not_applicable", "the device has no ECC")
        return None
    if count or failed:
        return Judgement(
            "ecc_uncorrectable",
            "fail",
            f"{count or 0:g} uncorrectable errors" + (", a row remap failed" if failed else ""),
        )
    if pending:
        return Judgement("ecc_uncorrectable", "fail", "a row remap is pending: reset the device")
    return Judgement("ecc_uncorrectable", "pass", "no uncorrectable memory errors")


def heat(case: Case) -> Judgement | None:
    """Hold the sustained clock and the active throttle reasons against a cool device."""
    now = case.number(
        "sustained_mhz",
        "sustained_clock_mhz",
        "clock_mhz",
        "sm_clock_mhz",
        "sustained_clock",
        "clock_after_mhz",
    )
    most = case.number(
        "max_mhz",
        "max_clock_mhz",
        "boost_mhz",
        "initial_mhz",
        "start_clock_mhz",
        "clock_before_mhz",
        "base_mhz",
    )
    reasons = case.get(
        "throttle_reasons",
        "reasons",
        "active_reasons",
        "clocks_throttle_reasons",
        "throttle_reason",
    )
    told = reasons if isinstance(reasons, list | tuple) else [reasons]
    active = [str(r) for r in told if r is not None]
    if isinstance(reasons, Mapping):
        active = [
            str(name) for name, on in reasons.items() if str(on).lower() in {"active", "true", "1"}
        ]
    hot = any(_HOT.search(item) and "not" not in item.lower() for item in active)
    if case.flag("hw_thermal_slowdown", "sw_thermal_slowdown", "thermal_slowdown"):
        return Judgement("thermal_throttle", "warn", "a thermal slowdown is active")
    if now is None and reasons is None:
        return None
    slow = now is not None and most is not None and now < _CLOCK_SHARE * most
    if hot:
        return Judgement(
            "thermal_throttle",
            "fail" if slow and now is not None and most and now < most / 2 else "warn",
            f"throttled for heat: {', '.join(active)}",
        )
    if slow and reasons is None:
        hottest = case.number("temperature", "temp", "temp_c", "temperature_c")
        limit = (
            case.number("slowdown_c", "slowdown_temp", "temp_limit", "slowdown_temperature") or 83.0
        )
        if hottest is not None and hottest >= limit - 3:
            return Judgement(
                "thermal_throttle", "warn", f"{now:g} of {most:g} MHz at {hottest:g} C"
            )
        return Judgement("thermal_throttle", "unknown", "the clock fell, and no reason is told")
    return Judgement("thermal_throttle", "pass", "no throttling for heat")


_XIDS = {
    79: "gpu_fell_off_bus",
    48: "ecc_uncorrectable",
    94: "ecc_uncorrectable",
    95: "ecc_uncorrectable",
    64: "ecc_uncorrectable",
}


def xid(case: Case) -> Judgement | None:
    """Read a number of the driver's own error list (docs.nvidia.com/deploy/xid-errors)."""
    number = case.number("xid", "xid_code", "Xid")
    several = case.get("xids")
    if number is None and isinstance(several, list):
        number = next((float(n) for n in several if isinstance(n, int) and n in _XIDS), None)
    if number is None or int(number) not in _XIDS:
        return None
    return Judgement(_XIDS[int(number)], "fail", f"Xid {int(number)}")


JUDGES = (xid, checksum, collective, launcher_rule, links, memory_errors, heat)
