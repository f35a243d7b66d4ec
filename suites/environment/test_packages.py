"""The training packages are there and fit the torch build."""

from cift_probe.verdict import (
    Finding,
    Reading,
    all_of,
    at_most,
    check,
    equals,
    is_present,
    is_true,
    same_major,
    unless_absent,
)


@check("ENV005")
def test_training_packages_are_installed(facts: Reading) -> Finding:
    """torch, transformers, peft, bitsandbytes, trl, datasets and accelerate are installed.

    Why: QLoRA as people run it needs all of them.

    Fix: install the missing ones, for instance with pip install "cift-probe[train]".
    """
    return all_of(
        is_present(facts["package.torch"]),
        is_present(facts["package.transformers"]),
        is_present(facts["package.peft"]),
        is_present(facts["package.bitsandbytes"]),
        is_present(facts["package.trl"]),
        is_present(facts["package.datasets"]),
        is_present(facts["package.accelerate"]),
    )


@check("ENV006", after=("ENV007",), device="gpu")
def test_flash_attention_fits_torch(
    facts: Reading, expected: Reading, measured: Reading
) -> Finding:
    """flash-attn, where installed, fits this torch, CUDA, C++ ABI and device, and is right.

    Why: a wheel for another torch fails at import with an undefined symbol.

    Fix: install the flash-attn wheel whose tags name this torch, CUDA and ABI, or remove it: torch
    has fused attention of its own.
    """
    return unless_absent(
        facts["package.flash_attn"],
        measured["attention.kernel"],
        lambda: all_of(
            equals(facts["flash_attn.built.torch"], expected["torch.version.release"]),
            same_major(facts["flash_attn.built.cuda"], facts["torch.cuda.version"]),
            equals(facts["flash_attn.built.cxx11_abi"], facts["torch.cxx11_abi"]),
            is_true(measured["flash_attn.imports"]),
            at_most(measured["flash_attn.error"], expected["flash_attn.error.max"]),
        ),
    )
