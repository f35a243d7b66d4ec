"""One small fine-tuning, whole, on every device: what it takes against what is said of it."""

from cift_probe.verdict import Finding, Reading, agrees, all_of, at_least, at_most, check


@check("MEM004", after=("KRN006",), device="gpu", quick=False)
def test_forward_alone_takes_less_than_a_step(measured: Reading) -> Finding:
    """A forward pass without gradients stays below the peak of a training step.

    Why: a pass that keeps activations although nobody asked for gradients is how inference and
    evaluation run out of memory on a card that trains.

    Fix: look for a wrapper that switches gradients on again; compare versions with the report.
    """
    return at_most(measured["lifecycle.forward.peak"], measured["lifecycle.step.peak"])


@check("MEM005", after=("KRN006",), device="gpu", quick=False)
def test_loading_takes_what_arithmetic_says(measured: Reading, expected: Reading) -> Finding:
    """After loading, the device holds the bytes of the plan's weights, quantised, and no more.

    Why: weights that were not quantised, or kept twice, take room that every later step lacks.

    Fix: print dtype and device of every parameter; compare transformers and bitsandbytes
    versions with the report.
    """
    return agrees(measured["lifecycle.load.allocated"], expected["reference.predicted.weights"])


@check("MEM006", after=("MEM005",), device="gpu", domain="suite", quick=False)
def test_the_peak_of_a_real_step_is_predicted(measured: Reading, expected: Reading) -> Finding:
    """The peak of a real step at full depth lies within the band of its prediction.

    Why: answers for models that nobody can load here rest on the same formula.

    Fix: read which instant set the peak in the report; the formula names the versions it is for.
    """
    return agrees(measured["lifecycle.step.peak"], expected["reference.predicted.peak"])


@check("MEM007", after=("MEM006",), device="gpu", domain="suite", quick=False)
def test_the_smallest_room_is_predicted(measured: Reading, expected: Reading) -> Finding:
    """The smallest cap under which the step runs lies within the band of its prediction.

    Why: "fits" is said of the room that the allocator needs, not of the tensors in it.

    Fix: compare allocator settings (PYTORCH_CUDA_ALLOC_CONF) and versions with the report.
    """
    return agrees(measured["room.smallest"], expected["reference.predicted.required"])


@check(
    "MEM008",
    after=("KRN006",),
    severity="should",
    device="gpu",
    domain="configuration",
    quick=False,
)
def test_memory_is_not_in_pieces(measured: Reading, expected: Reading) -> Finding:
    """After training, little reserved memory is stuck, and most free memory is had at once.

    Why: memory in pieces is free and cannot be used; a run then fails with gigabytes to spare.

    Fix: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; look for other processes.
    """
    return all_of(
        at_most(measured["lifecycle.stuck.share"], expected["lifecycle.stuck.share.max"]),
        at_least(
            measured["lifecycle.largest_block.share"],
            expected["lifecycle.largest_block.share.min"],
        ),
    )


@check("MEM009", after=("KRN006",), device="gpu", quick=False)
def test_optimizer_state_appears_at_the_first_step(measured: Reading, expected: Reading) -> Finding:
    """The first step adds the optimizer's state in its expected size, the second one nothing.

    Why: a run that is measured before its first step, or with half the state, fails later.

    Fix: print the optimizer's class and the dtype of its state; compare versions.
    """
    return all_of(
        agrees(
            measured["lifecycle.optimizer_state"], expected["reference.predicted.optimizer_state"]
        ),
        at_most(
            measured["lifecycle.optimizer_state.later"],
            expected["lifecycle.optimizer_state.later.max"],
        ),
    )


@check("MEM010", after=("KRN006",), device="gpu", quick=False)
def test_evaluation_adds_no_more_than_its_logits(measured: Reading, expected: Reading) -> Finding:
    """Evaluating a batch adds no more than its logits: as computed, and once as float32.

    Why: logits are as large as the vocabulary; a run that trains for a day dies in its evaluation.

    Fix: compute metrics per batch (preprocess_logits_for_metrics), or lower the evaluation batch.
    """
    return at_most(measured["lifecycle.evaluation.added"], expected["reference.predicted.logits"])


@check("MEM011", after=("KRN006",), severity="should", device="gpu", quick=False)
def test_saving_and_merging_need_little(measured: Reading, expected: Reading) -> Finding:
    """Saving the adapter and merging it add little, on the device and in host memory.

    Why: both come last; a run that dies there has trained for nothing.

    Fix: save the adapter alone, and merge on a machine with room for the model in full precision.
    """
    return all_of(
        at_most(measured["lifecycle.saving.device"], expected["lifecycle.saving.device.max"]),
        at_most(measured["lifecycle.saving.host"], expected["lifecycle.saving.host.max"]),
        at_most(measured["lifecycle.merging.device"], expected["lifecycle.merging.device.max"]),
        at_most(measured["lifecycle.merging.host"], expected["lifecycle.merging.host.max"]),
    )


@check("MEM012", after=("KRN006",), severity="should", device="gpu", quick=False)
def test_weights_go_straight_to_the_device(measured: Reading, expected: Reading) -> Finding:
    """Loading does not gather the weights in host memory on their way to the device.

    Why: a machine with less host memory than weights is killed while it loads.

    Fix: pass device_map, use safetensors files, and update transformers and accelerate.
    """
    return at_most(measured["lifecycle.load.host.share"], expected["lifecycle.load.host.share.max"])


@check("MEM015", after=("KRN006",), device="gpu", quick=False)
def test_steps_leave_nothing_behind(measured: Reading, expected: Reading) -> Finding:
    """Twenty steps leave no more allocated on the device than two.

    Why: what grows by a little each step fills every card in the end, hours into a run.

    Fix: look for losses, logits or batches that are kept with their graph; log floats.
    """
    return at_most(measured["lifecycle.growth"], expected["lifecycle.growth.max"])
