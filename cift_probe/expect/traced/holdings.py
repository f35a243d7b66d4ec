"""What is allocated at the peak: by component, and tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cift_probe.expect.traced.allocator import CachingAllocator, Event

LOADING = "loading"
_COMPONENTS = {
    LOADING: "weights",
    "between steps": "adapters and casts",
    "embedding": "saved for backward",
    "forward of the layers": "saved for backward",
    "loss": "logits and loss",
    "prefill": "logits",
    "decode": "logits",
    "backward of the loss": "logits and loss",
    "backward of the last layer": "backward of a layer",
    "backward of the layers": "backward of a layer",
    "backward of the embedding": "backward of the embedding",
    "clipping": "clipping",
    "optimizer": "optimizer state",
    "end of the step": "optimizer state",
}
_BACKWARD = "backward of"
_WORKSPACE = "cuBLAS workspace"


def live_at_peak(events: Iterable[Event]) -> tuple[str, dict[int, int]]:
    """Return the instant of the peak after loading, and {id: bytes} of what is live then.

    Bytes are those of the allocator's blocks, so that they sum to the peak.
    """
    room = CachingAllocator()
    live: dict[int, int] = {}
    peak = 0
    held: dict[int, int] = {}
    instant, in_peak = "", False
    for event in events:
        if event[0] == "a":
            live[event[1]] = room.allocate(event[1], event[2])  # type: ignore[arg-type, index, misc]  # by its kind
            if room.allocated > peak:
                peak, in_peak = room.allocated, True
                held = {}
            continue
        if in_peak and not held:
            held = dict(live)
        if event[0] == "f":
            room.release(event[1])  # type: ignore[arg-type, misc]  # as above
            del live[event[1]]  # type: ignore[arg-type, misc]  # as above
        elif event[0] == "m" and in_peak:
            instant, in_peak = str(event[1]), False  # type: ignore[misc]  # as above
        elif event[0] == "r":
            room.empty_cache()
            peak, held, in_peak = room.allocated, {}, False
    return instant, held or live


def components(
    events: Iterable[Event], operations: Mapping[int, str], held: Mapping[int, int]
) -> dict[str, int]:
    """Return {component: bytes} of what is held at the peak, largest first.

    A tensor belongs to the instant that made it; what the backward pass made and the optimizer
    still found is a gradient. `operations` name what made each id.
    """
    made_in, freed_in = _instants(events)
    sums: dict[str, int] = {}
    for name, num_bytes in held.items():
        instant = made_in.get(name, "")
        component = _COMPONENTS.get(instant, instant)
        if operations[name].startswith(_WORKSPACE):
            component = _WORKSPACE
        elif instant == LOADING and "quantize" in operations[name]:
            component = "quantised weights and their constants"
        elif instant.startswith(_BACKWARD) and not freed_in.get(name, "").startswith(_BACKWARD):
            component = "gradients"
        sums[component] = sums.get(component, 0) + num_bytes
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _instants(events: Iterable[Event]) -> tuple[dict[int, str], dict[int, str]]:
    """Return in which instant each id was allocated, and in which it was released."""
    made_in: dict[int, str] = {}
    freed_in: dict[int, str] = {}
    made: list[int] = []
    freed: list[int] = []
    for event in events:
        if event[0] == "a":
            made.append(event[1])  # type: ignore[arg-type, misc]  # by its kind
        elif event[0] == "f":
            freed.append(event[1])  # type: ignore[arg-type, misc]  # as above
        else:
            ended = LOADING if event[0] == "r" else str(event[1])  # type: ignore[misc]  # as above
            made_in.update(dict.fromkeys(made, ended))
            freed_in.update(dict.fromkeys(freed, ended))
            made, freed = [], []
    return made_in, freed_in
