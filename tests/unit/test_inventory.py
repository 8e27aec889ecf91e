"""Inventory: what is read, and that every error names file, line, key and repair."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_ops.errors import ExitCode, InventoryError
from ddtree_ops.inventory import load_fleet, parse_address, parse_fleet
from ddtree_ops.inventory.where import line_of
from ddtree_ops.model import Address, Fleet, GateSettings, Mode, SecretSource

EXAMPLES = Path(__file__).parents[2] / "inventory"

GOOD = """\
[defaults.host]
user = "root"
root = "/opt/ddtree"

[defaults.instance]
model = "/m"            # comment
drafter = "/d"
env = {A = "1", B = "2"}

[hosts.h1]
address = "h1:2222"
gpus = 2
default_instance = "a"

[hosts.h1.defaults]
env = {B = "3"}

[hosts.h1.instances.a]
mode = "tree"
gpus = [0]
port = 30000

[hosts.h1.instances.b]
mode = "ar"
gpus = [1]
port = 30001
budget = 4

[hosts.h2]
address = "me@[2001:db8::1]:22"

[groups]
pair = ["h1:a", "h2"]
everyone = ["pair", "h1"]
"""


def read(text: str) -> Fleet:
    return parse_fleet(text, "fleet.toml")


def fails(text: str) -> InventoryError:
    with pytest.raises(InventoryError) as caught:
        read(text)
    assert caught.value.exit_code == ExitCode.USAGE
    return caught.value


def test_layers_and_addresses() -> None:
    fleet = read(GOOD)
    h1 = fleet.hosts["h1"]
    assert h1.address == Address(host="h1", user="root", port=2222)
    assert fleet.hosts["h2"].address == Address(host="2001:db8::1", user="me", port=22)
    a, b = h1.instances["a"], h1.instances["b"]
    assert (a.mode, a.model, a.env) == (Mode.TREE, "/m", {"A": "1", "B": "3"})
    assert (b.topk_cap, fleet.notices) == (4, ())  # the default follows a small budget without a word
    assert fleet.groups == {"pair": ("h1:a", "h2"), "everyone": ("h1:a", "h2", "h1")}


def test_a_topk_cap_above_the_budget_is_capped_and_said() -> None:
    fleet = read(GOOD.replace('mode = "tree"', 'mode = "tree"\nbudget = 8\ntopk_cap = 9'))
    assert fleet.hosts["h1"].instances["a"].topk_cap == 8
    assert fleet.notices == ("h1:a: topk-cap 9 is above the budget; capped at 8",)


def test_gates_and_secrets_add_up_and_stand_aside() -> None:
    fleet = read(
        GOOD.replace("[hosts.h1]\n", '[defaults.instance.secrets]\nAPI = {env = "X"}\n[hosts.h1]\n')
        .replace("[hosts.h1.defaults]\n", "[hosts.h1.defaults]\ngates = {tokens = 64}\n")
        .replace("budget = 4", 'gates = {concurrencies = [1, 8]}\nsecrets = {api_key = {command = ["pass", "x"]}}')
    )
    h1 = fleet.hosts["h1"]
    assert h1.gates == {"a": GateSettings(tokens=64), "b": GateSettings(tokens=64, concurrencies=(1, 8))}
    assert h1.instances["b"].secrets == ("API", "api_key")
    assert h1.secrets["b"] == {"API": SecretSource(env="X"), "api_key": SecretSource(command=("pass", "x"))}
    assert list(h1.secrets["a"]) == ["API"]
    assert read(GOOD).hosts["h1"].gates == {}


CASES = {
    "unknown key": ("port = 30000", "prot = 30000", "fleet.toml:21: hosts.h1.instances.a.prot", "Did you mean 'port'?"),
    "unknown table": ("[groups]", "[grups]", "fleet.toml:32: grups", "Did you mean 'groups'?"),
    "unknown default": ('model = "/m"', 'modell = "/m"', "fleet.toml:6: defaults.instance.modell",
                        "Did you mean 'model'?"),
    "wrong type": ("port = 30000", 'port = "x"', "fleet.toml:21: hosts.h1.instances.a.port", "must be a whole number"),
    "bool is no number": ("port = 30000", "port = true", "fleet.toml:21", "must be a whole number"),
    "budget 0": ("budget = 4", "budget = 0", "fleet.toml:27: hosts.h1.instances.b.budget", "out of range"),
    "budget 1025": ("budget = 4", "budget = 1025", "fleet.toml:27", "out of range"),
    "budget text": ("budget = 4", 'budget = "many"', "fleet.toml:27", "must be a whole number"),
    "mode": ('mode = "tree"', 'mode = "treee"', "fleet.toml:19: hosts.h1.instances.a.mode", "Did you mean 'tree'?"),
    "states": ("budget = 4", 'states = "rings"', "fleet.toml:27: hosts.h1.instances.b.states",
               "states 'rings' is neither 'snapshots' nor 'records'"),
    "records of a wide tree": ("port = 30000", 'port = 30000\nstates = "records"\nbudget = 65',
                               "fleet.toml:22: hosts.h1.instances.a.states", "states as records with budget 65"),
    "width 0": ('mode = "tree"', 'mode = "auto"\nwidths = [8, 0]', "hosts.h1.instances.a.widths", "out of range"),
    "no width": ('mode = "tree"', 'mode = "auto"\nwidths = []', "hosts.h1.instances.a.widths", "widths []"),
    "width twice": ('mode = "tree"', 'mode = "auto"\nwidths = [8, 8]', "fleet.toml:20: hosts.h1.instances.a.widths",
                    "names one width twice"),
    "auto with records of a wide tree": ('mode = "tree"', 'mode = "auto"\nwidths = [8, 65]\nstates = "records"',
                                         "hosts.h1.instances.a.states", "states as records with width 65"),
    "no drafter": ('drafter = "/d"', "", "fleet.toml:19: hosts.h1.instances.a.mode", "no drafter"),
    "no model": ('model = "/m" ', "", "hosts.h1.instances.a.model", "model is missing"),
    "same port": ("port = 30001", "port = 30000", "fleet.toml:26: hosts.h1.instances.b.port", "already instance a's"),
    "same GPU": ("gpus = [1]", "gpus = [0]", "fleet.toml:25: hosts.h1.instances.b.gpus", "already instance a's"),
    "GPU twice": ("gpus = [1]", "gpus = [1, 1]", "fleet.toml:25", "names one GPU twice"),
    "GPU out of range": ("gpus = [1]", "gpus = [2]", "fleet.toml:25", "out of range: the host has 2 (0 to 1)"),
    "negative GPU": ("gpus = [1]", "gpus = [-1]", "fleet.toml:25", "at least 0"),
    "unsafe": ("budget = 4", "allow_hybrid_unsafe = true", "fleet.toml:27", "without a reason"),
    "address": ('"h1:2222"', '"h1:0"', "fleet.toml:11: hosts.h1.address", "'0' is not a port"),
    "no address": ('address = "h1:2222"', "", "hosts.h1.address", "no address"),
    "default instance": ('"a"\n', '"c"\n', "fleet.toml:13: hosts.h1.default_instance", "not an instance of h1"),
    "group member": ('"h2"]', '"h3"]', "fleet.toml:33: groups.pair", "'h3' is not a host."),
    "group instance": ('"h1:a"', '"h1:aa"', "fleet.toml:33", "h1 has no instance 'aa'. Did you mean 'a'?"),
    "group circle": ('"h2"]', '"everyone"]', "groups.pair", "groups contain each other: pair -> everyone -> pair"),
    "group named as host": ("pair = ", "h1 = ", "groups.h1", "a host and a group"),
    "host named all": ("[hosts.h2]", "[hosts.all]", "hosts.all", "cannot be the name"),
    "instance name": ("instances.b]", 'instances."b b"]', 'hosts.h1.instances."b b"', "not usable as a name"),
    "relative root": ('"/opt/ddtree"', '"ddtree"', "hosts.h1.root", "not an absolute path"),
    "environment name": ('A = "1"', '"A-B" = "1"', "fleet.toml:8", "not the name of an environment variable"),
    "table expected": ("[defaults.host]", "[defaults]\nhost = 1\n[defaults.unused]",
                       "defaults.host", "must be a table"),
    "unknown gate": ("budget = 4", "gates = {tokns = 1}", "hosts.h1.instances.b.gates.tokns", "Did you mean 'tokens'?"),
    "gate of a wrong size": ("budget = 4", "gates = {prompts = 1}", "instances.b.gates.prompts", "at least 8"),
    "a secret itself": ("budget = 4", 'secrets = {api_key = "x"}', "instances.b.secrets.api_key", "not what it is"),
    "two sources": ("budget = 4", 'secrets = {api_key = {env = "A", file = "f"}}', "secrets.api_key", "exactly one of"),
    "no such secret": ("budget = 4", 'secrets = {api_kay = {env = "A"}}', "secrets.api_kay", "Did you mean 'api_key'?"),
    "flag of a setting": ("budget = 4", 'extra_args = ["--port=1"]', "fleet.toml:27", "gives --port"),
    "variable of the unit": ("budget = 4", 'env = {PYTHONPATH = "/x"}', "instances.b.env.PYTHONPATH", "may not set"),
    "noncharacter": ("budget = 4", 'extra_args = ["\\uFFFF"]', "instances.b", "U+FFFF is not a character"),
    "jump": ('address = "h1:2222"', 'address = "h1"\njump = "a b"', "fleet.toml:12: hosts.h1.jump", "'a b'"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_error_names_place_and_cause(case: str) -> None:
    old, new, place, cause = CASES[case]
    assert old in GOOD
    error = fails(GOOD.replace(old, new, 1))
    problems = "\n".join(error.data["problems"])
    assert place in problems
    assert cause in problems
    assert error.next


def test_all_problems_come_at_once() -> None:
    error = fails(GOOD.replace("port = 30000", "prot = 1").replace("budget = 4", "budget = 0"))
    assert len(error.data["problems"]) == 3  # prot unknown, port missing, budget out of range
    assert "(and 2 more)" in error.found


def test_broken_toml_names_the_line() -> None:
    error = fails("[hosts\n")
    assert "fleet.toml is not valid TOML" in error.found
    assert "line 1" in error.found


def test_a_missing_file_is_said() -> None:
    with pytest.raises(InventoryError, match=r"nowhere\.toml does not exist"):
        load_fleet(Path("nowhere.toml"))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_examples_are_valid(path: Path) -> None:
    assert load_fleet(path).notices == ()


def test_line_of_skips_multiline_strings() -> None:
    text = '[a]\nx = """\n[b]\ny = 1\n"""\n[b]\ny = 2\n"q.r".s = 3\n'
    assert line_of(text, ("b", "y")) == 7
    assert line_of(text, ("b", "q.r", "s")) == 8
    assert line_of(text, ("a", "z")) == 1
    assert line_of(text, ("c",)) is None


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("h", Address(host="h")),
        ("root@10.77.0.11:2222", Address(host="10.77.0.11", user="root", port=2222)),
        ("[::1]:22", Address(host="::1", port=22)),
        ("u@[2001:db8::1]", Address(host="2001:db8::1", user="u")),
        ("2001:db8::1", Address(host="2001:db8::1")),
        ("me@corp@h", Address(host="h", user="me@corp")),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


BAD_ADDRESSES = ["", "h:", "h:0", "h:65536", "h:٣", "[::1", "[::1]22", "[h]:22", "a b", "-oProxy=x", "@h", ":22"]


@pytest.mark.parametrize("text", BAD_ADDRESSES)
def test_bad_addresses(text: str) -> None:
    with pytest.raises(ValueError):
        parse_address(text)


@given(
    st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,20}[a-z0-9])?", fullmatch=True) | st.ip_addresses(v=6).map(str),
    st.none() | st.from_regex(r"[a-z_][a-z0-9_-]{0,10}", fullmatch=True),
    st.none() | st.integers(1, 65535),
)
def test_addresses_round_trip(host: str, user: str | None, port: int | None) -> None:
    address = Address(host=host, user=user, port=port)
    assert parse_address(str(address)) == address
