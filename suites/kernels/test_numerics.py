"""What training steps are made of, besides attention and NF4: run, and right."""

from cift_probe.verdict import Finding, Reading, all_of, at_most, check, is_true


@check("KRN009", after=("KRN005",), severity="should", device="any", domain="hardware")
def test_fp4_products_are_right(measured: Reading, expected: Reading) -> Finding:
    """An FP4 layer agrees with the same product on its dequantised weights, both ways.

    Why: bnb_4bit_quant_type="fp4" is bitsandbytes' default and runs other code than NF4.

    Fix: use NF4; update bitsandbytes.
    """
    return all_of(
        at_most(measured["fp4.forward.error"], expected["fp4.forward.error.max"]),
        at_most(measured["fp4.backward.error"], expected["fp4.backward.error.max"]),
    )


@check("KRN010", after=("KRN005",), severity="should", device="any", domain="hardware")
def test_int8_products_are_right(measured: Reading, expected: Reading) -> Finding:
    """An LLM.int8() layer agrees with the product on the original weights, both ways.

    Why: outlier columns are split off and added again; a GPU without the path runs another one.

    Fix: use NF4 in place of int8; update bitsandbytes.
    """
    return all_of(
        at_most(measured["int8.forward.error"], expected["int8.forward.error.max"]),
        at_most(measured["int8.backward.error"], expected["int8.backward.error.max"]),
    )


@check("KRN011", after=("ENV007",), device="any")
def test_fused_adamw_is_right(measured: Reading, expected: Reading) -> Finding:
    """Fused AdamW takes the steps of AdamW's formula.

    Why: it is the Trainer's default, and updates every weight that learns.

    Fix: use optim="adamw_torch"; update torch.
    """
    return at_most(measured["optimizer.fused.error"], expected["optimizer.fused.error.max"])


@check("KRN012", after=("KRN005",), severity="should", device="gpu")
def test_optimizers_in_8_bits_are_right(measured: Reading, expected: Reading) -> Finding:
    """Optimizers with moments in 8 bits, and paged ones, take AdamW's steps within their rounding.

    Why: a state that is paged or quantised wrongly trains without an error message.

    Fix: use optim="adamw_torch_fused"; update bitsandbytes.
    """
    return all_of(
        at_most(measured["optimizer.8bit.error"], expected["optimizer.8bit.error.max"]),
        at_most(
            measured["optimizer.paged_32bit.error"], expected["optimizer.paged_32bit.error.max"]
        ),
        at_most(measured["optimizer.paged_8bit.error"], expected["optimizer.paged_8bit.error.max"]),
    )


@check("KRN013", after=("ENV007",), device="any")
def test_rms_norm_is_right(measured: Reading, expected: Reading) -> Finding:
    """RMS norm in bfloat16 agrees with float64, row by row, forward and backward.

    Why: every layer of a Llama runs it twice; a wrong row is a wrong token.

    Fix: update torch; if the error is on one card only, have it replaced.
    """
    return all_of(
        at_most(measured["rms_norm.forward.error"], expected["rms_norm.forward.error.max"]),
        at_most(measured["rms_norm.backward.error"], expected["rms_norm.backward.error.max"]),
    )


@check("KRN014", after=("KRN007",), severity="should", device="gpu", quick=False)
def test_a_compiled_block_is_right(measured: Reading, expected: Reading) -> Finding:
    """A decoder block under torch.compile agrees with itself uncompiled, forward and backward.

    Why: compiled kernels are other kernels, made on this machine by this machine's compiler.

    Fix: train without torch.compile; update torch, triton and the driver.
    """
    return all_of(
        at_most(measured["compile.forward.error"], expected["compile.forward.error.max"]),
        at_most(measured["compile.backward.error"], expected["compile.backward.error.max"]),
    )


@check("KRN015", after=("ENV007",), severity="should", device="gpu")
def test_xformers_is_right(measured: Reading, expected: Reading) -> Finding:
    """Xformers, where it is installed, imports, and its attention agrees with float32.

    Why: built for another torch it imports and leaves its kernels out, or crashes in the step.

    Fix: install the xformers that names this torch, or remove it: sdpa needs none.
    """
    return all_of(
        is_true(measured["xformers.imports"]),
        at_most(measured["xformers.error"], expected["xformers.error.max"]),
    )
