"""``--save`` changes what it must, keeps every comment, and never leaves a broken file."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from ddtree_ops.errors import InventoryError
from ddtree_ops.inventory import load_fleet
from ddtree_ops.inventory.edit import edit_text, save_settings
from ddtree_ops.model import Mode

EXAMPLE = Path(__file__).parents[2] / "inventory" / "ct200.toml"


def test_only_the_changed_lines_change() -> None:
    text = EXAMPLE.read_text()
    new, lines = edit_text(text, [("ct200", "tree", {"mode": Mode.TREE, "budget": 32, "gpus": (2, 3), "topk_cap": 8})])
    assert lines == [
        "hosts.ct200.instances.tree.budget = 32 (was 16)",
        "hosts.ct200.instances.tree.gpus = [2, 3] (was [1])",
    ]
    gone = [line for line in text.splitlines() if line not in new.splitlines()]
    assert gone == ["budget = 16", "gpus = [1]"]


def test_a_new_key_and_an_inline_table() -> None:
    text = 'hosts.h.address = "h"\nhosts.h.instances.a = {mode = "ar", port = 1} # x\n'
    new, _ = edit_text(text, [("h", "a", {"mode": Mode.LINEAR, "unsafe_reason": 'a "b"'})])
    assert new.splitlines()[1] == 'hosts.h.instances.a = {mode = "linear", port = 1, unsafe_reason = "a \\"b\\""} # x'


def test_the_file_is_replaced_whole_with_its_mode_and_through_links(tmp_path: Path) -> None:
    real = tmp_path / "real.toml"
    real.write_text(EXAMPLE.read_text())
    real.chmod(0o640)
    link = tmp_path / "link.toml"
    link.symlink_to(real)
    assert save_settings(link, [("ct200", "tree", {"budget": 32})])
    assert link.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert load_fleet(link).hosts["ct200"].instances["tree"].budget == 32
    assert save_settings(link, [("ct200", "tree", {"budget": 32})]) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.toml", "real.toml"]


def test_a_change_that_would_break_the_inventory_is_not_written(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(EXAMPLE.read_text())
    with pytest.raises(InventoryError, match="already instance linear's"):
        save_settings(file, [("ct200", "tree", {"port": 30000})])
    assert file.read_text() == EXAMPLE.read_text()
