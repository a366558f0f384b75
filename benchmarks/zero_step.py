"""One training step under each ZeRO stage beside its peers: time, memory, traffic, loss.

    python -m benchmarks.zero_step --size S --peers ddp,fsdp2,fsdp1,zero1,deepspeed --rounds 10
    python -m benchmarks.zero_step --size M --peers fsdp2 --stages 1,2,3 --parts time --markdown

Every mode trains the same model on the same batches (AdamW fused, fp32, plain loop, no clipping) in processes of its
own (`zero_worlds`). Part `time`: a round gives each mode a few steps, in an order that rotates, and the ratio to DDP is
taken within the round, so a slow spell of the machine falls on both. Part `memory`: each mode alone, one after the
other, twice: without a profiler (losses beside those of one process, bytes sent, live bytes, resident peak) and under
one (heap peak). DeepSpeed is `pip install -e '.[bench]'`. At size M not all peers fit into 24 GB at a time: choose.

Printed: median ratios of wall and CPU time to DDP's, and of wall time to the peers that a stage is to beat, with 95 %
intervals (bootstrap over rounds), and the rest, as a table or in Markdown; the last line has all of it in JSON.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from benchmarks.zero_modes import PEERS, modes_of
from benchmarks.zero_report import as_markdown, as_text, beside_rivals, time_rows
from benchmarks.zero_worlds import World, whole_turn

PARTS = ("time", "memory")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("S", "M", "tiny"), default="S", help="S: 10.5 M parameters, M: 82 M")
    parser.add_argument("--peers", default="ddp,fsdp2,fsdp1,zero1", help=f"of {', '.join(PEERS)}; ddp is always there")
    parser.add_argument("--stages", default="0,1,2,3", help="ZeRO stages of hybrid")
    parser.add_argument("--nproc", type=int, default=2, help="ranks of each mode")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each mode per round")
    parser.add_argument("--loss-steps", type=int, default=8, help="steps whose losses are compared (part memory)")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--markdown", action="store_true", help="print the table for benchmarks/README.md")
    arguments = parser.parse_args()
    parts = _listed(parser, "parts", arguments.parts, PARTS)
    peers = _listed(parser, "peers", arguments.peers, tuple(PEERS))
    stages = [int(stage) for stage in _listed(parser, "stages", arguments.stages, ("0", "1", "2", "3"))]
    modes = modes_of(peers, stages)
    rows: dict[str, dict[str, Any]] = {mode: {"mode": mode} for mode in modes}
    if "time" in parts:
        found = measure_time(modes, arguments)
        for mode, row in found.items():
            rows[mode] |= row
    if "memory" in parts:
        for mode, row in measure_memory(modes, arguments).items():
            rows[mode] |= row
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"size {arguments.size}, {arguments.nproc} ranks; load at the end {load} (1, 5, 15 minutes)")
    print((as_markdown if arguments.markdown else as_text)(list(rows.values())))
    print(beside_rivals(list(rows.values())))
    print(json.dumps(list(rows.values())))


def _listed(parser: argparse.ArgumentParser, name: str, text: str, known: tuple[str, ...]) -> list[str]:
    chosen = text.split(",")
    unknown = [item for item in chosen if item not in known]
    if unknown:
        parser.error(f"unknown {name} {', '.join(unknown)}; known: {', '.join(known)}")
    return chosen


def measure_time(modes: list[str], arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Interleaved rounds of all modes; one turn of each before them warms up."""
    worlds: dict[str, World] = {}
    turns: dict[str, list[tuple[float, float, float]]] = {mode: [] for mode in modes}
    losses: dict[str, list[float]] = {mode: [] for mode in modes}
    try:
        for mode in modes:
            worlds[mode] = World(mode, arguments.size, num_ranks=arguments.nproc)
            worlds[mode].ask("steps", 1, 1)
        for round_number in range(arguments.rounds):
            shift = round_number % len(modes)
            for mode in [*modes[shift:], *modes[:shift]]:
                # The first step of a turn gets its memory back from the system.
                *turn, some = whole_turn(worlds[mode].ask("steps", arguments.steps, 1))
                turns[mode].append((turn[0], turn[1], turn[2]))
                losses[mode] += some
    finally:
        for world in worlds.values():
            world.close()
    return time_rows(turns, losses)


def measure_memory(modes: list[str], arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What does not depend on the machine's load, of one mode at a time."""
    with World("single", arguments.size, num_ranks=1) as world:
        # One process takes the rows of all ranks.
        (whole,) = world.ask("losses", arguments.loss_steps, arguments.nproc)
    rows = {}
    for mode in modes:
        with World(mode, arguments.size, num_ranks=arguments.nproc) as world:
            facts = world.ask("facts", arguments.loss_steps)
        with World(mode, arguments.size, num_ranks=arguments.nproc) as world:
            peaks = world.ask("peak")
        by_step = zip(*(rank["losses"] for rank in facts), strict=True)
        differences = [abs(sum(step) / len(step) - one) for step, one in zip(by_step, whole, strict=True)]
        rows[mode] = {
            "max_loss_difference": max(differences),
            "heap_peak_bytes": max(peaks),
            **{key: max(rank[key] for rank in facts) for key in facts[0] if key != "losses"},
        }
    return rows


if __name__ == "__main__":
    main()
