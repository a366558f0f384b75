"""A pipeline schedule as a page."""

from __future__ import annotations

from hybrid.contracts.schedule_text import to_text
from hybrid.contracts.schedule_timing import Timeline, closed_form
from hybrid.report.page import Section, TableData, page
from hybrid.report.pictures import gantt
from hybrid.units import format_seconds

__all__ = ["schedule_page"]


def schedule_page(timeline: Timeline) -> str:
    """A whole HTML file: the schedule on the clock, what each rank idles and keeps, and its action lists."""
    made, form = timeline.schedule, closed_form(timeline.schedule)
    chunks = f", {made.virtual_stages} chunks per rank" if made.virtual_stages > 1 else ""
    picture, caption = gantt(timeline)
    rows = [
        (str(rank), f"{bubble:.1%}", str(kept), str(form.in_flight[rank]) if form else "–", format_seconds(busy))
        for rank, (bubble, kept, busy) in enumerate(
            zip(timeline.bubble_fractions, timeline.max_in_flight, timeline.busy_seconds, strict=True)
        )
    ]
    sentences = [f"Bubble {timeline.bubble_fraction:.1%} of a step of {format_seconds(timeline.total_seconds)}."]
    if form is not None:
        sentences.append(
            f"Closed form for stages of equal cost: {form.bubble_formula} = {form.bubble_fraction:.1%}; kept on "
            f"rank r: {form.in_flight_formula}."
        )
    heads = ("rank", "bubble", "kept at most", "closed form", "busy")
    lines = to_text(made).splitlines()[1:]
    return page(
        f"{made.name}: {made.num_stages} stages, {made.num_micro_batches} micro-batches{chunks}",
        "F forward, B backward, or in two halves I (gradients of inputs) and W (gradients of weights)",
        [
            Section(name="clock", heading="On the clock", sentences=sentences, picture=picture, caption=caption),
            Section(
                name="ranks",
                heading="Ranks",
                table=TableData(heads=heads, rows=rows, numbers=[*heads]),
            ),
            Section(
                name="actions",
                heading="Actions",
                table=TableData(
                    heads=("rank", "in order"), rows=[(str(rank), line) for rank, line in enumerate(lines)]
                ),
            ),
        ],
    )
