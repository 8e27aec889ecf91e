"""Do driver, torch and compiler speak the same CUDA: version files and version outputs. Pure."""

from __future__ import annotations

import re

# The oldest driver for each CUDA major: within a major, a program built for a later minor runs on it too.
# (CUDA Compatibility, "minor version compatibility".)
OLDEST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}


def parse_torch_cuda(text: str) -> tuple[str | None, str | None]:
    """torch's version and the CUDA it was built for, from its version.py; (None, None) if there is none."""
    version = re.search(r"^__version__ = '([^']+)'", text, re.M)
    cuda = re.search(r"^cuda(?:: *Optional\[str\])? = '(\d+\.\d+)'", text, re.M)
    return (version[1] if version else None, cuda[1] if cuda else None)


def parse_nvcc(text: str) -> str | None:
    """The release that ``nvcc --version`` names."""
    found = re.search(r"\brelease (\d+\.\d+)", text)
    return found[1] if found else None


def driver_too_old(driver: str, cuda: str) -> str | None:
    """The oldest driver that this CUDA needs, if ``driver`` is older; None if it will do or nothing is known."""
    have = re.match(r"(\d+)\.(\d+)", driver)
    need = OLDEST_DRIVER.get(int(cuda.partition(".")[0]))
    if have is None or need is None or (int(have[1]), int(have[2])) >= need:
        return None
    return f"{need[0]}.{need[1]}"


def major(version: str) -> int:
    """The major of a version, -1 if it has none."""
    found = re.match(r"\d+", version)
    return int(found[0]) if found else -1
