"""The kernels that QLoRA runs exist, run, and are right."""

from cift_probe.verdict import (
    Finding,
    Reading,
    all_of,
    at_least,
    at_most,
    check,
    is_in,
    is_present,
    is_true,
    same_major,
)


@check("KRN001", after=("GPU001",), severity="should", device="gpu", domain="hardware")
def test_bf16_is_native(facts: Reading, expected: Reading) -> Finding:
    """The device computes bf16 natively.

    Why: older devices emulate it, many times slower; torch.cuda.is_bf16_supported() counts that.

    Fix: train in fp16 with a gradient scaler, or use a device of capability 8.0 or later.
    """
    return at_least(facts["device.capability"], expected["bf16.capability.min"])


@check("KRN002", after=("ENV007",), device="any", domain="hardware")
def test_bf16_products_are_right(measured: Reading, expected: Reading) -> Finding:
    """bf16 matrix products agree with the reference, in the mean and in every element.

    Why: one wrong element in a million passes every average and ruins a run.

    Fix: repeat on a cool, unshared device; if it persists, have the card replaced.
    """
    return all_of(
        at_most(measured["bf16.matmul.error"], expected["bf16.matmul.error.max"]),
        at_most(measured["bf16.matmul.worst_element"], expected["bf16.matmul.worst_element.max"]),
    )


@check("KRN003", after=("ENV007",), device="any")
def test_attention_is_right(measured: Reading, expected: Reading) -> Finding:
    """Every attention back end that runs agrees with the reference, forward and backward.

    Why: a back end that is wrong for one head size trains without an error message.

    Fix: switch the back end off (torch.nn.attention.sdpa_kernel), update torch.
    """
    return all_of(
        at_most(measured["attention.error.forward"], expected["attention.error.forward.max"]),
        at_most(measured["attention.error.backward"], expected["attention.error.backward.max"]),
    )


@check("KRN004", after=("ENV007",), severity="should", device="gpu")
def test_attention_runs_fused(measured: Reading, expected: Reading) -> Finding:
    """Attention in a training step runs a fused kernel.

    Why: the plain one stores a score for every pair of tokens: memory grows with the square.

    Fix: use bf16 or fp16 and a head size of at most 256; update torch.
    """
    return is_in(measured["attention.kernel"], expected["attention.kernel.fused"])


@check("KRN005", after=("ENV005", "ENV007"), device="any")
def test_bitsandbytes_loads_its_library(facts: Reading, measured: Reading) -> Finding:
    """Bitsandbytes loads the native library for this torch's CUDA.

    Why: importing bitsandbytes proves nothing; without its library the first 4-bit layer fails.

    Fix: update bitsandbytes; unset BNB_CUDA_VERSION; see python -m bitsandbytes.
    """
    return all_of(
        is_present(measured["nf4.library"]),
        same_major(measured["nf4.library.cuda"], facts["torch.cuda.version"]),
    )


@check("KRN006", after=("KRN005",), device="any")
def test_nf4_products_are_right(measured: Reading, expected: Reading) -> Finding:
    """A 4-bit layer agrees with the same product on its dequantised weights, both ways.

    Why: QLoRA's gradient reaches the adapters through this product.

    Fix: update bitsandbytes; if the error is large on one card only, have it replaced.
    """
    return all_of(
        at_most(measured["nf4.forward.error"], expected["nf4.forward.error.max"]),
        at_most(measured["nf4.backward.error"], expected["nf4.backward.error.max"]),
        at_most(measured["nf4.quantisation.error"], expected["nf4.quantisation.error.max"]),
    )


@check("KRN007", after=("ENV007",), severity="should", device="gpu")
def test_triton_compiles(measured: Reading) -> Finding:
    """Triton compiles a kernel, runs it, and the result is right.

    Why: torch.compile and fused training losses need a C compiler, Python headers and ptxas.

    Fix: install gcc and the headers of this Python (python3-dev), or do without torch.compile.
    """
    return is_true(measured["triton.compiles"])


@check("KRN008", after=("ENV007",), device="gpu", domain="hardware")
def test_fp16_products_are_right(measured: Reading, expected: Reading) -> Finding:
    """fp16 matrix products agree with the reference.

    Why: some devices offer fp16 and return NaN (GTX 16xx).

    Fix: train in bf16 where it is native, else in float32.
    """
    return at_most(measured["fp16.matmul.error"], expected["fp16.matmul.error.max"])
