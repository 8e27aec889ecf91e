"""The gated delta rule at all rows of a tree at once.

The recurrence over a path unrolls into sums over ancestors. With G_i the log decay from the committed
state S to row i (inclusive), E_ij = exp(G_i - G_j) for an ancestor j of i, and the rows' unit keys k:

    delta_i = beta_i (v_i - exp(G_i) S k_i) - sum_j A_ij delta_j     A_ij = beta_i E_ij (k_i . k_j), j above i
    o_i     = exp(G_i) S q_i + sum_j B_ij delta_j                    B_ij = E_ij (q_i . k_j), j above i or i

(the WY form of DeltaNet, arXiv 2406.06484, under an ancestor mask instead of a causal one). So the state
is read once and its products with all keys and queries are matrix products. What is left is a system
(I + A) delta = u, lower triangular since a parent's row is smaller than its child's. With X the inverse
of its diagonal blocks of 16 rows and N = X (A without those blocks), delta = X u - N delta is reached
exactly after one step per further block: at most three, and matrix products again.

Two launches: X, N and B per value head, which do not depend on the value columns; then delta and o per
value head and tile of columns. All arithmetic is float32. Products run on tensor cores and are float32 to
the last bits all the same: activations of bfloat16 are multiplied as they are, a float32 state with them as
its three bfloat16 terms, and everything else as three tf32 products of high and low halves. Row 0, above
every row, is kept apart, so that 64 nodes fill tiles of 64. Differences of G must not lose the near ancestors
of a head that forgets fast, so G is summed in fixed point, exactly.
"""

import triton
import triton.language as tl

MAX_NODES = 64


@triton.jit
def _log_decay(a, dt_bias, a_log):
    """g = -exp(a_log) softplus(a + dt_bias), softplus cut at 20 as the model's kernels do."""
    x = a.to(tl.float32) + dt_bias
    soft = tl.where(x <= 20.0, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))), x)
    return -tl.exp(a_log) * soft


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x.to(tl.float32)))


@triton.jit
def _fixed(g):
    """int64 in units of 2^-32, so that sums and differences are exact."""
    return (g * 4294967296.0).to(tl.int64)


@triton.jit
def _float(fixed):
    return fixed.to(tl.float32) * (1.0 / 4294967296.0)


@triton.jit
def _sees(ancestors_ptr, n, live, column, WORDS: tl.constexpr):
    """bool [rows n, columns]: is the row ``column`` on the path to row n, or n itself?"""
    low = tl.load(ancestors_ptr + n * WORDS, mask=live, other=0)
    bits = low[:, None]
    if WORDS > 1:
        high = tl.load(ancestors_ptr + n * WORDS + 1, mask=live, other=0)
        bits = tl.where(column[None, :] < 64, low[:, None], high[:, None])
    return ((bits >> (column % 64).to(tl.int64)[None, :]) & 1) != 0


@triton.jit
def _product(x, y, INTERPRETED: tl.constexpr):
    """x @ y of activations, exact to float32 sums: those of bfloat16 as they are, others as float32."""
    if x.dtype == tl.bfloat16 and not INTERPRETED:  # the interpreter multiplies the raw bits
        return tl.dot(x, y)
    return tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision="tf32x3")


@triton.jit
def _product_with_state(x, state, INTERPRETED: tl.constexpr):
    """x @ state for activations x; a float32 state is three bfloat16 terms where x is one."""
    if state.dtype == tl.bfloat16 and x.dtype == tl.bfloat16:
        return _product(x, state, INTERPRETED)
    state = state.to(tl.float32)
    if x.dtype == tl.bfloat16:
        high = state.to(tl.bfloat16)
        rest = state - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        small = _product(x, low, INTERPRETED) + _product(x, middle, INTERPRETED)
        return small + _product(x, high, INTERPRETED)
    return tl.dot(x.to(tl.float32), state, input_precision="tf32x3")


@triton.jit
def _join_blocks(inverse, lower, SIZE: tl.constexpr):
    """From the inverses X of diagonal blocks of SIZE to those of 2 SIZE: X - X O X, O what couples the halves."""
    row = tl.arange(0, 16)[:, None]
    column = tl.arange(0, 16)[None, :]
    couples = (row // (2 * SIZE) == column // (2 * SIZE)) & (row // SIZE != column // SIZE)
    product = tl.dot(tl.where(couples, lower, 0.0), inverse, input_precision="tf32x3")
    return inverse - tl.dot(inverse, product, input_precision="tf32x3")


@triton.jit
def _unit_lower_inverse(lower):
    """(I + lower)^-1 of a strictly lower triangular [16, 16] tile, by diagonal blocks of 2, 4, 8 and 16."""
    row = tl.arange(0, 16)[:, None]
    column = tl.arange(0, 16)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, lower, 0.0)
    inverse = _join_blocks(inverse, lower, 2)
    inverse = _join_blocks(inverse, lower, 4)
    return _join_blocks(inverse, lower, 8)


@triton.jit
def gdn_tables_kernel(
    q_ptr, k_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, ancestors_ptr,
    key_ptr, decay_ptr, table_x_ptr, table_n_ptr, table_b_ptr, scalars_ptr,
    rows, q_stride, k_stride, a_stride, b_stride,
    scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KC: tl.constexpr, RB: tl.constexpr, TP: tl.constexpr,
    WORDS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """X, N, B, and per row exp(G), beta, 1/|k|, scale/|q|; a block of RB rows i against all TP columns j.

    Tables are [TP, TP] per request and head, indexed by row - 1; row 0's column is in ``scalars``:
    float32 [6, TP + 1] per request and head, its planes exp(G), beta, 1/|k|, scale/|q|, A_i0, B_i0.
    """
    hv = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    h = hv // (HV // H)
    first = request * rows
    i = tl.program_id(0) * RB + tl.arange(0, RB)  # row i + 1
    j = tl.arange(0, TP)  # row j + 1
    live_i, live_j = i + 1 < rows, j + 1 < rows
    # One 64-bit base per request; offsets within its rows fit 32 bits.
    q_ptr += first * q_stride + h * K
    k_ptr += first * k_stride + h * K
    a_ptr += first * a_stride + hv
    b_ptr += first * b_stride + hv
    ancestors_ptr += first * WORDS
    key_ptr += (first * H + h) * K
    decay_ptr += first * HV + hv
    n_i, n_j = 1 + i, 1 + j
    a_log = tl.load(a_log_ptr + hv).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + hv).to(tl.float32)

    kk = tl.zeros([RB, TP], tl.float32)
    qk = tl.zeros([RB, TP], tl.float32)
    k_k0 = tl.zeros([RB], tl.float32)
    q_k0 = tl.zeros([RB], tl.float32)
    k_i2 = tl.zeros([RB], tl.float32)
    q_i2 = tl.zeros([RB], tl.float32)
    k_j2 = tl.zeros([TP], tl.float32)
    k_02 = 0.0
    for c in range(0, K, KC):
        col = c + tl.arange(0, KC)
        k_i = tl.load(k_ptr + n_i[:, None] * k_stride + col[None, :], mask=live_i[:, None], other=0.0)
        q_i = tl.load(q_ptr + n_i[:, None] * q_stride + col[None, :], mask=live_i[:, None], other=0.0)
        k_j = tl.load(k_ptr + n_j[:, None] * k_stride + col[None, :], mask=live_j[:, None], other=0.0)
        k_0 = tl.load(k_ptr + col).to(tl.float32)
        k_t = tl.trans(k_j)
        kk += _product(k_i, k_t, INTERPRETED)
        qk += _product(q_i, k_t, INTERPRETED)
        k_i, q_i, k_j = k_i.to(tl.float32), q_i.to(tl.float32), k_j.to(tl.float32)
        k_k0 += tl.sum(k_i * k_0[None, :], 1)
        q_k0 += tl.sum(q_i * k_0[None, :], 1)
        k_i2 += tl.sum(k_i * k_i, 1)
        q_i2 += tl.sum(q_i * q_i, 1)
        k_j2 += tl.sum(k_j * k_j, 1)
        k_02 += tl.sum(k_0 * k_0, 0)
    unit_i, unit_j, unit_0 = 1.0 / tl.sqrt(k_i2 + 1e-6), 1.0 / tl.sqrt(k_j2 + 1e-6), 1.0 / tl.sqrt(k_02 + 1e-6)
    unit_q = scale / tl.sqrt(q_i2 + 1e-6)

    # In blocks of 16 columns, since whole tables of int64 would fill the registers.
    total_i = tl.zeros([RB], tl.int64)  # below row 0
    total_j = tl.zeros([TP], tl.int64)
    for block in tl.static_range(0, TP, 16):
        column = 1 + block + tl.arange(0, 16)
        a = tl.load(a_ptr + column * a_stride, mask=column < rows, other=0.0)
        fixed = _fixed(tl.where(column < rows, _log_decay(a, dt_bias, a_log), 0.0))
        seen_i = _sees(ancestors_ptr, n_i, live_i, column, WORDS)
        seen_j = _sees(ancestors_ptr, n_j, live_j, column, WORDS)
        total_i += tl.sum(tl.where(seen_i, fixed[None, :], 0), 1)
        total_j += tl.sum(tl.where(seen_j, fixed[None, :], 0), 1)
    g_0 = _fixed(_log_decay(tl.load(a_ptr), dt_bias, a_log))
    sees_i = _sees(ancestors_ptr, n_i, live_i, j + 1, WORDS)
    spread = tl.where(sees_i, tl.exp(_float(tl.where(sees_i, total_i[:, None] - total_j[None, :], 0))), 0.0)
    below_0 = tl.exp(_float(total_i))
    beta = _sigmoid(tl.load(b_ptr + n_i * b_stride, mask=live_i, other=0.0))

    head = request * HV + hv
    table_x_ptr += head * (TP * TP)
    table_n_ptr += head * (TP * TP)
    table_b_ptr += head * (TP * TP)
    cell = i[:, None] * TP + j[None, :]
    proper = sees_i & (i[:, None] > j[None, :])
    table_a = tl.where(proper, kk * unit_i[:, None] * unit_j[None, :] * spread * beta[:, None], 0.0)
    own_block = tl.arange(0, TP // RB) == tl.program_id(0)
    diagonal = tl.sum(tl.where(own_block[None, :, None], tl.reshape(table_a, [RB, TP // RB, RB]), 0.0), 1)
    inverse = _unit_lower_inverse(diagonal)
    table_x = tl.where(own_block[None, :, None], inverse[:, None, :], 0.0)
    tl.store(table_x_ptr + cell, tl.reshape(table_x, [RB, TP]))
    others = tl.where((j // RB == tl.program_id(0))[None, :], 0.0, table_a)
    tl.store(table_n_ptr + cell, tl.dot(inverse, others, input_precision="tf32x3"))
    tl.store(table_b_ptr + cell, qk * unit_q[:, None] * unit_j[None, :] * spread)
    plane: tl.constexpr = TP + 1
    at = scalars_ptr + head * (6 * plane) + i + 1
    tl.store(at, tl.exp(_float(total_i + g_0)))
    tl.store(at + plane, beta)
    tl.store(at + 2 * plane, unit_i)
    tl.store(at + 3 * plane, unit_q)
    # An unused row sees itself alone: to it row 0 is no ancestor, nor would anyone read it.
    tl.store(at + 4 * plane, k_k0 * unit_i * unit_0 * below_0 * beta)
    tl.store(at + 5 * plane, q_k0 * unit_q * unit_0 * below_0)
    g_i = _log_decay(tl.load(a_ptr + n_i * a_stride, mask=live_i, other=0.0), dt_bias, a_log)
    tl.store(decay_ptr + n_i * HV, tl.exp(g_i), mask=live_i)
    if tl.program_id(0) == 0:
        q_02 = 0.0
        q_0k = 0.0
        for c in range(0, K, KC):
            col = c + tl.arange(0, KC)
            q_0 = tl.load(q_ptr + col).to(tl.float32)
            k_0 = tl.load(k_ptr + col).to(tl.float32)
            q_02 += tl.sum(q_0 * q_0, 0)
            q_0k += tl.sum(q_0 * k_0, 0)
        unit_q0 = scale / tl.sqrt(q_02 + 1e-6)
        root = scalars_ptr + head * (6 * plane)
        tl.store(root, tl.exp(_float(g_0)))
        tl.store(root + plane, _sigmoid(tl.load(b_ptr)))
        tl.store(root + 2 * plane, unit_0)
        tl.store(root + 3 * plane, unit_q0)
        tl.store(root + 4 * plane, 0.0)
        tl.store(root + 5 * plane, q_0k * unit_0 * unit_q0)
        tl.store(decay_ptr, tl.exp(_float(g_0)))
    if hv % (HV // H) == 0:
        for c in range(0, K, KC):
            col = c + tl.arange(0, KC)
            k_i = tl.load(k_ptr + n_i[:, None] * k_stride + col[None, :], mask=live_i[:, None], other=0.0)
            to = key_ptr + n_i[:, None] * (H * K) + col[None, :]
            tl.store(to, k_i.to(tl.float32) * unit_i[:, None], mask=live_i[:, None])
            if tl.program_id(0) == 0:
                k_0 = tl.load(k_ptr + col).to(tl.float32)
                tl.store(key_ptr + col, k_0 * unit_0)


@triton.jit
def gdn_tree_kernel(
    q_ptr, k_ptr, v_ptr, state_ptr, state_indices_ptr, table_x_ptr, table_n_ptr, table_b_ptr, scalars_ptr,
    delta_ptr, out_ptr,
    rows, q_stride, k_stride, v_stride, state_slot,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KC: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    TP: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """delta and o of all rows, for one request, value head and BV value columns."""
    hv = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    h = hv // (HV // H)
    first = request * rows
    v_col = tl.program_id(0) * BV + tl.arange(0, BV)
    in_v = v_col < V
    i = tl.arange(0, TP)
    live = i + 1 < rows
    n = 1 + i
    q_ptr += first * q_stride + h * K
    k_ptr += first * k_stride + h * K
    v_ptr += first * v_stride + hv * V
    delta_ptr += (first * HV + hv) * V
    out_ptr += (first * HV + hv) * V
    inside = live[:, None] & in_v[None, :]

    slot = tl.load(state_indices_ptr + request).to(tl.int64)
    state_ptr += slot * state_slot + hv * (V * K)
    committed = in_v[None, :] & (slot >= 0)
    k_s = tl.zeros([TP, BV], tl.float32)
    q_s = tl.zeros([TP, BV], tl.float32)
    k0_s = tl.zeros([BV], tl.float32)
    q0_s = tl.zeros([BV], tl.float32)
    for c in range(0, K, KC):
        col = c + tl.arange(0, KC)
        state = tl.load(state_ptr + v_col[None, :] * K + col[:, None], mask=committed, other=0.0)
        k = tl.load(k_ptr + n[:, None] * k_stride + col[None, :], mask=live[:, None], other=0.0)
        k_s += _product_with_state(k, state, INTERPRETED)
        q = tl.load(q_ptr + n[:, None] * q_stride + col[None, :], mask=live[:, None], other=0.0)
        q_s += _product_with_state(q, state, INTERPRETED)
        k_0 = tl.load(k_ptr + col).to(tl.float32)
        q_0 = tl.load(q_ptr + col).to(tl.float32)
        state = state.to(tl.float32)
        k0_s += tl.sum(state * k_0[:, None], 0)
        q0_s += tl.sum(state * q_0[:, None], 0)

    head = request * HV + hv
    plane: tl.constexpr = TP + 1
    scalars_ptr += head * (6 * plane)
    decay_0, beta_0 = tl.load(scalars_ptr), tl.load(scalars_ptr + plane)
    v_0 = tl.load(v_ptr + v_col, mask=in_v, other=0.0).to(tl.float32)
    delta_0 = beta_0 * (v_0 - decay_0 * tl.load(scalars_ptr + 2 * plane) * k0_s)
    out_0 = decay_0 * tl.load(scalars_ptr + 3 * plane) * q0_s + tl.load(scalars_ptr + 5 * plane) * delta_0
    tl.store(delta_ptr + v_col, delta_0, mask=in_v)
    tl.store(out_ptr + v_col, out_0.to(out_ptr.dtype.element_ty), mask=in_v)

    scalar = scalars_ptr + 1 + i
    decay, beta = tl.load(scalar), tl.load(scalar + plane)
    v = tl.load(v_ptr + n[:, None] * v_stride + v_col[None, :], mask=inside, other=0.0).to(tl.float32)
    delta = beta[:, None] * (v - (decay * tl.load(scalar + 2 * plane))[:, None] * k_s)
    delta -= tl.load(scalar + 4 * plane)[:, None] * delta_0[None, :]
    out = (decay * tl.load(scalar + 3 * plane))[:, None] * q_s
    out += tl.load(scalar + 5 * plane)[:, None] * delta_0[None, :]

    cell = head * (TP * TP) + i[:, None] * TP + i[None, :]
    direct = tl.dot(tl.load(table_x_ptr + cell), delta, input_precision="tf32x3")
    delta = direct
    if TP > 16:
        between = tl.load(table_n_ptr + cell)
        for _ in range(TP // 16 - 1):
            delta = direct - tl.dot(between, delta, input_precision="tf32x3")
    out += tl.dot(tl.load(table_b_ptr + cell), delta, input_precision="tf32x3")
    tl.store(delta_ptr + n[:, None] * (HV * V) + v_col[None, :], delta, mask=inside)
    tl.store(out_ptr + n[:, None] * (HV * V) + v_col[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)
