"""What `hybrid plan --out DIR` writes: scripts that say what they need, and a manifest that Kubernetes takes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator, ValidationError
from kubeflow_trainer_api.models.io_k8s_api_core_v1_pod_template_spec import IoK8sApiCoreV1PodTemplateSpec

import hybrid
from hybrid.contracts.cluster import parse_cluster
from hybrid.contracts.rank_map import read_rank_map
from hybrid.errors import PlanError
from hybrid.planner.plan import Plan
from hybrid.report.launch_files import launch_files, write_launch_files

# The part of the custom resource kubeflow.org/v1 PyTorchJob that is written, as its definition and its admission
# webhook have it (training-operator 1.9, manifests/base/crds/kubeflow.org_pytorchjobs.yaml and pkg/webhooks). What is
# within a pod is checked by Kubernetes' own models of core/v1 (kubeflow-trainer-api).
PYTORCHJOB = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "kubeflow.org/v1"},
        "kind": {"const": "PyTorchJob"},
        "metadata": {
            "type": "object",
            "required": ["name"],
            "additionalProperties": False,
            # A service is made of it, so it is a label of DNS (RFC 1035); room for `-worker-1023`.
            "properties": {"name": {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 51}},
        },
        "spec": {
            "type": "object",
            "required": ["pytorchReplicaSpecs"],
            "additionalProperties": False,
            "properties": {
                "nprocPerNode": {"type": "string", "pattern": "^(auto|cpu|gpu|[0-9]+)$"},
                "pytorchReplicaSpecs": {
                    "type": "object",
                    "required": ["Master"],
                    "additionalProperties": False,
                    "properties": {
                        "Master": {"$ref": "#/$defs/replica", "properties": {"replicas": {"const": 1}}},
                        "Worker": {"$ref": "#/$defs/replica", "properties": {"replicas": {"minimum": 1}}},
                    },
                },
            },
        },
    },
    "$defs": {
        "replica": {
            "type": "object",
            "required": ["replicas", "template"],
            "properties": {
                "replicas": {"type": "integer"},
                "restartPolicy": {"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
                "template": {
                    "properties": {
                        "spec": {
                            "properties": {
                                "containers": {
                                    "contains": {"required": ["image"], "properties": {"name": {"const": "pytorch"}}}
                                }
                            }
                        }
                    }
                },
            },
        }
    },
}


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Of two nodes of two processors."""
    wanted = {"global_batch_size": 8, "seq": 128, "precision": "fp32", "num_plans": 1}
    return hybrid.plan("gpt3-125m", "2x2xcpu", **wanted).best


def with_names(plan: Plan, *, model: str | None = None, cluster: Any = None) -> Plan:
    job = plan.job
    if model is not None:
        job = replace(job, model=replace(job.model, name=model))
    return replace(plan, job=job if cluster is None else replace(job, cluster=cluster))


def check_manifest(text: str) -> dict[str, Any]:
    """A manifest is what the definition takes; nothing in it is unknown to Kubernetes, which would drop it unseen."""
    job: dict[str, Any] = yaml.safe_load(text)
    Draft202012Validator(PYTORCHJOB).validate(job)
    for role in job["spec"]["pytorchReplicaSpecs"].values():
        assert set(role) <= {"replicas", "restartPolicy", "template"}
        assert IoK8sApiCoreV1PodTemplateSpec.from_dict(role["template"]).to_dict() == role["template"]
    return job


@pytest.mark.parametrize("cluster", ["1x1xcpu", "2x2xcpu", "1x8xH100", "2x4xMI300X"])
def test_the_manifest_is_what_kubernetes_takes(cluster: str, plan: Plan) -> None:
    found = parse_cluster(cluster)
    sizes = {"dp_replicate": 1, "dp_shard": found.num_devices, "tp": 1, "pp": 1}
    candidate = replace(plan.candidate, **sizes, num_micro_batches=1, micro_batch_size=1)
    job = replace(with_names(plan, cluster=found).job, global_batch_size=found.num_devices)
    check_manifest(launch_files(replace(plan, job=job, candidate=candidate))["pytorchjob.yaml"])


def test_the_check_of_manifests_finds_mistakes(plan: Plan) -> None:
    """Misspelt keys, wrong types, what the webhook refuses."""
    good = launch_files(plan)["pytorchjob.yaml"]
    for old, new in (
        ("nprocPerNode", "nProcPerNode"),
        ('"2"', "2"),
        ("mountPath: /plan", "mountPaths: /plan"),
        ("name: pytorch", "name: torch"),
        ("replicas: 1\n", "replicas: 2\n"),
        ("gpt3-125m\n", "3-gpt\n"),
    ):
        assert old in good, old
        with pytest.raises((ValidationError, AssertionError, ValueError)):
            check_manifest(good.replace(old, new))


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("7b-chat", "hybrid-7b-chat"),
        ("模型", "hybrid"),
        ("größe/Llama 3 (8B)", "gr-e-llama-3-8b"),
        ("a" * 39 + "-b", "a" * 39),
        ("x\n  evil: y", "x-evil-y"),
    ],
)
def test_any_model_name_makes_a_job_name(model: str, name: str, plan: Plan, tmp_path: Path) -> None:
    """Names come from folders and classes. Kubernetes refuses what is no label of DNS; a line break ends a comment."""
    files = write_launch_files(with_names(plan, model=model), tmp_path)
    texts = {file.name: file.read_text(encoding="utf-8") for file in files}
    assert check_manifest(texts["pytorchjob.yaml"])["metadata"]["name"] == name
    assert f"#SBATCH --job-name={name}\n" in texts["job.sbatch"]
    shellcheck = Path(sys.executable).with_name("shellcheck")
    subprocess.run([shellcheck, tmp_path / "launch.sh", tmp_path / "job.sbatch"], check=True)
    assert "\n  evil" not in texts["launch.sh"] + texts["pytorchjob.yaml"]


def test_a_graph_without_nodes_has_its_domains_as_nodes(plan: Plan) -> None:
    """Ranks of two domains on one node would start four ranks on one machine of two devices."""
    links = [[f"{side}{number}", f"s{side}"] for side in "ab" for number in (0, 1)] + [["sa", "na"], ["sb", "nb"]]
    graph = {
        "kind": "A100-80GB",
        "devices": ["a0", "a1", "b0", "b1"],
        "switches": ["sa", "sb", "top"],
        "nics": ["na", "nb"],
        "links": [{"between": ends, "speed": "100 GB/s"} for ends in [*links, ["na", "top"], ["nb", "top"]]],
    }
    files = launch_files(with_names(plan, cluster=parse_cluster({"graph": graph})))
    assert "--nnodes=2 " in files["launch.sh"]
    assert "domain1 slots=2" in files["hostfile"]
    assert "2,domain1,b0,0," in files["ranks.csv"]


def test_folders_that_are_there_are_kept_and_what_is_in_the_way_is_named(plan: Plan, tmp_path: Path) -> None:
    """Other files stay, earlier ones of ours are replaced; a file where the folder should be is named."""
    folder = tmp_path / "a plan – größe"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "launch.sh").write_text("old")
    write_launch_files(plan, folder)
    assert (folder / "notes.txt").read_text() == "mine"
    assert "torchrun" in (folder / "launch.sh").read_text()
    with pytest.raises(PlanError, match=r"--out .*notes\.txt: is a file, and launch files need a folder"):
        write_launch_files(plan, folder / "notes.txt")
    with pytest.raises(PlanError, match=r"--out .*: Not a directory"):
        write_launch_files(plan, folder / "notes.txt" / "inside")


def test_launch_scripts_say_what_they_need(plan: Plan, tmp_path: Path) -> None:
    """Without a script, without a number, with one beyond the plan; and what torchrun is called with otherwise."""
    folder = tmp_path / "a plan's folder"
    write_launch_files(plan, folder)
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "torchrun").write_text('#!/bin/sh\necho "$@"\necho "$HYBRID_STRATEGY"\n')
    (bin_folder / "torchrun").chmod(0o755)

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(folder / "launch.sh"), *arguments]
        environment = {"PATH": f"{bin_folder}:/usr/bin:/bin", **variables}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert "name the script to run" in run(NODE_RANK="0", MASTER_ADDR="a").stderr
    for variables in ({}, {"NODE_RANK": "1"}, {"MASTER_ADDR": "a"}):
        assert "set NODE_RANK (0 to 1) and MASTER_ADDR" in run("train.py", **variables).stderr
    for number in ("2", "-1", "one", "07x"):
        refused = run("train.py", NODE_RANK=number, MASTER_ADDR="a")
        assert refused.returncode == 2
        assert f"node {number}, and the plan is for 2 nodes: 0 to 1" in refused.stderr
    for variable in ("NODE_RANK", "SLURM_NODEID", "PET_NODE_RANK"):
        done = run("my train.py", "--lr", "1", MASTER_ADDR="10.0.0.1", **{variable: "1"})
        assert done.returncode == 0, done.stderr
        words, strategy = done.stdout.splitlines()
        assert re.match("--nnodes=2 --node-rank=1 --nproc-per-node=2 --master-addr=10.0.0.1 --master-port=29500", words)
        assert words.endswith("my train.py --lr 1")
        assert strategy == str(folder / "strategy.yaml")


def test_the_map_that_is_written_is_read(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "ranks.csv"
    file.write_text(launch_files(plan)["ranks.csv"], encoding="utf-8")
    assert [node.name for node in read_rank_map(file).nodes] == ["node0", "node1"]


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "this is no Slurm job (SLURM_JOB_NODELIST is not set)"),
        ({"SLURM_JOB_NODELIST": "a[0-2]", "SLURM_NNODES": "3"}, "Slurm gave 3 nodes, and the plan is for 2"),
    ],
)
def test_a_batch_job_that_cannot_work_says_why(
    variables: dict[str, str], words: str, plan: Plan, tmp_path: Path
) -> None:
    """On another number of nodes all launchers would wait for the missing ones until their timeout."""
    write_launch_files(plan, tmp_path)
    environment = {"PATH": os.environ["PATH"], "SLURM_SUBMIT_DIR": str(tmp_path), **variables}
    job = ["bash", tmp_path / "job.sbatch", "train.py"]
    done = subprocess.run(job, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_batch_job_starts_no_other_plan(plan: Plan, tmp_path: Path) -> None:
    """Submitted from another plan's folder it would have started that one, on as many nodes."""
    own, other = tmp_path / "own", tmp_path / "another's folder"
    write_launch_files(plan, own)
    write_launch_files(plan, other)
    launcher = other / "launch.sh"
    launcher.write_text(re.sub("# Plan .*", "# Plan 0123456789ab", launcher.read_text()))
    (tmp_path / "bin").mkdir()
    for name, text in (("scontrol", "echo a"), ("srun", 'echo "$@"')):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
        "SLURM_SUBMIT_DIR": str(other),
        "SLURM_JOB_NODELIST": "a[0-1]",
        "SLURM_NNODES": "2",
        "SLURM_JOB_ID": "7",
    }

    def submit() -> subprocess.CompletedProcess[str]:
        job = ["bash", own / "job.sbatch", "train.py"]
        return subprocess.run(job, env=environment, capture_output=True, text=True, check=False)

    assert f"bash {own / 'launch.sh'} train.py" in submit().stdout
    (own / "launch.sh").unlink()
    refused = submit()
    assert refused.returncode == 2
    assert f"neither {other} nor {own} has the launch.sh and ranks.csv of this plan" in refused.stderr
