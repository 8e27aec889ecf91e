"""The target's law at a node and one seeded draw from it, as SGLang's own sampler defines them.

Filters are joint, as in SGLang's PyTorch sampler: on the tokens sorted by probability, keep the first
``top_k``, of those whose preceding mass is at most ``top_p``, of those at least ``min_p`` times the
largest. The draw is Gumbel-max on a hash of (seed, position, column): nothing but the request's seed
and the token's position enters, so neither the tree nor the batch changes what is drawn.
"""

import numpy as np

_MASK = np.uint64(0xFFFFFFFF)


def target_law(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[np.ndarray, np.ndarray]:
    """Ids sorted by probability (ties: lower id) and their unnormalised weights [V], 0 if filtered."""
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    weights = probs[order]
    before = np.cumsum(weights) - weights
    keep = (np.arange(len(weights)) < top_k) & (before <= top_p) & (weights >= min_p * weights[0])
    return order, np.where(keep, weights, 0.0)


def _rotl(x: np.ndarray, bits: int) -> np.ndarray:
    return ((x << np.uint64(bits)) | (x >> np.uint64(32 - bits))) & _MASK


def _mix(h: np.ndarray, block: np.ndarray) -> np.ndarray:
    k = (block * np.uint64(0xCC9E2D51)) & _MASK
    k = (_rotl(k, 15) * np.uint64(0x1B873593)) & _MASK
    return (_rotl(h ^ k, 13) * np.uint64(5) + np.uint64(0xE6546B64)) & _MASK


def murmur32(seed: int, position: int, columns: np.ndarray) -> np.ndarray:
    """MurmurHash3 of (64-bit seed, 32-bit position, 32-bit column) as four 32-bit blocks."""
    h = np.zeros(len(columns), dtype=np.uint64)
    seed64 = np.uint64(seed & 0xFFFFFFFFFFFFFFFF)
    for block in (seed64 & _MASK, seed64 >> np.uint64(32), np.uint64(position & 0xFFFFFFFF)):
        h = _mix(h, np.full(len(columns), block, dtype=np.uint64))
    h = _mix(h, columns.astype(np.uint64) & _MASK) ^ np.uint64(16)
    h ^= h >> np.uint64(16)
    h = (h * np.uint64(0x85EBCA6B)) & _MASK
    h ^= h >> np.uint64(13)
    h = (h * np.uint64(0xC2B2AE35)) & _MASK
    return h ^ (h >> np.uint64(16))


def gumbel(seed: int, position: int, columns: np.ndarray) -> np.ndarray:
    """-log(-log(u)), u the centre of the hash's cell: finite for every hash value."""
    uniform = (murmur32(seed, position, columns).astype(np.float64) + 0.5) / 2.0**32
    return -np.log(-np.log(uniform))


def draw(
    logits: np.ndarray,
    seed: int,
    position: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> int:
    """One token of the law at ``position`` (the node's own position).

    With a filter the hash's column is the token's rank, without one its id: SGLang's sampler draws
    over the sorted row in the first case and over the vocabulary in the second.
    """
    vocab = len(logits)
    filtered = (top_k is not None and top_k < vocab) or top_p < 1.0 or min_p > 0.0
    order, weights = target_law(logits, temperature, vocab if top_k is None else top_k, top_p, min_p)
    columns = np.arange(vocab) if filtered else order
    with np.errstate(divide="ignore"):
        score = np.log(weights) + gumbel(seed, position, columns)
    return int(order[np.argmax(score)])
