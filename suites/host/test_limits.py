"""Limits of the system that a training run meets."""

from cift_probe.verdict import Finding, Reading, all_of, at_least, check


@check("HST007", severity="should", domain="configuration")
def test_enough_files_may_be_open(facts: Reading, expected: Reading) -> Finding:
    """Enough files may be open at once.

    Why: loader workers hand tensors over as file descriptors; beyond the limit they end in "Too
    many open files", often after hours.

    Fix: raise the limit (ulimit -n, LimitNOFILE=, docker --ulimit nofile=), or set
    torch.multiprocessing's sharing strategy to file_system.
    """
    return at_least(facts["host.nofile.limit"], expected["host.nofile.limit.min"])


@check("HST008", severity="should", domain="configuration")
def test_enough_threads_may_be_started(facts: Reading, expected: Reading) -> Finding:
    """User and control group may start enough processes and threads.

    Why: a library that cannot start its threads ends its import, a loader its worker.

    Fix: raise ulimit -u and the container's or job's pids limit, or set OMP_NUM_THREADS and
    OPENBLAS_NUM_THREADS lower.
    """
    return all_of(
        at_least(facts["host.nproc.limit"], expected["host.tasks.min"]),
        at_least(facts["host.pids.left"], expected["host.tasks.min"]),
    )


@check("HST009", after=("HST002",), severity="should", domain="configuration")
def test_shared_memory_has_room_left(facts: Reading, expected: Reading) -> Finding:
    """Shared memory (/dev/shm) is not full of what others, or killed runs, left there.

    Why: its size is shared by all processes of the machine or container; files of a run that was
    killed stay until somebody removes them.

    Fix: look with ls -l /dev/shm, remove what no running process uses, or make it larger.
    """
    return at_least(facts["host.shm.free"], expected["host.shm.free.min"])


@check("HST010", severity="should", domain="configuration")
def test_the_kernel_grants_memory(facts: Reading, expected: Reading) -> Finding:
    """Where the kernel commits memory strictly, enough of it is left to be granted.

    Why: with vm.overcommit_memory=2 an allocation is refused although memory is free, because
    address space that CUDA and Python reserve counts as used.

    Fix: have the administrator set vm.overcommit_memory to 0, or raise vm.overcommit_ratio.
    """
    return at_least(facts["host.memory.commit.left"], expected["host.memory.available.min"])


@check("HST016", after=("GPU001",), severity="should", device="gpu", domain="configuration")
def test_enough_processors_may_be_used(facts: Reading, expected: Reading) -> Finding:
    """The affinity and quota of this process leave two processors for each device.

    Why: steps with small batches are bound by the processor that launches kernels; one more loads
    the data. A container's quota counts, not the host's processors.

    Fix: raise the container's or job's CPU limit, or its binding.
    """
    return at_least(facts["host.cpu.num_usable"], expected["host.cpu.num_usable.min"])
