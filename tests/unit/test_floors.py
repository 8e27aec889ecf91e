"""The performance page's tables are what benchmarks/engine/floors.py prints; its sizes are the engine's."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENGINE = str(ROOT / "patches" / "sglang-ddtree" / "src")
if ENGINE not in sys.path:
    sys.path.append(ENGINE)

from benchmarks.engine import floors  # noqa: E402

PAGE = ROOT / "docs" / "engine-performance.md"


@pytest.mark.parametrize("name", sorted(floors.tables()))
def test_the_page_shows_what_the_command_prints(name: str) -> None:
    found = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", PAGE.read_text(), re.DOTALL)
    assert found is not None, f"docs/engine-performance.md has no part <!-- {name} -->"
    assert found[1] == floors.tables()[name], "python -m benchmarks.engine.floors prints another table"


def test_sizes_are_those_of_the_27b_hybrid() -> None:
    s = floors.shape("shape-27b")
    assert (s.recurrent_layers, s.channels) == (48, 10240)
    # 144 MiB of snapshots a row and request over all layers; records a sixtieth of them
    assert s.recurrent_layers * s.state_bytes == 144 << 20
    assert s.record_bytes == 53_440
    assert s.state_bytes / s.record_bytes == pytest.approx(58.9, abs=0.1)
    # 27B parameters less embedding: 24.35 billion in the layers, 1.27 in the head
    assert s.target_bytes / 2e9 == pytest.approx(24.35, abs=0.05)
    assert s.head_bytes / 2e9 == pytest.approx(1.27, abs=0.01)


def test_snapshots_grow_with_the_tree_and_records_hardly() -> None:
    s = floors.shape("shape-27b")
    narrow, wide = floors.stage_bytes(s, 17, 5), floors.stage_bytes(s, 65, 5)
    per_row = s.recurrent_layers * s.state_bytes
    assert wide["recurrence with snapshots"] - narrow["recurrence with snapshots"] == 48 * per_row
    assert wide["recurrence with records"] < 2 * narrow["recurrence with records"]
    assert wide["target's layers"] == narrow["target's layers"]


def test_a_kernel_belongs_to_the_stage_it_works_for() -> None:
    kernels = [
        {"name": "nvjet_sm90_tst_384x16_64x4_4x1_v_bz_TNT", "us_per_round": 5.0},
        {"name": "fused_sigmoid_gating_delta_rule_update_kernel", "us_per_round": 3.0},
        {"name": "_causal_conv1d_update_kernel", "us_per_round": 2.0},
        {"name": "gdn_tables_kernel", "us_per_round": 0.25},
        {"name": "gdn_tree_kernel", "us_per_round": 0.25},
        {"name": "conv_tree_kernel", "us_per_round": 0.5},
        {"name": "commit_state_kernel", "us_per_round": 4.0},
        {"name": "chunk_gated_delta_rule_fwd_kkt_solve_kernel", "us_per_round": 8.0},
        {"name": "_build_tree_kernel", "us_per_round": 1.0},
        {"name": "Memcpy DtoD (Device -> Device)", "us_per_round": 0.5},
    ]
    split = floors.by_stage(kernels)
    assert sum(split.values()) == pytest.approx(24.5)
    assert (split["matrix products"], split["recurrence"], split["convolution"]) == (5.0, 3.5, 2.5)
    assert (split["state commit"], split["tree and head"], split["rest"]) == (4.0, 1.0, 0.5)
    assert split[floors.PREFILL] == 8.0


def test_an_arm_without_a_profile_of_the_batch_is_left_out() -> None:
    timed, profiled = {"job": "timed", "batch": 1, "ms_per_round": 2.5}, {"job": "profiled", "batch": 1, "kernels": []}
    rows = [
        {"arm": "t/cost-ar", "measured": [timed, profiled]},
        {"arm": "t/cost-linear", "measured": [timed]},
        {"arm": "t-12/cost-ar", "measured": [timed, profiled]},
        {"arm": "t/cost-tree-8"},
    ]
    assert [line.split(" | ")[:2] for line in floors.seen_table(rows, "t", 1).splitlines()[2:]] == [["| ar", "2.50"]]
    assert len(floors.seen_table(rows, "t", 8).splitlines()) == 2
