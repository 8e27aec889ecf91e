"""Depthwise causal convolution over ancestors: one row and a block of channels per program."""

import triton
import triton.language as tl


@triton.jit
def conv_tree_kernel(
    x_ptr, state_ptr, weight_ptr, bias_ptr, state_indices_ptr, table_ptr, record_ptr, out_ptr,
    rows, channels, x_stride, state_slot, state_channel, state_tap,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The row's inputs 0, 1, .. steps up; neighbouring threads hold neighbouring channels."""
    request = tl.program_id(2).to(tl.int64)
    first = request * rows
    n = first + tl.program_id(1)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    in_c = c < channels
    slot = tl.load(state_indices_ptr + request).to(tl.int64)
    own = tl.load(x_ptr + n * x_stride + c, mask=in_c, other=0.0)
    tl.store(record_ptr + n * channels + c, own, mask=in_c)
    acc = own.to(tl.float32) * tl.load(weight_ptr + c * (TAPS + 1) + TAPS, mask=in_c, other=0.0).to(tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + c, mask=in_c, other=0.0).to(tl.float32)
    window = state_ptr + slot * state_slot + c.to(tl.int64) * state_channel
    for step in tl.static_range(TAPS):
        at = tl.load(table_ptr + n * TAPS + step)
        in_tree = at >= 0
        from_tree = tl.load(x_ptr + (first + tl.maximum(at, 0)) * x_stride + c, mask=in_c & in_tree, other=0.0)
        tap = tl.where(in_tree, 0, TAPS + at).to(tl.int64)
        from_window = tl.load(window + tap * state_tap, mask=in_c & (at < 0) & (slot >= 0), other=0.0)
        weight = tl.load(weight_ptr + c * (TAPS + 1) + TAPS - 1 - step, mask=in_c, other=0.0).to(tl.float32)
        acc += (from_tree.to(tl.float32) + from_window.to(tl.float32)) * weight
    acc = acc / (1.0 + tl.exp(-acc))
    tl.store(out_ptr + n * channels + c, acc.to(out_ptr.dtype.element_ty), mask=in_c)
