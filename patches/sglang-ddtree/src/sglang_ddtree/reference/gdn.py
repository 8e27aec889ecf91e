"""Causal convolution and gated delta rule on a draft tree.

A row sees its ancestors and itself, in path order, exactly as a chain made of that path would; the
root's parent is the committed state. One head, Gated DeltaNet (arXiv 2412.06464):

    S_n = exp(g_n) S_p(n) + delta_n k_n^T,   delta_n = beta_n (v_n - exp(g_n) S_p(n) k_n)
    o_n = S_n q_n

with g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b), q and k normalised to length one and q
scaled by K^-1/2. So (delta, k, exp(g)) of a path's rows and the committed state give the path's state:
these records replace a state per node.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class GdnRows:
    """Inputs of one request and one layer: N rows, H key heads, HV value heads."""

    q: np.ndarray  # [N, H, K]
    k: np.ndarray  # [N, H, K]
    v: np.ndarray  # [N, HV, V]
    a: np.ndarray  # [N, HV]
    b: np.ndarray  # [N, HV]
    a_log: np.ndarray  # [HV]
    dt_bias: np.ndarray  # [HV]


@dataclass(frozen=True)
class GdnTree:
    out: np.ndarray  # [N, HV, V]
    states: np.ndarray  # [N, HV, V, K], the state after each row
    delta: np.ndarray  # [N, HV, V]
    key: np.ndarray  # [N, H, K], normalised
    decay: np.ndarray  # [N, HV], exp(g)


def softplus(x: np.ndarray, threshold: float = 20.0) -> np.ndarray:
    """log(1 + e^x), and x above the threshold, as the model's kernels cut it."""
    return np.where(x <= threshold, np.log1p(np.exp(np.minimum(x, threshold))), x)


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


def gdn_tree(rows: GdnRows, state: np.ndarray, parent: np.ndarray) -> GdnTree:
    """Run the recurrence over the rows in order; ``state`` [HV, V, K] is the committed one."""
    num_rows, key_heads, width = rows.k.shape
    value_heads = rows.v.shape[1]
    expand = value_heads // key_heads
    key = _unit(rows.k.astype(np.float64))
    query = _unit(rows.q.astype(np.float64)) * width**-0.5
    decay = np.exp(-np.exp(rows.a_log.astype(np.float64)) * softplus(rows.a.astype(np.float64) + rows.dt_bias))
    beta = 1.0 / (1.0 + np.exp(-rows.b.astype(np.float64)))
    states = np.zeros((num_rows, *state.shape))
    delta = np.zeros(rows.v.shape)
    out = np.zeros(rows.v.shape)
    for n in range(num_rows):
        k_n, q_n = (np.repeat(x[n], expand, axis=0) for x in (key, query))
        before = (state if n == 0 else states[parent[n]]) * decay[n, :, None, None]
        delta[n] = beta[n, :, None] * (rows.v[n] - np.einsum("hvk,hk->hv", before, k_n))
        states[n] = before + delta[n, :, :, None] * k_n[:, None, :]
        out[n] = np.einsum("hvk,hk->hv", states[n], q_n)
    return GdnTree(out, states, delta, key, decay)


def replay(state: np.ndarray, path: list[int], tree: GdnTree) -> np.ndarray:
    """The state after ``path``, from the committed one and the records alone."""
    state = state.astype(np.float64)
    for n in path:
        key = np.repeat(tree.key[n], len(state) // tree.key.shape[1], axis=0)
        state = state * tree.decay[n, :, None, None] + tree.delta[n, :, :, None] * key[:, None, :]
    return state


def conv_tree(
    x: np.ndarray, window: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, table: np.ndarray
) -> np.ndarray:
    """SiLU of the causal convolution over each row's ancestors: x [N, C], window [C, W-1] (newest
    last), weight [C, W] (its last column meets the row itself), table of
    :func:`~sglang_ddtree.reference.tree.conv_ancestors`."""
    width = weight.shape[1]
    out = np.zeros(x.shape, dtype=np.float64)
    for n in range(len(x)):
        acc = np.zeros(x.shape[1]) if bias is None else bias.astype(np.float64)
        acc = acc + x[n].astype(np.float64) * weight[:, width - 1]
        for step in range(width - 1):
            at = table[n, step]
            value = x[at] if at >= 0 else window[:, width - 1 + at]
            acc = acc + value.astype(np.float64) * weight[:, width - 2 - step]
        out[n] = acc / (1.0 + np.exp(-acc))
    return out


def conv_window(x: np.ndarray, window: np.ndarray, path: list[int]) -> np.ndarray:
    """The committed window [C, W-1] after ``path``: its last inputs, older ones from before."""
    history = np.concatenate([window, x[path].T], axis=1)
    return history[:, history.shape[1] - window.shape[1] :]
