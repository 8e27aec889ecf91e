"""The way to a host: what the inventory leaves open comes from ~/.ssh/config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import paramiko
import pytest

from ddtree_ops.errors import InventoryError
from ddtree_ops.model import Address, HostSpec
from ddtree_ops.remote.ssh_config import find_route, load_config, split_jump


def route(text: str, host: str = "box", **more: Any) -> list[str]:
    spec = HostSpec(name="h", address=Address(host=host, **more.pop("address", {})), **more)
    return [str(hop) for hop in find_route(spec, paramiko.SSHConfig.from_text(text))]


def test_alias_user_and_port_with_the_inventory_winning() -> None:
    text = "Host box\n HostName 10.0.0.1\n User me\n Port 2222\n"
    assert route(text) == ["me@10.0.0.1:2222"]
    assert route(text, address={"user": "you", "port": 22}) == ["you@10.0.0.1"]


def test_proxy_jumps_nest_and_a_list_goes_in_order() -> None:
    text = "Host *\n User u\nHost box\n ProxyJump b\nHost b\n ProxyJump a:2200\n"
    assert route(text) == ["u@a:2200", "u@b", "u@box"]
    assert route("Host *\n User u\n", jump="a,me@b:2222,[2001:db8::1]:22") == [
        "u@a",
        "me@b:2222",
        "u@[2001:db8::1]",
        "u@box",
    ]


def test_a_jump_host_caught_by_its_own_wildcard_has_none_before_it() -> None:
    assert route("Host *\n User u\n ProxyJump gate\n") == ["u@gate", "u@box"]


def test_a_circle_is_an_error_that_says_so() -> None:
    with pytest.raises(InventoryError, match="goes in a circle"):
        route("Host *\n User u\nHost box\n ProxyJump a\nHost a\n ProxyJump b\nHost b\n ProxyJump a\n")


def test_jump_none_in_the_inventory_overrides_the_configuration() -> None:
    assert route("Host *\n User u\nHost box\n ProxyJump gate\n", jump="none") == ["u@box"]


def test_the_name_in_known_hosts_and_its_files(tmp_path: Path) -> None:
    text = f"Host box\n HostName 10.0.0.1\n Port 2222\n UserKnownHostsFile {tmp_path}/a {tmp_path}/b\n"
    spec = HostSpec(name="h", address=Address(host="box"), known_hosts=str(tmp_path / "own"))
    hop = find_route(spec, paramiko.SSHConfig.from_text(text))[-1]
    assert hop.key_name == "[10.0.0.1]:2222"
    assert hop.known_hosts[:3] == (f"{tmp_path}/own", f"{tmp_path}/a", f"{tmp_path}/b")
    aliased = find_route(spec, paramiko.SSHConfig.from_text(text + " HostKeyAlias gold\n"))[-1]
    assert aliased.key_name == "gold"


def test_include_is_expanded_and_the_users_file_wins(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("Include conf.d/*.conf\nHost box\n Port 1\n")
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "a.conf").write_text("Host box\n HostName 10.0.0.9\n")
    (tmp_path / "system").write_text("Port 2\nUser sys\n")
    found = load_config(str(tmp_path / "config"), str(tmp_path / "system")).lookup("box")
    assert (found["hostname"], found["port"], found["user"]) == ("10.0.0.9", "1", "sys")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a", (None, "a", None)),
        ("u@a:22", ("u", "a", 22)),
        ("ssh://u@a:22", ("u", "a", 22)),
        ("[::1]:22", (None, "::1", 22)),
        ("u@corp@a", ("u@corp", "a", None)),
        ("::1", (None, "::1", None)),
    ],
)
def test_jumps_are_split(text: str, parts: tuple[str | None, str, int | None]) -> None:
    assert split_jump(text) == parts
