"""Peak memory of every instant of a training step, apart.

Marks are set by forward hooks and by hooks on tensors' gradients, which keep nothing alive that
autograd would not keep, unlike full backward hooks on modules. A mark ends an instant: it notes
the peak since the last mark and begins anew.
"""

from __future__ import annotations

import math
import time
from typing import Any


class Watch:
    """Notes peaks (bytes allocated) and durations (seconds) of a trainer's steps."""

    def __init__(self, num_steps: int, pause_s: float = 0.0) -> None:
        """Watch nothing yet; `pause_s` is a planted fault that slows every step.

        The last of `num_steps` is profiled for the time that the device itself computes, and
        is left out of `durations`.
        """
        self.peaks: dict[str, int] = {}
        self.durations: list[float] = []
        self.busy_s = math.nan
        self._num_steps = num_steps
        self._profile: Any = None
        self._pause_s = pause_s
        self._forward = False
        self._started = 0.0

    def attach(self, trainer: Any) -> None:
        """Set the marks on a trainer's model; its callback must be `self.callback()`."""
        layers, norm = decoder_of(trainer.model)
        layers[0].register_forward_pre_hook(self._enters_first, with_kwargs=True)
        layers[-1].register_forward_pre_hook(self._enters_last, with_kwargs=True)
        norm.register_forward_pre_hook(self._leaves_layers, with_kwargs=True)

    def callback(self) -> Any:
        """Return the callback that begins and ends steps."""
        from transformers import TrainerCallback

        watch = self

        class Marks(TrainerCallback):  # type: ignore[misc]  # transformers exports it lazily
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                watch.step_begins()

            def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
                watch.mark("clipping")

            def on_optimizer_step(self, *_: Any, **__: Any) -> None:
                watch.mark("optimizer")

            def on_step_end(self, *_: Any, **__: Any) -> None:
                watch.step_ends()

        return Marks()

    def mark(self, instant: str) -> None:
        """End an instant: keep the largest peak seen for it over all steps."""
        import torch

        if not torch.cuda.is_available():
            return
        peak = torch.cuda.max_memory_allocated()
        self.peaks[instant] = max(peak, self.peaks.get(instant, 0))
        torch.cuda.reset_peak_memory_stats()

    def step_begins(self) -> None:
        """Note the time; what happened before the step is an instant of its own."""
        self.mark("between steps")
        if len(self.durations) == self._num_steps - 1:
            self._profile = device_profile()
            self._profile.start()
        self._started = settled_time()

    def step_ends(self) -> None:
        """Note how long the step took."""
        self.mark("end of the step")
        time.sleep(self._pause_s)
        ended = settled_time()
        if self._profile is None:
            self.durations.append(ended - self._started)
        else:
            self._profile.stop()
            self.busy_s = device_seconds(self._profile)

    def _enters_first(self, _module: Any, _args: Any, _kwargs: Any) -> None:
        # under checkpointing a layer is entered again during the backward pass
        import torch

        if torch._C._current_graph_task_id() == -1:  # noqa: SLF001 - -1 is "no backward runs"
            self._forward = True
            self.mark("embedding")

    def _enters_last(self, _module: Any, args: Any, kwargs: Any) -> None:
        if self._forward:
            self._on_gradient(args, kwargs, "backward of the last layer")

    def _leaves_layers(self, _module: Any, args: Any, kwargs: Any) -> None:
        if self._forward:
            self._forward = False
            self.mark("forward of the layers")
            self._on_gradient(args, kwargs, "loss")

    def _on_gradient(self, args: Any, kwargs: Any, instant: str) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.requires_grad:
            # the gradient of what enters a part arrives when the part's backward is done
            hidden.register_hook(lambda _gradient: self.mark(instant))


def decoder_of(model: Any) -> tuple[Any, Any]:
    """Return the decoder layers and the norm behind them; raises ValueError without them."""
    for module in model.modules():
        layers, norm = getattr(module, "layers", None), getattr(module, "norm", None)
        if layers is not None and norm is not None and len(layers):
            return layers, norm
    message = f"{type(model).__name__} has no module with `layers` and `norm`"
    raise ValueError(message)


def device_profile() -> Any:
    """Return a profile of what runs on the device, not yet started."""
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CUDA])


def device_seconds(profile: Any) -> float:
    """Return the sum of the durations of all kernels and copies in a profile; NaN for none.

    One stream runs one kernel at a time, so that the sum is the time the device was busy.
    """
    total = sum(event.device_time_total for event in profile.key_averages())
    return total / 1e6 if total else math.nan


def settled_time() -> float:
    """Return a clock reading in seconds after all work on the device has ended."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
