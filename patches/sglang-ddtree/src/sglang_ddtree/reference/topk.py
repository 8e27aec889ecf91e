"""Top-k log-probabilities of the drafter's rows, whole or sharded over the vocabulary."""

import numpy as np


def logsumexp(rows: np.ndarray) -> np.ndarray:
    """log sum exp over the last axis; a row of only -inf gives -inf."""
    top = rows.max(axis=-1, keepdims=True)
    safe = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return (np.log(np.exp(rows - safe).sum(axis=-1, keepdims=True)) + safe)[..., 0]


def topk(
    logits: np.ndarray, k: int, *, vocab_start: int = 0, num_valid: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Global ids [R, k], their logits [R, k] and the log-sum-exp [R] of the valid columns.

    Sorted by logit, largest first; equal logits by the lower id. NaN counts as -inf. Columns from
    ``num_valid`` on are padding of the shard and take part in nothing. Entries beyond the valid
    vocabulary carry id 0 and -inf.
    """
    valid = logits.shape[-1] if num_valid is None else num_valid
    rows = np.asarray(logits[:, :valid], dtype=np.float64)
    rows = np.where(np.isnan(rows), -np.inf, rows)
    order = np.argsort(-rows, axis=-1, kind="stable")[:, :k]
    ids = np.zeros((rows.shape[0], k), dtype=np.int64)
    values = np.full((rows.shape[0], k), -np.inf)
    ids[:, : order.shape[1]] = order + vocab_start
    values[:, : order.shape[1]] = np.take_along_axis(rows, order, axis=-1)
    return ids, values, logsumexp(rows)


def log_probs(values: np.ndarray, lse: np.ndarray) -> np.ndarray:
    """values - lse, and -inf (never NaN) where the whole row is -inf."""
    safe = np.where(np.isfinite(lse), lse, 0.0)
    return values - safe[..., None]


def merge_topk(ids: np.ndarray, values: np.ndarray, lse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Global top-k from the shards' ids [tp, R, K], logits [tp, R, K] and log-sum-exps [tp, R]."""
    _, rows, k = ids.shape
    all_ids = ids.transpose(1, 0, 2).reshape(rows, -1)
    all_values = values.transpose(1, 0, 2).reshape(rows, -1).astype(np.float64)
    # A filler entry (-inf, id 0) must lose against a real -inf entry of any id: order by rank first.
    order = np.argsort(-all_values, axis=-1, kind="stable")[:, :k]
    merged = np.take_along_axis(all_values, order, axis=-1)
    return np.take_along_axis(all_ids, order, axis=-1), log_probs(merged, logsumexp(lse.T.astype(np.float64)))
