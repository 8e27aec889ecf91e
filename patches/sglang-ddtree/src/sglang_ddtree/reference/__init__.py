"""What the engine computes, in NumPy float64: the oracle of every kernel.

Short on purpose and without torch: a reader can check each function against its formula, and every
test of a kernel is a comparison with one of them.

* :mod:`~sglang_ddtree.reference.topk`: top-k log-probabilities of the drafter, vocabulary shards.
* :mod:`~sglang_ddtree.reference.tree`: best-first tree construction, links, ancestor tables.
* :mod:`~sglang_ddtree.reference.accept`: the walk over target tokens, KV compaction.
* :mod:`~sglang_ddtree.reference.sampling`: the target's law and one seeded draw per node.
* :mod:`~sglang_ddtree.reference.gdn`: causal convolution and gated delta rule on a tree.
* :mod:`~sglang_ddtree.reference.shadow`: what a tree would have accepted, judged by later tokens.
"""
