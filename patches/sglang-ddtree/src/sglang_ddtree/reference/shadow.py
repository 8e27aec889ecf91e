"""What a tree would have accepted, judged by the tokens the linear verifier emitted later."""

from dataclasses import dataclass

from sglang_ddtree.reference.tree import NO_LINK, Tree


@dataclass(frozen=True)
class Proposal:
    """A tree and the length of the sequence up to and including its root."""

    tree: Tree
    root_at: int


def shadow_score(proposal: Proposal, sequence: list[int]) -> int | None:
    """Depth to which the emitted sequence follows the tree, None while that is still open.

    ``sequence[proposal.root_at]`` is the first token after the root.
    """
    row, depth = 0, 0
    for token in sequence[proposal.root_at :]:
        child = int(proposal.tree.next_token[row])
        while child != NO_LINK and int(proposal.tree.tokens[child]) != token:
            child = int(proposal.tree.next_sibling[child])
        if child == NO_LINK:
            return depth
        row, depth = child, depth + 1
        if int(proposal.tree.next_token[row]) == NO_LINK:
            return depth
    return depth if int(proposal.tree.next_token[row]) == NO_LINK else None
