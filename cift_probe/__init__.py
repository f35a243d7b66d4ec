"""can-i-fine-tune: what this machine can fine-tune, how sure that is, and why."""

__version__ = "0.1.0"
SUITE = "can-i-fine-tune"
