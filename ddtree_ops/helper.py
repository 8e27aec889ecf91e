"""The helper as one file: the package ``hostside`` zipped so that equal sources give equal bytes."""

from __future__ import annotations

import functools
import hashlib
import io
import zipfile
from dataclasses import dataclass
from importlib import resources

PACKAGE = "ddtree_hostside"
# Read by whatever Python the host has, however old: it must be able to say that it is too old.
MAIN = b"""\
import sys
if sys.version_info < (3, 8):
    sys.stdout.write('\\n{"event":"result","ok":false,"error":{"kind":"RefusedError",'
                     '"found":"python3 is %d.%d, too old",'
                     '"why":"the helper needs Python 3.8 or newer","next":"","data":{}}}\\n' % sys.version_info[:2])
    sys.exit(1)
from ddtree_hostside.__main__ import main
sys.exit(main())
"""


@dataclass(frozen=True)
class HelperFile:
    """The helper's bytes and the name that its content gives it."""

    data: bytes
    version: str

    @property
    def name(self) -> str:
        return f"{self.version}.pyz"


@functools.cache
def helper_file() -> HelperFile:
    """Zip the package: sorted names, one fixed date, no compression differences between zlib versions."""
    source = resources.files("ddtree_ops").joinpath("hostside")
    parts = {f"{PACKAGE}/{entry.name}": entry.read_bytes() for entry in source.iterdir() if entry.name.endswith(".py")}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for name, data in sorted({"__main__.py": MAIN, **parts}.items()):
            info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            info.create_system = 3
            info.external_attr = 0o644 << 16
            archive.writestr(info, data)
    data = packed.getvalue()
    return HelperFile(data, hashlib.sha256(data).hexdigest()[:16])
