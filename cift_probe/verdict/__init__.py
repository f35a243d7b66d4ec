"""The judge. Suites import this package and nothing else."""

from cift_probe.evidence import Reading
from cift_probe.verdict.compare import (
    agrees,
    all_of,
    any_of,
    at_least,
    at_most,
    disjoint,
    equals,
    is_empty,
    is_false,
    is_in,
    is_present,
    is_true,
    overlaps,
    same_major,
    unless_absent,
)
from cift_probe.verdict.declare import check
from cift_probe.verdict.finding import Finding, Outcome

__all__ = [
    "Finding",
    "Outcome",
    "Reading",
    "agrees",
    "all_of",
    "any_of",
    "at_least",
    "at_most",
    "check",
    "disjoint",
    "equals",
    "is_empty",
    "is_false",
    "is_in",
    "is_present",
    "is_true",
    "overlaps",
    "same_major",
    "unless_absent",
]
