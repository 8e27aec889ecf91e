"""Which host keys are trusted: ``known_hosts`` files as OpenSSH reads them, and no key is ever taken on faith.

paramiko reads these files without wildcards, markers and second keys of one type, and fabric does not read them at
all; so the lines are read here. A ``@cert-authority`` line cannot be honoured, because paramiko does not ask servers
for certificates: the error says so instead of calling the host unknown.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import paramiko

from ddtree_ops.errors import HostKeyError

REVOKED = "@revoked"
AUTHORITY = "@cert-authority"


@dataclass(frozen=True)
class Entry:
    """One line: which hosts it is about, and the key."""

    hosts: str
    key_type: str
    blob: bytes
    marker: str
    file: str
    line: int

    def matches(self, name: str) -> bool:
        """``name`` is ``host`` or ``[host]:port``. A pattern with ``!`` that fits rules the line out."""
        fits = False
        for pattern in self.hosts.split(","):
            if pattern.startswith("!") and fnmatch.fnmatchcase(name, brackets(pattern[1:])):
                return False
            if pattern.startswith("|1|"):
                fits = fits or hashed(name, pattern)
            elif fnmatch.fnmatchcase(name.lower(), brackets(pattern.lower())):
                fits = True
        return fits


def brackets(pattern: str) -> str:
    """known_hosts knows ``*`` and ``?`` only: ``[`` is part of ``[host]:port``, not a set of characters."""
    return pattern.replace("[", "[[]")


def hashed(name: str, pattern: str) -> bool:
    """``|1|SALT|HMAC-SHA1(SALT, name)``, both in base64."""
    try:
        salt, digest = (base64.b64decode(part) for part in pattern.split("|")[2:4])
    except (ValueError, binascii.Error):
        return False
    return hmac.compare_digest(hmac.new(salt, name.encode(), hashlib.sha1).digest(), digest)


def parse(text: str, file: str) -> list[Entry]:
    """The lines that can be read; any other is left out, as OpenSSH does."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        marker = words.pop(0) if words[0].startswith("@") else ""
        if len(words) < 3:
            continue
        try:
            blob = base64.b64decode(words[2], validate=True)
        except (ValueError, binascii.Error):
            continue
        found.append(Entry(words[0], words[1], blob, marker, file, number))
    return found


def read(files: Iterable[str]) -> list[Entry]:
    """The entries of those files that exist."""
    found: list[Entry] = []
    for file in files:
        try:
            found += parse(Path(file).read_text(errors="replace"), file)
        except OSError:
            continue
    return found


def fingerprint(blob: bytes) -> str:
    """As ``ssh-keygen -l`` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


@dataclass(frozen=True)
class KnownHosts:
    """The entries in use for one host, in the order of their files."""

    entries: tuple[Entry, ...]
    files: tuple[str, ...]

    @classmethod
    def load(cls, files: Sequence[str]) -> KnownHosts:
        return cls(tuple(read(files)), tuple(files))

    def about(self, name: str, marker: str = "") -> list[Entry]:
        return [entry for entry in self.entries if entry.marker == marker and entry.matches(name)]

    def preferred_types(self, name: str) -> list[str]:
        """The algorithms to ask the host for first: those of the keys that we could check."""
        found: list[str] = []
        for entry in self.about(name):
            names = ["rsa-sha2-512", "rsa-sha2-256"] if entry.key_type == "ssh-rsa" else [entry.key_type]
            found += [n for n in names if n not in found]
        return found

    def check(self, name: str, key: paramiko.PKey, host: str) -> None:
        """Return if the key is trusted; raise the HostKeyError that says why not."""
        blob = key.asbytes()
        shown = f"{key.get_name()} {fingerprint(blob)}"
        data = {"name": name, "type": key.get_name(), "fingerprint": fingerprint(blob), "files": list(self.files)}
        for entry in self.about(name, REVOKED):
            if entry.blob == blob:
                raise HostKeyError(
                    f"its key {shown} is revoked in {entry.file}, line {entry.line}", host,
                    "somebody said that this key must not be trusted any more",
                    f"ask who runs {host} for its new key", data,
                )  # fmt: skip
        known = self.about(name)
        if any(entry.blob == blob for entry in known):
            return
        if known:
            first = known[0]
            raise HostKeyError(
                f"its key is {shown}, but {first.file}, line {first.line} has {first.key_type} "
                f"{fingerprint(first.blob)} for {name}",
                host,
                "either the host was installed anew or another machine answers in its place",
                f"ddtree-ops trust {host} --replace",
                {**data, "known": [fingerprint(entry.blob) for entry in known]},
            )
        why = "without a known key, any machine could answer in its place"
        if self.about(name, AUTHORITY):
            why = (
                "known_hosts trusts it through a certificate authority (@cert-authority), which cannot be checked "
                "here; its plain key must be known"
            )
        raise HostKeyError(f"its key {shown} is not known", host, why, f"ddtree-ops trust {host}", data)


def line_for(name: str, key: paramiko.PKey) -> str:
    return f"{name} {key.get_name()} {base64.b64encode(key.asbytes()).decode()}\n"


def remember(file: Path, name: str, keys: Sequence[paramiko.PKey], *, replace: bool) -> None:
    """Write the keys into ``file``, by rename. With ``replace`` the lines that knew ``name`` go.

    A line that also names other hosts loses only this name; hashed and wildcard lines that fit go as a whole or, for
    wildcards, stay: they speak of other hosts too.
    """
    file = file.resolve()  # it may be a link to where a person keeps such files
    text = file.read_text("utf-8", "surrogateescape") if file.exists() else ""  # a comment may be in any encoding
    if replace:
        text = "".join(without(line, name) for line in text.splitlines(keepends=True))
    if text and not text.endswith("\n"):
        text += "\n"
    text += "".join(line_for(name, key) for key in keys)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    tmp = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with tmp.open("w", encoding="utf-8", errors="surrogateescape") as out:
            out.write(text)
            out.flush()
            os.fchmod(out.fileno(), 0o600 if not file.exists() else file.stat().st_mode & 0o777)
            os.fsync(out.fileno())
        tmp.replace(file)
    finally:
        tmp.unlink(missing_ok=True)


def without(line: str, name: str) -> str:
    words = line.split()
    if len(words) < 3 or words[0].startswith(("#", "@")):
        return line
    patterns = words[0].split(",")
    left = [p for p in patterns if p.lower() != name.lower() and not (p.startswith("|1|") and hashed(name, p))]
    if len(left) == len(patterns):
        return line
    return line.replace(words[0], ",".join(left), 1) if left else ""


def split_files(text: str | None, default: Sequence[str]) -> tuple[str, ...]:
    """``UserKnownHostsFile`` holds several names; ``~`` is the home folder."""
    names = shlex.split(text) if text else list(default)
    return tuple(os.path.expanduser(name) for name in names if name.lower() != "none")
