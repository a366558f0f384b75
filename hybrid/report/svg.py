"""Pieces of SVG. What can be pointed at carries `data-tip`, which the page shows."""

from __future__ import annotations

from collections.abc import Iterable

from markupsafe import Markup

__all__ = ["NUM_COLORS", "WIDTH", "box", "frame", "label", "line", "svg"]

WIDTH = 1080
"""Of every picture, in its own units; the page makes it smaller where there is less room."""
NUM_COLORS = 12
"""The page has the looks `c0` to `c11`."""


def svg(parts: Iterable[Markup], height: float) -> Markup:
    """The whole picture."""
    return Markup('<svg viewBox="0 0 {} {:.0f}" width="{}" role="img">{}</svg>').format(
        WIDTH, height, WIDTH, Markup("").join(parts)
    )


def box(x: float, y: float, width: float, height: float, look: str, tip: str) -> Markup:
    """Filled, from its upper left corner."""
    return Markup('<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" class="{}" data-tip="{}"/>').format(
        x, y, max(0.5, width), height, look, tip
    )


def frame(x: float, y: float, width: float, height: float) -> Markup:
    """Around other things."""
    return Markup(
        '<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" rx="3" fill="none" class="axis"/>'
    ).format(x, y, width, height)


def label(x: float, y: float, words: str, *, anchor: str = "start", look: str = "") -> Markup:
    """Text on its base line."""
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}"{}>{}</text>').format(
        x, y, anchor, Markup(' class="{}"').format(look) if look else "", words
    )


def line(path: str, look: str, tip: str) -> Markup:
    """Not filled."""
    return Markup('<path class="{}" fill="none" data-tip="{}" d="{}"/>').format(look, tip, path)
