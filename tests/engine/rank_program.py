"""Ranks of a tensor-parallel group: `python rank_program.py SGLANG OUT`; `alone()` is what they are compared with.

SGLang is imported once, and for each of the group sizes as many processes are forked from that as there are ranks.
Each rank holds its shard of SGLang's own ParallelLMHead, drafts with this plugin's head over SGLang's own group
(gloo on the CPU), and verifies on logits that SGLang's own processor gathers. What it saw goes to OUT/RANKS.RANK as
JSON: tensors as lists, and digests of their bytes, so that ranks can be compared bit by bit.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

BLOCK, HIDDEN, BATCH, ROWS = 5, 8, 3, 12
PADDING = 1e4  # in every row of a shard that is no token: one look at it and it would win


@dataclasses.dataclass(frozen=True)
class Case:
    """A target's vocabulary. Small integers, so that every product is exact whatever its order."""

    vocab: int
    children: int
    kind: str = "plain"  # "ties": few distinct rows; "banned": a third of the tokens, and one whole range, is -inf

    @property
    def name(self) -> str:
        return f"{self.vocab}-{self.children}-{self.kind}"

    def weight(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.vocab)
        rows = torch.randint(-4, 5, (self.vocab, HIDDEN), generator=generator).float()
        if self.kind == "ties":
            rows = rows[:3][torch.randint(0, 3, (self.vocab,), generator=generator)]
        if self.kind == "banned":
            rows[::3, 0] = float("-inf")
            rows[: self.vocab // 3, 0] = float("-inf")
        return rows

    def hidden(self) -> torch.Tensor:
        """[BATCH * BLOCK, HIDDEN]; its first column is 1, so that -inf stays -inf."""
        generator = torch.Generator().manual_seed(7)
        rows = torch.randint(-3, 4, (BATCH * BLOCK, HIDDEN), generator=generator).float() / 4
        rows[:, 0] = 1.0
        return rows


# By ranks. 50 and 129 are padded to 64 and 192: the last shard is padding in part, or altogether.
CASES = {
    2: (Case(129, 4, "banned"), Case(50, 4, "ties"), Case(5, 8)),
    4: (Case(129, 4, "ties"), Case(50, 4, "banned")),
}


def digest(*tensors: torch.Tensor) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def draft(lm_head: Any, hidden: torch.Tensor, case: Case, group: Any) -> tuple[Any, Any]:
    """(head, trees) of one draft block."""
    from sglang_ddtree.head import build_head
    from sglang_ddtree.kernels.buffers import TreeBuffers
    from sglang_ddtree.kernels.build import build_tree

    head = build_head(SimpleNamespace(lm_head=lm_head), block_size=BLOCK, children=case.children, capacity=BATCH,
                      tp_group=group)  # fmt: skip
    head(hidden)
    trees = TreeBuffers.allocate(BATCH, ROWS, "cpu")
    build_tree(head.logp, head.ids, torch.arange(BATCH), torch.arange(BATCH) + 20, trees)
    return head, trees


def seen(head: Any, trees: Any) -> dict[str, Any]:
    """Tokens are listed as far as the tree goes; the digest covers every cell of every buffer."""
    used = trees.num_nodes.tolist()
    return {
        "tokens": [row[:n] for row, n in zip(trees.tokens.tolist(), used, strict=True)],
        "parents": [row[:n] for row, n in zip(trees.parent.tolist(), used, strict=True)],
        "logp": head.logp.tolist(),
        "top1": head.out.tolist(),
        "digest": digest(*vars(trees).values(), head.ids, head.logp),
    }


def alone(case: Case) -> dict[str, Any]:
    """The reference: one rank with the whole vocabulary."""
    return seen(*draft(SimpleNamespace(weight=case.weight()), case.hidden(), case, None))


# -- one of several ----------------------------------------------------------------------------------------------------


def join(rank: int, ranks: int, out: Path) -> Any:
    """SGLang's own groups over gloo; returns the tensor-parallel one."""
    from sglang.srt.distributed import get_tp_group, parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.runtime_context import get_parallel, publish
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path="dummy", tp_size=ranks, device="cpu")
    publish(args, role="test")
    parallel_state.set_custom_all_reduce(False)  # it is of GPUs
    parallel_state.init_distributed_environment(
        world_size=ranks, rank=rank, local_rank=rank, backend="gloo", timeout=60,
        distributed_init_method=f"file://{out}/store-{ranks}",
    )  # fmt: skip
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    sizes = SimpleNamespace(hf_config=SimpleNamespace(), hidden_size=HIDDEN, dtype=torch.float32)
    initialize_dp_attention(args, sizes)
    assert (get_parallel().tp_rank, get_parallel().tp_size) == (rank, ranks)
    group = get_tp_group()
    group.all_gather_into_tensor = group._all_gather_into_tensor  # the operator in front of it is registered for GPUs
    return group


def shard(case: Case) -> Any:
    """SGLang's head with this rank's rows, loaded by its own loader; then its padding is poisoned."""
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

    head = ParallelLMHead(case.vocab, HIDDEN, params_dtype=torch.float32)
    with torch.no_grad():
        head.weight_loader(head.weight, case.weight())
        head.weight[int(head.shard_indices.num_org_elements) :] = PADDING
    return head


def gathered(lm_head: Any, hidden: torch.Tensor, case: Case) -> torch.Tensor:
    """The target's logits of all rows, by SGLang's own processor."""
    from sglang.srt.layers.logits_processor import LogitsProcessor

    processor = LogitsProcessor(SimpleNamespace(vocab_size=case.vocab))
    return processor._get_logits(hidden, lm_head, SimpleNamespace(next_token_logits_buffer=None))


def requests(**values: Any) -> list[Any]:
    params = {"top_k": 1 << 30, "sampling_seed": None, "frequency_penalty": 0.0, "presence_penalty": 0.0,
              "repetition_penalty": 1.0, "min_new_tokens": 0}  # fmt: skip
    return [SimpleNamespace(rid=str(n), sampling_params=SimpleNamespace(**params), **values) for n in range(BATCH)]


def laws(greedy: bool) -> Any:
    ones = torch.ones(BATCH)
    return SimpleNamespace(
        is_all_greedy=greedy, temperatures=ones[:, None] * 3, top_ks=torch.full((BATCH,), 1 << 30, dtype=torch.int32),
        top_ps=ones, min_ps=ones * 0, sampling_seed=None, need_top_k_sampling=False, need_top_p_sampling=False,
        need_min_p_sampling=False,
    )  # fmt: skip


def verified(lm_head: Any, trees: Any, case: Case, number: int, group: Any) -> dict[str, Any]:
    """Tokens of all rows and the walks they give, with what each rank computes by itself made to differ."""
    from sglang_ddtree import verify
    from sglang_ddtree.kernels.accept import accept_tree
    from sglang_ddtree.kernels.buffers import AcceptBuffers
    from sglang_ddtree.tags import RequestTags

    generator = torch.Generator().manual_seed(100 + number)
    rows = torch.randint(-8, 9, (BATCH * ROWS, HIDDEN), generator=torch.Generator().manual_seed(3)).float() / 8
    rows[:, 0] = 1.0
    own = rows + torch.randn(rows.shape, generator=generator) * 1e-3 * (torch.arange(HIDDEN) > 0)
    logits = gathered(lm_head, own, case)
    noisy = logits + torch.randn(logits.shape, generator=generator)

    def tokens(given: torch.Tensor, reqs: list[Any], tp_group: Any, greedy: bool) -> torch.Tensor:
        return verify.target_tokens(
            given.clone(), trees.positions, laws(greedy), reqs, RequestTags("cpu").of(reqs), tp_group
        )

    chosen = {
        "greedy": tokens(logits, requests(), group, True),
        "greedy_apart": tokens(noisy, requests(), group, True),
        "processed": tokens(noisy, requests(custom_logit_processor="x"), group, True),
        "grammar": tokens(noisy, requests(grammar=object()), group, True),
        "drawn": tokens(noisy, requests(), group, False),
        "drawn_apart": tokens(logits, requests(), None, False),
    }
    found = {"hidden": digest(own), "logits": digest(logits), "width": logits.shape[1]}
    slots = torch.arange(BATCH * ROWS).view(BATCH, ROWS)
    for name, target in chosen.items():
        accept = AcceptBuffers.allocate(BATCH, BLOCK, "cpu")
        accept_tree(target, trees, slots, torch.arange(BATCH) + 20, accept)
        found[name] = {"tokens": digest(target), "walk": digest(*vars(accept).values()), "largest": int(target.max())}
    return found


def rank(number: int, ranks: int, out: Path) -> None:
    """All cases of one rank, in order: its partners run the same ones."""
    group = join(number, ranks, out)
    found = {}
    for case in CASES[ranks]:
        lm_head = shard(case)
        head, trees = draft(lm_head, case.hidden(), case, group)
        found[case.name] = {
            "tokens_of_shard": int(lm_head.shard_indices.num_org_elements),
            "poisoned": int((lm_head.weight == PADDING).all(1).sum()),
            **seen(head, trees),
            "hidden_apart": seen(*draft(lm_head, case.hidden() + number / 64, case, group))["digest"],
        }
    found["verified"] = verified(lm_head, trees, case, number, group)
    (out / f"{ranks}.{number}").write_text(json.dumps(found))


def forked(number: int, ranks: int, out: Path) -> int:
    """The process of one rank."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        rank(number, ranks, out)
        code = 0
    except BaseException:  # noqa: BLE001  the parent reads the exit status, a person the traceback
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # gloo's threads need not be waited for


def main(source: str, out: str) -> int:
    """0 if all ranks ended well; the first that does not ends its partners, which would wait for it."""
    import sglang_setup

    sglang_setup.load(Path(source))
    for ranks in CASES:
        left = {forked(number, ranks, Path(out)) for number in range(ranks)}
        while left:
            pid, status = os.wait()
            left.discard(pid)
            if status != 0:
                for other in left:
                    os.kill(other, signal.SIGKILL)
                return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1], sys.argv[2])
    sys.stdout.flush()
    os._exit(code)
