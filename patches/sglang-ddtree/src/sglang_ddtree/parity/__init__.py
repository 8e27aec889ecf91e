"""The parity suite: SGLang's own scheduler driven inside one process, arm against arm, and the proof it writes."""
