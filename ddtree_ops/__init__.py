"""Deploy, prove and roll back SGLang servers with DDTree speculative decoding."""

__version__ = "0.1.0"
