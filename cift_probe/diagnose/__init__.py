"""What a training log, a traceback or a kernel log says went wrong."""

from cift_probe.diagnose.diagnosis import Diagnosis, diagnose

__all__ = ["Diagnosis", "diagnose"]
