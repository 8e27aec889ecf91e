"""``trust`` against a real SSH server on loopback: what is shown, what is written, what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest
from sshserver import SshServer, serving
from typer.testing import CliRunner, Result

from ddtree_ops.cli.app import build_app
from ddtree_ops.errors import ExitCode
from ddtree_ops.remote.known_hosts import Entry, fingerprint, line_for, parse, remember

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def keys() -> dict[str, paramiko.PKey]:
    return {name: paramiko.ECDSAKey.generate() for name in ("host", "other", "user")}


@pytest.fixture
def server(keys: dict[str, paramiko.PKey]) -> Iterator[SshServer]:
    with serving(SshServer(keys["host"], keys["user"])) as running:
        yield running


@pytest.fixture
def known(tmp_path: Path, server: SshServer) -> Path:
    """The known_hosts file of an inventory with one host, ``h1``."""
    (tmp_path / "fleet.toml").write_text(
        f'[hosts.h1]\naddress = "op@127.0.0.1:{server.port}"\nknown_hosts = "{tmp_path}/known_hosts"\n'
        '[hosts.h1.instances.a]\nmode = "ar"\ngpus = [0]\nport = 30000\nmodel = "/m"\n'
    )
    return tmp_path / "known_hosts"


def trust(known: Path, *args: str) -> Result:
    return RUNNER.invoke(build_app(), ["trust", "h1", "-i", str(known.parent / "fleet.toml"), *args])


def test_the_key_is_shown_and_written_once(known: Path, server: SshServer) -> None:
    mine = fingerprint(server.host_key.asbytes())
    done = trust(known, "--yes", "--json")
    assert done.exit_code == ExitCode.DONE, done.output
    assert [(k["fingerprint"], k["state"]) for k in json.loads(done.stdout)["keys"]] == [(mine, "trusted")]
    assert known.read_text() == line_for(f"[127.0.0.1]:{server.port}", server.host_key)
    assert known.stat().st_mode & 0o777 == 0o600
    again = json.loads(trust(known, "--json").stdout)
    assert [k["state"] for k in again["keys"]] == ["known"]
    assert known.read_text().count("\n") == 1


def test_nothing_is_trusted_when_there_is_nobody_to_ask(known: Path, server: SshServer) -> None:
    done = trust(known)
    assert done.exit_code == ExitCode.USAGE
    assert "there is nobody to ask" in done.stderr
    assert fingerprint(server.host_key.asbytes()) in done.stderr
    assert not known.exists()


def test_a_fingerprint_read_elsewhere_must_fit(known: Path, server: SshServer, keys: dict[str, paramiko.PKey]) -> None:
    wrong = trust(known, "--fingerprint", fingerprint(keys["other"].asbytes()))
    assert wrong.exit_code == ExitCode.UNREACHABLE
    assert "has no key" in wrong.stderr
    assert not known.exists()
    assert trust(known, "--fingerprint", fingerprint(server.host_key.asbytes())).exit_code == ExitCode.DONE
    assert known.exists()


def test_a_changed_key_needs_replace_and_then_only_the_new_one_is_known(
    known: Path, server: SshServer, keys: dict[str, paramiko.PKey]
) -> None:
    name = f"[127.0.0.1]:{server.port}"
    known.write_text("# mine\n" + line_for(f"{name},box", keys["other"]) + line_for("elsewhere", keys["other"]))
    refused = trust(known, "--yes")
    assert refused.exit_code == ExitCode.UNREACHABLE
    assert f"ddtree-ops trust -i {known.parent}/fleet.toml h1 --replace" in refused.stderr
    assert trust(known, "--yes", "--replace").exit_code == ExitCode.DONE
    assert known.read_text().splitlines() == [
        "# mine",
        line_for("box", keys["other"]).strip(),
        line_for("elsewhere", keys["other"]).strip(),
        line_for(name, server.host_key).strip(),
    ]


def entry(hosts: str) -> Entry:
    return parse(f"{hosts} ssh-ed25519 AAAA", "f")[0]


@pytest.mark.parametrize(
    ("hosts", "name", "fits"),
    [
        ("h1", "h1", True),
        ("H1", "h1", True),
        ("h1,h2", "h2", True),
        ("*.lab", "a.lab", True),
        ("*.lab,!b.lab", "b.lab", False),
        ("[h1]:2222", "[h1]:2222", True),
        ("h1", "[h1]:2222", False),
        ("h?", "h1", True),
        ("|1|F1E1KeoE/eEWhi10WpGv4OdiO6Y=|3988QV0VE8wmZL7suNrYQLITLCg=", "192.168.1.61", True),
        ("|1|F1E1KeoE/eEWhi10WpGv4OdiO6Y=|3988QV0VE8wmZL7suNrYQLITLCg=", "192.168.1.62", False),
        ("|1|broken", "h1", False),
    ],
)
def test_which_hosts_a_line_is_about(hosts: str, name: str, fits: bool) -> None:
    assert entry(hosts).matches(name) is fits


def test_lines_that_cannot_be_read_are_left_out() -> None:
    text = "# comment\n\nh1\nh1 ssh-ed25519 not/base64!\n@revoked h1 ssh-ed25519 AAAA\nh1 ssh-ed25519 AAAA comment\n"
    assert [(e.marker, e.line) for e in parse(text, "f")] == [("@revoked", 5), ("", 6)]


def test_a_file_without_a_last_newline_is_not_glued_to(tmp_path: Path, keys: dict[str, paramiko.PKey]) -> None:
    file = tmp_path / "known_hosts"
    file.write_text(line_for("a", keys["host"]).strip())
    remember(file, "b", [keys["other"]], replace=False)
    assert [e.hosts for e in parse(file.read_text(), "f")] == ["a", "b"]


def test_a_linked_file_stays_a_link_and_what_is_not_utf_8_stays_as_it_is(
    tmp_path: Path, keys: dict[str, paramiko.PKey]
) -> None:
    real, link = tmp_path / "dotfiles", tmp_path / "known_hosts"
    real.write_bytes(b"# caf\xe9\n")
    real.chmod(0o640)
    link.symlink_to(real)
    remember(link, "b", [keys["other"]], replace=False)
    assert link.is_symlink()
    assert real.read_bytes() == b"# caf\xe9\n" + line_for("b", keys["other"]).encode()
    assert real.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dotfiles", "known_hosts"]
