"""Evidence: what is in the archive, and that no secret is."""

from __future__ import annotations

import base64
import gzip
import io
import json
import tarfile
from pathlib import Path

import pytest
from helperhost import helper_host, release_tar

from ddtree_ops.hostside.evidence import HIDDEN, redact


def test_the_archive_holds_what_a_failure_is_read_from_and_no_secret(tmp_path: Path) -> None:
    host = helper_host(tmp_path)
    secret = "correct-horse-battery"
    with host.agent.locked("test"):
        digest, tar = release_tar("one\n")
        host.do("stage_release", tar, instance="qwen", release=digest)
        host.do("switch", instance="qwen", release=digest)
        host.do("put_secrets", json.dumps({"api_key": secret}).encode(), instance="qwen")
        host.do("record", instance="qwen", release=digest, outcome="failed", details={"reason": f"key {secret} bad"})
    lines = [f"started with {secret}", "token is hf_abcdefghijklmnopqrstuvwx", "loaded weights"]
    journal = [
        json.dumps({"MESSAGE": line, "__REALTIME_TIMESTAMP": "1700000000000000", "__CURSOR": "c"}) for line in lines
    ]
    (host.systemd / "journal.jsonl").write_text("\n".join(journal) + "\n")
    answer = host.do("evidence", instance="qwen", port=1)
    packed = gzip.decompress(base64.b64decode(answer["archive_b64"]))
    assert secret.encode() not in packed
    assert b"hf_abcdef" not in packed
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        texts = {member.name.partition("/")[2]: tar.extractfile(member).read().decode() for member in tar}  # type: ignore[union-attr]
    assert {"unit-state.txt", "journal.txt", "processes.json", "history.jsonl", "release-manifest.json"} <= set(texts)
    assert f"started with {HIDDEN}" in texts["journal.txt"]
    assert "loaded weights" in texts["journal.txt"]
    assert answer["name"].startswith("evidence-here-qwen-")


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("--api-key abcdef123 --port 1", f"--api-key {HIDDEN} --port 1"),
        ("--api-key=abcdef123", f"--api-key={HIDDEN}"),
        ('["--admin-api-key", "abcdef123", "--x"]', f'["--admin-api-key", "{HIDDEN}", "--x"]'),
        ("OPENAI_API_KEY=abcdef123", f"OPENAI_API_KEY={HIDDEN}"),
        ('{"hf_token": "abcdef123"}', f'{{"hf_token": "{HIDDEN}"}}'),
        ("Authorization: Bearer abcdefgh123", f"Authorization: Bearer {HIDDEN}"),
        ("MY_PASSWORD='p q r s'", f"MY_PASSWORD='{HIDDEN}'"),
        ("hf_abcdefghijklmnopqrst", HIDDEN),
        ("max_total_num_tokens=12345", "max_total_num_tokens=12345"),
        ("prompt tokens: 128, token usage: 0.25", "prompt tokens: 128, token usage: 0.25"),
        ('"completion_tokens": 16384', '"completion_tokens": 16384'),
        ("tokenizer_path='/models/qwen'", "tokenizer_path='/models/qwen'"),
        ("--tokenizer-path /models/qwen", "--tokenizer-path /models/qwen"),
        ("eos_token_id: 151645", "eos_token_id: 151645"),
    ],
)
def test_what_looks_like_a_secret_goes_and_what_a_failure_is_read_from_stays(text: str, left: str) -> None:
    assert redact(text, []) == left


def test_a_known_secret_goes_wherever_it_stands_also_escaped() -> None:
    assert redact('say "a\\"b\\nc" or a"b\nc', ['a"b\nc']) == f'say "{HIDDEN}" or {HIDDEN}'
