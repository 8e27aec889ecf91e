"""From settings to what runs: the server's argument list and the systemd unit. Pure, except for reading templates."""

from ddtree_ops.render.argv import server_argv
from ddtree_ops.render.unit import RELEASE_PLACEHOLDER, render_target, render_unit

__all__ = ["RELEASE_PLACEHOLDER", "render_target", "render_unit", "server_argv"]
