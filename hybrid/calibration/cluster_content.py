"""The cluster file of a calibrated machine: hosts and ranks, figures of its device, and all that was measured."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from hybrid.contracts.device_kind import DeviceKind, device_kinds
from hybrid.contracts.kept_file import replace_text
from hybrid.contracts.measurements import CollectivePoint, Measurements
from hybrid.errors import PlanError

__all__ = ["check_out", "cluster_content", "write_cluster_file"]

_MOST_FILE_BYTES = 1 << 16
# What stands for an accelerator that is not in the list: no links of its own, so that measured ones are all there is.
_UNKNOWN_LIKE = "RTX4090-24GB"


def cluster_content(measured: Measurements, free_bytes: float) -> dict[str, Any]:
    """What `parse_cluster` takes.

    Args:
        free_bytes: memory that a rank may use.
    """
    machine = measured.machine
    figures: dict[str, Any]
    if machine.accelerator is None:
        kind, figures = "cpu-measured", {"like": "cpu", **_processor_figures(measured)}
    else:
        known = _known_accelerator(machine.accelerator, free_bytes)
        figures = {"like": known.name if known else _UNKNOWN_LIKE}
        if known is None:
            figures |= _peaks(measured) | {"memory_gigabytes_per_second": _memory_rate(measured)}
        kind = f"{known.name if known else re.sub(r'[^A-Za-z0-9]+', '-', machine.accelerator)}-measured"
    figures |= {"usable_gibibytes": _rounded(free_bytes / 2**30), "source": measured.source, "date": measured.date}
    nodes: dict[str, Any] = {"count": len(machine.hosts), "devices": machine.ranks_per_host, "kind": kind}
    network = _network(measured)
    if network is not None and machine.accelerator is None:
        nodes["network"] = network
    ranks = len(machine.hosts) * machine.ranks_per_host
    return {
        "name": f"{machine.hosts[0]}-{ranks}x{machine.accelerator or 'cpu'}",
        "kinds": {kind: {name: value for name, value in figures.items() if value is not None}},
        "nodes": [nodes],
        "measured": _short(measured.to_dict()),
    }


def _short(value: Any) -> Any:
    """Figures to four digits: no measurement has more."""
    if isinstance(value, Mapping):
        return {name: _short(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_short(one) for one in value]
    return _rounded(value) if isinstance(value, float) else value


def _processor_figures(measured: Measurements) -> dict[str, Any]:
    """Peaks and links of a rank, as far as they were measured."""
    figures: dict[str, Any] = dict(_peaks(measured))
    rate = _memory_rate(measured)
    figures |= {"memory_gigabytes_per_second": rate, "host_gigabytes_per_second": rate}
    near = next((curve.points for curve in measured.collectives if curve.kind == "send" and curve.stride == 1), ())
    if near:
        largest = max(near, key=lambda point: point.num_bytes)
        speed = _rounded(largest.num_bytes / largest.seconds / 1e9)
        latency = _rounded(min(near, key=lambda point: point.num_bytes).seconds * 1e6)
        figures |= {"scale_up_gigabytes_per_second": speed, "peer_gigabytes_per_second": speed}
        figures["scale_up_latency_microseconds"] = latency
    return figures


def _peaks(measured: Measurements) -> dict[str, float]:
    """The best product of each dtype."""
    best: dict[str, float] = {}
    for point in measured.matmul:
        name = f"{point.dtype}_teraflops_per_second"
        best[name] = max(best.get(name, 0.0), 2e-12 * point.m * point.k * point.n / point.seconds)
    return {name: _rounded(rate) for name, rate in best.items()}


def _memory_rate(measured: Measurements) -> float | None:
    """Of the largest pointwise work, in GB/s."""
    if not measured.pointwise:
        return None
    return _rounded(max(measured.pointwise, key=lambda point: point.num_bytes).bytes_per_second / 1e9)


def _network(measured: Measurements) -> str | None:
    """All that leaves a host while each of its ranks talks to its counterparts on the others, as one card."""
    machine = measured.machine
    hosts, ranks = len(machine.hosts), machine.ranks_per_host
    if hosts == 1:
        return None
    points: tuple[CollectivePoint, ...] = next(
        (
            curve.points
            for curve in measured.collectives
            if curve.kind == "all_gather" and curve.size == hosts and curve.stride == ranks
        ),
        (),
    )
    if not points:
        return None
    largest = max(points, key=lambda point: point.num_bytes)
    sent = ranks * largest.num_bytes * (hosts - 1) / hosts / largest.seconds
    return f"1x{max(0.001, sent * 8e-9):.3f}G"


def _known_accelerator(name: str, memory_bytes: float) -> DeviceKind | None:
    """The kind whose family stands in the name that the driver gives, with the nearest memory."""
    listed = re.split(r"[\s_/-]+", name.upper())
    words = {*listed, *(one + other for one, other in pairwise(listed))}  # RTX 4090 is RTX4090
    fits = [kind for kind in device_kinds() if kind.name.split("-")[0].upper() in words and not kind.is_processor]
    is_pcie = "PCIE" in words

    def unlike(kind: DeviceKind) -> tuple[bool, float]:
        return ("PCIe" in kind.name) != is_pcie, abs(kind.memory_bytes - memory_bytes)

    return min(fits, key=unlike, default=None)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


# ---------------------------------------------------------------- the file


def check_out(out: Path, *, option: str = "--out") -> None:
    """Raise PlanError where the file could not be written; looked at before anything is measured."""
    if out.is_dir():
        raise PlanError(f"{option} {out}: is a folder; give the name of a file in it, such as {out / 'cluster.yaml'}")
    if out.suffix.lower() not in {".yaml", ".yml"}:
        raise PlanError(f"{option} {out}: a cluster file is YAML; name it {out.with_suffix('.yaml').name}")
    folder = out.parent
    if not folder.is_dir():
        raise PlanError(f"{option} {out}: {folder} is no folder; make it first, or give another")
    try:
        with tempfile.TemporaryFile(dir=folder) as file:  # permissions alone do not say it of a file server
            file.write(bytes(_MOST_FILE_BYTES))  # and it is minutes until a full disk would say so
    except OSError as error:
        raise PlanError(f"{option} {out}: cannot be written ({error.strerror}); give another place") from None
    if out.exists() and not os.access(out, os.W_OK):
        raise PlanError(f"{option} {out}: cannot be written; give another place")
    if out.exists() and not _is_calibrated(out):
        raise PlanError(f"{option} {out}: is there, and no calibration; it is not replaced: give another name")


def _is_calibrated(path: Path) -> bool:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return False
    return isinstance(content, Mapping) and "measured" in content


def write_cluster_file(out: Path, content: Mapping[str, Any], *, option: str = "--out") -> None:
    """As a whole or not at all."""
    measured = content["measured"]
    text = (
        f"# Measured {measured['date']} by `hybrid calibrate`; hybrid plan --cluster {out.name} and\n"
        f"# hybrid cluster show {out.name} take it. What stands where: docs/calibrate.md.\n"
    )
    text += yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=150)
    check_out(out, option=option)  # again: it is minutes since
    try:
        replace_text(out, text)
    except OSError as error:
        raise PlanError(f"{option} {out}: cannot be written ({error.strerror or error})") from None


class _Dumper(yaml.SafeDumper):
    """One line for each point, and for each list of numbers or names."""

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        is_point = bool(set(mapping) & {"num_bytes", "is_backward", "devices", "k"})
        return super().represent_mapping(tag, mapping, flow_style=is_point or flow_style)

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        is_plain = not any(isinstance(value, dict | list) for value in sequence)
        return super().represent_sequence(tag, sequence, flow_style=is_plain or flow_style)
