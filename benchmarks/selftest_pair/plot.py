"""Loss curves of a train_log.json as SVG: `python -m benchmarks.selftest_pair.plot train_log.json loss.svg`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP = 420, 240, 46, 34


def panel(title: str, entry: dict, x0: int) -> str:
    losses, every = entry["losses"], entry["loss_every"]
    low, high = min(losses), min(max(losses), losses[0], 6.0)
    inner_w, inner_h = WIDTH - LEFT - 14, HEIGHT - TOP - 34

    def point(index: int, value: float) -> tuple[float, float]:
        x = x0 + LEFT + inner_w * index / (len(losses) - 1)
        y = TOP + inner_h * (1 - (min(value, high) - low) / (high - low))
        return round(x, 1), round(y, 1)

    line = " ".join(f"{x},{y}" for x, y in (point(i, v) for i, v in enumerate(losses)))
    parts = [f'<text x="{x0 + LEFT}" y="20" class="t">{title}</text>']
    for share in (0, 0.25, 0.5, 0.75, 1):
        value = low + share * (high - low)
        _, y = point(0, value)
        parts.append(f'<line x1="{x0 + LEFT}" y1="{y}" x2="{x0 + LEFT + inner_w}" y2="{y}" class="g"/>')
        parts.append(f'<text x="{x0 + LEFT - 6}" y="{y + 4}" class="n" text-anchor="end">{value:.2f}</text>')
    for share in (0, 0.5, 1):
        x = x0 + LEFT + inner_w * share
        step = round(share * len(losses) * every / 10) * 10
        parts.append(f'<text x="{x:.0f}" y="{HEIGHT - 14}" class="n" text-anchor="middle">{step}</text>')
    parts.append(f'<polyline points="{line}" class="l"/>')
    return "".join(parts)


def svg(log: dict) -> str:
    body = panel(f"target: nats per token, {log['target']['steps']} steps", log["target"], 0)
    body += panel(f"drafter: nats per slot, {log['drafter']['steps']} steps", log["drafter"], WIDTH)
    style = (
        ".t{font:600 13px system-ui,sans-serif;fill:#222}.n{font:11px system-ui,sans-serif;fill:#666}"
        ".g{stroke:#ddd}.l{fill:none;stroke:#1f6feb;stroke-width:1.6}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {HEIGHT}" role="img" '
        f'aria-label="Loss curves of target and drafter"><style>{style}</style>'
        f'<rect width="100%" height="100%" fill="#fff"/>{body}</svg>\n'
    )


def main() -> None:
    log, out = sys.argv[1:]
    Path(out).write_text(svg(json.loads(Path(log).read_text())))


if __name__ == "__main__":
    main()
