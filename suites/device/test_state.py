"""What the driver and the kernel say of a device's state, links and place."""

from cift_probe.verdict import (
    Finding,
    Reading,
    agrees,
    all_of,
    at_least,
    at_most,
    check,
    disjoint,
    equals,
    is_empty,
    is_false,
    is_in,
    is_true,
)


@check("GPU007", after=("GPU001",), severity="should", device="gpu", domain="configuration")
def test_power_limit_is_the_default(facts: Reading) -> Finding:
    """The power limit of the device is not below its default.

    Why: a lowered limit, or a laptop's on battery, holds the clocks down under load.

    Fix: have the administrator restore it (nvidia-smi -pl), or plan with the lower speed.
    """
    return at_least(facts["device.power.limit"], facts["device.power.limit.default"])


@check("GPU008", after=("GPU001",), severity="should", device="gpu", domain="configuration")
def test_device_may_be_shared(facts: Reading, expected: Reading) -> Finding:
    """The compute mode lets more than one process use the device.

    Why: an exclusive mode refuses the second context, as a launcher, a notebook or a monitor
    makes it: "all CUDA-capable devices are busy or unavailable".

    Fix: have the administrator set the default mode (nvidia-smi -c 0), or keep to one process.
    """
    return is_in(facts["device.compute_mode"], expected["device.compute_mode.shared"])


@check("GPU009", after=("GPU001",), severity="info", device="gpu", domain="configuration")
def test_persistence_mode_is_on(facts: Reading) -> Finding:
    """The driver keeps the device initialised between programs.

    Why: without it the first program after a pause waits seconds, on large nodes a minute, which
    some container runtimes do not wait for.

    Fix: enable nvidia-persistenced, or leave it: a display or another program does the same.
    """
    return is_true(facts["device.persistence"])


@check("GPU010", after=("GPU001",), severity="should", device="gpu", domain="hardware")
def test_no_memory_page_waits_to_be_retired(facts: Reading) -> Finding:
    """No page of device memory waits for a reset to be retired (devices before Ampere).

    Why: until then the damaged page is in use.

    Fix: reset the GPU or reboot.
    """
    return is_false(facts["device.retired.pending"])


@check("GPU011", after=("GPU001",), severity="should", device="gpu", domain="hardware")
def test_spare_memory_rows_are_left(facts: Reading, expected: Reading) -> Finding:
    """The device has rows left that can stand in for damaged ones.

    Why: at 512 remapped rows the vendor's own diagnosis fails the device.

    Fix: have the card replaced.
    """
    return at_most(facts["device.remap.uncorrectable"], expected["device.remap.uncorrectable.max"])


@check("GPU012", after=("GPU001",), severity="should", device="gpu", domain="driver")
def test_fabric_is_ready(facts: Reading, expected: Reading) -> Finding:
    """On a board with NVSwitches, the device has joined the fabric.

    Why: until then CUDA answers 802, even to a job on one GPU.

    Fix: start the fabric manager of exactly the driver's version; on a rented node ask for another.
    """
    return is_in(facts["device.fabric.state"], expected["device.fabric.state.ready"])


@check("GPU013", after=("GPU001",), severity="should", device="gpu", domain="hardware")
def test_kernel_log_has_no_hardware_xid(facts: Reading, expected: Reading) -> Finding:
    """The kernel log has no XID of this device that stands for hardware.

    Why: memory errors, lost links and a silent system processor come back; those that a program
    causes (13, 31, 43) do not count.

    Fix: look the number up in NVIDIA's XID documentation; drain the node, reset, or replace.
    """
    return disjoint(facts["device.xids"], expected["device.xids.hardware"])


@check("GPU014", after=("GPU001",), severity="info", device="gpu", domain="configuration")
def test_all_device_memory_is_in_the_window(facts: Reading) -> Finding:
    """The PCIe window (BAR1) covers all memory of the device.

    Why: with a window of 256 MiB, peers and network cards reach little of the memory at once.

    Fix: switch on "Above 4G decoding" and "Resizable BAR" in the firmware.
    """
    return at_least(facts["device.bar1.total"], facts["device.memory.total"])


@check("GPU015", after=("GPU001",), severity="should", device="gpu", domain="configuration")
def test_process_may_run_near_the_device(facts: Reading) -> Finding:
    """A processor of this process belongs to the memory node of the device.

    Why: from a far node every copy and every kernel launch crosses the link between sockets.

    Fix: bind to the near node (numactl --cpunodebind, the job's CPU binding).
    """
    return is_true(facts["device.cpus.near"])


@check("GPU016", after=("GPU001",), severity="info", device="gpu", domain="configuration")
def test_pcie_link_is_kept_awake(facts: Reading, expected: Reading) -> Finding:
    """The kernel's PCIe power policy does not put the device's link to sleep.

    Why: a link that sleeps between copies wakes late, and some boards lose the device then.

    Fix: boot with pcie_aspm.policy=performance, or choose performance in the firmware.
    """
    return is_in(facts["host.pcie.aspm.policy"], expected["host.pcie.aspm.policy.accepted"])


@check("GPU017", after=("ENV008",), severity="should", device="gpu", domain="driver")
def test_managed_memory_is_paged(facts: Reading) -> Finding:
    """The driver offers managed memory on the device, and pages it on demand.

    Why: paged optimizers take managed memory; virtual GPUs may refuse it, WSL limits it.

    Fix: use an optimizer that is not paged (adamw_8bit instead of paged_adamw_8bit).
    """
    return all_of(is_true(facts["device.managed"]), is_true(facts["device.managed.concurrent"]))


@check("GPU018", after=("GPU001",), severity="info", device="gpu", domain="hardware")
def test_peers_read_each_other(facts: Reading) -> Finding:
    """The driver lets this device read the memory of its peers directly.

    Why: otherwise every exchange goes through host memory; most GeForce cards are refused it.

    Fix: nothing has to be done: NCCL takes the way through the host.
    """
    return is_empty(facts["device.peers.refused"])


@check("GPU019", after=("GPU001",), severity="info", device="gpu", domain="hardware")
def test_all_nvlinks_are_up(facts: Reading) -> Finding:
    """Every NVLink of the device is active.

    Why: a link that is down takes its share of the bandwidth between devices.

    Fix: look at nvidia-smi nvlink -s; without a bridge or a switch, links are down by design.
    """
    return equals(facts["device.nvlink.num_active"], facts["device.nvlink.num_links"])


@check("GPU020", after=("GPU001", "ENV007"), severity="should", device="gpu")
def test_driver_and_torch_tell_one_capacity(facts: Reading, expected: Reading) -> Finding:
    """Torch sees as much device memory as the driver tells.

    Why: a software slice shows one of them less, and a plan made for the product's name fails.

    Fix: plan with the smaller figure; the name of a product says nothing of a slice.
    """
    return agrees(facts["torch.device.memory.total"], expected["device.memory.capacity"])
