from __future__ import annotations

import difflib
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_ops.bundle.patches import apply_file, apply_series, parse_patch, read_base, read_series
from ddtree_ops.data import data_dir
from ddtree_ops.errors import RefusedError

HEADER = "Subject: Mend it\n\nDefect: it is broken.\n---\n"
lines = st.lists(st.sampled_from(["a", "b", "  c", "", "+d", "-e", "@@ f", "--- a/g"]), max_size=30)


def diff(before: str, after: str, path: str = "x/y.py") -> str:
    made = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{path}", f"b/{path}"
    )
    return HEADER + "".join(made)


@given(lines, lines)
def test_what_difflib_writes_is_applied_exactly(before: list[str], after: list[str]) -> None:
    old, new = ("".join(f"{line}\n" for line in text) for text in (["start", *before], ["start", *after]))
    if old == new:
        return
    patch = parse_patch("p", diff(old, new))
    assert apply_file("p", patch.files[0], old) == new


@given(lines, lines, lines)
def test_other_sources_are_refused_or_untouched_by_chance(
    before: list[str], after: list[str], other: list[str]
) -> None:
    """Whatever the sources are: either every line of context stands where it must, or nothing is applied."""
    old, new, odd = ("".join(f"{line}\n" for line in ["start", *text]) for text in (before, after, other))
    if old == new:
        return
    patch = parse_patch("p", diff(old, new))
    found = odd.splitlines(keepends=True)
    fits = all(tuple(found[h.start - 1 : h.start - 1 + len(h.old)]) == h.old for h in patch.files[0].hunks)
    if fits:
        apply_file("p", patch.files[0], odd)
    else:
        with pytest.raises(RefusedError, match="does not match"):
            apply_file("p", patch.files[0], odd)


def test_a_hunk_is_never_searched_for_elsewhere() -> None:
    patch = parse_patch("p", diff("a\nb\nc\n", "a\nB\nc\n"))
    with pytest.raises(RefusedError, match=r"the hunk at line 1 of x/y\.py does not match"):
        apply_file("p", patch.files[0], "shifted\na\nb\nc\n")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n", "no header"),
        ("Subject: S\n---\n", "changes no file"),
        ("Subject: S\n---\nhello\n", "not the start of a diff"),
        ("Subject: S\n---\n--- a/x\n+++ b/y\n@@ -1 +1 @@\n-a\n+b\n", "renames"),
        ("Subject: S\n---\n--- a/x\n+++ b/x\n", "no hunk"),
        ("Subject: S\n---\n--- a/x\n+++ b/x\n@@ -1,2 +1 @@\n-a\n+b\n", "cut short"),
        ("Subject: S\n---\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n-b\n+b\n", "longer than it says"),
        ("Subject: S\n---\n--- a/x\n+++ b/x\n@@ -0,0 +1 @@\n+b\n", "no context"),
        ("Subject: S\n---\n--- a/x\n+++ b/x\n@@ nonsense\n", "not a hunk header"),
    ],
)
def test_malformed_patches_are_refused(text: str, reason: str) -> None:
    with pytest.raises(RefusedError, match=reason):
        parse_patch("p", text)


def test_base_must_be_the_pinned_one() -> None:
    patch = parse_patch("p", diff("a\n", "b\n"))
    base = {"x/y.py": hashlib.sha256(b"a\n").hexdigest()}
    assert apply_series((patch,), base, lambda _: b"a\n") == {"x/y.py": b"b\n"}
    with pytest.raises(RefusedError, match="not the file the series was made for"):
        apply_series((patch,), base, lambda _: b"a\na\n")
    with pytest.raises(RefusedError, match=r"disagree about z\.py"):
        apply_series((patch,), {**base, "z.py": "0" * 64}, lambda _: b"a\n")


def test_the_series_says_what_it_mends() -> None:
    folder = data_dir("patches") / "sglang-0.5.17"
    series = read_series(folder)
    assert [patch.name for patch in series] == sorted(path.name for path in folder.glob("*.patch"))
    for patch in series:
        assert "Defect" in patch.header
        assert "Mended here:" in patch.header
        assert "Upstream:" in patch.header
    assert set(read_base(folder)) == {file.path for patch in series for file in patch.files}
