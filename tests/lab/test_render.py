"""What systemd itself makes of a rendered unit: the server gets the exact arguments and variables it was meant to."""

from __future__ import annotations

import json
import random
import subprocess

from waiting import until

from ddtree_ops.lab.machine import Machine
from ddtree_ops.model import Mode, Settings
from ddtree_ops.render import render_unit, server_argv
from ddtree_ops.render.environment import server_environment
from ddtree_ops.render.mounts import needed_paths
from ddtree_ops.text import unusable

ENGINE = "/opt/x engine%h"
VENV = "/opt/v env%d é"
LATE = "/mnt/late 50%"
MOUNT = f"[Mount]\nWhat=tmpfs\nType=tmpfs\nWhere={LATE.replace('%', '%%')}\n"
NASTY = [
    "", " ", "%", "%%", "%h", "$", "$$", "$HOME", "${HOME}", '"', "'", "\\", "\\n", "a\nb", "\r", "\t", ";", "#", "-",
    "é", "漢字", "\x7f", "\x1b[0m", "\u2028", "\u0085", "a b", "50%off $x \"q\" '\\'", "@/bin/sh", "\\\n", "x\\",
]  # fmt: skip
DUMP = """\
import json, os
argv = open("/proc/self/cmdline", "rb").read().split(b"\\0")[:-1]
with open("/run/dump.json", "w") as file:
    json.dump({"argv": [word.decode() for word in argv], "env": dict(os.environ)}, file)
"""


def anything(count: int) -> list[str]:
    """Texts of every kind of character, the same on each run."""
    dice = random.Random(252)
    ranges = [
        (1, 0x7F),
        (1, 0x7F),
        (0x80, 0x2FF),
        (0x2000, 0x2FFF),
        (0x4E00, 0x9FFF),
        (0xE000, 0xFDFF),
        (0x10000, 0x10FFFF),
    ]
    texts = []
    while len(texts) < count:
        text = "".join(chr(dice.randint(*dice.choice(ranges))) for _ in range(dice.randint(1, 12)))
        if unusable(text) is None:
            texts.append(text)
    return texts


def put(host: Machine, path: str, text: str) -> None:
    quoted = "'" + path.replace("'", "'\\''") + "'"
    argv = host.ssh_argv(f'mkdir -p "$(dirname {quoted})" && cat > {quoted}')
    subprocess.run(argv, input=text.encode(), check=True, timeout=30)


def said(host: Machine, line: str) -> str:
    done = host.ssh(line)
    assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
    return done.stdout


def test_systemd_gives_the_server_the_exact_arguments_and_variables(host: Machine) -> None:
    words = [*NASTY, *anything(200)]
    settings = Settings(
        instance="quoting", mode=Mode.TREE, gpus=(1, 0), port=30001, venv=VENV, launch_module="dump",
        model=" /m/50%off $x \"q\" '\\' é", drafter=LATE + "/$HOME \"q\" '\\' é", extra_args=("--words", *words),
        env={f"V{i}": word for i, word in enumerate(words)},
    )  # fmt: skip
    unit = render_unit(
        settings, release="0123456789abcdef", engine_dir=ENGINE, root="/opt/ddtree", scope="system", systemd_version=252
    )
    put(host, f"{ENGINE}/site/dump.py", DUMP)
    said(host, f"mkdir -p '{VENV}/bin' && ln -sf /usr/bin/python3 '{VENV}/bin/python'")
    put(host, "/etc/systemd/system/sglang-ddtree-quoting.service", unit)
    assert host.ssh("systemd-analyze verify --man=no sglang-ddtree-quoting.service 2>&1").stdout == ""
    mount = said(host, f"systemd-escape -p --suffix=mount '{LATE}'").strip()
    put(host, f"/etc/systemd/system/{mount}", MOUNT)
    said(host, "systemctl daemon-reload && systemctl start sglang-ddtree-quoting.service")
    got = json.loads(dumped(host))
    assert got["argv"] == server_argv(settings, "0123456789abcdef")
    wanted = server_environment(settings, engine_dir=ENGINE)
    assert {name: got["env"].get(name) for name in wanted} == wanted
    assert got["env"]["TRITON_CACHE_DIR"] == "/var/cache/sglang-ddtree/quoting/triton"
    # systemd's own parse (what ``systemctl show -p ExecStart`` prints, here with its words apart); variables come later
    path = "/org/freedesktop/systemd1/unit/sglang_2dddtree_2dquoting_2eservice"
    asked = f"busctl --json=short get-property org.freedesktop.systemd1 {path} org.freedesktop.systemd1"
    [command] = json.loads(said(host, f"{asked}.Service ExecStart"))["data"]
    assert [word.replace("$$", "$") for word in command[1]] == [VENV + "/bin/python", *got["argv"][1:]]
    # its file systems: what is not mounted yet is mounted first
    mounts = json.loads(said(host, f"{asked}.Unit RequiresMountsFor"))["data"]
    assert set(needed_paths(settings, "/opt/ddtree")) <= set(mounts)
    assert said(host, f"findmnt -n -o FSTYPE '{LATE}'").strip() == "tmpfs"


def dumped(host: Machine) -> str:
    """The dump, once the service has ended."""
    unit = "sglang-ddtree-quoting.service"
    until(lambda: "inactive" in host.ssh(f"systemctl is-active {unit}").stdout, "the service has ended")
    return said(host, "cat /run/dump.json")
