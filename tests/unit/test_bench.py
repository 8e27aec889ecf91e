"""Measuring servers that run: taking turns, what is compared with what, and what keeps one from being measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakehost import ENGINE, deployer, host_of, settings
from test_sweep import GATES, Measured

from ddtree_ops.bench import RECORDED, Bench, Benched
from ddtree_ops.errors import LockedError, MovedError
from ddtree_ops.gates import baseline
from ddtree_ops.gates.measure import Measurement, parse_run
from ddtree_ops.interrupt import Interrupted, Token
from ddtree_ops.model import Mode, Settings

LINEAR, TREE = settings(), settings(mode=Mode.TREE, budget=32)


def serving(name: str, wanted: Settings, tmp: Path) -> Measured:
    fake = Measured(name=name)
    deployer(fake, tmp=tmp).run([(host_of(wanted, name=name), [wanted])])
    fake.ops.clear()
    return fake


def bench(fakes: list[tuple[Measured, Settings]], tmp: Path, token: Token | None = None) -> list[Benched]:
    made = Bench(lambda _c, _s: GATES, fakes[0][0].clock, token or Token(), lambda _event: None, lambda _c, _s: {})
    pairs = []
    for fake, wanted in fakes:
        run = deployer(fake, tmp=tmp)
        pairs.append((run.connect(host_of(wanted, name=fake.name)), wanted))
    return made.run(pairs)


def test_the_first_is_what_the_others_are_compared_with(tmp_path: Path) -> None:
    linear, tree = serving("h1", LINEAR, tmp_path), serving("h2", TREE, tmp_path)
    order: list[str] = []
    for fake in (linear, tree):
        fake.hook = lambda op, name=fake.name: order.append(name) if op == "load" else None
    found = bench([(linear, LINEAR), (tree, TREE)], tmp_path)
    assert order == ["h1", "h2", "h2", "h1"], "in turn, the other way round at the second concurrency"
    assert [each.beside for each in found] == ["", "h1:a"]
    assert [round(run["speedup"], 2) for run in found[1].runs] == [1.24, 1.24]
    assert found[1].answers == "8 of 8 prompts answered alike"
    assert found[0].runs[0]["tokens_per_s"] == 256.0
    for fake in (linear, tree):
        assert fake.held is None
        assert not {"switch", "stage_release", "systemctl restart", "record"} & set(fake.ops)


def test_other_answers_are_counted(tmp_path: Path) -> None:
    linear, tree = serving("h1", LINEAR, tmp_path), serving("h2", TREE, tmp_path)
    tree.differs = {32}
    assert bench([(linear, LINEAR), (tree, TREE)], tmp_path)[1].answers == "0 of 8 prompts answered alike"


class Recorded(Measured):
    """It keeps a linear baseline for exactly this server."""

    def op_baseline(self, args: dict[str, Any], _payload: Any) -> dict[str, Any]:
        wanted = baseline.baseline_key(TREE, ENGINE, GATES, Mode.LINEAR)
        replies = [{"body": body, "seconds": 1.0, "tokens": list(range(16))} for body in range(8)]
        runs = (parse_run({"concurrency": n, "wall_s": 1.0, "replies": replies}, 16) for n in (1, 4))
        value = baseline.pack(Measurement(tuple(runs)), {}, "r", 0.0)
        return {"value": value if args["key"] == wanted else None}


def test_a_single_one_is_compared_with_the_recorded_baseline(tmp_path: Path) -> None:
    fake = Recorded(name="h1")
    deployer(fake, tmp=tmp_path).run([(host_of(TREE), [TREE])])
    (found,) = bench([(fake, TREE)], tmp_path)
    assert found.beside == RECORDED
    assert found.runs[0]["speedup"] > 1
    assert found.as_json()["budget"] == 32


def test_what_runs_is_measured_not_what_the_inventory_wants(tmp_path: Path) -> None:
    fake = Recorded(name="h1")
    deployer(fake, tmp=tmp_path).run([(host_of(TREE), [TREE])])
    assert bench([(fake, LINEAR)], tmp_path)[0].settings.mode is Mode.TREE


def test_a_server_that_is_not_well_has_no_figures(tmp_path: Path) -> None:
    fake = serving("h1", LINEAR, tmp_path)
    server = fake.server["a"]
    assert server is not None
    server.fault = "wrong-release"
    with pytest.raises(MovedError, match="gate identity"):
        bench([(fake, LINEAR)], tmp_path)
    server.fault, fake.errors = "", {"linear"}  # type: ignore[arg-type]
    with pytest.raises(MovedError, match="HTTP 500") as failed:
        bench([(fake, LINEAR)], tmp_path)
    assert failed.value.next == "ddtree-ops logs h1:a"
    assert fake.held is None


def test_nothing_deployed(tmp_path: Path) -> None:
    with pytest.raises(MovedError, match="nothing is deployed"):
        bench([(Measured(name="h1"), LINEAR)], tmp_path)


def test_it_does_not_measure_while_somebody_deploys(tmp_path: Path) -> None:
    fake = serving("h1", LINEAR, tmp_path)
    fake.held = {"owner": "anna", "pid": 1, "purpose": "deploy a", "token": "t"}
    with pytest.raises(LockedError):
        bench([(fake, LINEAR)], tmp_path)


def test_ctrl_c_frees_the_lock(tmp_path: Path) -> None:
    fake, token = serving("h1", LINEAR, tmp_path), Token()
    token.set("SIGINT")
    with pytest.raises(Interrupted):
        bench([(fake, LINEAR)], tmp_path, token)
    assert fake.held is None
