"""The environment of one SGLang server. Pure."""

from __future__ import annotations

from ddtree_ops.model import Settings

_SYSTEM_PATH = "/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


CACHES = {
    "PYTHONPYCACHEPREFIX": "pycache",  # an engine is never written after it is complete, not even by the interpreter
    "SGLANG_CACHE_DIR": "sglang",
    "SGLANG_DG_CACHE_DIR": "deep_gemm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
    "CUDA_CACHE_PATH": "cuda",
}
"""Where compiled things are kept: folders below the instance's cache directory, which outlives releases. Without them
every start compiles for minutes, or fails where the service's user has no home."""


def server_environment(settings: Settings, *, engine_dir: str) -> dict[str, str]:
    """Variables in the order they are written, without the caches; what the settings say comes last and wins."""
    # ninja and nvcc compile kernels at start; systemd's own PATH has neither
    env = {"PATH": f"{settings.venv}/bin:{_SYSTEM_PATH}"}
    # before site-packages: the overlay's sglang and plugin win, the venv stays as it was installed
    env["PYTHONPATH"] = f"{engine_dir}/site"
    env["PYTHONUNBUFFERED"] = "1"
    if settings.gpus:
        # CUDA's own default order is fastest first; this is the order of nvidia-smi
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, settings.gpus))
    return env | settings.env


def cache_folders(settings: Settings) -> dict[str, str]:
    """The cache variables that the settings do not set themselves."""
    return {name: folder for name, folder in CACHES.items() if name not in settings.env}
