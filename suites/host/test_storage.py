"""Room on the disks that a training run writes to."""

from cift_probe.verdict import Finding, Reading, all_of, at_least, check, is_true


@check("HST005", domain="configuration")
def test_work_folder_has_room(facts: Reading, expected: Reading) -> Finding:
    """The working folder has room for the checkpoints of an adapter.

    Why: a full disk ends the run at its first checkpoint, after the expensive part.

    Fix: free space there, or train from a folder on a larger disk.
    """
    return at_least(facts["storage.work.free"], expected["storage.work.free.min"])


@check("HST006", severity="should", domain="configuration")
def test_model_cache_has_room(facts: Reading, expected: Reading) -> Finding:
    """The model cache has room for the bf16 weights of an 8B model.

    Why: a download that meets a full disk leaves a partial file, and loading it fails later.

    Fix: free space there, or set HF_HOME to a folder on a larger disk.
    """
    return at_least(facts["storage.cache.free"], expected["storage.cache.free.min"])


@check("HST011", domain="configuration")
def test_work_folder_may_be_written(facts: Reading) -> Finding:
    """The working folder may be written by this user.

    Why: a run that cannot write its checkpoint has trained for nothing.

    Fix: change to a folder of your own, or mount this one read-write.
    """
    return is_true(facts["storage.work.writable"])


@check("HST012", severity="should", domain="configuration")
def test_caches_may_be_written(facts: Reading) -> Finding:
    """The folders of models and compiled kernels may be written by this user.

    Why: a read-only home folder, usual in containers and batch jobs, ends the first download and
    the first compilation.

    Fix: set HF_HOME and TRITON_CACHE_DIR to folders that may be written.
    """
    return all_of(
        is_true(facts["storage.cache.writable"]),
        is_true(facts["storage.kernels.writable"]),
    )


@check("HST013", severity="should", domain="configuration")
def test_work_folder_has_inodes(facts: Reading, expected: Reading) -> Finding:
    """The file system of the working folder has inodes left.

    Why: without them every new file ends in "No space left on device", with space left.

    Fix: remove folders of many small files (caches, unpacked data sets), or use another disk.
    """
    return at_least(facts["storage.work.inodes.free"], expected["storage.work.inodes.free.min"])


@check("HST014", severity="should", domain="configuration")
def test_temporary_folder_has_room(facts: Reading, expected: Reading) -> Finding:
    """The folder for temporary files has room.

    Why: compilers, loaders and data sets write there, and a small tmpfs fills unseen.

    Fix: free space there, or set TMPDIR to a folder on a larger disk.
    """
    return at_least(facts["storage.temporary.free"], expected["storage.temporary.free.min"])
