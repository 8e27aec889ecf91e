"""The inventory that names a lab's hosts. Pure: text from names.

``inventory/lab.toml`` of the repository is this text for the default lab with two hosts; ``lab up`` writes the same,
for the hosts it booted, into the lab's state directory.
"""

from __future__ import annotations

from collections.abc import Sequence

HEAD = """\
# Lab hosts, booted by `ddtree-ops lab up{flags}`: real systemd and sshd on this machine, a stand-in for SGLang.
#   ddtree-ops -i {path} deploy lab1 --mode tree --budget 32

[defaults.host]
gpus = 2
identity = ["{identity}"]
known_hosts = "{known_hosts}"

[defaults.instance]
model = "/models/Qwen3.6-27B"
drafter = "/models/Qwen3.6-27B-DFlash"
served_model_name = "qwen3.6-27b"
venv = "/opt/sglang/venv"
launch_module = "ddtree_standin"     # not SGLang: same flags and endpoints, nothing is decoded
max_running_requests = 8
start_timeout_s = 60
drain_timeout_s = 10

[groups]
lab = [{names}]
"""
HOST = """
[hosts.{name}]
address = "root@{address}:22"

[hosts.{name}.instances.main]
mode = "linear"
gpus = [0]
port = 30000
"""


def inventory_text(
    hosts: Sequence[tuple[str, str]], *, path: str, identity: str, known_hosts: str, lab: str = ""
) -> str:
    """TOML for hosts given as (name, address); ``path`` and ``lab`` only make the comment at its top right."""
    names = ", ".join(f'"{name}"' for name, _ in hosts)
    flags = f" --lab {lab}" if lab else ""
    head = HEAD.format(flags=flags, path=path, identity=identity, known_hosts=known_hosts, names=names)
    return head + "".join(HOST.format(name=name, address=address) for name, address in hosts)
