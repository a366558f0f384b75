"""`hybrid verify-placement`: whether ranks came up on the nodes that a plan has them on."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated

import typer

from hybrid.contracts.rank_map import named, read_rank_map
from hybrid.errors import LaunchError
from hybrid.launch.environment import read_environment
from hybrid.launch.variables import PLACEMENT_VARIABLE, STRATEGY_VARIABLE
from hybrid.strategy import DistributedStrategy

__all__ = ["verify_placement"]


def verify_placement(
    ranks: Annotated[Path, typer.Argument(metavar="RANKS.CSV", help="What `hybrid plan --out DIR` wrote.")],
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds to wait for all ranks.")] = 120.0,
) -> None:
    """Start on every rank, instead of the script: compares the hosts and local ranks that came up with the plan's.

    Ends with code 0 when every rank is where the plan has it, else with code 2 and the first rank that is not. A script
    started by the plan's launch.sh does the same by itself before it trains (it sets HYBRID_PLACEMENT).

    \b
    Examples:
      ./launch.sh --no-python hybrid verify-placement ranks.csv     # on every node
      sbatch job.sbatch --no-python hybrid verify-placement ranks.csv
      torchrun --nproc-per-node 4 --no-python hybrid verify-placement ranks.csv
    """
    planned = read_rank_map(ranks)
    environment = read_environment()
    if not environment.launched:
        raise LaunchError(
            f"verify-placement runs as the {planned.num_ranks} ranks of {ranks}, and here is one process without a "
            "launcher: start it by launch.sh or torchrun with --no-python (see --help)"
        )
    os.environ[PLACEMENT_VARIABLE] = str(ranks)
    os.environ.pop(STRATEGY_VARIABLE, None)  # nothing is trained
    from hybrid.compose import context  # torch comes with it

    context.init(DistributedStrategy({"timeout_seconds": timeout}))
    node = next(node for node in planned.nodes if environment.rank in node.ranks)
    if environment.rank == node.ranks[0]:
        typer.echo(f"{node.name}: host {socket.gethostname()}, {named(node.ranks)}, as planned")
    context.shutdown()
