"""Room on the disks that a training run writes to."""

from cift_probe.verdict import Finding, Reading, at_least, check


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
