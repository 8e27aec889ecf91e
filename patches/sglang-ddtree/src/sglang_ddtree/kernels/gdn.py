"""Gated DeltaNet layers on a draft tree without a state per node.

A verify leaves, per layer and request, one record per row: delta, the normalised key, the decay and the
convolution's input (see :mod:`sglang_ddtree.reference.gdn` for the formulas). They are about a
sixtieth of the float32 states SGLang snapshots. After acceptance one replay of the path writes the committed
states of all layers in place.

All layers of a round share the ancestor tables that the builder wrote. A request whose state index is
negative is padding: it is computed from zeros and never committed.
"""

from dataclasses import dataclass

import torch
import triton

from sglang_ddtree.kernels.buffers import check, require
from sglang_ddtree.kernels.gdn_commit import commit_conv_kernel, commit_state_kernel
from sglang_ddtree.kernels.gdn_conv import conv_tree_kernel
from sglang_ddtree.kernels.gdn_verify import MAX_NODES, gdn_tables_kernel, gdn_tree_kernel


@dataclass(frozen=True)
class GdnRecords:
    """What a verify leaves for the commit: L layers, B requests in batch order, N rows."""

    delta: torch.Tensor  # float32 [L, B, N, HV, V]
    key: torch.Tensor  # float32 [L, B, N, H, K], length one
    decay: torch.Tensor  # float32 [L, B, N, HV]
    x: torch.Tensor  # activation dtype [L, B, N, C], the convolution's input

    @staticmethod
    def bytes_per_row(heads: int, value_heads: int, k_dim: int, v_dim: int, channels: int, x_bytes: int = 2) -> int:
        """Bytes of one row of one request in one layer."""
        return 4 * (value_heads * v_dim + heads * k_dim + value_heads) + x_bytes * channels

    @classmethod
    def allocate(
        cls,
        layers: int,
        batch: int,
        rows: int,
        heads: int,
        value_heads: int,
        k_dim: int,
        v_dim: int,
        channels: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "GdnRecords":
        """Records for ``batch`` requests of ``rows`` rows; head and channel counts are this rank's."""
        shape = (layers, batch, rows)
        return cls(
            delta=torch.zeros((*shape, value_heads, v_dim), dtype=torch.float32, device=device),
            key=torch.zeros((*shape, heads, k_dim), dtype=torch.float32, device=device),
            decay=torch.zeros((*shape, value_heads), dtype=torch.float32, device=device),
            x=torch.zeros((*shape, channels), dtype=dtype, device=device),
        )

    def layer(self, index: int) -> "GdnRecords":
        """Views of one layer, [B, N, ..]."""
        return GdnRecords(self.delta[index], self.key[index], self.decay[index], self.x[index])

    @property
    def nbytes(self) -> int:
        """Memory of all records."""
        return sum(t.numel() * t.element_size() for t in (self.delta, self.key, self.decay, self.x))


def conv_tree(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state_indices: torch.Tensor,
    conv_ancestors: torch.Tensor,
    record_x: torch.Tensor,
) -> torch.Tensor:
    """SiLU of the depthwise causal convolution over each row's ancestors, and the record of x.

    x [bs * N, C], unit channel stride; conv_state [S, C, W - 1], any strides, newest input last, only
    read; weight [C, W], its last column meets the row itself; bias [C] or None; state_indices int32 or
    int64 [bs], negative for padding; conv_ancestors int32 [bs, N, W - 1]; record_x [B >= bs, N, C] of
    x's dtype. Products and sums in float32. Returns [bs * N, C] of x's dtype.
    """
    bs, rows, taps = conv_ancestors.shape
    channels = x.shape[1]
    require(x.shape == (bs * rows, channels) and x.stride(1) == 1, f"x {list(x.shape)} for {bs} x {rows} rows")
    check("weight", weight, weight.dtype, channels, taps + 1)
    check("conv_ancestors", conv_ancestors, torch.int32, bs, rows, taps)
    check("record_x", record_x, x.dtype, -1, rows, channels)
    require(conv_state.shape[1:] == (channels, taps), f"conv_state {list(conv_state.shape)}")
    out = torch.empty((bs * rows, channels), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    block = 512
    conv_tree_kernel[(triton.cdiv(channels, block), rows, bs)](
        x, conv_state, weight, bias, state_indices, conv_ancestors, record_x, out,
        rows, channels, x.stride(0), conv_state.stride(0), conv_state.stride(1), conv_state.stride(2),
        TAPS=taps, HAS_BIAS=bias is not None, BC=block,
        num_warps=4,
    )  # fmt: skip
    return out


def _tiles(padded: int, heads: int, half: bool) -> tuple[int, int, int, int]:
    """Warps of the tables' programs; value columns, key columns at a time and warps of the outputs' programs.

    As measured on an H200 at 48 value heads: one request leaves processors idle, so small tiles are faster; of eight
    the large ones are, which read less twice. Float32 activations have three terms to each, so less fits.
    """
    few = heads <= 96
    table_warps = 4 if few else 2
    if padded <= 16:
        return table_warps, 32, (64 if few and half else 32), 2
    if padded <= 32:
        return table_warps, 32, 32, 2
    return table_warps, (32 if few or not half else 64), (64 if few and half else 32), 4


def gdn_tree(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    ssm_states: torch.Tensor,
    state_indices: torch.Tensor,
    ancestors: torch.Tensor,
    record: GdnRecords,
) -> torch.Tensor:
    """Outputs of the gated delta rule at every row of the trees, and their records.

    q, k [1, bs * N, H, K], v [1, bs * N, HV, V]: contiguous but for the row stride; a, b [bs * N, HV];
    a_log, dt_bias [HV]; ssm_states [S, HV, V, K], float32 or bfloat16, contiguous but for the slot
    stride, only read; state_indices [bs]; ancestors int64 [bs, N, words]; record: one layer's views.
    q and k are normalised to length one here. Returns [1, bs * N, HV, V] of v's dtype.
    """
    bs, rows, words = ancestors.shape
    heads, k_dim = q.shape[2:]
    value_heads, v_dim = v.shape[2:]
    require(q.shape[1] == bs * rows, f"{q.shape[1]} rows of q for {bs} x {rows}")
    require(1 <= rows <= MAX_NODES + 1, f"{rows} rows, but the kernel is written for at most {MAX_NODES + 1}")
    require(k_dim >= 16 and k_dim == triton.next_power_of_2(k_dim) and v_dim % 16 == 0, f"head sizes {k_dim}, {v_dim}")
    for name, tensor, size in (("q", q, k_dim), ("k", k, k_dim), ("v", v, v_dim), ("states", ssm_states, k_dim)):
        require(tensor.stride(-1) == 1 and tensor.stride(-2) == size, f"{name}: heads are not contiguous")
    require(ssm_states.stride(1) == k_dim * v_dim, "states: heads are not contiguous")
    require(a.stride(-1) == 1 and b.stride(-1) == 1, "gates need a unit head stride")
    check("ancestors", ancestors, torch.int64, bs, rows, words)
    check("record.delta", record.delta, torch.float32, -1, rows, value_heads, v_dim)
    check("record.key", record.key, torch.float32, -1, rows, heads, k_dim)
    check("record.decay", record.decay, torch.float32, -1, rows, value_heads)
    require(record.delta.shape[0] >= bs, f"{bs} requests but records for {record.delta.shape[0]}")
    out = torch.empty((1, bs * rows, value_heads, v_dim), dtype=v.dtype, device=v.device)
    if bs == 0:
        return out
    padded = max(16, triton.next_power_of_2(rows - 1))
    table_warps, block_v, block_k, warps = _tiles(padded, bs * value_heads, q.element_size() == 2)
    interpreted = not isinstance(gdn_tree_kernel, triton.JITFunction)
    tables = torch.empty((3, bs, value_heads, padded, padded), dtype=torch.float32, device=v.device)
    scalars = torch.empty((bs, value_heads, 6, padded + 1), dtype=torch.float32, device=v.device)
    gdn_tables_kernel[(padded // 16, value_heads, bs)](
        q, k, a, b, a_log, dt_bias, ancestors,
        record.key, record.decay, tables[0], tables[1], tables[2], scalars,
        rows, q.stride(1), k.stride(1), a.stride(-2), b.stride(-2),
        k_dim**-0.5,
        H=heads, HV=value_heads, K=k_dim, KC=min(32, k_dim), RB=16, TP=padded, WORDS=words,
        INTERPRETED=interpreted,
        num_warps=table_warps,
    )  # fmt: skip
    gdn_tree_kernel[(triton.cdiv(v_dim, block_v), value_heads, bs)](
        q, k, v, ssm_states, state_indices, tables[0], tables[1], tables[2], scalars, record.delta, out,
        rows, q.stride(1), k.stride(1), v.stride(1), ssm_states.stride(0),
        H=heads, HV=value_heads, K=k_dim, KC=min(block_k, k_dim), V=v_dim, BV=block_v, TP=padded,
        INTERPRETED=interpreted,
        num_warps=warps,
    )  # fmt: skip
    return out


def commit_tree(
    records: GdnRecords,
    ancestors: torch.Tensor,
    conv_ancestors: torch.Tensor,
    last_row: torch.Tensor,
    ssm_states: torch.Tensor,
    conv_states: torch.Tensor,
    state_indices: torch.Tensor,
    track_indices: torch.Tensor | None = None,
    track_rows: torch.Tensor | None = None,
) -> None:
    """Replay the accepted path of every request into the states of all layers, in two launches.

    last_row int32 or int64 [bs]: the last accepted row (``AcceptBuffers.last_row``, or what SGLang calls
    ``last_correct_step_indices``); its ancestors are the path. ssm_states [L, S, HV, V, K] and
    conv_states [L, S, C, W - 1] are rewritten at state_indices [bs] (negative: skipped). With
    track_rows [bs], the state after that row of the path (negative: none) also goes to slot
    track_indices [bs]: prefix caching's state at an interval boundary.
    """
    layers, _, rows, value_heads, v_dim = records.delta.shape
    heads, k_dim = records.key.shape[3:]
    channels, taps = conv_states.shape[2:]
    bs = last_row.shape[0]
    check("ancestors", ancestors, torch.int64, -1, rows, -1)
    check("conv_ancestors", conv_ancestors, torch.int32, -1, rows, taps)
    require(ssm_states.shape[0] == layers and conv_states.shape[0] == layers, "a record per layer is needed")
    require(ssm_states.stride()[2:] == (v_dim * k_dim, k_dim, 1), "states: heads are not contiguous")
    require((track_rows is None) == (track_indices is None), "tracking needs rows and indices")
    if bs == 0:
        return
    track = track_rows is not None
    block_v, block_c = 16, 256
    commit_state_kernel[(triton.cdiv(v_dim, block_v) * value_heads, layers, bs)](
        records.delta, records.key, records.decay, ancestors, last_row, ssm_states, state_indices,
        track_indices, track_rows,
        rows, records.delta.stride(0), records.key.stride(0), records.decay.stride(0),
        ssm_states.stride(0), ssm_states.stride(1),
        H=heads, HV=value_heads, K=k_dim, V=v_dim, BV=block_v, WORDS=ancestors.shape[2], TRACK=track,
        num_warps=4,
    )  # fmt: skip
    commit_conv_kernel[(triton.cdiv(channels, block_c), layers, bs)](
        records.x, conv_ancestors, last_row, conv_states, state_indices, track_indices, track_rows,
        rows, channels, records.x.stride(0),
        conv_states.stride(0), conv_states.stride(1), conv_states.stride(2), conv_states.stride(3),
        TAPS=taps, TP=triton.next_power_of_2(taps), BC=block_c, TRACK=track,
        num_warps=2,
    )  # fmt: skip
