"""What a training step needs, and whether that is known well enough."""

from cift_probe.verdict import Finding, Reading, all_of, at_least, at_most, check


@check(
    "MEM001",
    after=("KRN006",),
    device="gpu",
    each="plan",
    domain="suite",
    quick=False,
)
def test_slices_predict_a_deeper_slice(measured: Reading, expected: Reading) -> Finding:
    """The memory of a deeper slice of the model is predicted by two shallower ones.

    Why: the answer for the whole depth rests on this line; where it bends, no answer is given.

    Fix: read the instants in the report; measure the plan at full depth on a larger device.
    """
    return at_most(measured["step.extrapolation.error"], expected["step.extrapolation.error.max"])


@check("MEM002", after=("MEM001",), device="gpu", each="plan", quick=False)
def test_step_stays_within_its_budget(measured: Reading, expected: Reading) -> Finding:
    """A training step of the plan stays within the memory and time that its budget allows.

    Why: a plan file states what a step may take, so that an update that needs more is seen.

    Fix: compare package versions with the last report that passed, or raise the budget.
    """
    return all_of(
        at_most(measured["step.peak"], expected["plan.budget.peak_allocated"]),
        at_most(measured["step.required"], expected["plan.budget.required"]),
        at_most(measured["step.seconds"], expected["plan.budget.step_s"]),
        at_most(measured["step.host_ram"], expected["plan.budget.host_ram"]),
    )


@check("MEM003", after=("ENV007",), device="gpu", domain="configuration")
def test_free_memory_can_be_allocated(measured: Reading, expected: Reading) -> Finding:
    """Most of the memory that the driver calls free is handed out when asked for.

    Why: a cap, a software slice or another process can stand between free and usable memory.

    Fix: look for other processes, a vGPU profile, or an allocator setting in the environment.
    """
    return at_least(measured["device.allocatable.share"], expected["device.allocatable.share.min"])


@check("MEM017", after=("MEM003",), severity="should", device="gpu", domain="environment")
def test_little_stands_between_the_card_and_a_tensor(
    measured: Reading, expected: Reading
) -> Finding:
    """The CUDA context stays small, and what is free can be had in one piece.

    Why: what a context holds, and what fragments divide, is no room for a training step.

    Fix: look for libraries that allocate past torch, CUDA_MODULE_LOADING=EAGER, a debugger or
    profiler, or a driver with a history of other allocations; start a fresh process.
    """
    return all_of(
        at_most(measured["device.context.bytes"], expected["device.context.bytes.max"]),
        at_least(
            measured["device.largest_block.share"], expected["device.largest_block.share.min"]
        ),
    )
