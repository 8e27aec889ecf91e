"""The engine bundle: pinned SGLang wheel + patch series + plugin, built on the operator's machine, one digest."""
