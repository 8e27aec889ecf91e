"""SGLang's command line, read from its sources without importing them (that would need torch).

``ServerArgs`` is a dataclass whose fields carry their flags as ``A[type, Arg(...)]`` or ``A[type, "help"]``; a few
more are registered by ``parser.add_argument``. Both are plain syntax, so the flags follow the sources on the path.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import re
from collections.abc import Iterator
from typing import Any, Mapping


def package_dir(name: str) -> str | None:
    """Where a package lies on the import path; it is not imported."""
    spec = importlib.util.find_spec(name)
    places = list(spec.submodule_search_locations or ()) if spec else []
    return places[0] if places else None


def build_parser(sglang: str, plugin: str | None) -> argparse.ArgumentParser:
    """The parser of ``sglang serve``: its own flags, and the plugin's if there is one."""
    parser = argparse.ArgumentParser(prog="sglang serve")
    tree = _parse(os.path.join(sglang, "srt", "server_args.py"))
    constants = _constants(tree)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "ServerArgs":
            for field in node.body:
                if isinstance(field, ast.AnnAssign):
                    _add_field(parser, field, constants)
    _add_calls(parser, tree)
    if plugin is not None and os.path.exists(os.path.join(plugin, "args.py")):
        _add_calls(parser, _parse(os.path.join(plugin, "args.py")))
    return parser


def with_config(argv: list[str]) -> list[str]:
    """The arguments with those of the file that ``--config`` names before them. The file's YAML must be JSON here."""
    if "--config" not in argv:
        return argv
    at = argv.index("--config")
    with open(argv[at + 1], encoding="utf-8") as file:
        given = json.load(file)
    words = [word for key, value in given.items() for word in (f"--{key}", str(value))]
    return words + argv[:at] + argv[at + 2 :]


def _parse(path: str) -> ast.Module:
    with open(path, encoding="utf-8") as source:
        return ast.parse(source.read(), path)


def _literal(node: ast.AST | None, constants: dict[str, Any]) -> Any:
    """The value of a literal or of a module constant, None for anything that would need running code."""
    if isinstance(node, ast.Name):
        return constants.get(node.id)
    try:
        return ast.literal_eval(node) if node is not None else None
    except (ValueError, TypeError):
        return None


def _constants(tree: ast.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = _literal(node.value, {})
    return found


def _type_words(node: ast.AST) -> str:
    """A type as text, ``Optional[...]`` taken off."""
    text = _unparse(node)
    return text[len("Optional[") : -1] if text.startswith("Optional[") else text


def _inside(node: ast.Subscript) -> ast.AST:
    """What stands in the brackets; Python 3.8 wraps it once more."""
    return node.slice.value if type(node.slice).__name__ == "Index" else node.slice  # type: ignore[attr-defined]


def _unparse(node: ast.AST) -> str:
    # ast.unparse is Python 3.9; types here are names and subscripts only
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Constant):
        return repr(node.value)
    if isinstance(node, ast.Tuple):
        return ", ".join(_unparse(part) for part in node.elts)
    if isinstance(node, ast.Subscript):
        return f"{_unparse(node.value)}[{_unparse(_inside(node))}]"
    return "str"


def _add_field(parser: argparse.ArgumentParser, field: ast.AnnAssign, constants: dict[str, Any]) -> None:
    annotation = field.annotation
    if not (isinstance(annotation, ast.Subscript) and getattr(annotation.value, "id", "") == "A"):
        return
    marks = _inside(annotation)
    assert isinstance(marks, ast.Tuple)
    assert isinstance(field.target, ast.Name)
    calls = [m for m in marks.elts[1:] if isinstance(m, ast.Call) and getattr(m.func, "id", "") == "Arg"]
    strings = [m for m in marks.elts[1:] if isinstance(m, (ast.Constant, ast.JoinedStr, ast.BinOp))]
    if not calls and not strings:
        return
    meta = {word.arg: word.value for word in calls[0].keywords} if calls else {}
    if _literal(meta.get("no_cli"), {}):
        return
    name = field.target.id
    flag = _literal(meta.get("cli_name"), {}) or "--" + name.replace("_", "-")
    names = [flag, *list(_literal(meta.get("aliases"), {}) or [])]
    options: dict[str, Any] = {"dest": name, "default": _literal(field.value, constants)}
    options.update(_value_options(_type_words(marks.elts[0]), meta, constants))
    if field.value is None:
        options["required"] = True
    parser.add_argument(*names, **options)


def _value_options(kind: str, meta: Mapping[str | None, ast.AST], constants: dict[str, Any]) -> dict[str, Any]:
    """argparse's options for a field of type ``kind``, as SGLang's own ``arg_utils`` chooses them."""
    action = meta.get("action")
    if action is not None:
        if getattr(action, "attr", "") == "BooleanOptionalAction":
            return {"action": getattr(argparse, "BooleanOptionalAction", "store_true")}
        return {"nargs": "*"}
    options: dict[str, Any] = {}
    choices = _literal(meta.get("choices"), constants)
    if kind.startswith("Literal["):
        choices = choices or list(ast.literal_eval("[{}]".format(kind[len("Literal[") : -1])))
        kind = type(choices[0]).__name__
    if kind == "bool":
        return {"action": "store_true"}
    if "type_parser" not in meta:
        if kind.startswith("List["):
            options["nargs"] = "+"
            kind = kind[len("List[") : -1]
        options["type"] = {"int": int, "float": float}.get(kind, str)
    elif getattr(meta["type_parser"], "id", "") == "human_readable_int":
        options["type"] = human_readable_int
    if choices:
        options["choices"] = sorted(choices) if isinstance(choices, set) else choices
    for key in ("nargs", "const"):
        if key in meta:
            options[key] = _literal(meta[key], constants)
    return options


def human_readable_int(text: str) -> int:
    """A whole number, or one with SGLang's suffixes: ``25.6k`` is 25600, ``1Ki`` is 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(?:([kMGT])|([KMGT])i)", text.strip())
    if match is None:
        return int(text)
    if match[3]:
        return int(match[1]) << 10 * (1 + "KMGT".index(match[3]))
    return int(float(match[1]) * 10 ** (3 * (1 + "kMGT".index(match[2]))))


def _add_calls(parser: argparse.ArgumentParser, tree: ast.Module) -> None:
    known = set(parser._option_string_actions)
    for call in _argument_calls(tree):
        names = [name for name in (_literal(arg, {}) for arg in call.args) if isinstance(name, str)]
        if not names or not names[0].startswith("--") or known & set(names):
            continue
        words = {word.arg: word.value for word in call.keywords}
        action = str(_literal(words.get("action"), {}) or getattr(words.get("action"), "id", ""))
        options: dict[str, Any] = {}
        if action.startswith(("Deprecated", "store_")) and "Alias" not in action:
            options["action"] = "store_true"
        else:
            options["type"] = {"int": int, "float": float}.get(getattr(words.get("type"), "id", ""), str)
            nargs = _literal(words.get("nargs"), {})
            options.update({"nargs": nargs} if nargs else {})
            choices = _literal(words.get("choices"), {})
            options.update({"choices": choices} if choices else {})
        dest = _literal(words.get("dest"), {})
        options.update({"dest": dest} if dest else {})
        parser.add_argument(*names, **dict(options, default=argparse.SUPPRESS if "Deprecated" in action else None))


def _argument_calls(tree: ast.Module) -> Iterator[ast.Call]:
    found: list[ast.Call] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            found.append(node)
    return iter(found)
