"""One round of the tree worker, as Triton kernels behind plain functions.

Sizes: bs requests; D = block size - 1 drafted depths; K = top-k cap; T = budget; N = T + 1 rows of a
tree (row 0 the root); W = D + 1 the longest root path; V vocabulary; R logit rows.

Rules every function here keeps:

* nothing is read back by the host, no tensor is resized, no Python loop depends on data: each call can
  be captured in a CUDA graph and runs while the scheduler prepares the next round;
* outputs are written into buffers the caller owns (``out=``), every cell of the first ``bs`` rows each
  time, so nothing of an earlier round can be read by mistake;
* offsets are 64-bit, ids are int64 and global (vocabulary shards are merged before the tree is built);
* shapes, dtypes and contiguity are checked by the wrapper; it raises ``ValueError`` with what it got.

====================================  ==========================================================
``buffers.TreeBuffers``               the trees of a batch: tokens, positions, links, ancestors
``buffers.AcceptBuffers``             what one verify yields; rotate at least two sets
``buffers.TreeCounters``              counts kept on the device, read off the hot path
``topk.draft_topk``                   drafter logits -> top-k ids, log-probabilities, log-sum-exp
``topk.merge_topk``                   the same from the shards of tensor parallel ranks
``build.build_tree``                  top-k log-probabilities -> trees
``slots.prepare_round``               draft block and KV slots of a round, the only req_to_token read
``mask.write_tree_mask``              tail cells of the FULL_MASK the triton backend reads
``sample.sample_targets``             one seeded draw per row, SGLang's law
``accept.accept_tree``                target tokens -> accepted path, bonus, slots to move, counters
``shadow.shadow_step``                score of trees that were only watched
``nested.count_nested``               what narrower trees would have had accepted
``gdn.conv_tree``, ``gdn.gdn_tree``   a hybrid layer on trees, without a state per node
``gdn.commit_tree``                   replay of the accepted path, all layers in two launches
``hybrid.HybridTree``                 these three behind the calls SGLang makes
``checks.run_checks``                 every kernel against its oracle, on this machine
====================================  ==========================================================

The oracle of each is in :mod:`sglang_ddtree.reference`.
"""
