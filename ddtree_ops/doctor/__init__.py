"""Know before you touch: what a host is like, what is wrong with it, and the command that repairs each thing."""

from ddtree_ops.doctor.catalogue import CHECKS, Check, Finding, Level
from ddtree_ops.doctor.checks import examine
from ddtree_ops.doctor.machine import Machine, parse_machine

__all__ = ["CHECKS", "Check", "Finding", "Level", "Machine", "examine", "parse_machine"]
