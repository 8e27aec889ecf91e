"""Three plain charts as inline SVG: grouped bars, lines, dots with intervals. No script, no fonts, no network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#6b7280", "#1d4ed8", "#0f766e", "#b45309", "#be123c", "#7e22ce", "#4d7c0f", "#0e7490")
WIDTH, HEIGHT = 640, 280
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 14, 40


@dataclass(frozen=True)
class Frame:
    """The plotting area and the scale of its vertical axis."""

    low: float
    high: float
    unit: str

    @property
    def inner_w(self) -> float:
        return WIDTH - LEFT - RIGHT

    @property
    def inner_h(self) -> float:
        return HEIGHT - TOP - BOTTOM

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low or 1)
        return round(TOP + self.inner_h * (1 - min(max(share, 0.0), 1.0)), 1)

    def axes(self) -> str:
        parts = []
        for step in range(5):
            value = self.low + step * (self.high - self.low) / 4
            y = self.y(value)
            parts.append(f'<line x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}" class="grid"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" class="tick" text-anchor="end">{number(value)}</text>')
        parts.append(f'<text x="{LEFT}" y="{HEIGHT - 4}" class="tick">{escape(self.unit)}</text>')
        return "".join(parts)


def number(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def label_at(x: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{HEIGHT - 22}" class="tick" text-anchor="middle">{escape(text)}</text>'


def nice(high: float) -> float:
    """A round number a little above."""
    for step in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10):
        scale = 10.0
        while scale * 10 <= high:
            scale *= 10
        while scale > high:
            scale /= 10
        if step * scale >= high:
            return step * scale
    return high


def span(low: float, high: float) -> tuple[float, float]:
    """Ends of an axis of four equal steps, all of them round numbers, that holds both."""
    for step in (0.05, 0.1, 0.2, 0.25, 0.5, 1.0, 2.0, 5.0):
        start = step * math.floor(round(low / step, 6))
        if start + 4 * step >= high:
            return start, start + 4 * step
    return low, high


def figure(title: str, body: str, names: Sequence[str], colours: Mapping[str, str]) -> str:
    keys = "".join(
        f'<span class="key"><i style="background:{colours[name]}"></i>{escape(name)}</span>' for name in names
    )
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><div class="keys">{keys}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{body}</svg></figure>'
    )


def palette(names: Sequence[str]) -> dict[str, str]:
    return {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}


def bars(title: str, unit: str, groups: Mapping[str, Mapping[str, float]], colours: Mapping[str, str]) -> str:
    """groups: label -> series name -> value."""
    names = [name for name in colours if any(name in series for series in groups.values())]
    frame = Frame(0, nice(max(v for series in groups.values() for v in series.values())), unit)
    body = [frame.axes()]
    slot = frame.inner_w / len(groups)
    width = min(28.0, 0.8 * slot / max(len(names), 1))
    for place, (label, series) in enumerate(groups.items()):
        middle = LEFT + slot * (place + 0.5)
        left = middle - width * len(names) / 2
        for index, name in enumerate(names):
            if name in series:
                x, y = left + index * width, frame.y(series[name])
                height = TOP + frame.inner_h - y
                body.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{width - 2:.1f}" height="{height:.1f}" fill="{colours[name]}">'
                    f"<title>{escape(name)}: {number(series[name])}</title></rect>"
                )
        body.append(label_at(middle, label))
    return figure(title, "".join(body), names, colours)


def lines(title: str, unit: str, series: Mapping[str, Sequence[float | None]], colours: Mapping[str, str]) -> str:
    """series: name -> values at 1, 2, 3, ..."""
    longest = max(len(values) for values in series.values())
    high = max(v for values in series.values() for v in values if v is not None)
    frame = Frame(0, min(1.0, 0.1 * math.ceil(10 * high)) if high <= 1 else nice(high), unit)
    body = [frame.axes()]

    def x(place: int) -> float:
        return round(LEFT + frame.inner_w * (place + 0.5) / longest, 1)

    for place in range(longest):
        body.append(label_at(x(place), str(place + 1)))
    for name, values in series.items():
        points = [(x(place), frame.y(v)) for place, v in enumerate(values) if v is not None]
        path = " ".join(f"{a},{b}" for a, b in points)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colours[name]}" stroke-width="2"/>')
        body += [f'<circle cx="{a}" cy="{b}" r="2.6" fill="{colours[name]}"/>' for a, b in points]
    return figure(title, "".join(body), list(series), colours)


def intervals(
    title: str, unit: str, groups: Mapping[str, Mapping[str, tuple[float, float, float]]], colours: Mapping[str, str]
) -> str:
    """Dots with whiskers around a line at 1: label -> series -> (value, low, high)."""
    names = [name for name in colours if any(name in series for series in groups.values())]
    values = [v for series in groups.values() for triple in series.values() for v in triple]
    frame = Frame(*span(min(0.9, min(values)), max(1.1, max(values))), unit)
    one = frame.y(1)
    body = [frame.axes(), f'<line x1="{LEFT}" y1="{one}" x2="{WIDTH - RIGHT}" y2="{one}" class="one"/>']
    slot = frame.inner_w / len(groups)
    for place, (label, series) in enumerate(groups.items()):
        middle = LEFT + slot * (place + 0.5)
        for index, name in enumerate(names):
            if name in series:
                value, low, high = series[name]
                x = round(middle + (index - (len(names) - 1) / 2) * min(26.0, 0.8 * slot / len(names)), 1)
                body.append(
                    f'<line x1="{x}" y1="{frame.y(low)}" x2="{x}" y2="{frame.y(high)}" stroke="{colours[name]}" '
                    f'stroke-width="2"/><circle cx="{x}" cy="{frame.y(value)}" r="4.5" fill="{colours[name]}">'
                    f"<title>{escape(name)}: {value:.3f} ({low:.3f} to {high:.3f})</title></circle>"
                )
        body.append(label_at(middle, label))
    return figure(title, "".join(body), names, colours)
