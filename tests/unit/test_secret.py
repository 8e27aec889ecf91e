"""Secrets: where they are looked for, what is said when they are not there, and that no one shows them."""

from __future__ import annotations

import json
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helperhost import helper_host

from ddtree_ops.errors import ExitCode, UsageError
from ddtree_ops.inventory import parse_fleet
from ddtree_ops.model import HostSpec, Settings
from ddtree_ops.render import render_target
from ddtree_ops.secret import Secrets, gather

PLANTED = 'planted-$"key`\\ 1'


def inventory(source: str) -> tuple[HostSpec, Settings]:
    text = f"""
    [hosts.h]
    address = "h"
    [hosts.h.instances.a]
    mode = "ar"
    gpus = [0]
    port = 30000
    model = "/m"
    secrets = {source}
    """
    host = parse_fleet(text, "fleet.toml").hosts["h"]
    return host, host.instances["a"]


def found(source: str, run: Any = None, **environ: str) -> dict[str, str]:
    return dict(gather(*inventory(source), environ, run).values)


def test_from_the_environment_a_file_and_a_command(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("from a file\n")
    source = f'{{A = {{env = "X"}}, B = {{file = "{file}"}}, C = {{command = ["printf", "from %s\\n", "printf"]}}}}'
    assert found(source, X="from a variable") == {"A": "from a variable", "B": "from a file", "C": "from printf"}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('{api_key = {env = "NOPE"}}', "h:a: secret api_key: the variable NOPE is not set"),
        ('{api_key = {env = "EMPTY"}}', "h:a: secret api_key: the variable EMPTY is empty"),
        ('{api_key = {env = "LINES"}}', "the value of the variable LINES has line breaks or control characters"),
        ('{api_key = {env = "DASH"}}', "the value of the variable DASH begins with a dash"),
        ('{api_key = {file = "/nonexistent"}}', "/nonexistent cannot be read: No such file or directory"),
        ('{api_key = {command = ["sh", "-c", "echo secret; exit 3"]}}', "sh ended with status 3"),
        ('{api_key = {command = ["/nonexistent"]}}', "/nonexistent ended with status 127"),
    ],
)
def test_a_secret_that_cannot_be_found_says_where_it_was_looked_for(source: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        found(source, EMPTY="", LINES="a\nb", DASH="-x")
    assert message in str(caught.value)
    assert caught.value.exit_code == ExitCode.USAGE
    assert caught.value.next
    assert "a\nb" not in str(caught.value)


def test_printing_secrets_prints_names() -> None:
    secrets = Secrets({"api_key": PLANTED})
    assert PLANTED not in f"{secrets} {secrets!r} {[secrets]}"
    assert repr(secrets) == "Secrets(api_key)"
    assert secrets.headers == {"Authorization": f"Bearer {PLANTED}"}
    assert Secrets().headers == {}


def test_the_files_hold_what_systemd_and_sglang_read() -> None:
    files = json.loads(Secrets({"api_key": PLANTED, "HF_TOKEN": PLANTED}).payload())
    assert json.loads(files["server.yaml"]) == {"api-key": PLANTED}
    # a shell reads such a line as systemd does: four characters are escaped within double quotes
    shell = subprocess.run(
        ["sh", "-c", files["environment"] + 'printf %s "$HF_TOKEN"'], capture_output=True, check=True
    )
    assert shell.stdout.decode() == PLANTED


def unit(source: str, scope: str = "system") -> str:
    host, settings = inventory(source)
    host = host.model_copy(update={"scope": scope})
    return render_target(host, settings, release="0" * 16, engine_dir="/opt/ddtree/engines/x", systemd_version=252)


def test_the_unit_names_files_only() -> None:
    text = unit('{api_key = {env = "X"}, HF_TOKEN = {env = "Y"}}')
    folder = "/opt/ddtree/instances/a/secrets"
    assert f"LoadCredential=server.yaml:{folder}/server.yaml\n" in text
    assert "    --config /run/credentials/sglang-ddtree-a.service/server.yaml" in text
    assert f"EnvironmentFile={folder}/environment\n" in text
    user = unit('{api_key = {env = "X"}}', scope="user")
    assert f"    --config {folder}/server.yaml" in user
    assert "LoadCredential" not in user
    assert "EnvironmentFile" not in user


def test_the_helper_keeps_them_for_root_alone(tmp_path: Path) -> None:
    host = helper_host(tmp_path)
    payload = Secrets({"api_key": PLANTED}).payload()
    with host.agent.locked("test"):
        assert host.do("put_secrets", payload, instance="a") == {"changed": ["api_key", "server.yaml"]}
        assert host.do("put_secrets", payload, instance="a") == {"changed": []}
    folder = host.root / "instances" / "a" / "secrets"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert (folder / "api_key").read_text() == PLANTED
