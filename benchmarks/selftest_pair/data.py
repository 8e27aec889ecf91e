"""The text the self-test pair learns from: fetch, split, tokenise.

Run as `python -m benchmarks.selftest_pair.data COMMAND`:

    fetch   WORK          download the packages of sources.toml (pip, apt-get) into WORK
    prepare WORK OUT      write tokenizer.json, train.u16.xz, heldout.npz and corpus.json into OUT
    prompts WORK FILE     choose the benchmark's prompts from the held-out documents

Everything below `fetch` is deterministic: documents are ordered by the hash of their name, one in 64 is held out by
that same hash, exact duplicates are dropped, and the tokenizer is trained on a fixed sample.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).resolve().parent
VOCAB = 2048
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|MASK|>"]
EOS, MASK = 0, 3
HELDOUT_ONE_IN = 64
DOCUMENT_BYTES = (400, 200_000)
SAMPLE_BYTES = 24_000_000
CATEGORIES = ("code", "prose", "dialogue")


@dataclass(frozen=True)
class Document:
    name: str
    kind: str
    text: str

    @property
    def key(self) -> int:
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8], "big")

    @property
    def heldout(self) -> bool:
        return self.key % HELDOUT_ONE_IN == 0


def sources() -> dict:
    return tomllib.loads((HERE / "sources.toml").read_text())


# ---------------------------------------------------------------------------------------------- fetch


def fetch(work: Path) -> None:
    table = sources()
    (work / "pip").mkdir(parents=True, exist_ok=True)
    (work / "deb").mkdir(exist_ok=True)
    wanted = [f"{name}=={entry['version']}" for name, entry in table["pip"].items()]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", "pip", *wanted]
    subprocess.run(pip, check=True, cwd=work)
    for entry in table["deb"].values():
        subprocess.run(["apt-get", "download", entry["package"]], check=True, cwd=work / "deb")
    for archive in sorted((work / "deb").glob("*.deb")):
        target = work / "x" / archive.name.split("_")[0]
        subprocess.run(["dpkg-deb", "-x", str(archive), str(target)], check=True)


# ------------------------------------------------------------------------------------------ documents


class _Text(HTMLParser):
    """The readable text of an HTML page: no markup, no scripts, code blocks kept as they are."""

    BLOCKS = frozenset({"p", "li", "h1", "h2", "h3", "h4", "pre", "tr", "dt", "dd", "div", "br"})
    SKIP = frozenset({"script", "style", "nav", "head", "svg"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.skipping = 0
        self.pre = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002 (the base class's signature)
        self.skipping += tag in self.SKIP
        self.pre += tag == "pre"
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.skipping -= tag in self.SKIP
        self.pre -= tag == "pre"
        if tag in ("p", "pre", "h1", "h2", "h3"):
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if self.skipping <= 0:
            self.parts.append(data if self.pre > 0 else re.sub(r"\s+", " ", data))


def html_text(page: str) -> str:
    parser = _Text()
    parser.feed(page)
    text = "".join(parser.parts).replace("\xa0", " ").replace("¶", "")
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text)).strip() + "\n"


def read_document(name: str, kind: str, raw: bytes) -> Iterator[Document]:
    low, high = DOCUMENT_BYTES
    if name.endswith(".dz"):
        raw = gzip.decompress(raw)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return
    if name.endswith(".html"):
        text = html_text(text)
    text = text.replace("\r\n", "\n")
    if kind == "dialogue":  # one file holds thousands of short pieces: cut it so that some can be held out
        text, high = text.replace("\n%\n", "\n\n"), 8_000
    if len(raw) < low:
        return
    if kind == "code" and len(raw) > high:
        return
    for number, start in enumerate(range(0, len(text), high)):
        yield Document(f"{name}#{number}", kind, text[start : start + high])


def capped(documents: Iterator[Document], cap_mb: float) -> Iterator[Document]:
    left = int(cap_mb * 1e6)
    for document in sorted(documents, key=lambda d: d.key):
        left -= len(document.text)
        if left < 0:
            return
        yield document


def wheel_documents(name: str, path: Path) -> Iterator[Document]:
    with zipfile.ZipFile(path) as archive:
        for member in sorted(archive.namelist()):
            if member.endswith(".py"):
                yield from read_document(f"{name}/{member}", "code", archive.read(member))


def tree_documents(name: str, kind: str, root: Path, globs: list[str]) -> Iterator[Document]:
    found = sorted({path for pattern in globs for path in root.glob(pattern) if path.is_file()})
    for path in found:
        yield from read_document(f"{name}/{path.relative_to(root)}", kind, path.read_bytes())


def stdlib_documents() -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        member = path.relative_to(root)
        if "site-packages" not in member.parts:
            yield from read_document(f"stdlib/{member}", "code", path.read_bytes())


def corpus(work: Path) -> Iterator[Document]:
    table = sources()
    seen: set[bytes] = set()
    groups = [capped(stdlib_documents(), table["stdlib"]["cap_mb"])]
    for name, entry in table["pip"].items():
        (wheel,) = (work / "pip").glob(f"{name.replace('-', '_')}-{entry['version']}-*.whl")
        groups.append(capped(wheel_documents(name, wheel), entry["cap_mb"]))
    for entry in table["deb"].values():
        root = work / "x" / entry["package"]
        groups.append(tree_documents(entry["package"], entry["kind"], root, entry["files"]))
    for group in groups:
        for document in group:
            digest = hashlib.sha256(document.text.encode()).digest()
            if digest not in seen:
                seen.add(digest)
                yield document


# ------------------------------------------------------------------------------------------ tokenizer


def train_tokenizer(documents: list[Document]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = r"'(?:[sdmt]|ll|ve|re)|[^\r\n\w]?[A-Za-z]+|\d|[^\s\w]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+|\w"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern=_regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample, size = [], 0
    for document in sorted(documents, key=lambda d: d.key):
        if size > SAMPLE_BYTES:
            break
        sample.append(document.text)
        size += len(document.text)
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def _regex(pattern: str):
    from tokenizers import Regex

    return Regex(pattern)


# -------------------------------------------------------------------------------------------- prepare


def encode(tokenizer: Tokenizer, documents: list[Document]) -> list[np.ndarray]:
    rows: list[np.ndarray] = []
    for start in range(0, len(documents), 512):
        batch = [document.text for document in documents[start : start + 512]]
        rows += [np.array([*e.ids, EOS], dtype=np.uint16) for e in tokenizer.encode_batch(batch)]
    return rows


def prepare(work: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    documents = sorted(corpus(work), key=lambda d: d.key)
    training = [d for d in documents if not d.heldout]
    heldout = [d for d in documents if d.heldout]
    tokenizer = train_tokenizer(training)
    tokenizer.save(str(out / "tokenizer.json"))

    stream = np.concatenate(encode(tokenizer, training))
    (out / "train.u16.xz").write_bytes(lzma.compress(stream.tobytes(), preset=2))
    rows = encode(tokenizer, heldout)
    np.savez_compressed(
        out / "heldout.npz",
        tokens=np.concatenate(rows),
        lengths=np.array([len(row) for row in rows]),
        text_bytes=np.array([len(d.text.encode()) for d in heldout]),
        kinds=np.array([CATEGORIES.index(d.kind) for d in heldout], dtype=np.uint8),
    )
    summary = {
        "documents": len(training),
        "tokens": int(stream.size),
        "bytes": sum(len(d.text.encode()) for d in training),
        "heldout_documents": len(heldout),
        "heldout_tokens": sum(len(row) for row in rows),
        "by_kind": {kind: sum(len(d.text) for d in training if d.kind == kind) for kind in CATEGORIES},
        "sha256": hashlib.sha256(stream.tobytes()).hexdigest(),
        "heldout_names": [d.name for d in heldout],
    }
    (out / "corpus.json").write_text(json.dumps(summary, indent=1) + "\n")
    print({key: value for key, value in summary.items() if key != "heldout_names"})


# -------------------------------------------------------------------------------------------- prompts

PER_CATEGORY = 8
PROMPT_CHARS = 320


def cut(document: Document, start: int) -> str:
    """About PROMPT_CHARS from the first line break after ``start``, ending in the middle of the text."""
    begin = document.text.find("\n", start) + 1
    return document.text[begin : begin + PROMPT_CHARS].rstrip()


def squeezed(text: str) -> float:
    """How small the text compresses: low is repetitive."""
    raw = text.encode()
    return len(zlib.compress(raw, 9)) / max(len(raw), 1)


def turns(text: str) -> float:
    """Fewer is better: minus the number of questions put to an interpreter or a shell."""
    return -len(re.findall(r"^\s*(?:>>> |\$ |[a-z]*=[>#] )", text, re.M))


def best_windows(documents: list[Document], score: Callable[[str], float]) -> list[tuple[str, str]]:
    """The best window of each document by ``score`` (low is good), the best PER_CATEGORY documents."""
    found = []
    for document in documents:
        starts = range(0, len(document.text) - 2 * PROMPT_CHARS, PROMPT_CHARS)
        texts = [text for text in (cut(document, s) for s in starts) if len(text) > PROMPT_CHARS // 2]
        varied = [text for text in texts if len(set(text.split())) > 8]
        if varied:
            text = min(varied, key=score)
            found.append((score(text), document.name, text))
    return [(name, text) for _, name, text in sorted(found)[:PER_CATEGORY]]


def choose_prompts(documents: list[Document]) -> Iterator[dict[str, str]]:
    """Eight windows each: of code, of prose, the liveliest dialogues with an interpreter, the most repetitive."""
    for kind in ("code", "prose"):
        of_kind = [d for d in documents if d.kind == kind and len(d.text) > 4 * PROMPT_CHARS]
        for document in of_kind[:PER_CATEGORY]:
            start = (document.key >> 8) % (len(document.text) - 2 * PROMPT_CHARS)
            yield {"category": kind, "source": document.name, "text": cut(document, start)}
    for category, score in (("dialogue", turns), ("repetitive", squeezed)):
        for name, text in best_windows([d for d in documents if d.kind != "dialogue"], score):
            yield {"category": category, "source": name, "text": text}


def write_prompts(work: Path, out: Path) -> None:
    heldout = sorted((d for d in corpus(work) if d.heldout), key=lambda d: d.key)
    lines = [json.dumps(prompt, ensure_ascii=False) for prompt in choose_prompts(heldout)]
    out.write_text("\n".join(lines) + "\n")


def main() -> None:
    command, work, *rest = sys.argv[1:]
    if command == "fetch":
        fetch(Path(work))
    elif command == "prepare":
        prepare(Path(work), Path(rest[0]))
    elif command == "prompts":
        write_prompts(Path(work), Path(rest[0]))
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
