"""The worker of a server that keeps records: its trees are those that the state pool's records belong to."""

from __future__ import annotations

from sglang_ddtree import records
from sglang_ddtree.worker import DDTreeWorker


class RecordsWorker(DDTreeWorker):
    """DDTreeWorker over trees that were there first: the target's graphs read them and are captured before this."""

    def _allocate(self) -> None:
        super()._allocate()
        pool = self._target_worker.model_runner.req_to_token_pool
        kept = records.of_pool(pool)
        if kept is None:
            raise RuntimeError(
                "--speculative-ddtree-states records: the state pool has no records. The hook on MambaPool was not "
                "applied; SGLang's log says why. Use --speculative-ddtree-states snapshots"
            )
        batch, rows = kept.tree.tokens.shape
        if batch < pool.size or rows != self.trees.width:
            raise RuntimeError(
                f"the state pool's records are for {batch} trees of {rows} rows, but rounds have {pool.size} of "
                f"{self.trees.width}: SGLang resized them after the pool was allocated"
            )
        self.trees = kept.tree
