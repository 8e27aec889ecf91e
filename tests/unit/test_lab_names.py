"""The pure parts of the lab: names that cannot clash, addresses, the inventory."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from ddtree_ops.errors import RefusedError, UsageError
from ddtree_ops.inventory import load_fleet
from ddtree_ops.lab.inventory import inventory_text
from ddtree_ops.lab.lab import choose_net
from ddtree_ops.lab.names import LabNames
from ddtree_ops.lab.root import guest_files
from ddtree_ops.lab.system import parse_cgroup2

ROOT = Path(__file__).parents[2]
LINK_NAME_MAX = 15  # IFNAMSIZ less its zero


def test_link_names_fit_the_kernel_and_differ_between_labs() -> None:
    labs = [LabNames(lab) for lab in ("default", "a", "b", "x" * 32)]
    names = [lab.bridge for lab in labs] + [lab.host(index).link for lab in labs for index in (1, 64)]
    assert max(map(len, names)) <= LINK_NAME_MAX
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", ["", "A", "a/b", "../x", "-a", "x" * 33, "a b"])
def test_a_lab_name_that_could_leave_its_directory_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be a lab's name"):
        LabNames(name)


@pytest.mark.parametrize("name", ["lab0", "lab", "lab65", "h1", "lab1x", "lab01"])
def test_a_host_is_called_by_its_number(name: str) -> None:
    with pytest.raises(UsageError, match="no lab host"):
        LabNames().host_by_name(name)
    assert LabNames().host_by_name("lab12").address(0) == "10.77.0.22"


def test_networks_never_overlap() -> None:
    assert choose_net("default", []) == 0
    assert choose_net("other", [0, 1, 3]) == 2
    with pytest.raises(RefusedError, match=r"10\.77\.0\.1"):
        choose_net("default", [0])
    with pytest.raises(RefusedError, match="no free network"):
        choose_net("other", range(256))


V1 = "31 23 0:31 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n41 31 0:38 / {where} {mode},relatime - cgroup2 cgroup2 rw\n"


def test_the_cgroup2_tree_is_found_where_it_is_writable() -> None:
    assert parse_cgroup2(V1.format(where="/sys/fs/cgroup/unified", mode="rw")) == Path("/sys/fs/cgroup/unified")
    assert parse_cgroup2(V1.format(where="/sys/fs/cgroup", mode="ro")) is None
    assert parse_cgroup2("") is None


def test_the_repository_s_inventory_is_that_of_the_default_lab() -> None:
    state = "~/.local/state/ddtree-ops/lab/default"
    text = inventory_text(
        [("lab1", "10.77.0.11"), ("lab2", "10.77.0.12")],
        path="inventory/lab.toml",
        identity=f"{state}/id_ed25519",
        known_hosts=f"{state}/known_hosts",
    )
    assert (ROOT / "inventory/lab.toml").read_text() == text
    fleet = load_fleet(ROOT / "inventory/lab.toml")
    assert fleet.groups == {"lab": ("lab1", "lab2")}
    assert {name: str(host.address) for name, host in fleet.hosts.items()} == {
        "lab1": "root@10.77.0.11:22",
        "lab2": "root@10.77.0.12:22",
    }


def test_a_lab_s_inventory_is_valid_for_any_number_of_hosts() -> None:
    hosts = [(f"lab{n}", f"10.77.5.{10 + n}") for n in range(1, 20)]
    text = inventory_text(hosts, path="p", identity="i", known_hosts="k", lab="five")
    assert len(tomllib.loads(text)["hosts"]) == 19
    assert "lab up --lab five" in text


def test_hosts_get_the_models_that_their_inventory_names() -> None:
    files = guest_files()
    main = load_fleet(ROOT / "inventory/lab.toml").hosts["lab1"].instances["main"]
    assert f"{main.model[1:]}/config.json" in files
    assert f"{main.drafter}"[1:] + "/config.json" in files
    assert f"{main.venv[1:]}/lib/python3.11/site-packages/{main.launch_module}/__main__.py" in files
    assert files["usr/bin/nvidia-smi"][1] == 0o755
