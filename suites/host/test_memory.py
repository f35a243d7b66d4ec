"""Host memory and shared memory."""

from cift_probe.verdict import Finding, Reading, all_of, at_least, check, is_true


@check("HST001", severity="should", domain="configuration")
def test_shared_memory_is_large_enough(facts: Reading, expected: Reading) -> Finding:
    """Shared memory (/dev/shm) is large enough for data-loader workers.

    Why: workers hand batches over in /dev/shm; a container's default of 64 MiB ends in a bus error.

    Fix: start the container with --shm-size=1g or --ipc=host, or train with 0 loader workers.
    """
    return at_least(facts["host.shm.size"], expected["host.shm.size.min"])


@check("HST002", domain="configuration")
def test_shared_memory_is_writable(facts: Reading) -> Finding:
    """A file can be created and removed in /dev/shm.

    Why: PyTorch's loader workers and NCCL create files there; a size alone does not permit that.

    Fix: mount /dev/shm with mode 1777, or remount it read-write.
    """
    return is_true(facts["host.shm.writable"])


@check("HST003", domain="configuration")
def test_host_memory_is_available(facts: Reading, expected: Reading) -> Finding:
    """The host memory that this process may still take holds the training stack.

    Why: the limit of a container or job counts, not the host's memory; beyond it the kernel kills.

    Fix: raise the container's or job's memory limit, or end other processes.
    """
    return at_least(facts["host.memory.available"], expected["host.memory.available.min"])


@check("HST004", after=("GPU001",), severity="should", device="gpu", domain="configuration")
def test_host_memory_matches_device_memory(facts: Reading, expected: Reading) -> Finding:
    """Host memory, and a container's limit on it, are of the order of the device's memory.

    Why: checkpoints, offloading and loaders that stage weights in host memory need that much.

    Fix: add host memory, or load straight to the device and do not offload.
    """
    return all_of(
        at_least(facts["host.memory.total"], expected["host.memory.total.min"]),
        at_least(facts["host.memory.limit"], expected["host.memory.total.min"]),
    )


@check("HST015", after=("ENV007",), severity="should", device="gpu", domain="configuration")
def test_host_memory_can_be_pinned(measured: Reading, expected: Reading) -> Finding:
    """The driver pins as much host memory at once as offloaded activations take.

    Why: offloading and loaders copy from pinned memory; WSL and virtual machines limit it far
    below the memory that is free, and the error names the GPU's memory.

    Fix: raise the virtual machine's or WSL's memory, and leave out pin_memory and offloading.
    """
    return at_least(measured["host.pinned.largest"], expected["host.pinned.min"])
