"""What lab hosts are made of: a Debian base root, and the disk every host starts from.

Both are built once and kept in the cache directory under a digest of what went into them. A host sees the base
root through an overlay whose upper layer is its own ext4 disk. The virtual environment with SGLang's sources is
on that disk and not in the base root: a hard link to a file of the lower layer makes overlayfs copy the file up
first, so staging an engine would copy the whole package instead of linking it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import zipfile
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from ddtree_ops.bundle.wheel import PINS, fetch_wheel
from ddtree_ops.lab.names import cache_dir
from ddtree_ops.lab.system import debian, locked, run

if TYPE_CHECKING:
    from collections.abc import Callable

BASE_PACKAGES = (
    "systemd", "systemd-sysv", "libpam-systemd", "dbus", "openssh-server", "python3", "iproute2", "procps", "sudo",
    "libstdc++6",
)  # fmt: skip
NOT_NEEDED = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*")
# no console to log in at, no devices to manage, no audit, no timers that wake up in the middle of a test
MASKED = (
    "console-getty.service", "getty@.service", "serial-getty@.service", "systemd-udevd.service",
    "systemd-journald-audit.socket", "fstrim.timer", "dpkg-db-backup.timer", "systemd-pstore.service",
    "apt-daily.timer", "apt-daily-upgrade.timer", "e2scrub_all.timer",
)  # fmt: skip
SSHD = "PermitRootLogin prohibit-password\nPasswordAuthentication no\nUseDNS no\nMaxStartups 100\n"
# the user a careful fleet deploys as, one who may log in but not become root, and the one that servers run as
USERS = {"ops": "ops ALL=(ALL) NOPASSWD: ALL\n", "visitor": None, "sglang": None}
VENV = "opt/sglang/venv"
PYTHON = "python3.11"
DISKS_KEPT = 6


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:16]


def base_root(say: Callable[[str], None]) -> Path:
    """The base root's directory; built first if it is not there (about 40 s)."""
    codename, sources = debian()
    recipe = json.dumps([codename, BASE_PACKAGES, NOT_NEEDED, MASKED, SSHD, USERS, 1])
    final = cache_dir() / f"base-{_digest(recipe)}"
    with locked(cache_dir() / "base.lock"):
        if final.is_dir():
            return final
        building = final.with_suffix(".building")
        _remove_tree(building)
        say(f"building the hosts' base root (Debian {codename}, once, about 40 s)")
        run(
            "mmdebstrap", "--variant=essential", f"--include={','.join(BASE_PACKAGES)}",
            '--aptopt=Acquire::Languages "none"', *(f"--dpkgopt=path-exclude={path}" for path in NOT_NEEDED),
            codename, building, sources,
            timeout=900,
        )  # fmt: skip
        _prepare_base(building)
        building.rename(final)
    return final


def _prepare_base(root: Path) -> None:
    """Make a fresh root bootable as many different hosts: nothing in it may be one host's own."""
    for key in (root / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    (root / "etc/hostname").unlink(missing_ok=True)
    for empty in ("etc/machine-id", "etc/fstab", "etc/resolv.conf", "etc/default/locale"):
        (root / empty).unlink(missing_ok=True)
        (root / empty).write_text("")
    (root / "etc/ssh/sshd_config.d/10-lab.conf").write_text(SSHD)
    (root / "var/log/journal").mkdir(parents=True, exist_ok=True)
    for unit in MASKED:
        link = root / "etc/systemd/system" / unit
        link.unlink(missing_ok=True)
        link.symlink_to("/dev/null")
    for user, sudoers in USERS.items():
        run("chroot", root, "useradd", "--create-home", "--shell", "/bin/bash", user)
        if sudoers:
            path = root / "etc/sudoers.d" / user
            path.write_text(sudoers)
            path.chmod(0o440)


def _remove_tree(path: Path) -> None:
    """Remove a directory of ours without ever following a mount that something left below it."""
    if path.exists():
        run("rm", "-rf", "--one-file-system", path, timeout=120)


def guest_files() -> dict[str, tuple[bytes, int]]:
    """What we add to every host, by path: the stand-in server, ``nvidia-smi``, the models; bytes and mode."""
    lab = resources.files("ddtree_ops.lab")
    site = f"{VENV}/lib/{PYTHON}/site-packages"
    files: dict[str, tuple[bytes, int]] = {
        "usr/bin/nvidia-smi": (lab.joinpath("guest/nvidia_smi.py").read_bytes(), 0o755),
        "usr/lib/tmpfiles.d/ddtree-lab.conf": (b"d /run/ddtree-lab/gpu 1777 root root -\n", 0o644),
    }
    for source in sorted(lab.joinpath("standin").iterdir(), key=lambda entry: entry.name):
        if source.name.endswith(".py"):
            files[f"{site}/ddtree_standin/{source.name}"] = (source.read_bytes(), 0o644)
    for model in sorted(lab.joinpath("guest/models").iterdir(), key=lambda entry: entry.name):
        files[f"models/{model.name.removesuffix('.json')}/config.json"] = (model.read_bytes(), 0o644)
    return files


def _wheel() -> Path:
    """The pinned wheel, for the hosts' Python and this machine's architecture where there is one."""
    tag = f"cp311-{platform.machine()}"
    return fetch_wheel(tag=tag if tag in PINS else None)


def disk_image(size_mib: int, say: Callable[[str], None]) -> Path:
    """The image a host's disk starts as a copy of: ext4, with the overlay's upper and work directories."""
    wheel, files = _wheel(), guest_files()
    listing = json.dumps([[path, mode, _digest(data)] for path, (data, mode) in sorted(files.items())])
    digest = _digest(listing, hashlib.sha256(wheel.read_bytes()).digest(), str(size_mib), "2")
    final = cache_dir() / f"disk-{size_mib}-{digest}.img"
    with locked(cache_dir() / "disk.lock"):
        if final.is_file():
            os.utime(final)
            return final
        say(f"building the hosts' first disk ({size_mib} MiB, SGLang's sources in a virtual environment)")
        tree, image = cache_dir() / "disk.tree", cache_dir() / "disk.building"
        _remove_tree(tree)
        image.unlink(missing_ok=True)
        (tree / "work").mkdir(parents=True)
        _fill_upper(tree / "upper", wheel, files)
        run("truncate", "-s", f"{size_mib}M", image)
        run("mkfs.ext4", "-q", "-F", "-m0", "-d", tree, image, timeout=120)
        _remove_tree(tree)
        image.rename(final)
        kept = sorted(cache_dir().glob("disk-*.img"), key=lambda path: path.stat().st_mtime, reverse=True)
        for old in kept[DISKS_KEPT:]:
            old.unlink()
    return final


def _fill_upper(upper: Path, wheel: Path, files: dict[str, tuple[bytes, int]]) -> None:
    """A virtual environment as ``python3 -m venv --without-pip`` lays it out, the wheel unpacked in it, our files."""
    venv = upper / VENV
    site = venv / "lib" / PYTHON / "site-packages"
    (venv / "bin").mkdir(parents=True)
    site.mkdir(parents=True)
    for name, target in (("python3", "/usr/bin/python3"), ("python", "python3"), (PYTHON, "python3")):
        (venv / "bin" / name).symlink_to(target)
    (venv / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\nversion = 3.11.2\n")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for info in site.glob("*.dist-info"):
        (info / "INSTALLER").write_text("pip\n")
    for path, (data, mode) in files.items():
        target_file = upper / path
        target_file.parent.mkdir(parents=True, exist_ok=True)
        target_file.write_bytes(data)
        target_file.chmod(mode)
    for directory, _, names in os.walk(upper):
        os.chmod(directory, 0o755)
        for name in names:
            os.chown(Path(directory) / name, 0, 0, follow_symlinks=False)


def copy_disk(image: Path, to: Path) -> None:
    """A host's own disk: a sparse copy, in place or not there at all."""
    partial = to.with_suffix(".partial")
    run("cp", "--sparse=always", image, partial, timeout=120)
    partial.rename(to)
