"""The instants of a training step: where one ends and the next begins.

The peak of a step is a maximum over instants that grow differently with depth, so each is
recorded apart. Marks are set by forward hooks and by hooks on tensors' gradients, which keep
nothing alive that autograd would not keep, unlike full backward hooks on modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Marks:
    """Calls `note(instant)` at the end of each instant of each step.

    The names are the same for every trainer and loop. Where nothing before the layers learns and
    nothing is checkpointed, no gradient reaches the first layer's input, and "backward of the
    layers" is not told apart from what follows it. The backward pass of all layers but the last is
    one instant: its maximum lies at one of its ends, and the end at the last layer is an instant
    of its own.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        """Tell the ends of instants to `note`."""
        self._note = note
        self._forward = False

    def mark(self, instant: str) -> None:
        """End an instant."""
        self._note(instant)

    def step_begins(self) -> None:
        """Note that a step begins; what happened before it is an instant of its own."""
        self.mark("between steps")

    def step_ends(self) -> None:
        """Note that a step has ended."""
        self.mark("end of the step")

    def attach(self, model: Any) -> None:
        """Set the marks on a model's decoder layers."""
        layers = decoder_layers(model)
        layers[0].register_forward_pre_hook(self._enters_first, with_kwargs=True)
        layers[-1].register_forward_pre_hook(self._enters_last, with_kwargs=True)
        layers[-1].register_forward_hook(self._leaves_last)

    def around_backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Return `backward` with the marks that end the loss and the backward pass."""

        def marked(*args: Any, **kwargs: Any) -> Any:
            self.mark("loss")
            result = backward(*args, **kwargs)
            self.mark("backward of the embedding")
            return result

        return marked

    def callback(self) -> Any:
        """Return the callback that marks a `Trainer`'s steps."""
        from transformers import TrainerCallback

        marks = self

        class StepMarks(TrainerCallback):  # type: ignore[misc]  # transformers exports it lazily
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                marks.step_begins()

            def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
                marks.mark("clipping")

            def on_optimizer_step(self, *_: Any, **__: Any) -> None:
                marks.mark("optimizer")

            def on_step_end(self, *_: Any, **__: Any) -> None:
                marks.step_ends()

        return StepMarks()

    def _enters_first(self, _module: Any, args: Any, kwargs: Any) -> None:
        # under checkpointing a layer is entered again during the backward pass
        import torch

        if torch._C._current_graph_task_id() == -1:  # noqa: SLF001 - -1 is "no backward runs"
            self._forward = True
            self.mark("embedding")
            self._on_gradient(_hidden(args, kwargs), "backward of the layers")

    def _enters_last(self, _module: Any, args: Any, kwargs: Any) -> None:
        if self._forward:
            self._on_gradient(_hidden(args, kwargs), "backward of the last layer")

    def _leaves_last(self, _module: Any, _args: Any, output: Any) -> None:
        if self._forward:
            self._forward = False
            self.mark("forward of the layers")
            hidden = output[0] if isinstance(output, tuple) else output
            self._on_gradient(hidden, "backward of the loss")

    def _on_gradient(self, hidden: Any, instant: str) -> None:
        if hidden.requires_grad:
            # the gradient of what enters a part arrives when the part's backward is done
            hidden.register_hook(lambda _gradient: self.mark(instant))


def decoder_layers(model: Any) -> Any:
    """Return the list of decoder layers; raises ValueError for a model without one.

    It is the list of modules that is as long as the configuration's `num_hidden_layers`.
    """
    import torch

    depth = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == depth:
            return module
    message = f"{type(model).__name__} has no list of {depth} decoder layers"
    raise ValueError(message)


def _hidden(args: Any, kwargs: Any) -> Any:
    return args[0] if args else kwargs["hidden_states"]
