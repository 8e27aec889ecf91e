"""Gates: what a release must show before it is called proven, in this order.

    identity    the process that answers is the unit's, and names the wanted release
    attest      the server resolved what was asked; every silent downgrade is named
    completion  one real completion returns the tokens asked for
    lossless    fixed prompts give the answers that linear mode gave, but for near ties
    throughput  with 95 % confidence not slower than the linear baseline of the same host, engine and model
    soak        it stays healthy, without a restart, and its accept length above the floor

Each module has a pure ``judge`` over data that ``run`` gathers through the helper on the host.
"""

from ddtree_ops.gates.result import NAMES, GateError, GateResult, Verdict

__all__ = ["NAMES", "GateError", "GateResult", "Verdict"]
