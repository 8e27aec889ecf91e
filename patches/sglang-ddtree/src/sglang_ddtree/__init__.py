"""DDTree speculative decoding for SGLang 0.5.17. Nothing is imported here: the reference must load without torch."""

__version__ = "0.1.0"
SGLANG_VERSION = "0.5.17"
