"""What a training log, a traceback or a kernel log says went wrong: `diagnosis.diagnose`."""
