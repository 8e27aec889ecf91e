"""Documentation that code can check: a key or exit code that is not described fails here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from ddtree_ops.cli import lab
from ddtree_ops.errors import ExitCode
from ddtree_ops.inventory.load import HOST_DEFAULT_KEYS, HOST_KEYS, SETTINGS_KEYS, parse_fleet
from ddtree_ops.lab.standin import faults
from ddtree_ops.model import Frozen, GateSettings, HostSpec, Settings

DOCS = Path(__file__).parents[2] / "docs"


def rows(text: str) -> list[list[str]]:
    """The cells of the rows of a Markdown table, without head."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [row for row in lines if not row[0].startswith("---")][1:]


def section(name: str) -> str:
    text = (DOCS / "inventory.md").read_text()
    return text.split(f"## {name}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize(
    ("title", "keys"),
    [
        ("[hosts.NAME]", HOST_KEYS),
        ("[hosts.NAME.instances.NAME]", SETTINGS_KEYS),
        ("Gates", tuple(GateSettings.model_fields)),
    ],
)
def test_every_key_of_the_inventory_is_described(title: str, keys: tuple[str, ...]) -> None:
    assert sorted(row[0].strip("`") for row in rows(section(title))) == sorted(keys)


@pytest.mark.parametrize(
    ("title", "model"),
    [("[hosts.NAME]", HostSpec), ("[hosts.NAME.instances.NAME]", Settings), ("Gates", GateSettings)],
)
def test_described_defaults_are_the_models(title: str, model: type[Frozen]) -> None:
    for row in rows(section(title)):
        field = model.model_fields.get(row[0].strip("`"))
        default = row[2].strip("`")
        if field is None or field.is_required() or field.default in (None, ()) or field.default_factory:
            continue
        shown = str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
        assert default.strip('"') == shown.replace("(1,)", "[1]").replace("(", "[").replace(")", "]"), row[0]


def test_host_defaults_are_described() -> None:
    text = section("[hosts.NAME]").split("`[defaults.host]` takes")[1]
    assert set(re.findall(r"`(\w+)`", text)) == set(HOST_DEFAULT_KEYS)


def test_the_example_is_valid() -> None:
    text = (DOCS / "inventory.md").read_text()
    fleet = parse_fleet(text.split("```toml\n")[1].split("```")[0], "docs/inventory.md")
    assert fleet.hosts["ct200"].instances["tree"].context_length == 32768


def test_the_example_of_secrets_is_valid() -> None:
    text = (DOCS / "inventory.md").read_text()
    fleet = parse_fleet("\n".join(text.split("```toml\n")[i].split("```")[0] for i in (1, 2)), "docs/inventory.md")
    assert sorted(fleet.hosts["ct200"].secrets["tree"]) == ["HF_TOKEN", "admin_api_key", "api_key"]


def test_every_exit_code_is_described() -> None:
    described = {int(row[0]): row[1] for row in rows((DOCS / "exit-codes.md").read_text())}
    assert described == {int(code): code.name.lower().replace("_", " ") for code in ExitCode}


def test_every_fault_of_the_stand_in_is_described() -> None:
    text = (DOCS / "lab.md").read_text().split("## Faults of the stand-in\n")[1].split("\n## ")[0]
    described = {row[0].strip("`"): row[1] for row in rows(text)}
    assert set(described) == {*faults.KNOBS, *faults.FAULTS, "ONLY"}
    speeds = {mode: float(value) for mode, value in (part.split("=") for part in described["TOK_S"].split(","))}
    assert speeds == faults.TOK_S


def test_every_lab_command_is_described() -> None:
    text = (DOCS / "lab.md").read_text().split("## Commands\n")[1].split("\n## ")[0]
    described = {name for row in rows(text) for name in re.findall(r"`(\w+)", row[0])}
    assert described == set(typer.main.get_command(lab.app).commands)  # type: ignore[attr-defined]


def test_every_test_that_a_document_names_exists() -> None:
    tests = {
        (path.stem, name)
        for path in (DOCS.parent / "tests").rglob("test_*.py")
        for name in re.findall(r"^ *def (test_\w+)\(", path.read_text(), re.MULTILINE)
    }
    text = "".join(path.read_text() for path in DOCS.glob("*.md"))
    named = set(re.findall(r"\b(test_\w+)(?:\.py)?::(test_\w+)", text))
    assert named
    assert named <= tests, named - tests


def test_the_readme_names_every_page_and_shows_what_exists() -> None:
    text = (DOCS.parent / "README.md").read_text()
    links = set(re.findall(r"\]\(((?!https?:)[^)#]+)", text))
    assert all((DOCS.parent / link).exists() for link in links), links
    assert {f"docs/{page.name}" for page in DOCS.glob("*.md")} <= links
