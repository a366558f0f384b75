"""`hybrid cluster`: what a cluster is taken to be before anything is planned on it; the devices that are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hybrid.cli.cluster_drawing import device_dict, print_devices
from hybrid.cli.cluster_summary import ClusterSummary
from hybrid.contracts.cluster import parse_cluster
from hybrid.contracts.device_kind import device_kinds
from hybrid.report.page import check_page_path, write_page

__all__ = ["commands"]

HELP = """
Look at clusters: devices, links, switches, and what groups of ranks have of them.

\b
CLUSTER is
  16x8xH100         nodes x devices x kind; 8xA100-80GB is one node; + joins unequal ones
  local             the processors of this machine
  lab.yaml          nodes and network, single slow links, or the whole graph (docs/cluster.md)

\b
Examples:
  hybrid cluster list                                       the devices that are known
  hybrid cluster show 4x8xH100 --network 8x400G             levels, bandwidths, latencies
  hybrid cluster show 64x8xA100 --network 4x200G --oversubscription 2
"""

SETTINGS = {"help_option_names": ["-h", "--help"]}

commands = typer.Typer(
    name="cluster", no_args_is_help=True, add_completion=False, rich_markup_mode=None, context_settings=SETTINGS
)

Json = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]


@commands.callback(help=HELP)
def cluster() -> None:
    """The group; its help is HELP."""


@commands.command("show", context_settings=SETTINGS)
def show(
    source: Annotated[
        str, typer.Argument(metavar="CLUSTER", help="16x8xH100, local, or a YAML file.", show_default=False)
    ],
    network: Annotated[
        str | None,
        typer.Option(
            "--network",
            metavar="CARDSxSPEED",
            help="Network cards of a node and their speed in Gb/s, such as 8x400G.  [default: typical for the device]",
        ),
    ] = None,
    oversubscription: Annotated[
        float | None,
        typer.Option(
            "--oversubscription",
            metavar="RATIO",
            help="Bandwidth of a leaf switch towards its nodes over that towards the spine.  [default: 1]",
        ),
    ] = None,
    rails: Annotated[
        bool | None,
        typer.Option(
            "--rails/--no-rails",
            help="Card i of every node on leaf switch i, or all cards of a node on one leaf.  "
            "[default: rails, unless oversubscription is given]",
        ),
    ] = None,
    nodes_per_leaf: Annotated[
        int | None,
        typer.Option(
            "--nodes-per-leaf",
            metavar="NODES",
            help="Nodes that meet at one leaf switch or one set of rails.  [default: 32 with rails, else 1]",
        ),
    ] = None,
    domain: Annotated[
        int | None,
        typer.Option(
            "--domain",
            metavar="DEVICES",
            help="Devices that scale-up links join, such as 36 for half racks.  [default: as the device has it]",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with the graph drawn.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Draw a cluster and say what groups of ranks have of its links.

    From top to bottom: the switches between nodes, the domains (devices that meet without a network card), their
    links. Below, rates in one direction: of one message between two devices; of every device in rings over its domain;
    of rings over all devices; and between the halves of the cluster when all devices send at once. They are
    what links carry, before any loss of a library. A cluster on which nothing can be planned is drawn too; the
    last line says why.

    \b
    Examples:
      hybrid cluster show 4x8xH100 --network 8x400G
      hybrid cluster show 4x8xH100 --network 8x400G --oversubscription 2
      hybrid cluster show 64x8xH100 --rails --nodes-per-leaf 16 --oversubscription 3
      hybrid cluster show 36x4xGB200                             two NVLink domains of 72
      hybrid cluster show 2x8xMI300X                             64 GB/s for a pair, 448 for eight
      hybrid cluster show lab.yaml --json
      hybrid cluster show lab.yaml --html lab.html               links, switches and rates to point at
    """
    check_page_path(html, option="--html")
    found = parse_cluster(
        source,
        network=network,
        oversubscription=oversubscription,
        rails=rails,
        nodes_per_leaf=nodes_per_leaf,
        domain=domain,
        describe=True,
    )
    summary = ClusterSummary(cluster=found)
    if html is not None:
        write_page(html, summary.page(), option="--html")
    if json_output:
        typer.echo(json.dumps(summary.to_dict(), indent=2, ensure_ascii=False))
    else:
        summary.print()


@commands.command("list", context_settings=SETTINGS)
def list_devices(json_output: Json = False) -> None:
    """List the devices that are known: peak rates, memory, links, network.

    Dense peaks without sparsity, in TFLOP/s; bandwidths in GB/s and one direction. `best` is the largest fraction of
    the bf16 peak that anybody measured for a matrix product. --json adds sources and dates.

    \b
    Examples:
      hybrid cluster list
      hybrid cluster list --json
    """
    if json_output:
        typer.echo(json.dumps([device_dict(kind) for kind in device_kinds()], indent=2, ensure_ascii=False))
    else:
        print_devices(device_kinds())
