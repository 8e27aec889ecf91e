"""SshRemote against a real SSH server on loopback: what works, and every way the road there can end."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paramiko
import pytest
from sshserver import SshServer, serving
from waiting import running, until

from ddtree_ops.clock import Clock, FakeClock, SystemClock
from ddtree_ops.errors import AuthError, DeadlineError, HostKeyError, RefusedError, UnreachableError
from ddtree_ops.model import Address, HostSpec
from ddtree_ops.remote import ssh
from ddtree_ops.remote.known_hosts import fingerprint, line_for
from ddtree_ops.remote.ssh import SshRemote, prefer, within
from ddtree_ops.remote.ssh_auth import agent_answers

Open = Callable[..., SshRemote]


@pytest.fixture(scope="module")
def keys() -> dict[str, paramiko.PKey]:
    return {name: paramiko.ECDSAKey.generate() for name in ("host", "other", "user")}


@pytest.fixture
def server(keys: dict[str, paramiko.PKey]) -> Iterator[SshServer]:
    with serving(SshServer(keys["host"], keys["user"])) as running:
        yield running


@pytest.fixture
def files(tmp_path: Path, keys: dict[str, paramiko.PKey]) -> Path:
    keys["user"].write_private_key_file(str(tmp_path / "id"))
    keys["other"].write_private_key_file(str(tmp_path / "id_other"))
    (tmp_path / "known_hosts").touch()
    return tmp_path


@pytest.fixture
def open_ssh(files: Path, server: SshServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens a remote for the server; keyword arguments change the host or the SSH configuration."""
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setenv("HOME", str(files))
    opened: list[SshRemote] = []

    def make(
        *, trust: bool = True, user: str = "op", key: str = "id", config: str = "", host: str | None = None,
        port: int | None = None, jump: str | None = None, clock: Clock | None = None, **limits: float,
    ) -> SshRemote:  # fmt: skip
        if trust:
            known(files, server)
        address = Address(host=host or server.address, user=user, port=port or server.port)
        spec = HostSpec(
            name="h1", address=address, identity=(str(files / key),), known_hosts=str(files / "known_hosts"), jump=jump,
        )  # fmt: skip
        text = f"Host *\n  IdentitiesOnly yes\n{config}"
        remote = SshRemote(
            spec, clock, config=paramiko.SSHConfig.from_text(text), **{"connect_s": 60.0, "silence_s": 60.0, **limits}
        )
        opened.append(remote)
        return remote

    yield make
    for remote in opened:
        remote.close()


def known(files: Path, server: SshServer, key: paramiko.PKey | None = None) -> None:
    with (files / "known_hosts").open("a") as out:
        out.write(line_for(f"[{server.address}]:{server.port}", key or server.host_key))


def test_a_command_gives_its_status_and_both_outputs(open_ssh: Open) -> None:
    done = open_ssh().run(["sh", "-c", "echo out; echo err >&2; exit 3"], deadline_s=60)
    assert (done.rc, done.text, done.err_text) == (3, "out\n", "err\n")


def test_arguments_arrive_as_they_are(open_ssh: Open) -> None:
    awkward = ["a b", "$HOME", "`id`", 'q"q', "it's", "new\nline", "*", "%s", "~", "ü", ""]
    done = open_ssh().run(["python3", "-c", "import sys; print(sys.argv[1:])", *awkward], deadline_s=60)
    assert done.text.strip() == repr(awkward)


def test_binary_input_and_output_survive(open_ssh: Open) -> None:
    data = os.urandom(3_000_000)
    remote = open_ssh()
    assert remote.run(["cat"], deadline_s=60, stdin=data).out == data
    assert remote.run(["cat"], deadline_s=60, stdin=io.BytesIO(data)).out == data
    assert (remote.connections, remote.round_trips) == (1, 2)


def test_a_command_that_does_not_read_its_input_still_ends(open_ssh: Open) -> None:
    assert open_ssh().run(["true"], deadline_s=60, stdin=b"x" * 8_000_000).rc == 0


def test_lines_come_while_the_command_runs(open_ssh: Open, tmp_path: Path) -> None:
    seen: list[str] = []
    go = tmp_path / "go"

    def on_line(line: str) -> None:
        seen.append(line)
        go.touch()  # the command waits for it: a line that comes only at the end never comes

    program = f"echo one; until [ -e {go} ]; do sleep 0.05; done; printf two"
    assert open_ssh().run(["sh", "-c", program], deadline_s=60, on_line=on_line).rc == 0
    assert seen == ["one", "two"]


def test_put_is_whole_and_get_reads_it_back(open_ssh: Open, tmp_path: Path) -> None:
    remote = open_ssh()
    data = os.urandom(100_000)
    path = tmp_path / "new folder" / "file"
    remote.put(data, str(path), mode=0o600, deadline_s=60)
    assert path.read_bytes() == data
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]
    assert remote.get(str(path), deadline_s=60) == data
    with pytest.raises(RefusedError, match="larger than 10 bytes"):
        remote.get(str(path), deadline_s=60, limit=10)
    with pytest.raises(RefusedError, match="could not be read"):
        remote.get(str(path) + "x", deadline_s=60)


def test_a_login_shell_that_greets_spoils_no_file(open_ssh: Open, server: SshServer, tmp_path: Path) -> None:
    server.greeting = "printf 'Welcome to h1'; "
    (tmp_path / "unit").write_bytes(b"[Service]\n\xff\0")
    remote = open_ssh()
    assert remote.get(str(tmp_path / "unit"), deadline_s=60) == b"[Service]\n\xff\0"
    with pytest.raises(RefusedError, match="could not be read"):
        remote.get(str(tmp_path / "nothing"), deadline_s=60)


@pytest.mark.parametrize("shell", ["zsh", "tcsh", "fish"])
def test_any_login_shell_will_do(open_ssh: Open, server: SshServer, tmp_path: Path, shell: str) -> None:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"{shell} is not installed here")
    server.shell, path, words = found, tmp_path / "it's !50% $x\n", ["a\nb", "it's", "!!", "\\", "$HOME", "é"]
    remote = open_ssh()
    remote.put(b"\0one\ntwo!", str(path), deadline_s=60)
    assert remote.get(str(path), deadline_s=60) == b"\0one\ntwo!"
    done = remote.run(["printf", "%s|", *words], deadline_s=60)
    assert (done.rc, done.text, done.err_text) == (0, "".join(f"{word}|" for word in words), "")
    with pytest.raises(RefusedError, match="could not be read"):
        remote.get(str(tmp_path / "nothing"), deadline_s=60)


def test_a_command_that_takes_too_long_is_ended_on_the_host_too(open_ssh: Open) -> None:
    with pytest.raises(DeadlineError, match="took longer than 1 s and was ended"):
        open_ssh().run(["sh", "-c", "sleep 600.0123; true"], deadline_s=1)
    until(lambda: not running("600.0123"), "the command is gone")


def test_an_unknown_key_is_refused_with_its_fingerprint_and_the_command(open_ssh: Open, server: SshServer) -> None:
    with pytest.raises(HostKeyError) as error:
        open_ssh(trust=False).run(["true"], deadline_s=60)
    assert fingerprint(server.host_key.asbytes()) in error.value.found
    assert error.value.next == "ddtree-ops trust h1"


def test_a_wrong_key_is_refused_and_says_where_the_other_one_is(
    open_ssh: Open, files: Path, server: SshServer, keys: dict[str, paramiko.PKey]
) -> None:
    known(files, server, keys["other"])
    with pytest.raises(HostKeyError, match="line 1 has ecdsa") as error:
        open_ssh(trust=False).run(["true"], deadline_s=60)
    assert fingerprint(keys["other"].asbytes()) in error.value.found
    assert error.value.next == "ddtree-ops trust h1 --replace"


def test_a_revoked_key_is_refused_though_another_line_has_it(open_ssh: Open, files: Path, server: SshServer) -> None:
    (files / "known_hosts").write_text("@revoked " + line_for("*", server.host_key))
    with pytest.raises(HostKeyError, match="is revoked in"):
        open_ssh().run(["true"], deadline_s=60)


def test_a_certificate_authority_is_said_not_to_be_honoured(open_ssh: Open, files: Path, server: SshServer) -> None:
    (files / "known_hosts").write_text("@cert-authority " + line_for("*", server.host_key))
    with pytest.raises(HostKeyError) as error:
        open_ssh(trust=False).run(["true"], deadline_s=60)
    assert "certificate authority" in error.value.why


@pytest.mark.parametrize("change", [{"user": "eve"}, {"key": "id_other"}])
def test_a_wrong_user_or_key_is_an_auth_error(open_ssh: Open, change: dict[str, str]) -> None:
    with pytest.raises(AuthError, match=r"does not let (op|eve) in") as error:
        open_ssh(**change).run(["true"], deadline_s=60)
    assert error.value.host == "h1"


def test_a_host_that_wants_more_than_a_key_is_said_so(open_ssh: Open) -> None:
    with pytest.raises(AuthError, match="a key alone is not enough, it wants keyboard-interactive"):
        open_ssh(user="two-factors").run(["true"], deadline_s=60)


def test_a_key_file_that_is_not_there_is_named(open_ssh: Open) -> None:
    with pytest.raises(AuthError, match=r"id_nowhere does not exist"):
        open_ssh(key="id_nowhere").run(["true"], deadline_s=60)


def test_a_locked_key_asks_for_the_agent(open_ssh: Open, files: Path, keys: dict[str, paramiko.PKey]) -> None:
    keys["user"].write_private_key_file(str(files / "id_locked"), password="secret")
    with pytest.raises(AuthError, match="id_locked needs a passphrase") as error:
        open_ssh(key="id_locked").run(["true"], deadline_s=60)
    assert error.value.next == f"ssh-add {files}/id_locked"


@contextlib.contextmanager
def nobody_listens() -> Iterator[int]:
    """A port that refuses connections: it is taken, so that nobody else gets it, but not listened on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def no_such_name(*_args: object, **_more: object) -> None:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_a_closed_port_a_bad_name_and_a_silent_port(open_ssh: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    with nobody_listens() as port, pytest.raises(UnreachableError, match="refuses connections"):
        open_ssh(port=port).run(["true"], deadline_s=60)
    monkeypatch.setattr(socket, "getaddrinfo", no_such_name)  # what a resolver without a network says differs
    with pytest.raises(UnreachableError, match=r"the name nowhere\.invalid does not resolve"):
        open_ssh(host="nowhere.invalid").run(["true"], deadline_s=60)
    monkeypatch.undo()
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(DeadlineError, match="accepts connections, but no SSH server answers"),
    ):
        open_ssh(port=silent.getsockname()[1], connect_s=3.0).run(["true"], deadline_s=60)


def test_a_connection_that_breaks_off_is_said_and_the_next_call_makes_a_new_one(
    open_ssh: Open, server: SshServer
) -> None:
    remote = open_ssh()
    with pytest.raises(UnreachableError, match="the connection was lost while running sh"):
        remote.run(["sh", "-c", "echo on; sleep 600"], deadline_s=600, on_line=lambda _line: server.cut())
    assert remote.run(["echo", "back"], deadline_s=60).text == "back\n"
    assert remote.connections == 2


class FromNowOn(SystemClock):
    """A clock that stands still until it is started: a busy machine costs no time before."""

    def __init__(self) -> None:
        self.began: float | None = None

    def start(self) -> None:
        self.began = super().monotonic()

    def monotonic(self) -> float:
        return super().monotonic() - self.began if self.began is not None else 0.0


def test_a_frozen_host_is_declared_dead_long_before_the_deadline(open_ssh: Open, server: SshServer) -> None:
    clock = FromNowOn()

    def freeze(_line: str) -> None:
        server.frozen.set()
        clock.start()

    remote = open_ssh(silence_s=3.0, probe_every_s=0.1, clock=clock)
    remote.run(["true"], deadline_s=600)
    with pytest.raises(DeadlineError, match="silent for 3 s while running sh"):
        remote.run(["sh", "-c", "echo on; sleep 600"], deadline_s=600, on_line=freeze)


def test_a_link_cut_just_as_the_command_is_asked_for_is_noticed_too(
    open_ssh: Open, server: SshServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nothing to watch yet, and the library waits for the server's word without end."""

    def impatient(seconds: float, func: Callable[[], Any]) -> Any:
        return within(0.5 if seconds == 55.0 else seconds, func)  # only what waits for the frozen server

    server.freeze_on_exec = True
    monkeypatch.setattr(ssh, "within", impatient)
    with pytest.raises(UnreachableError, match="the host was silent for 55 s"):
        open_ssh(silence_s=55.0, probe_every_s=0.3).run(["true"], deadline_s=600)


def test_a_quiet_command_on_a_live_link_is_not_taken_for_dead(
    open_ssh: Open, server: SshServer, tmp_path: Path
) -> None:
    """Each question costs most of the silence that is allowed, by the clock; the answer makes up for it."""
    clock, go, probes = FakeClock(), tmp_path / "go", iter(range(6))

    def probe() -> None:
        clock.sleep(40.0)
        if next(probes, None) is None:
            go.touch()

    server.on_probe = probe
    remote = open_ssh(silence_s=60.0, probe_every_s=0.02, clock=clock)
    quiet = f"until [ -e {go} ]; do sleep 0.05; done"
    assert remote.run(["sh", "-c", quiet], deadline_s=6000).rc == 0
    assert clock.now >= 6 * 40.0


def test_an_alias_of_the_ssh_configuration_gives_address_port_and_user(open_ssh: Open, server: SshServer) -> None:
    config = f"Host box\n  HostName {server.address}\n  Port {server.port}\n  User op\n"
    remote = open_ssh(config=config, host="box", port=server.port)
    assert str(remote.route[-1]) == f"op@127.0.0.1:{server.port}"
    assert remote.run(["true"], deadline_s=60).rc == 0


def test_two_jump_hosts_each_with_its_own_key_check(
    open_ssh: Open, files: Path, server: SshServer, keys: dict[str, paramiko.PKey]
) -> None:
    with (
        serving(SshServer(keys["other"], keys["user"])) as first,
        serving(SshServer(keys["host"], keys["user"])) as second,
    ):
        known(files, second)
        jump = f"op@127.0.0.1:{first.port},op@127.0.0.1:{second.port}"
        with pytest.raises(HostKeyError, match="is not known"):
            open_ssh(jump=jump).run(["true"], deadline_s=60)
        known(files, first)
        assert open_ssh(jump=jump).run(["echo", "through"], deadline_s=60).text == "through\n"
        assert first.forwards[-1] == ("127.0.0.1", second.port)
        assert second.forwards[-1] == ("127.0.0.1", server.port)


def test_a_jump_host_that_is_gone_when_the_link_through_it_ends_is_no_traceback() -> None:
    """The library's own thread ends the link, and what it raises is printed on the person's terminal."""

    class Gone(paramiko.Channel):
        def close(self) -> None:
            raise EOFError

    with contextlib.closing(prefer(())(Gone(1))) as transport:
        transport.packetizer.close()


def test_a_jump_host_that_cannot_reach_the_host_is_told_apart(open_ssh: Open, files: Path, server: SshServer) -> None:
    known(files, server)
    with nobody_listens() as port, pytest.raises(UnreachableError, match="the jump host could not reach"):
        open_ssh(port=port, jump=f"op@127.0.0.1:{server.port}").run(["true"], deadline_s=60)


def test_ipv6(files: Path, open_ssh: Open, keys: dict[str, paramiko.PKey]) -> None:
    try:
        with serving(SshServer(keys["host"], keys["user"], address="::1")) as six:
            known(files, six)
            assert open_ssh(host="::1", port=six.port).run(["echo", "six"], deadline_s=60).text == "six\n"
    except OSError as error:
        pytest.skip(f"no IPv6 loopback here: {error}")


def test_a_dead_agent_does_not_hang_us(tmp_path: Path) -> None:
    path = str(tmp_path / "agent")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(path)
        silent.listen()
        assert agent_answers(path, 0.3) is False
    assert agent_answers(path, 0.3) is False
    assert agent_answers(None, 0.3) is False


@pytest.fixture
def ssh_agent(tmp_path: Path, keys: dict[str, paramiko.PKey]) -> Iterator[str]:
    """A running ssh-agent that holds the user's key; yields its socket."""
    if shutil.which("ssh-agent") is None:
        pytest.skip("no ssh-agent on this machine")
    path = str(tmp_path / "agent.sock")
    with subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL) as running:
        try:
            until(lambda: agent_answers(path, 60.0), "the agent answers")
            keys["user"].write_private_key_file(str(tmp_path / "for_agent"))
            added = subprocess.run(
                ["ssh-add", "-q", str(tmp_path / "for_agent")], env={**os.environ, "SSH_AUTH_SOCK": path}, check=False
            )
            assert added.returncode == 0
            yield path
        finally:
            running.terminate()


def test_the_agents_keys_are_used_and_only_those_named_under_identities_only(
    open_ssh: Open, ssh_agent: str, files: Path, keys: dict[str, paramiko.PKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", ssh_agent)
    with pytest.raises(AuthError, match=r"id_other \(refused\)$"):
        open_ssh(key="id_other").run(["true"], deadline_s=60)
    user = keys["user"]
    (files / "id_other.pub").write_text(f"{user.get_name()} {user.get_base64()} mine\n")
    assert open_ssh(key="id_other").run(["true"], deadline_s=60).rc == 0
