"""A tape: what forward and backward allocate and release, in the order PyTorch does.

Operations are written down once per structure of a model, with sizes as names of dimensions
("tokens" x "hidden" x 2 bytes); `Program.measure` puts numbers in. Nothing is computed: only
which buffers live at which moment.

What it follows, all of torch 2.13:
- a node's saved tensors are released after its backward ran, the incoming gradient with them
  (torch/csrc/autograd/engine.cpp, evaluate_function);
- nodes run in the reverse order of their creation (same file, ready queue by sequence number);
- two gradients for one tensor are added in place where nobody else holds the first, else, and
  where it is a view, into a new one (torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace);
- checkpointing without re-entrance saves nothing in the first pass and stops the second one at
  its last saved tensor (torch/utils/checkpoint.py, _checkpoint_without_reentrant_generator).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import TypeAlias

Dims: TypeAlias = tuple[str, ...]
Key: TypeAlias = tuple[Dims, int]

HALF = 2  # bytes of bfloat16 and float16
FP32 = 4
KEPT = "inputs of int8 layers"
BLOCK_BYTES = 512  # c10/core/CachingDeviceAllocator: kMinBlockSize


class _EarlyStopError(Exception):
    """The second pass of a checkpoint has recomputed all that the backward needs."""


class Buffer:
    """One allocation: its size by name, what it is, and how many hold it."""

    __slots__ = ("born", "key", "part", "refs", "viewed")

    def __init__(self, key: int, part: int, born: int = -1) -> None:
        """Hold one reference; `born` is the event of its allocation.

        `viewed` says that the tensor at hand is a view, whose base holds the storage too.
        """
        self.viewed = False
        self.born = born
        self.key = key
        self.part = part
        self.refs = 1


class Value:
    """A tensor of the graph: its buffer, dimensions, bytes per element and gradient so far."""

    __slots__ = ("buffer", "dims", "grad", "item", "needs_grad")

    def __init__(self, buffer: Buffer, dims: Dims, item: int) -> None:
        """Start without a gradient."""
        self.buffer = buffer
        self.dims = dims
        self.item = item
        self.grad: Buffer | None = None
        self.needs_grad = True


Backward: TypeAlias = Callable[[Buffer], None]


class Node:
    """A step of the backward: the tensor whose gradient it takes, and what it saved."""

    __slots__ = ("backward", "inert", "output", "packs", "saved")

    def __init__(
        self, backward: Backward, saved: list[Buffer], *, packs: bool, inert: bool = False
    ) -> None:
        """`packs` says that something, if only a weight, is saved."""
        self.output: Value | None = None
        self.backward = backward
        self.saved = saved
        self.packs = packs
        self.inert = inert


class Tape:
    """The recorder; see the module's text."""

    def __init__(
        self,
        *,
        autocast: bool,
        compute: int = HALF,
        float16: bool = False,
        keep_gradients: bool = True,
    ) -> None:
        """Products are of `compute` bytes, `float16` says which 16 bits.

        `keep_gradients` False: the gradients exist already and are added to in place.
        """
        self.float16 = float16
        self.autocast = autocast
        self.compute = compute
        self.keep_gradients = keep_gradients
        self.part = "saved for backward"
        self.keys: dict[Key, int] = {}
        self.parts: dict[str, int] = {}
        self.events: list[tuple[int, int, int]] = []
        self.nodes: list[Node] = []
        self.saving = True
        self.casts: dict[str, Value] = {}
        self._pending: list[Node] | None = None
        self._given: list[tuple[Value, Buffer]] = []
        self._locals: dict[int, Value] = {}

    def alloc(self, dims: Dims, item: int, part: str = "") -> Buffer:
        """Allocate a buffer; the caller holds it."""
        key = self.keys.setdefault((dims, item), len(self.keys))
        kind = self.parts.setdefault(part or self.part, len(self.parts))
        self.events.append((key, 1, kind))
        return Buffer(key, kind, len(self.events) - 1)

    def relabel(self, buffer: Buffer, part: str) -> None:
        """Say that a buffer turned out to be something else, from its allocation on."""
        buffer.part = self.parts.setdefault(part, len(self.parts))
        self.events[buffer.born] = (buffer.key, 1, buffer.part)

    def release(self, buffer: Buffer) -> None:
        """Let go of one reference."""
        buffer.refs -= 1
        if buffer.refs == 0:
            self.events.append((buffer.key, -1, buffer.part))

    def pulse(self, *buffers: tuple[Dims, int]) -> None:
        """Allocate the workspaces of a kernel together and release them."""
        held = [self.alloc(dims, item, "temporaries") for dims, item in buffers]
        for buffer in held:
            self.release(buffer)

    def new(self, dims: Dims, item: int, part: str = "") -> Value:
        """Return a tensor that the running Python code holds."""
        value = Value(self.alloc(dims, item, part), dims, item)
        self._locals[id(value)] = value
        return value

    def adopt(self, value: Value) -> None:
        """Let the running Python code hold a view."""
        self._locals[id(value)] = value

    def drop(self, *values: Value) -> None:
        """Python lets go of local names, in this order; a tensor not local is left alone."""
        for value in values:
            if self._locals.pop(id(value), None) is not None:
                self.release(value.buffer)

    def keep(self, value: Value) -> None:
        """Let the graph itself hold a tensor that a node needs: to the end of the step.

        What a second pass makes goes with that pass.
        """
        value.buffer.refs += 1
        if self._pending is not None:
            held = Value(value.buffer, value.dims, value.item)
            self._locals[id(held)] = held
        else:
            self.relabel(value.buffer, KEPT)

    def names(self) -> frozenset[int]:
        """Return what the running Python code holds, for `leave`."""
        return frozenset(self._locals)

    def leave(self, outer: frozenset[int] = frozenset()) -> None:
        """Leave Python frames: let go of all local names but the outer ones."""
        self.drop(*[value for name, value in self._locals.items() if name not in outer])

    def node(
        self,
        backward: Backward,
        *saved: Value,
        packs: bool = False,
        of: tuple[Value, ...] = (),
    ) -> Node:
        """Record a step of the backward, before its kernel runs; may stop a second pass.

        `of` are the tensors it differentiates; where none needs a gradient, nothing is recorded.
        """
        if of and not any(value.needs_grad for value in of):
            return Node(backward, [], packs=False, inert=True)
        if self._pending is not None:
            return self._refill(saved, packs=packs)
        held = self._hold(saved) if self.saving else []
        node = Node(backward, held, packs=packs or bool(saved))
        self.nodes.append(node)
        return node

    def output(self, node: Node, value: Value, *, save: bool = False) -> Value:
        """Name a node's result; `save` keeps it for the backward, as activations do."""
        if node.inert:
            value.needs_grad = False
            return value
        if node.output is None:
            node.output = value
        if save and (self.saving or self._pending is not None):
            node.saved.extend(self._hold((value,)))
        return value

    def _hold(self, values: Iterable[Value]) -> list[Buffer]:
        held = [value.buffer for value in values]
        for buffer in held:
            buffer.refs += 1
        return held

    def _refill(self, saved: tuple[Value, ...], *, packs: bool) -> Node:
        pending = self._pending or []
        if not (packs or saved):
            return Node(_ignore, [], packs=False)
        node = pending.pop(0)
        node.saved = self._hold(saved)
        if not pending:
            raise _EarlyStopError
        return node

    def _recompute(self, nodes: list[Node], run: Callable[[], object]) -> None:
        """Run a checkpointed function again, filling the saved tensors of its nodes."""
        outer, self.part = self.part, "layer recomputed"
        casts, self.casts = self.casts, {}
        names, self._locals = self._locals, {}
        self._pending = [node for node in nodes if node.packs]
        with contextlib.suppress(_EarlyStopError):
            run()
        self.leave()
        self.casts, self._locals, self._pending, self.part = casts, names, None, outer

    def give(self, value: Value, gradient: Buffer) -> None:
        """Hand a gradient to the tensor it belongs to, once the running node is done."""
        self._given.append((value, gradient))

    def _accumulate(self, value: Value, gradient: Buffer) -> None:
        """Keep a gradient, or add it to what is there."""
        if not value.needs_grad:
            self.release(gradient)
        elif value.grad is None:
            value.grad = gradient
        elif value.grad.refs == 1 and not value.grad.viewed:
            self.release(gradient)
        else:
            total = self.alloc(value.dims, value.item)
            self.release(value.grad)
            self.release(gradient)
            value.grad = total

    def keep_gradient(self, gradient: Buffer, *, waits: bool = False) -> None:
        """Store a weight's gradient, or add it to the one of an earlier micro-batch.

        `waits`: another gradient of the same weight is still to come, and added first.
        """
        if not self.keep_gradients and not waits:
            self.release(gradient)

    def run_backward(
        self, holder: Buffer | None = None, again: Callable[[], object] | None = None
    ) -> None:
        """Run all recorded nodes.

        `again` recomputes a checkpointed layer, when the first node asks for what it saved;
        `holder`, the checkpoint's input, goes with the last one that does.
        """
        nodes, self.nodes = self.nodes, []
        self.part = "activation gradients"
        left = sum(node.packs for node in nodes)
        for node in reversed(nodes):
            if node.packs and again is not None:
                self._recompute(nodes, again)
                again = None
            self._run(node)
            left -= node.packs
            if left == 0 and holder is not None:
                self.release(holder)
                holder = None

    def _run(self, node: Node) -> None:
        gradient = node.output.grad if node.output is not None else None
        if gradient is not None and node.output is not None:
            node.output.grad = None
            node.backward(gradient)
            self.release(gradient)
        for buffer in node.saved:
            self.release(buffer)
        given, self._given = self._given, []
        for value, buffer in given:
            self._accumulate(value, buffer)


def _ignore(_gradient: Buffer) -> None:
    """Stand in for a step that the first pass has recorded already."""


class Program:
    """Frozen events of a tape, cheap to evaluate for many sizes."""

    def __init__(self, tape: Tape) -> None:
        """Take the events over."""
        self.keys = list(tape.keys)
        self.parts = list(tape.parts)
        self.steps = [2 * key + (sign < 0) for key, sign, _ in tape.events]
        self.kinds = [part for _, _, part in tape.events]
        self._remains: dict[str, list[tuple[int, int, int]]] = {}

    def changes(self, dims: Mapping[str, int]) -> list[int]:
        """Return the signed bytes of every event."""
        table = self.table(dims)
        return [table[step] for step in self.steps]

    def measure(
        self, table: list[int], sections: Mapping[str, tuple[int, int]]
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Return how far every section rises above its start, and what it leaves behind."""
        heights, nets = {}, {}
        changes = [table[step] for step in self.steps]
        for name, (start, end) in sections.items():
            running = list(accumulate(changes[start:end], initial=0))
            heights[name] = max(running)
            nets[name] = running[-1]
        return heights, nets

    def remains(
        self, section: str, sections: Mapping[str, tuple[int, int]]
    ) -> list[tuple[int, int, int]]:
        """Return what a section leaves behind: key, part and number of tensors."""
        if section not in self._remains:
            start, end = sections[section]
            counts: dict[tuple[int, int], int] = {}
            for step, part in zip(self.steps[start:end], self.kinds[start:end], strict=True):
                place = (step // 2, part)
                counts[place] = counts.get(place, 0) + (-1 if step % 2 else 1)
            self._remains[section] = [(k, p, n) for (k, p), n in counts.items() if n]
        return self._remains[section]

    def partly(self, table: list[int], section: tuple[int, int]) -> dict[str, int]:
        """Return the bytes of every part from a section's start to its highest moment."""
        start, end = section
        changes = [table[step] for step in self.steps[start:end]]
        running = list(accumulate(changes, initial=0))
        found = dict.fromkeys(self.parts, 0)
        names = self.parts
        top = running.index(max(running))
        for change, part in zip(changes[:top], self.kinds[start:end], strict=False):
            found[names[part]] += change
        return found

    def table(self, dims: Mapping[str, int]) -> list[int]:
        """Return the bytes of every kind of allocation, and their negatives, in turn."""
        table: list[int] = []
        for names, item in self.keys:
            size = item
            for name in names:
                size *= dims[name]
            size = -(-size // BLOCK_BYTES) * BLOCK_BYTES
            table += (size, -size)
        return table
