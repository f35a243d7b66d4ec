"""Native libraries come from one place, and what compiles at run time can compile."""

from cift_probe.verdict import (
    Finding,
    Reading,
    all_of,
    at_least,
    check,
    is_empty,
    is_present,
    same_major,
    unless_absent,
)


@check("ENV011", after=("GPU001", "ENV003"), severity="should", device="gpu")
def test_cuda_libraries_have_one_origin(facts: Reading) -> Finding:
    """A process with torch has loaded one copy of each CUDA library, and the one it ships with.

    Why: an older cuBLAS, cuDNN or nvJitLink from LD_LIBRARY_PATH ends in undefined symbols, in a
    version error at the first convolution, or in slower kernels and no error at all.

    Fix: take the folder of the copy that is named out of LD_LIBRARY_PATH.
    """
    return all_of(
        is_empty(facts["library.doubled"]),
        is_empty(facts["library.shadowed"]),
        is_empty(facts["library.split"]),
    )


@check("ENV012", severity="should")
def test_installed_packages_fit_each_other(facts: Reading) -> Finding:
    """No package is there twice, no CUDA library for two majors, and requirements are met.

    Why: of a package that is there twice the first on the path is imported; CUDA wheels of two
    majors overwrite each other; a compiled package pins the torch that it was built with.

    Fix: install the versions that the reason names together, in one command; best in a fresh
    environment.
    """
    return all_of(
        is_empty(facts["package.nvidia.doubled"]),
        is_empty(facts["package.duplicates"]),
        is_empty(facts["package.conflicts"]),
    )


@check("ENV013", severity="should", device="gpu")
def test_triton_can_build_its_launchers(facts: Reading) -> Finding:
    """A C compiler and Python's headers are there for Triton.

    Why: Triton compiles a launcher for each kernel with the system's C compiler; without it
    torch.compile and fused kernels end at their first call.

    Fix: install gcc and the headers of this Python (build-essential, python3-dev), or set CC.
    """
    return unless_absent(
        facts["package.triton"],
        facts["package.torch"],
        lambda: all_of(
            is_present(facts["toolchain.compiler"]),
            is_present(facts["toolchain.python.headers"]),
        ),
    )


@check("ENV014", after=("ENV003",), severity="should", device="gpu")
def test_nvcc_fits_torch_where_something_builds(facts: Reading) -> Finding:
    """Where a package compiles CUDA sources when used, nvcc is of torch's CUDA major release.

    Why: an extension built by another major links to another runtime; where nothing compiles, no
    nvcc is needed and its version says nothing.

    Fix: install the CUDA toolkit of torch's major release and point CUDA_HOME to it.
    """
    return unless_absent(
        facts["toolchain.builders"],
        facts["package.torch"],
        lambda: all_of(
            is_present(facts["toolchain.nvcc.version"]),
            same_major(facts["toolchain.nvcc.version"], facts["torch.cuda.version"]),
        ),
    )


@check("ENV015", severity="should")
def test_the_c_library_is_new_enough(facts: Reading) -> Finding:
    """The C library of this system is as new as the installed native packages need it.

    Why: a wheel that was built elsewhere or forced in ends in "version GLIBC_2.x not found".

    Fix: use the package's own wheel for this system, a newer container image, or a newer system.
    """
    return at_least(facts["host.libc.version"], facts["package.glibc.needed"])


@check("ENV019", after=("ENV003",), severity="should", device="gpu")
def test_the_native_library_of_bitsandbytes_loads(facts: Reading) -> Finding:
    """The native library of bitsandbytes for torch's CUDA is there and loads.

    Why: bitsandbytes imports without it, and fails at the first quantised layer; the loader's
    words name the library that is missing.

    Fix: unset BNB_CUDA_VERSION, install a bitsandbytes with a binary for this CUDA, or let the
    loader find the library that is named (wheels of CUDA 13 keep it in nvidia/cu13/lib).
    """
    return is_empty(facts["bitsandbytes.native.errors"])
