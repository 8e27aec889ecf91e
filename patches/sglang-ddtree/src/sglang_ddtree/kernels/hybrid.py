"""The hybrid kernels behind the calls SGLang 0.5.17 makes for a Gated DeltaNet layer.

SGLang's backend runs, per layer of a verify, ``causal_conv1d_update(x [bs, C, N], conv_state, ..)`` and
``GDNKernelDispatcher.target_verify(A_log=.., q=.., ..)``, and after acceptance
``update_mamba_state_after_mtp_verify(last_correct_step_indices, mamba_track_indices, ..)``. The methods
here take the same tensors and give back the same shapes, so that an AROUND hook is one call.

Neither call names its layer; the views they pass of the pools do.
"""

from dataclasses import dataclass
from typing import Any

import torch

from sglang_ddtree.kernels import gdn
from sglang_ddtree.kernels.buffers import TreeBuffers, require


@dataclass(frozen=True)
class HybridTree:
    """The trees of the round, the pools and the records of one rank.

    ``tree`` is the full set of static buffers: a captured graph of any batch size reads its first rows.
    ``conv_pool`` [L, S, C, W - 1] and ``ssm_pool`` [L, S, HV, V, K] are SGLang's
    ``MambaPool.mamba_cache.conv[0]`` and ``.temporal``. Records are indexed by the place in the batch.
    """

    tree: TreeBuffers
    records: gdn.GdnRecords
    conv_pool: torch.Tensor
    ssm_pool: torch.Tensor

    @classmethod
    def allocate(cls, tree: TreeBuffers, conv_pool: torch.Tensor, ssm_pool: torch.Tensor, heads: int) -> "HybridTree":
        """With records for as many requests and rows as ``tree`` has; ``heads`` = key heads of this rank."""
        layers, _, value_heads, v_dim, k_dim = ssm_pool.shape
        batch, rows = tree.tokens.shape
        records = gdn.GdnRecords.allocate(
            layers, batch, rows, heads, value_heads, k_dim, v_dim, conv_pool.shape[2], conv_pool.dtype, ssm_pool.device
        )
        return cls(tree, records, conv_pool, ssm_pool)

    def conv(
        self,
        x: torch.Tensor,
        conv_state: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | bool | None = None,
        *,
        conv_state_indices: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        """``causal_conv1d_update`` of a verify: x and the result are [bs, C, N]."""
        require(activation in ("silu", "swish", True), f"the tree convolution knows SiLU, not {activation!r}")
        bs, channels, rows = x.shape
        rows_x = x.transpose(1, 2).reshape(bs * rows, channels)
        record = self.records.x[_layer_of(self.conv_pool, conv_state)]
        table = self.tree.conv_ancestors[:bs]
        out = gdn.conv_tree(rows_x, conv_state, weight, bias, conv_state_indices, table, record)
        return out.view(bs, rows, channels).transpose(1, 2)

    def verify(
        self,
        *,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        ssm_states: torch.Tensor,
        cache_indices: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        """``GDNKernelDispatcher.target_verify``: q, k, v and the result are [1, bs * N, heads, dim]."""
        bs = q.shape[1] // self.tree.width
        return gdn.gdn_tree(
            q, k, v, a, b, a_log=A_log, dt_bias=dt_bias, ssm_states=ssm_states, state_indices=cache_indices[:bs],
            ancestors=self.tree.ancestors[:bs], record=self.records.layer(_layer_of(self.ssm_pool, ssm_states)),
        )  # fmt: skip

    def commit(
        self,
        last_correct_step_indices: torch.Tensor,
        state_indices: torch.Tensor,
        mamba_track_indices: torch.Tensor | None = None,
        mamba_steps_to_track: torch.Tensor | None = None,
    ) -> None:
        """``update_mamba_state_after_mtp_verify`` for the requests of this verify, in batch order."""
        bs = last_correct_step_indices.shape[0]
        tracked = mamba_track_indices is not None and mamba_steps_to_track is not None
        gdn.commit_tree(
            self.records, self.tree.ancestors[:bs], self.tree.conv_ancestors[:bs], last_correct_step_indices,
            self.ssm_pool, self.conv_pool, state_indices[:bs],
            mamba_track_indices if tracked else None, mamba_steps_to_track if tracked else None,
        )  # fmt: skip


def _layer_of(pool: torch.Tensor, view: torch.Tensor) -> int:
    """Which layer of the pool [L, ..] a view of one layer is."""
    layer, rest = divmod(view.data_ptr() - pool.data_ptr(), pool.stride(0) * pool.element_size())
    if rest != 0 or not 0 <= layer < pool.shape[0] or view.shape != pool.shape[1:]:
        raise ValueError(f"a state of shape {list(view.shape)} is no layer of the pool {list(pool.shape)}")
    return layer
