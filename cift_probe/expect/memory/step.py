"""One training step as sections of a tape: embedding, layers, head, and back again.

Every kind of decoder layer is written once; `Step.walk` repeats its section as often as the model
has such layers, adds what stays behind, and keeps the highest moment of every instant.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from itertools import groupby
from typing import NamedTuple

from cift_probe.expect.memory.head import Head
from cift_probe.expect.memory.layers import HIDDEN, Forward, Layer, Regime
from cift_probe.expect.memory.operations import Weight
from cift_probe.expect.memory.tape import FP32, KEPT, Buffer, Node, Program, Tape, Value

FIRST = -1
EMBEDDING = "embedding"
FORWARD = "forward of the layers"
LOSS = "loss"
LOSS_BACKWARD = "backward of the loss"
LAST_BACKWARD = "backward of the last layer"
BACKWARD = "backward of the layers"
EMBEDDING_BACKWARD = "backward of the embedding"


class Structure(NamedTuple):
    """All that decides which tensors live when, but not how large they are."""

    kinds: tuple[Layer, ...]
    regime: Regime
    hidden_item: int
    loss: str
    tied: bool
    checkpointing: bool
    head_item: int
    softcap: bool = False
    logit_scale: bool = False
    embedding_scale: str = ""
    keep_gradients: bool = True
    first: int = 0


class Step:
    """The compiled sections of a structure."""

    def __init__(self, structure: Structure) -> None:
        """Write all sections once."""
        self.structure = structure
        self.sections: dict[str, tuple[int, int]] = {}
        regime = structure.regime
        tape = Tape(
            autocast=regime.autocast,
            compute=regime.compute,
            float16=regime.float16,
            keep_gradients=structure.keep_gradients,
        )
        self._tape = tape
        self._layers: dict[int, tuple[Forward, Value, list[Node], Buffer | None]] = {}
        self._casts: dict[int, list[Value]] = {}
        x = self._embed()
        first = x
        self.first_differs = not x.needs_grad
        if self.first_differs:
            # nothing before its first trained weight is recorded in the first layer
            x = self._layer(FIRST, Forward(tape, structure.kinds[structure.first], regime), x)
            x.needs_grad = True
        for index, layer in enumerate(structure.kinds):
            x = self._layer(index, Forward(tape, layer, regime), x)
        self._head(Forward(tape, structure.kinds[-1], regime), x)
        self._back(first)
        self.program = Program(tape)

    def _section(self, name: str, start: int) -> None:
        self.sections[name] = start, len(self._tape.events)

    def _embed(self) -> Value:
        tape, structure = self._tape, self.structure
        tape.part = "saved for backward"
        x = tape.new(HIDDEN, structure.hidden_item)
        if structure.embedding_scale:
            scaled = tape.new(HIDDEN, structure.hidden_item)
            if structure.embedding_scale == "dropout":
                tape.alloc(HIDDEN, 1)  # its mask, for the backward
            if structure.embedding_scale == "inside" or structure.regime.trained:
                tape.drop(x)
            x = scaled  # and the unscaled one stays: enable_input_require_grads makes it a leaf
        x.needs_grad = structure.regime.trained or structure.checkpointing
        self._section(EMBEDDING, 0)
        return x

    def _layer(self, index: int, forward: Forward, x: Value) -> Value:
        tape = self._tape
        start = len(tape.events)
        holder = None
        if self.structure.checkpointing:
            tape.saving, tape.part = False, "temporaries"
            holder = x.buffer
            holder.refs += 1
        out = forward.run(x)
        if self.structure.checkpointing:
            tape.saving, tape.part = True, "saved for backward"
            tape.relabel(out.buffer, "saved for backward")
        tape.drop(x)
        nodes, tape.nodes = tape.nodes, []
        self._layers[index] = forward, x, nodes, holder
        self._casts[index] = list(tape.casts.values())
        tape.casts = {}
        self._section(f"forward {index}", start)
        return out

    def _head(self, forward: Forward, x: Value) -> None:
        structure, tape = self.structure, self._tape
        start = len(tape.events)
        trained = structure.regime.trained
        weight = Weight(
            "head", "vocabulary", "hidden", structure.head_item, trained, tied=structure.tied
        )
        tape.part = "logits and loss"
        head = Head(forward, weight, structure.loss, softcap=structure.softcap)
        head.run(x, scaled=structure.logit_scale)
        self._section(LOSS, start)
        for index, casts in self._casts.items():
            # the end of autocast's context drops its copies; what a node saved stays
            start = len(tape.events)
            tape.drop(*casts)
            self._section(f"uncache {index}", start)

    def _back(self, first: Value) -> None:
        tape, structure = self._tape, self.structure
        start = len(tape.events)
        tape.run_backward()
        self._section(LOSS_BACKWARD, start)
        for index in reversed(self._layers):
            forward, x, nodes, holder = self._layers[index]
            start = len(tape.events)
            tape.nodes = nodes
            again = partial(forward.run, x) if structure.checkpointing else None
            tape.run_backward(holder, again)
            self._section(f"backward {index}", start)
        start = len(tape.events)
        if first.grad is not None:
            self._embedding_backward(first.grad)
        self._section(EMBEDDING_BACKWARD, start)

    def _embedding_backward(self, gradient: Buffer) -> None:
        """Give the embedding a dense gradient; tied with the head's, the two are added.

        The workspace is that of embedding_dense_backward_cuda with sorted indices
        (torch/aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu), used above 3,072 tokens.
        """
        tape = self._tape
        if self.structure.regime.trained:
            item = self.structure.regime.norm_item
            table = tape.alloc(("vocabulary", "hidden"), item, "gradients")
            tape.pulse((("sorted_tokens", "hidden"), FP32), (("sorted_tokens",), 48))
            regime = self.structure.regime
            copied = regime.autocast and regime.norm_item != regime.compute
            if self.structure.tied and (copied or self.structure.loss == "fused"):
                tape.release(table)  # added to the head's in place: that one is no view
                table = Buffer(table.key, table.part)
            elif self.structure.tied:
                total = tape.alloc(("vocabulary", "hidden"), item, "gradients")
                tape.release(table)
                tape.release(Buffer(table.key, table.part))
                table = total
            if not self.structure.keep_gradients:
                tape.release(table)
        tape.release(gradient)

    def walk(self, dims: Mapping[str, int], order: tuple[int, ...], base: int) -> Walk:
        """Return the highest bytes of every instant of a model.

        `order` names the kind of every layer, `base` is what lives between steps. Layers of one
        kind that follow each other are visited together: their bytes rise or fall evenly, so that
        the first or the last of them is the highest.
        """
        table = self.program.table(dims)
        heights, nets = self.program.measure(table, self.sections)
        if self.first_differs:
            order = (FIRST, *order[1:])
        walk = Walk(self, table, _stops(order))
        current = base
        for index, (instant, section, count) in enumerate(walk.stops):
            net, height = nets[section], heights[section]
            repeats = count - 1 if net > 0 else 0
            walk.note(instant, current + repeats * net + height, index, repeats)
            current += count * net
        return walk


def _stops(order: tuple[int, ...]) -> list[tuple[str, str, int]]:
    """Return instant, section and number of repetitions, in the order of a step."""
    runs = [(kind, len(list(group))) for kind, group in groupby(order)]
    stops = [(EMBEDDING, EMBEDDING, 1)]
    stops += [(FORWARD, f"forward {kind}", count) for kind, count in runs]
    stops.append((LOSS, LOSS, 1))
    stops += [(LOSS, f"uncache {kind}", count) for kind, count in runs]
    stops.append((LOSS_BACKWARD, LOSS_BACKWARD, 1))
    kind, count = runs[-1]
    stops.append((LAST_BACKWARD, f"backward {kind}", 1))
    if count > 1:
        stops.append((BACKWARD, f"backward {kind}", count - 1))
    stops += [(BACKWARD, f"backward {kind}", count) for kind, count in reversed(runs[:-1])]
    stops.append((EMBEDDING_BACKWARD, EMBEDDING_BACKWARD, 1))
    return stops


class Walk:
    """The instants of one model's step, in bytes."""

    def __init__(self, step: Step, table: list[int], stops: list[tuple[str, str, int]]) -> None:
        """Visit `stops` of `step` with the sizes of `table`."""
        self.stops = stops
        self.peaks: dict[str, int] = {}
        self._step = step
        self._table = table
        self._places: dict[str, tuple[int, int]] = {}

    def note(self, instant: str, height: int, index: int, repeats: int) -> None:
        """Keep the highest moment of an instant and where it was."""
        if height > self.peaks.get(instant, -1):
            self.peaks[instant] = height
            self._places[instant] = index, repeats

    @property
    def largest(self) -> int:
        """The largest single allocation in bytes."""
        return max(self._table)

    @property
    def kept(self) -> int:
        """Bytes that nothing but the end of the graph lets go of."""
        program, found = self._step.program, 0
        for _, section, count in self.stops:
            for key, part, number in program.remains(section, self._step.sections):
                if program.parts[part] == KEPT:
                    found += count * number * self._table[2 * key]
        return found

    def parts(self, instant: str) -> dict[str, int]:
        """Return the bytes of every part at an instant's peak."""
        index, repeats = self._places[instant]
        visited = [(section, count) for _, section, count in self.stops[:index]]
        last = self.stops[index][1]
        program, sections = self._step.program, self._step.sections
        found = program.partly(self._table, sections[last])
        for section, count in (*visited, (last, repeats)):
            for key, part, number in program.remains(section, sections):
                found[program.parts[part]] += count * number * self._table[2 * key]
        return found


@cache
def compile_step(structure: Structure) -> Step:
    """Return the sections of a structure; kept, because plans differ mostly in sizes."""
    return Step(structure)
