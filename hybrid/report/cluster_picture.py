"""The graph of a cluster as SVG: switches in rows, below them the domains with cards, devices and the links between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import networkx as nx
from markupsafe import Markup

from hybrid.contracts.cluster import Cluster
from hybrid.report.cluster_folding import Domain, Folded, fold
from hybrid.report.svg import NUM_COLORS, WIDTH, box, frame, label, line, svg
from hybrid.units import format_rate

__all__ = ["cluster_picture"]

_LEFT = 112  # names of the rows, and what their links have
_ROW = 74  # from one row of switches to the next
_GAP = 12  # between domains
_MOST_SWITCHES = 32  # of a row
_MOST_LARGE = 16  # devices of a domain that are drawn large, each with its links
_MOST_LINES = 36  # devices beside each other


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a vertex is drawn: a box, and the row it belongs to."""

    x: float
    y: float
    width: float
    height: float
    row: int
    look: str
    tip: str

    def at(self, x: float) -> float:
        """The part of the box that is nearest to x."""
        half = max(0.0, self.width / 2 - 3)
        return min(max(x, self.x - half), self.x + half)


def cluster_picture(cluster: Cluster, marks: Mapping[str, tuple[int, str]] | None = None) -> tuple[Markup, str, Folded]:
    """(picture, caption, what was folded).

    Args:
        cluster: what is drawn.
        marks: device -> (colour, what its tip says as well); all else is grey then.
    """
    folded = fold(cluster, room=WIDTH - _LEFT, width_of=_width, most_switches=_MOST_SWITCHES)
    drawing = _Drawing(cluster, folded, marks)
    picture = drawing.picture()
    return picture, _caption(cluster, folded, has_slow_links=drawing.has_slow_links), folded


def _caption(cluster: Cluster, folded: Folded, *, has_slow_links: bool) -> str:
    said = []
    if any(len(one.alike) > 1 for one in folded.domains) or len(folded.domains) < cluster.num_domains:
        stands = "; ".join(
            f"{one.name} for {len(one.alike)} that are alike" if len(one.alike) > 1 else one.name
            for one in folded.domains
        )
        said.append(f"Of {cluster.num_domains} domains the picture shows {len(folded.domains)}: {stands}.")
    for tier, size in zip(folded.tiers, folded.tier_sizes, strict=True):
        if len(tier) < size:
            said.append(f"Of {size} switches of a row {len(tier)} are shown: those that these domains hang on.")
    if has_slow_links:
        said.append("Red: slower than most links of its row.")
    return " ".join(said)


def _cell(count: int) -> float:
    return 26 if count <= _MOST_LARGE else 12.5


def _width(domain: Domain) -> float:
    rows = [min(len(names), _MOST_LINES) * _cell(len(names)) for names in (domain.devices, domain.cards) if names]
    return max(84, *rows) + 16 + _GAP


class _Drawing:
    """Places of all vertices that are shown, then the links between them."""

    def __init__(self, cluster: Cluster, folded: Folded, marks: Mapping[str, tuple[int, str]] | None) -> None:
        self._graph: nx.Graph = cluster.graph
        self._marks = marks
        self._folded = folded
        self._ranks: Mapping[str, int] = {name: rank for rank, name in enumerate(cluster.ranks)}
        self._places: dict[str, _Place] = {}
        self._ends: dict[str, _Place] = {}  # where links of a vertex end, where it is not its own place
        self._frames: list[Markup] = []
        self._titles: list[Markup] = []
        self._names: list[tuple[float, str]] = []
        self._row = 0
        widest = max(map(len, folded.tiers), default=0)
        self._room = min(WIDTH - _LEFT, max(sum(map(_width, folded.domains)), 58 * widest))
        top = 4.0
        for number in reversed(range(len(folded.tiers))):
            self._place_tier(number, top)
            top += _ROW
        self._height = self._place_domains(top)
        self.has_slow_links = False

    def picture(self) -> Markup:
        lines, labels = self._lines()
        boxes = [
            box(place.x - place.width / 2, place.y, place.width, place.height, place.look, place.tip)
            for place in self._places.values()
        ]
        names = [label(0, y, name) for y, name in self._names]
        return svg([*self._frames, *lines, *self._titles, *boxes, *names, *labels], self._height)

    # ---------------------------------------------------------------- places

    def _place_tier(self, number: int, top: float) -> None:
        names = self._folded.tiers[number]
        room = self._room
        step = room / max(1, len(names))
        levels = {self._graph.nodes[name].get("level", "") for name in names}
        word = {"leaf": "leaf switches", "spine": "spine switches"}.get(levels.pop() if len(levels) == 1 else "")
        size = self._folded.tier_sizes[number]
        self._names.append((top + 13, f"{word or 'switches'}" + (f" ({size})" if size > 1 else "")))
        for place, name in enumerate(names):
            alike = self._folded.num_alike[name]
            others = f"\none of {alike} that are alike" if alike > 1 else ""
            is_spine = self._graph.nodes[name].get("level") == "spine"
            self._places[name] = _Place(
                x=_LEFT + step * (place + 0.5),
                y=top,
                width=min(room, 520) if is_spine and len(names) == 1 else min(86, step - 4),
                height=18,
                row=self._row,
                look=self._look("c4"),
                tip=f"{name}{'' if not is_spine else ' (stands for all of them)'}{others}\n{self._told(name)}",
            )
        self._row += 1

    def _place_domains(self, top: float) -> float:
        """Returns the height of all."""
        left = float(_LEFT)
        bottom = top
        for domain in self._folded.domains:
            width = _width(domain) - _GAP
            bottom = max(bottom, self._place_domain(domain, left, width, top))
            left += width + _GAP
        return bottom + 6

    def _place_domain(self, domain: Domain, left: float, width: float, top: float) -> float:
        y, row = top + 24, self._row
        times = f" × {len(domain.alike)}" if len(domain.alike) > 1 else ""
        self._titles.append(label(left + 8, top + 15, f"{domain.name}{times}", look="over-lines"))
        if domain.cards:
            y = self._place_row(domain.cards, "cards", left, width, y, row, "c5") + 30
        y = self._place_row(domain.devices, "devices", left, width, y, row + 1, "c0")
        if any(there in domain.devices for name in domain.devices for there in self._graph.adj[name]):
            y += 34  # arcs from device to device
        for number, name in enumerate(domain.switches):
            y += 30 if number == 0 else 8
            is_host = self._graph.nodes[name].get("level") == "host"
            self._name(y + 12, "host" if is_host else "scale-up switch")
            self._places[name] = _Place(
                x=left + width / 2,
                y=y,
                width=width - 16,
                height=16,
                row=row + 2,
                look=self._look("c7" if is_host else "c2"),
                tip=f"{name}\n{self._told(name)}",
            )
            y += 16
        self._frames.append(frame(left, top, width, y + 8 - top))
        return y + 8

    def _place_row(
        self, names: tuple[str, ...], word: str, left: float, width: float, y: float, row: int, look: str
    ) -> float:
        """Boxes beside each other, in several lines where they are many; where the last line ends."""
        cell = _cell(len(names))
        self._name(y + 12, word)
        per_line = min(len(names), _MOST_LINES)
        start = left + (width - per_line * cell) / 2
        for place, name in enumerate(names):
            line, column = divmod(place, per_line)
            self._places[name] = _Place(
                x=start + (column + 0.5) * cell,
                y=y + line * cell,
                width=cell - (4 if cell > 20 else 2),
                height=16 if cell > 20 else cell - 2,
                row=row,
                look=self._look(look, name),
                tip=f"{self._title(name)}\n{self._told(name)}",
            )
        num_lines = -(-len(names) // per_line)
        height = (num_lines - 1) * cell + (16 if cell > 20 else cell)
        if len(names) > _MOST_LARGE:  # links of all of them as one
            tip = f"each of {len(names)} {word}"
            block = _Place(x=left + width / 2, y=y, width=per_line * cell, height=height, row=row, look=look, tip=tip)
            self._ends.update(dict.fromkeys(names, block))
        return y + height

    def _look(self, look: str, name: str = "") -> str:
        """Of a vertex, as it is by itself or by its mark."""
        if self._marks is None:
            return look
        return f"c{self._marks[name][0] % NUM_COLORS}" if name in self._marks else "c7"

    def _name(self, y: float, word: str) -> None:
        """Of a row; once."""
        if all(name != word for _, name in self._names):
            self._names.append((y, word))

    def _title(self, name: str) -> str:
        if name in self._ranks:
            mark = "" if self._marks is None or name not in self._marks else f"\n{self._marks[name][1]}"
            said = f"rank {self._ranks[name]}: {name}, {self._graph.nodes[name].get('device', '')}".rstrip(", ")
            return said + mark.rstrip("\n")
        return name

    def _told(self, name: str) -> str:
        """Its links by rate: `4 links of 50 GB/s`."""
        rates = Counter(data["bytes_per_second"] for data in self._graph.adj[name].values())
        listed = [f"{count} link{'s' * (count > 1)} of {format_rate(rate)}" for rate, count in rates.most_common()]
        return ", ".join(listed) or "no link"

    # ---------------------------------------------------------------- links

    def _lines(self) -> tuple[list[Markup], list[Markup]]:
        """(lines, what links of each row have, beside it)."""
        edges = list(self._edges())
        rates: dict[tuple[int, int], Counter[float]] = {}
        for here, there, rate in edges:
            rates.setdefault(self._rows(here, there), Counter())[rate] += 1
        usual = {rows: max(found, key=lambda rate: (found[rate], rate)) for rows, found in rates.items()}
        told = {rows: f"{format_rate(rate)} each" for rows, rate in usual.items()}
        for rows, found in rates.items():
            if rows[0] == rows[1] and len(found) > 1:  # from device to device: made so, none of them is at fault
                told[rows], usual[rows] = f"{format_rate(min(found))} to {format_rate(max(found))}", 0.0
        drawn: dict[tuple[int, int], tuple[float, str, str]] = {}  # by where they end: of several the slowest
        for here, there, rate in edges:
            key = id(self._end(here)), id(self._end(there))
            drawn[key] = min(drawn.get(key, (rate, here, there)), (rate, here, there))
        lines = [
            self._line(here, there, rate, is_slow=rate < usual[self._rows(here, there)])
            for rate, here, there in drawn.values()
        ]
        return lines, list(self._labels(edges, told))

    def _end(self, name: str) -> _Place:
        return self._ends.get(name, self._places[name])

    def _edges(self) -> Iterator[tuple[str, str, float]]:
        for here in self._places:
            for there, data in self._graph.adj[here].items():
                if there in self._places and (self._places[here].row, here) < (self._places[there].row, there):
                    yield here, there, data["bytes_per_second"]

    def _rows(self, here: str, there: str) -> tuple[int, int]:
        first, second = sorted((self._places[here].row, self._places[there].row))
        return first, second

    def _labels(self, edges: list[tuple[str, str, float]], told: Mapping[tuple[int, int], str]) -> Iterator[Markup]:
        """What most links of a row have, in the middle of its lines."""
        drawn: dict[tuple[int, int], float] = {}
        for here, there, _ in edges:
            upper, lower = sorted((self._end(here), self._end(there)), key=lambda place: place.y)
            rows = self._rows(here, there)
            is_next = rows[1] - rows[0] == 1
            middle = (upper.y + upper.height + lower.y) / 2 if is_next else upper.y + upper.height + 14
            drawn.setdefault(rows, middle)
        for rows, y in drawn.items():
            yield label(0, y + 4, told[rows], look="dim")

    def _line(self, here: str, there: str, rate: float, *, is_slow: bool) -> Markup:
        one, other = self._end(here), self._end(there)
        look = "link slow" if is_slow else "link"
        self.has_slow_links |= is_slow
        names = [self._ends[name].tip if name in self._ends else name for name in (here, there)]
        tip = f"{names[0]} – {names[1]}: {format_rate(rate)}"
        if one is other:  # between devices that are drawn as one
            return line(f"M{one.x - 20:.1f} {one.y + one.height:.1f} q20 24 40 0", look, tip)
        if one.row == other.row:  # an arc below the row
            y, depth = one.y + one.height, min(60.0, 12 + abs(one.x - other.x) / 4)
            path = f"M{one.x:.1f} {y:.1f} Q{(one.x + other.x) / 2:.1f} {y + depth:.1f} {other.x:.1f} {y:.1f}"
            return line(path, look, tip)
        upper, lower = (one, other) if one.y < other.y else (other, one)
        if upper.width > lower.width:
            x, low_x = upper.at(lower.x), lower.x
        else:
            x, low_x = upper.x, lower.at(upper.x)
        return line(f"M{x:.1f} {upper.y + upper.height:.1f} L{low_x:.1f} {lower.y:.1f}", look, tip)
