"""The fleet in TOML: finding the file, reading it into a ``Fleet``, checking it, changing it with its comments kept."""

from ddtree_ops.inventory.address import parse_address
from ddtree_ops.inventory.load import load_fleet, parse_fleet
from ddtree_ops.inventory.locate import locate_inventory

__all__ = ["load_fleet", "locate_inventory", "parse_address", "parse_fleet"]
