"""What a rollout leaves behind so that it can go on: what was wanted, by which rules, and what is done."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import platformdirs
from pydantic import ValidationError

from ddtree_ops.errors import UsageError
from ddtree_ops.model import Frozen, Settings
from ddtree_ops.outcome import Outcome
from ddtree_ops.rollout import Rules
from ddtree_ops.targets import Target

FORMAT = 1


class RolloutFile(Frozen):
    """A rollout as it stands. ``done`` are the targets that need nothing more."""

    format: int = FORMAT
    inventory: str
    settings: dict[str, Settings]
    done: tuple[str, ...] = ()
    batches: tuple[str, ...]
    max_failures: int
    max_unreachable: int
    soak_s: float
    deadline_s: float | None

    @property
    def rules(self) -> Rules:
        """The rules for what is left. The canary has been, so its batches are not repeated."""
        left = self.batches[1:] if self.done and len(self.batches) > 1 else self.batches
        return Rules(left, self.max_failures, self.max_unreachable, self.soak_s, self.deadline_s)

    @property
    def left(self) -> dict[str, Settings]:
        return {target: settings for target, settings in self.settings.items() if target not in self.done}


def default_path() -> Path:
    return platformdirs.user_state_path("ddtree-ops") / "rollout.json"


def begin(inventory: str, targets: Sequence[Target], rules: Rules) -> RolloutFile:
    return RolloutFile(
        inventory=inventory,
        settings={target.name: target.settings for target in targets},
        batches=rules.batches,
        max_failures=rules.max_failures,
        max_unreachable=rules.max_unreachable,
        soak_s=rules.soak_s,
        deadline_s=rules.deadline_s,
    )


def write(rollout: RolloutFile, path: Path, outcomes: Sequence[Outcome] = ()) -> RolloutFile:
    """Keep where the rollout stands; written beside its place and renamed, so that it is whole at any time."""
    done = {*rollout.done, *(outcome.target for outcome in outcomes if outcome.status.good)}
    now = rollout.model_copy(update={"done": tuple(sorted(done))})
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as out:
        out.write(now.model_dump_json(indent=2) + "\n")
        out.flush()
        os.fsync(out.fileno())
    partial.replace(path)
    return now


def read(path: Path) -> RolloutFile:
    """A rollout that was stopped; one that is over, or none, is a usage error."""
    try:
        found = RolloutFile.model_validate_json(path.read_text("utf-8"))
    except FileNotFoundError:
        raise UsageError("there is no rollout to resume", next="ddtree-ops deploy all --batches 1,25%,rest") from None
    except ValidationError as bad:
        raise UsageError(f"{path} is no rollout: {bad.errors()[0]['msg']}", next=f"remove {path}") from bad
    if not found.left:
        raise UsageError(
            "the last rollout is complete",
            why=f"all of its {len(found.settings)} instances are done",
            next="ddtree-ops status",
        )
    return found
