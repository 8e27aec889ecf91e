"""The inventory that names a lab's hosts. Pure: text from names.

``inventory/lab.toml`` of the repository is this text for the default lab with two hosts; ``lab up`` writes the same,
for the hosts it booted, into the lab's state directory.
"""

from __future__ import annotations

from collections.abc import Sequence

HEAD = """\
# Lab hosts, booted by `ddtree-ops lab up{flags}`: real systemd and sshd on this machine, {what}.
#   ddtree-ops -i {path} deploy lab1 --mode tree --budget 32

[defaults.host]
gpus = 2
identity = ["{identity}"]
known_hosts = "{known_hosts}"

[defaults.instance]
{instance}max_running_requests = 8
start_timeout_s = 60
drain_timeout_s = 10

[groups]
lab = [{names}]
"""
STAND_IN = """\
model = "/models/Qwen3.6-27B"
drafter = "/models/Qwen3.6-27B-DFlash"
served_model_name = "qwen3.6-27b"
venv = "/opt/sglang/venv"
launch_module = "ddtree_standin"     # not SGLang: same flags and endpoints, nothing is decoded
"""
PAIR_MODELS = "/models/selftest-pair"
PAIR_VENV = "/opt/pair/venv"
PAIR_PORT = 30010
PAIR = f"""\
model = "{PAIR_MODELS}/target"
drafter = "{PAIR_MODELS}/drafter"
served_model_name = "selftest-pair"
venv = "{PAIR_VENV}"
launch_module = "sglang_ddtree.cpu.server"     # the engine's CPU reference: real tokens, its speed means nothing
"""
HOST = """
[hosts.{name}]
address = "root@{address}:22"

[hosts.{name}.instances.{instance}]
mode = "linear"
gpus = [{gpu}]
port = {port}
"""


def inventory_text(
    hosts: Sequence[tuple[str, str]],
    *,
    path: str,
    identity: str,
    known_hosts: str,
    lab: str = "",
    pair: bool = False,
) -> str:
    """TOML for hosts given as (name, address); ``path`` and ``lab`` only make the comment at its top right.

    ``pair``: the self-test pair on the CPU engine, as an instance of its own beside the stand-in's.
    """
    names = ", ".join(f'"{name}"' for name, _ in hosts)
    flags = f" --lab {lab}" if lab else ""
    what, defaults = ("the self-test pair on its CPU engine", PAIR) if pair else ("a stand-in for SGLang", STAND_IN)
    head = HEAD.format(
        flags=flags, path=path, identity=identity, known_hosts=known_hosts, names=names, what=what, instance=defaults
    )
    instance, gpu, port = ("pair", 1, PAIR_PORT) if pair else ("main", 0, 30000)
    return head + "".join(
        HOST.format(name=name, address=address, instance=instance, gpu=gpu, port=port) for name, address in hosts
    )
