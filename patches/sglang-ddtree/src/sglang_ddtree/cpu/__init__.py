"""The pair on a CPU: the whole of DDTree in NumPy, one request at a time, for tests and for hosts without a GPU.

It runs the four modes with the oracles of :mod:`sglang_ddtree.reference` (tree building, acceptance, the sampler's
law) on a real target and a real drafter, and answers like SGLang. Read in this order:

* :mod:`~sglang_ddtree.cpu.weights`: safetensors to arrays;
* :mod:`~sglang_ddtree.cpu.delta`: the gated delta rule and its convolution over tree rows;
* :mod:`~sglang_ddtree.cpu.target`: the hybrid target, its caches, one pass over the rows of a tree;
* :mod:`~sglang_ddtree.cpu.drafter`: the DFlash drafter and its cache of target features;
* :mod:`~sglang_ddtree.cpu.decode`: rounds: draft, build, verify, commit; what was accepted where;
* :mod:`~sglang_ddtree.cpu.args`, :mod:`~sglang_ddtree.cpu.server`: SGLang's flags, paths and metrics.

NumPy, safetensors and tokenizers are all it needs.
"""

NOTICE = "ddtree-ops CPU reference engine: its tokens are real, its speed means nothing"
