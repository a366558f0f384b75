"""What starts a plan: the strategy, where each rank runs, and scripts for torchrun, Slurm and Kubernetes."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from hybrid.contracts.cluster import Cluster
from hybrid.contracts.device_kind import DeviceKind
from hybrid.contracts.rank_map import PlannedNode, RankMap, make_rank_map
from hybrid.errors import PlanError
from hybrid.planner.plan import Plan

__all__ = ["launch_files", "write_launch_files"]

_TEMPLATES = ("launch.sh", "job.sbatch", "pytorchjob.yaml")


def launch_files(plan: Plan, folder: Path = Path()) -> dict[str, str]:
    """Name -> text: `strategy.yaml`, `ranks.csv`, `hostfile`, `launch.sh`, `job.sbatch`, `pytorchjob.yaml`.

    Args:
        plan: what they start.
        folder: in which they will be; a batch job that is submitted elsewhere looks for them there.

    Raises:
        PlanError: a layout that this version cannot run, or ranks that no launcher numbers as the plan does.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined  # here: every `hybrid` command loads this file

    strategy = plan.strategy
    layout = strategy.resolve(plan.job.cluster.num_devices).layout
    ranks = make_rank_map(_devices(plan.job.cluster), layout)
    files = {"strategy.yaml": strategy.to_yaml(), "ranks.csv": ranks.to_csv(), "hostfile": _hostfile(ranks)}
    environment = Environment(
        loader=PackageLoader("hybrid.report"), undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True
    )
    values = {
        "label": plan.candidate.label,
        "model": _one_line(plan.job.model.name),
        "cluster": _one_line(plan.job.cluster.name),
        "layout": layout.describe(),
        "num_nodes": len(ranks.nodes),
        "num_ranks": ranks.num_ranks,
        "devices_per_node": len(ranks.nodes[0].devices),
        "device_resource": _device_resource(plan.job.cluster.device),
        "visible_devices": _visible_devices(ranks),
        "communicator_variables": _communicator_variables(plan, ranks),
        "job_name": _job_name(plan.job.model.name),
        "folder": shlex.quote(str(folder.resolve())),
        "plan_id": hashlib.sha256(f"{files['strategy.yaml']}\n{files['ranks.csv']}".encode()).hexdigest()[:12],
    }
    return files | {name: environment.get_template(f"{name}.j2").render(values) for name in _TEMPLATES}


def write_launch_files(plan: Plan, folder: Path) -> tuple[Path, ...]:
    """Write them into a folder, which is made; files of these names in it are replaced.

    Raises:
        PlanError: as `launch_files`; or the folder cannot be written.
    """
    files = launch_files(plan, folder)
    if folder.is_file():
        raise PlanError(
            f"--out {folder}: is a file, and launch files need a folder; the strategy alone goes to a name that ends "
            "in .yaml or .json"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
            if name == "launch.sh":
                (folder / name).chmod(0o755)
    except OSError as error:
        raise PlanError(f"--out {folder}: {error.strerror or error}") from None
    return tuple(folder / name for name in files)


def _devices(cluster: Cluster) -> list[str]:
    """Written node/device; of a graph whose names say no node each domain is one."""
    return [
        name if "/" in name else f"domain{domain}/{name}"
        for name, domain in zip(cluster.ranks, cluster.domain_of, strict=True)
    ]


def _one_line(name: str) -> str:
    """For a comment, which a line break would end."""
    return " ".join(name.split())


def _job_name(model: str) -> str:
    """As Kubernetes takes it, which puts `-worker-0` behind: small letters, digits, dashes, a letter first."""
    name = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")[:40].strip("-")
    return name if name[:1].isalpha() else f"hybrid-{name}".rstrip("-")


def _hostfile(ranks: RankMap) -> str:
    """One line per node, in the order in which they are numbered."""
    lines = [f"{node.name} slots={len(node.devices)}" for node in ranks.nodes]
    return "# Replace the plan's names by your hosts', in this order.\n" + "\n".join(lines) + "\n"


def _visible_devices(ranks: RankMap) -> Mapping[int, str]:
    """Node -> CUDA_VISIBLE_DEVICES, for nodes whose ranks do not run on their devices in order."""
    numbers = {number: _device_numbers(node) for number, node in enumerate(ranks.nodes)}
    return {number: ",".join(map(str, order)) for number, order in numbers.items() if order and order != sorted(order)}


def _device_numbers(node: PlannedNode) -> list[int]:
    """gpu3 is 3; devices with other names are in order."""
    found = [re.fullmatch(r"gpu(\d+)", device) for device in node.devices]
    return [int(match[1]) for match in found if match] if all(found) else []


def _communicator_variables(plan: Plan, ranks: RankMap) -> Mapping[str, tuple[str, str]]:
    """NCCL's variable -> value and reason."""
    shape = plan.job.cluster.shape
    if _device_resource(plan.job.cluster.device) != "nvidia.com/gpu" or len(ranks.nodes) == 1 or shape is None:
        return {}
    if shape.fabric.rails:
        return {"NCCL_CROSS_NIC": ("0", "cards of one rail talk to each other: no ring changes rails")}
    return {}


def _device_resource(device: DeviceKind) -> str:
    """Kubernetes' name of the devices; empty for processors."""
    if device.is_processor:
        return ""
    return "amd.com/gpu" if device.like.startswith("MI") else "nvidia.com/gpu"
