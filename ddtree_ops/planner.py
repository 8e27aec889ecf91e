"""Will it fit, and with which limits: the GPU memory of one server, predicted before anything is loaded. Pure.

The arithmetic is that of SGLang 0.5.17 (``mem_cache/kv_cache_configurator.py``, ``mem_cache/memory_pool.py``), so that
the limits can be rendered explicitly instead of being left to heuristics that do not know a tree's width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ddtree_ops.keeping import Dtypes, Kept, kept
from ddtree_ops.model import MAX_BUDGET, MAX_RECORDS_BUDGET, Mode, States
from ddtree_ops.shapes import DTYPE_BYTES, DrafterShape, ModelShape

MIB = 1 << 20
GIB = 1 << 30

CONTEXT_BYTES = 1 * GIB
"""What CUDA's context and its libraries take before SGLang counts (measured by SGLang as total minus available)."""
RESERVE_FLOOR = 512 * MIB
RESERVE_LARGE_GPU = 10 * GIB
ACTIVATION_PER_TOKEN = 3 * MIB // 2
GRAPH_PER_REQUEST = 2 * MIB
PREFILL_CHUNK = ((20 * GIB, 2048), (35 * GIB, 2048), (60 * GIB, 4096), (160 * GIB, 8192))
SLOTS_PER_REQUEST = {"off": 1, "no_buffer": 3, "extra_buffer": 5}
"""State slots of a request by the radix cache's strategy; the extra buffer's two are for the overlap scheduler."""
CONV_DTYPE_BYTES = 2
IMAGE_POOL_MIB = 1024
POOLS = ("KV cache", "KV cache of the drafter")


@dataclass(frozen=True)
class Ask:
    """What should run on each GPU. ``budget`` is that of the widest tree in mode auto; ``weights`` are the bytes of the
    target and of the drafter, before splitting. ``states`` and ``dtypes`` unset: as the engine decides (``keeping``).
    ``image_pool``: bytes that SGLang keeps on the first GPU for images and video (``image_pool``).
    """

    target: ModelShape
    weights: int
    gpu_bytes: int
    mode: Mode = Mode.AR
    drafter: DrafterShape | None = None
    drafter_weights: int = 0
    budget: int = 16
    running: int = 8
    context: int = 32768
    tp: int = 1
    state_dtype: str | None = None
    kv_dtype: str | None = None
    radix: str = "extra_buffer"
    slots_given: int | None = None
    mem_fraction: float | None = None
    tokens_given: int | None = None
    image_pool: int = 0
    states: States | None = None
    dtypes: Dtypes | None = None

    @property
    def kept(self) -> Kept:
        """How rows keep states, and why; a chain's are always snapshots."""
        return kept(self.states, self.mode, self.target, self.budget, self.dtypes)

    @property
    def records(self) -> bool:
        """Whether rows leave records."""
        return self.kept.states == "records"

    @property
    def slots(self) -> int:
        """State slots: one and more for each running request, the rest for the prefix cache."""
        return self.slots_given or self.running * SLOTS_PER_REQUEST[self.radix]

    @property
    def rows(self) -> int:
        """Rows of one request in a verify pass of the target: the tree with its root, or the drafter's block."""
        if self.mode is Mode.AR:
            return 0
        return self.budget + 1 if self.mode.verifies_trees else self.block

    @property
    def block(self) -> int:
        return (self.drafter.block_size if self.drafter else None) or 16

    @property
    def state_bytes(self) -> int:
        return DTYPE_BYTES.get(self.state_dtype or self.target.state_dtype, 4)

    @property
    def kv_bytes(self) -> int:
        return DTYPE_BYTES.get(self.kv_dtype or self.target.dtype, 2)


@dataclass(frozen=True)
class Item:
    """One thing that takes memory, and how its size comes about."""

    name: str
    bytes: int
    how: str


@dataclass(frozen=True)
class MemoryPlan:
    """The prediction for one GPU. ``room`` is how many tokens' keys and values fit into what is left; ``tokens`` is how
    many the server takes of that.
    """

    ask: Ask
    items: tuple[Item, ...]
    reserve: int
    bytes_per_token: int

    @property
    def taken(self) -> int:
        return sum(item.bytes for item in self.items)

    @property
    def left(self) -> int:
        """For the KV cache; negative when not even the rest fits."""
        return self.ask.gpu_bytes - CONTEXT_BYTES - self.reserve - self.taken

    @property
    def room(self) -> int:
        return max(0, self.left) // max(1, self.bytes_per_token)

    @property
    def tokens(self) -> int:
        return min(self.room, self.ask.tokens_given or self.room)

    def pools(self, tokens: int) -> tuple[Item, ...]:
        """The caches of so many tokens; each has one more slot, which padding writes to."""
        named = zip(POOLS, _per_token(self.ask), strict=False)
        return tuple(Item(name, (tokens + 1) * each, f"({tokens} + 1) tokens x {each} B") for name, each in named)

    @property
    def needed_tokens(self) -> int:
        """One request of the whole context with what speculation reserves past its end, and a start for the others."""
        ahead = 2 * max(self.ask.rows, self.ask.block if self.ask.mode.speculates else 0)
        return self.ask.context + ahead + (self.ask.running - 1) * (1024 + ahead)

    @property
    def fits(self) -> bool:
        return self.left > 0 and self.room >= self.needed_tokens

    @property
    def mem_fraction(self) -> float:
        """``--mem-fraction-static``: weights, states and KV cache as a part of the memory SGLang finds free."""
        found = self.ask.gpu_bytes - CONTEXT_BYTES
        return int((found - self.reserve) / found * 1000) / 1000

    def flags(self) -> tuple[str, ...]:
        """The limits, said explicitly: what SGLang would guess otherwise."""
        made = ["--max-running-requests", str(self.ask.running)]
        made += ["--cuda-graph-max-bs-decode", str(self.ask.running)]
        made += ["--mem-fraction-static", f"{self.mem_fraction:.3f}"]
        if self.ask.target.hybrid:
            made += ["--max-mamba-cache-size", str(self.ask.slots)]
            made += ["--mamba-ssm-dtype", self.ask.state_dtype or self.ask.target.state_dtype]
        return tuple(made)


def plan_memory(ask: Ask) -> MemoryPlan:
    """The memory of one GPU, item by item."""
    items = [Item("target weights", ask.weights // ask.tp, f"{_gib(ask.weights)} in its files / tp {ask.tp}")]
    if ask.mode.speculates and ask.drafter is not None:
        how = f"{_gib(ask.drafter_weights)} in its files / tp {ask.tp}"
        items.append(Item("drafter weights", ask.drafter_weights // ask.tp, how))
    items += _states(ask)
    if ask.image_pool:
        how = "SGLang's, on the first GPU; --mm-feature-transport cpu does without"
        items.append(Item("pool for images", ask.image_pool, how))
    return MemoryPlan(ask, tuple(items), _reserve(ask), sum(_per_token(ask)))


def image_pool(target: ModelShape, flags: Mapping[str, str], env: Mapping[str, str]) -> int:
    """Bytes on the first GPU that SGLang 0.5.17 sets aside for images and video of a target that can see, unless told
    otherwise (server_args.py, multimodal/processors/base_processor.py).
    """
    given, older = flags.get("--mm-feature-transport"), env.get("SGLANG_USE_CUDA_IPC_TRANSPORT")
    by_gpu = given == "cuda_ipc" if given else older is None or older.lower() in ("true", "1", "yes", "y")
    megabytes = env.get("SGLANG_MM_FEATURE_CACHE_MB", "")
    return (int(megabytes) if megabytes.isdigit() else IMAGE_POOL_MIB) * MIB if target.sees and by_gpu else 0


def _per_token(ask: Ask) -> tuple[int, ...]:
    """Bytes of one token's keys and values: the target's, and the drafter's where one drafts."""
    target = ask.target.attention.bytes_per_token(ask.kv_bytes, ask.tp)
    if not ask.mode.speculates or ask.drafter is None:
        return (target,)
    return target, ask.drafter.attention.bytes_per_token(ask.drafter.dtype_bytes, ask.tp)


def _states(ask: Ask) -> list[Item]:
    """The recurrent layers: slots for requests and the prefix cache, and what every row of a verify pass leaves."""
    gdn = ask.target.recurrence
    if gdn is None:
        return []
    slots = ask.slots + 1
    state = gdn.state_bytes(ask.state_bytes, ask.tp)
    conv = gdn.conv_bytes(CONV_DTYPE_BYTES, ask.tp)
    items = [
        Item("recurrent states", slots * state, f"({slots - 1} slots + 1) x {_mib(state)}"),
        Item("convolution states", slots * conv, f"({slots - 1} slots + 1) x {_mib(conv)}"),
    ]
    if not ask.rows:
        return items
    if ask.records:
        record = gdn.record_bytes(CONV_DTYPE_BYTES, ask.tp)
        how = f"{ask.running} x {ask.rows} rows x {_mib(record)}"
        return [*items, Item("state records", ask.running * ask.rows * record, how)]
    requests = ask.running + 1
    items.append(
        Item("state snapshots", requests * ask.rows * state, f"({ask.running} + 1) x {ask.rows} rows x {_mib(state)}")
    )
    # A chain's windows overlap and are stored once; siblings of a tree need windows of their own.
    columns = ask.rows * (gdn.conv_width - 1) if ask.mode.verifies_trees else ask.rows + gdn.conv_width - 2
    window = gdn.conv_bytes(CONV_DTYPE_BYTES, ask.tp, columns)
    items.append(Item("convolution snapshots", requests * window, f"({ask.running} + 1) x {_mib(window)}"))
    return items


def _reserve(ask: Ask) -> int:
    """What is left free for activations, CUDA graphs and the logits of a verify pass: as given, else as SGLang does."""
    if ask.mem_fraction is not None:
        return int((ask.gpu_bytes - CONTEXT_BYTES) * (1 - ask.mem_fraction))
    chunk = next((size for limit, size in PREFILL_CHUNK if ask.gpu_bytes < limit), 16384)
    reserve = RESERVE_FLOOR + chunk * ACTIVATION_PER_TOKEN + ask.tp * 128 * MIB + ask.running * GRAPH_PER_REQUEST
    if ask.gpu_bytes > 60 * GIB:
        reserve = max(reserve, RESERVE_LARGE_GPU)
    return reserve + logits_bytes(ask)


def logits_bytes(ask: Ask) -> int:
    """The fp32 logits of every row of a full batch; the buffer is allocated once, for the largest graph."""
    return ask.running * max(1, ask.rows) * ask.target.vocab * 4


# -- the largest that fits --------------------------------------------------------------------------------------------


def fitted(ask: Ask) -> MemoryPlan | None:
    """The plan with as many of the requests asked for as fit; None if not even one does."""
    running = largest_running(ask, ask.running)
    return plan_memory(replace(ask, running=running)) if running else None


def largest_running(ask: Ask, limit: int = 256) -> int:
    """The most running requests that fit; 0 if not even one does."""
    return _largest(limit, lambda n: plan_memory(replace(ask, running=n)).fits)


def largest_budget(ask: Ask, limit: int = MAX_BUDGET) -> int:
    """The largest tree that fits with the requests asked for; 0 if none does."""
    limit = min(limit, MAX_RECORDS_BUDGET) if ask.states == "records" and ask.target.hybrid else limit
    return _largest(limit, lambda n: plan_memory(replace(ask, mode=Mode.TREE, budget=n)).fits)


def largest_context(ask: Ask) -> int:
    """The longest context that fits, in steps of 1024, up to the model's own; 0 if none does."""
    limit = (ask.target.context or 1 << 20) // 1024
    return 1024 * _largest(limit, lambda n: plan_memory(replace(ask, context=n * 1024)).fits)


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The last n of 1..limit for which ``fits`` holds, which it does up to some point and never after."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _mib(size: int) -> str:
    return f"{size / MIB:.2f} MiB"
