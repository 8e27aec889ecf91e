"""The systemd unit of one instance, from a Jinja2 template. An undefined variable is an error, never an empty text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jinja2

from ddtree_ops.data import data_dir
from ddtree_ops.errors import InventoryError
from ddtree_ops.inventory.checks import SERVER_SECRETS
from ddtree_ops.model import HostSpec, Settings, unit_name
from ddtree_ops.render.argv import server_argv
from ddtree_ops.render.environment import cache_folders, server_environment
from ddtree_ops.render.mounts import needed_paths
from ddtree_ops.render.quote import quote_arg, quote_env, quote_path
from ddtree_ops.secret import CONFIG_FILE, ENVIRONMENT_FILE

TEMPLATE = "sglang-ddtree.service.j2"
RELEASE_PLACEHOLDER = "0" * 16
"""The release's digest is taken over a unit that has this in the place of the release: a digest cannot hold itself."""

STOP_MARGIN_S = 80
"""After its drain SGLang waits 15 s for its schedulers and up to 60 s for killed processes; then systemd may kill."""

RESTART_BURST = 3
RESTART_SEC = 5
RESTART_STEPS_SINCE = 254


def render_target(host: HostSpec, settings: Settings, *, release: str, engine_dir: str, systemd_version: int) -> str:
    """The unit of one instance on one host, with the host's own template if it names one."""
    return render_unit(
        settings,
        release=release,
        engine_dir=engine_dir,
        root=host.root,
        scope=host.scope,
        systemd_version=systemd_version,
        template=Path(host.unit_template) if host.unit_template else None,
    )


def render_unit(
    settings: Settings,
    *,
    release: str,
    engine_dir: str,
    root: str,
    scope: str,
    systemd_version: int,
    template: Path | None = None,
) -> str:
    """The unit's text. ``systemd_version`` is the host's: what it does not know it would ignore without a word."""
    secrets = secret_files(settings, root, scope)
    source = template or data_dir("templates") / TEMPLATE
    variables = {
        "settings": settings,
        "unit": unit_name(settings.instance),
        "release": release,
        "engine_dir": engine_dir,
        "root": root,
        "scope": scope,
        "command_lines": _lines(server_argv(settings, release, secrets.config)),
        "secrets": secrets,
        "environment": server_environment(settings, engine_dir=engine_dir),
        "cache": f"sglang-ddtree/{settings.instance}",
        "cache_folders": cache_folders(settings),
        "needed_paths": needed_paths(settings, root),
        "stop_s": settings.drain_timeout_s + STOP_MARGIN_S,
        "restart_sec": RESTART_SEC,
        "restart_burst": RESTART_BURST,
        # a crash may come after a whole load, so the window must hold that many loads or the limit never bites
        "restart_window_s": RESTART_BURST * (settings.start_timeout_s + RESTART_SEC),
        "restart_steps": systemd_version >= RESTART_STEPS_SINCE,
    }
    return _render(source, variables)


@dataclass(frozen=True)
class SecretFiles:
    """Where the unit finds the instance's secrets; None for what it has none of.

    config: the path the server reads its keys from.  credential: what systemd loads for it.  environment: variables.
    """

    config: str | None = None
    credential: str | None = None
    environment: str | None = None


def secret_files(settings: Settings, root: str, scope: str) -> SecretFiles:
    """A system service runs as its own user: systemd reads the file and shows the server a copy only it can read."""
    folder = f"{root}/instances/{settings.instance}/secrets"
    keys = any(name in SERVER_SECRETS for name in settings.secrets)
    variables = any(name not in SERVER_SECRETS for name in settings.secrets)
    stored = f"{folder}/{CONFIG_FILE}" if keys else None
    loaded = f"/run/credentials/{unit_name(settings.instance)}/{CONFIG_FILE}"
    return SecretFiles(
        config=loaded if stored and scope == "system" else stored,
        credential=stored if scope == "system" else None,
        environment=f"{folder}/{ENVIRONMENT_FILE}" if variables else None,
    )


def _lines(argv: list[str]) -> list[list[str]]:
    """One flag with its values a line, so that a diff shows which flag changed."""
    lines = [argv[:3]]
    for word in argv[3:]:
        if word.startswith("-"):
            lines.append([])
        lines[-1].append(word)
    return lines


def _render(source: Path, variables: dict[str, object]) -> str:
    loader = jinja2.FileSystemLoader(source.parent)
    env = jinja2.Environment(
        loader=loader,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    env.filters |= {"arg": quote_arg, "env": lambda item: quote_env(*item), "path": quote_path}
    try:
        return env.get_template(source.name).render(variables)
    except jinja2.TemplateNotFound:
        raise InventoryError(
            f"the unit template {source} does not exist", next="correct unit_template in the inventory, or remove it"
        ) from None
    except jinja2.TemplateError as error:
        line = _line(error, source)
        raise InventoryError(
            f"the unit template {source}{f':{line}' if line else ''}: {error.message}",
            why="a unit with a gap would start the wrong server",
            next=f"repair that line; a template may use: {', '.join(sorted(variables))}",
        ) from None


def _line(error: jinja2.TemplateError, source: Path) -> int | None:
    """The template's line, which Jinja2 writes into the traceback of errors that happen while rendering."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return error.lineno
    line, frame = None, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == str(source):
            line = frame.tb_lineno
        frame = frame.tb_next
    return line
