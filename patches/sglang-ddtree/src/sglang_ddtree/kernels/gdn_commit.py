"""The committed states after the accepted path, from the records of the verify."""

import triton
import triton.language as tl


@triton.jit
def commit_state_kernel(
    delta_ptr, key_ptr, decay_ptr, ancestors_ptr, last_row_ptr, state_ptr, state_indices_ptr,
    track_indices_ptr, track_rows_ptr,
    rows, delta_layer, key_layer, decay_layer, state_layer, state_slot,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    WORDS: tl.constexpr, TRACK: tl.constexpr,
):  # fmt: skip
    """S <- decay S + delta k^T for each row of the path, root first; one program per BV columns."""
    hv = tl.program_id(0) % HV
    h = hv // (HV // H)
    layer = tl.program_id(1).to(tl.int64)
    request = tl.program_id(2).to(tl.int64)
    slot = tl.load(state_indices_ptr + request).to(tl.int64)
    if slot < 0:
        return
    kk = tl.arange(0, K)
    vv = (tl.program_id(0) // HV) * BV + tl.arange(0, BV)
    in_v = vv < V
    tile = hv * (V * K) + vv[:, None] * K + kk[None, :]
    pool = state_ptr + layer * state_layer
    first = request * rows
    delta_ptr += layer * delta_layer + hv * V
    key_ptr += layer * key_layer + h * K
    decay_ptr += layer * decay_layer + hv
    last = tl.load(last_row_ptr + request).to(tl.int32)
    track_row = -1
    track_slot = slot
    if TRACK:
        track_row = tl.load(track_rows_ptr + request).to(tl.int32)
        track_slot = tl.load(track_indices_ptr + request).to(tl.int64)

    state = tl.load(pool + slot * state_slot + tile, mask=in_v[:, None], other=0.0).to(tl.float32)
    for row in range(last + 1):
        bits = tl.load(ancestors_ptr + (first + last) * WORDS + row // 64)
        if ((bits >> (row % 64)) & 1) != 0:
            n = first + row
            key = tl.load(key_ptr + n * (H * K) + kk)
            delta = tl.load(delta_ptr + n * (HV * V) + vv, mask=in_v, other=0.0)
            state = state * tl.load(decay_ptr + n * HV) + delta[:, None] * key[None, :]
            if (row == track_row) & (track_slot >= 0):
                at = pool + track_slot * state_slot + tile
                tl.store(at, state.to(state_ptr.dtype.element_ty), mask=in_v[:, None])
    tl.debug_barrier()  # read whole before it is written
    tl.store(pool + slot * state_slot + tile, state.to(state_ptr.dtype.element_ty), mask=in_v[:, None])


@triton.jit
def _window_after(x_ptr, table_ptr, old_ptr, row, channels, state_tap, in_c, TAPS: tl.constexpr, TP: tl.constexpr):
    """[TP, BC]: the window after ``row``, its own input last and those of the TAPS - 1 rows above before it."""
    tap = tl.arange(0, TP)
    above = tl.load(table_ptr + row * TAPS + TAPS - 2 - tap, mask=tap < TAPS - 1, other=0)
    at = tl.where(tap < TAPS - 1, above, row)[:, None]  # a row of the tree, or -1, -2, .. of the old window
    wanted = (tap < TAPS)[:, None] & in_c[None, :]
    from_tree = tl.load(x_ptr + tl.maximum(at, 0) * channels, mask=wanted & (at >= 0), other=0.0)
    old = old_ptr + tl.where(at < 0, TAPS + at, 0) * state_tap
    from_window = tl.load(old, mask=wanted & (at < 0), other=0.0)
    return tl.where(at >= 0, from_tree.to(from_window.dtype), from_window)


@triton.jit
def commit_conv_kernel(
    x_ptr, table_ptr, last_row_ptr, state_ptr, state_indices_ptr, track_indices_ptr, track_rows_ptr,
    rows, channels, x_layer, state_layer, state_slot, state_channel, state_tap,
    TAPS: tl.constexpr, TP: tl.constexpr, BC: tl.constexpr, TRACK: tl.constexpr,
):  # fmt: skip
    """The windows of a request's slot, and of its tracked row's, for a block of channels."""
    layer = tl.program_id(1).to(tl.int64)
    request = tl.program_id(2).to(tl.int64)
    slot = tl.load(state_indices_ptr + request).to(tl.int64)
    if slot < 0:
        return
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    in_c = c < channels
    tap = tl.arange(0, TP)[:, None]
    wanted = (tap < TAPS) & in_c[None, :]
    first = request * rows
    x = x_ptr + layer * x_layer + first * channels + c[None, :]
    table = table_ptr + first * TAPS
    pool = state_ptr + layer * state_layer
    cell = c[None, :] * state_channel
    old = pool + slot * state_slot + cell
    if TRACK:
        track_row = tl.load(track_rows_ptr + request).to(tl.int32)
        track_slot = tl.load(track_indices_ptr + request).to(tl.int64)
        if (track_row >= 0) & (track_slot >= 0):
            window = _window_after(x, table, old, track_row, channels, state_tap, in_c, TAPS, TP)
            tl.store(pool + track_slot * state_slot + cell + tap * state_tap, window, mask=wanted)
    last = tl.load(last_row_ptr + request).to(tl.int32)
    window = _window_after(x, table, old, last, channels, state_tap, in_c, TAPS, TP)
    tl.debug_barrier()  # all of the old window is read before any of it is written
    tl.store(old + tap * state_tap, window, mask=wanted)
