"""Everything a person sees: tables, lines, JSON, errors. The only user of rich besides cli/."""

from ddtree_ops.ui.output import Output, plain
from ddtree_ops.ui.problem import error_data, error_lines

__all__ = ["Output", "error_data", "error_lines", "plain"]
