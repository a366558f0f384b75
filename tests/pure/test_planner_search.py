"""The search: what it looks at, what it leaves out and says of it, and that its shortcuts change nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest

from hybrid.contracts.cluster import parse_cluster
from hybrid.errors import PlanError, StrategyError
from hybrid.planner.base_queue import Group
from hybrid.planner.constraints import problems_of
from hybrid.planner.cost import least_base_seconds, least_step_seconds, step_time, step_timeline
from hybrid.planner.job import Candidate, Job
from hybrid.planner.memory import least_bytes, memory, worst_bytes
from hybrid.planner.model_spec import ModelSpec, ParameterSpec, UnitSpec
from hybrid.planner.options import SCHEDULES, bases, shapes, state_options
from hybrid.planner.plan import plan
from hybrid.planner.presets import preset
from hybrid.planner.request import Request, read_fixed
from hybrid.planner.request_reading import make_request
from hybrid.planner.room import Room
from hybrid.planner.search import anything_fits, fit_of, search, why
from hybrid.planner.stages import stage_ranges, stage_units


def request_for(**changes: object) -> Request:
    asked = {"model": "llama2-7b", "cluster": "2x4xA100-80GB", "global_batch_size": 16, "seq": 2048, "num_plans": 5}
    given = asked | changes
    return make_request(given.pop("model"), given.pop("cluster"), **given)  # type: ignore[arg-type]


def everything(request: Request) -> list[Candidate]:
    """Every candidate that keeps the rules, without a shortcut."""
    found = []
    for shape in shapes(request):
        for base in chain.from_iterable(bases(request, shape)):
            if not problems_of(request.job, base, is_all=request.is_all, is_tp_given="tp" in request.fixed):
                found += list(state_options(request, base))
    return found


@pytest.mark.parametrize("fixed", ["", "tp=2", "pp=4"])
def test_shortcuts_lose_no_better_plan(fixed: str) -> None:
    """Bounds and the memory of smaller micro-batches only save work: the plans are those of a full search."""
    request = request_for(fixed=fixed)
    priced = [
        (step_time(request.job, candidate).total_seconds, candidate.label)
        for candidate in everything(request)
        if fit_of(request, memory(request.job, candidate)).fits
    ]
    found = search(request).found
    assert [(one.time.total_seconds, one.candidate.label) for one in found] == sorted(priced)[: len(found)]
    assert len(found) == min(5, len(priced))


def test_bounds_are_below_what_they_bound() -> None:
    """A bound above the bytes or the seconds of a layout drops it unseen, and it may be the best."""
    request, seen = request_for(), set()
    room = Room(request)
    for option in everything(request)[::23]:
        job, plan = request.job, memory(request.job, option)
        assert least_bytes(job, option) <= worst_bytes(job, option) == plan.worst.pooled_bytes
        assert (worst_bytes(job, option) <= room.most_bytes(option)) == fit_of(request, plan).fits
        seconds = step_time(job, option).total_seconds
        for is_played in (False, True):
            assert least_base_seconds(job, option, is_played=is_played) <= seconds, option.label
        for is_played in (False, True):
            assert least_step_seconds(job, option, is_played=is_played) <= seconds, option.label
        seen.add(option.schedule)
    assert seen == set(SCHEDULES)


@pytest.mark.parametrize(("schedule", "chunks"), [("zb-h1", 1), ("zbv", 2)])
def test_a_split_backward_is_planned_as_it_runs(schedule: str, chunks: int) -> None:
    """Asked for, it is planned: with less bubble than 1f1b, what is kept between the halves, and on the clock as the
    runtime's list of actions has it."""
    request = request_for(fixed=f"schedule={schedule},pp=4,tp=1,zero_stage=1,recompute=full,micro_batch_size=1")
    (best, *_), job = search(request).found, request.job
    assert (best.candidate.schedule, best.candidate.virtual_stages) == (schedule, chunks)
    plain = replace(best.candidate, schedule="1f1b", virtual_stages=1)
    assert best.time.parts["pp_bubble"] < step_time(job, plain).parts["pp_bubble"] * 0.8
    assert best.memory.worst.tensors_bytes > memory(job, plain).worst.tensors_bytes
    timeline = step_timeline(job, best.candidate)
    assert timeline.schedule.splits_backward
    ends = sum(best.time.parts.values()) - sum(
        best.time.parts[part] for part in ("overhead", "optimizer", "gather_exposed", "dp_exposed")
    )
    assert timeline.total_seconds == pytest.approx(ends)
    told, _ = why(request)
    assert all(candidate.schedule == schedule for candidate, _ in told)


def test_the_same_request_gives_the_same_answer() -> None:
    """A plan that changes between two calls cannot be argued about."""
    first, second = (search(request_for()) for _ in range(2))
    assert [one.candidate for one in first.found] == [one.candidate for one in second.found]
    assert first.rejections == second.rejections


def test_every_plan_keeps_the_batch_and_the_devices_and_fits() -> None:
    """Megatron-LM and others round the batch or leave devices idle without a word."""
    request = request_for()
    for one in search(request).found:
        candidate = one.candidate
        assert candidate.world_size == 8
        assert candidate.dp * candidate.micro_batch_size * candidate.num_micro_batches == 16
        assert one.fit.chance_of_running_out <= request.risk
        assert one.fit.needed_bytes <= request.limit_bytes


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_every_plan_is_a_strategy_that_resolves_to_it(zero_stage: int) -> None:
    """What is written to the file must be what was priced, for every kind of setting."""
    plans = plan(
        "llama2-7b", "1x8xH200", global_batch_size=16, seq=1024, fixed={"zero_stage": zero_stage}, num_plans=25
    )
    for one in plans:
        candidate = one.candidate
        resolved = one.strategy.resolve(8)
        assert (resolved.zero_stage, resolved.shard_size) == (candidate.zero_stage, candidate.dp_shard)
        assert resolved.accumulate_steps == candidate.num_micro_batches
        assert resolved.micro_batch_size == candidate.micro_batch_size
        assert (resolved.tensor_parallel.degree if resolved.tensor_parallel else 1) == candidate.tp
        assert (resolved.pipeline.degree if resolved.pipeline else 1) == candidate.pp
        assert (resolved.recompute.policy if resolved.recompute else "none") == candidate.recompute
        if candidate.pp > 1:
            assert resolved.pipeline is not None
            assert (resolved.pipeline.schedule, resolved.pipeline.virtual_stages) == (
                candidate.schedule,
                candidate.virtual_stages,
            )
        if candidate.zero_stage >= 2:
            assert resolved.grad_reduce == candidate.grad_reduce
    assert len(plans) > 3


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("tp=3", "tp 3 does not divide the 8 devices"),
        ("tp=4,pp=4", "pp 4 × tp 4 = 16 does not divide the 8 devices"),
        ("tp=2,pp=3", "pp 3 × tp 2 = 6 does not divide the 8 devices"),
        ("tp=2,pp=2,dp=1", "pp 2 × dp 1 × tp 2 = 4 leaves idle some of the 8 devices"),
        ("shard_size=3,dp=4", "shard_size 3 does not divide dp 4"),
        ("shard_size=16", "shard_size 16 does not divide the 8 devices"),
        ("dp=4,dp_replicate=2,shard_size=4", "dp_replicate 2 × shard_size 4 is not dp 4"),
        ("dp=-2", "expected a whole number of at least 1, or -1 to leave it open"),
        ("tp=0", "expected a whole number of at least 1"),
        ("zero_stage=0,shard_size=2", "zero_stage 0 cuts nothing, but shard_size is 2"),
        ("cp=2", "cp 2: this version of hybrid cannot run it"),
        ("virtual_stages=2,schedule=1f1b", "needs schedule 'interleaved', not '1f1b'"),
        ("micro_batch_size=3", "= 3 does not divide the global batch 16"),
        ("sequence_parallel=true,tp=1", "sequence_parallel needs tp of 2 or more"),
        ("pp=2,virtual_stages=2,accumulate_steps=3", "accumulate_steps 3 is no multiple of pp 2"),
        ("schedule=zbv,virtual_stages=3", "schedule 'zbv' has 2 chunks per rank, not virtual_stages 3"),
        ("schedule=zb-h1,pp=1", "schedule 'zb-h1' splits backwards to fill the bubble of a pipeline, but pp is 1"),
        ("schedule=interleaved,pp=1", "schedule 'interleaved' needs pp and virtual_stages of 2 or more"),
        ("pp=8,virtual_stages=8", "pp 8 × virtual_stages 8 is more chunks than the 34 layers"),
        ("zero_stage=2,dp=1", "zero_stage 2 cuts state over dp ranks, but dp is 1"),
        ("tpp=2", "unknown name; did you mean tp"),
        ("tp", "expected name=value"),
        ("tp=many", "expected a whole number"),
        ("zero_stage=4", "expected 0, 1, 2 or 3"),
        ("recompute=some", "expected one of none, core_attention, selective, full"),
        ("tp=2,mp=4", "tp is given twice, as 2 and 4"),
    ],
)
def test_contradictory_flags_are_refused_with_both_values(given: str, expected: str) -> None:
    """A planner that drops one of two settings plans something else than was asked."""
    with pytest.raises(PlanError) as caught:
        request_for(fixed=given)
    assert expected in str(caught.value)


def test_open_degrees_are_derived_and_sharding_of_one_is_plain_data_parallel() -> None:
    """-1 means what it means in a strategy; a shard_size of 1 must not switch data parallel off."""
    found = search(request_for(fixed="dp=-1,tp=2,pp=-1,shard_size=1")).found
    assert found
    for one in found:
        assert (one.candidate.tp, one.candidate.dp_shard, one.candidate.zero_stage) == (2, 1, 0)
        assert one.candidate.pp * one.candidate.dp == 4


@pytest.mark.parametrize(
    ("num_blocks", "pp", "sizes"),
    [(30, 4, {8, 7}), (10, 3, {4, 3}), (5, 4, {2, 1}), (38, 8, {5, 4})],
)
def test_bc22_every_layer_is_placed_once_and_evenly(num_blocks: int, pp: int, sizes: set[int]) -> None:
    """Others train 28 of 30 layers, leave a stage empty, or put ten on the last."""
    block = UnitSpec(name="block", kind="block", parameters=(ParameterSpec(name="weight", shape=(4, 4)),))
    units = tuple(replace(block, name=f"blocks.{index}") for index in range(num_blocks))
    job = replace(request_for().job, model=ModelSpec(name="equal", units=units, hidden=4))
    chunks = stage_units(job, Candidate(pp=pp))
    assert [unit.name for chunk in chunks for unit in chunk] == [unit.name for unit in units]
    assert {len(chunk) for chunk in chunks} == sizes


def test_bc22_too_many_stages_and_a_stale_split_are_refused() -> None:
    """A preset's counts must not survive a changed number of stages."""
    job = request_for().job
    assert any("64 chunks for 34 layers" in one.text for one in problems_of(job, Candidate(pp=64)))
    with pytest.raises(StrategyError, match="add up to 22, the model has 34 layers"):
        stage_units(job, Candidate(pp=2, split=(11, 11)))


def test_rank_order_mends_a_shuffled_cluster() -> None:
    """A host file in any order: tp groups belong where the links are fast, whatever number a device has."""
    cluster = parse_cluster("2x4xA100-80GB").with_rank_order((0, 4, 1, 5, 2, 6, 3, 7))
    given = plan("llama2-7b", cluster, global_batch_size=16, seq=2048, fixed="tp=4,pp=1")
    straight = plan("llama2-7b", "2x4xA100-80GB", global_batch_size=16, seq=2048, fixed="tp=4,pp=1")
    assert given.best.rank_order == (0, 2, 4, 6, 1, 3, 5, 7)
    assert given.best.time.total_seconds == pytest.approx(straight.best.time.total_seconds)
    assert straight.best.rank_order == tuple(range(8))
    assert [one.candidate for one in given] == [one.candidate for one in straight]
    # Searched in that order, and not only moved into it afterwards: the advice is about the plan that is shown.
    assert given.advice == straight.advice


def test_all_problems_of_a_request_come_at_once() -> None:
    """Fixing one mistake only to meet the next costs a user's patience."""
    with pytest.raises(PlanError) as caught:
        request_for(model="lama3-70b", cluster="2x4xH1000", precision="int3", global_batch_size=0, risk=2.0)
    text = str(caught.value)
    assert len(caught.value.problems) == 5
    for part in ("llama3-70b", "H100", "int3", "global_batch_size = 0", "risk = 2.0"):
        assert part in text


@pytest.mark.parametrize(
    ("candidate", "rule", "part"),
    [
        (Candidate(tp=5, dp_replicate=1), "tensor", "tp = 5 does not divide 32 (attention heads)"),
        (Candidate(pp=64, dp_replicate=1), "layers", "64 chunks for 34 layers"),
        (Candidate(dp_replicate=3), "batch", "global batch 16 is no multiple of dp = 3"),
        (
            Candidate(pp=4, dp_replicate=2, schedule="interleaved", virtual_stages=2, num_micro_batches=6),
            "schedule",
            "6 is no multiple",
        ),
        (Candidate(zero_stage=1, dp_replicate=8), "sharding", "zero_stage 1 with shard_size 1 cuts nothing"),
        (Candidate(zero_stage=0, dp_shard=8), "sharding", "zero_stage 0 cuts nothing"),
        (Candidate(cp=2, dp_replicate=4), "not built", "cp = 2"),
    ],
)
def test_each_rule_names_the_value_and_what_would_do(candidate: Candidate, rule: str, part: str) -> None:
    """Opaque lists of allowed combinations are what people complain of."""
    problems = problems_of(request_for().job, candidate)
    assert any(problem.rule == rule and part in problem.text for problem in problems), problems


def test_key_value_heads_need_a_divisor_or_copies() -> None:
    """tp above the key-value heads works by copies; between the two it cannot."""
    job = request_for(model="llama3-8b", cluster="4x8xA100-80GB", global_batch_size=32).job
    whole = Candidate(dp_replicate=1)
    assert not [one for one in problems_of(job, replace(whole, tp=16, dp_replicate=2)) if one.rule == "tensor"]
    assert not [one for one in problems_of(job, replace(whole, tp=8, dp_replicate=4)) if one.rule == "tensor"]


def test_tensor_parallel_over_nodes_is_priced_only_when_wanted() -> None:
    """Its sums run over the network in every layer: 43 % slower in the measurements of others."""
    free = request_for(cluster="4x2xA100-80GB")
    assert all(one.candidate.tp <= 2 for one in search(free).found)
    assert any(rejection.rule == "tp over nodes" for rejection in search(free).rejections)
    plans = plan("llama2-7b", "4x2xA100-80GB", global_batch_size=16, seq=2048, fixed="tp=4")
    assert {one.candidate.tp for one in plans} == {4}
    assert any("crosses the fast links of 2 devices" in note for note in plans.advice.notes)
    assert plans.best.time.total_seconds > search(free).found[0].time.total_seconds


def test_nothing_fits_says_by_how_much_and_what_would() -> None:
    """'Does not fit' alone leaves a user to guess."""
    with pytest.raises(PlanError) as caught:
        plan("llama3-70b", "1x8xA100-40GB", global_batch_size=8, seq=8192)
    text = str(caught.value)
    assert "needs" in text
    assert "GiB more" in text


def test_nothing_fits_with_what_is_fixed_names_the_value_to_free() -> None:
    """The nearest change that fits is often one flag."""
    with pytest.raises(PlanError) as caught:
        plan("llama2-7b", "1x8xA100-40GB", global_batch_size=8, seq=2048, fixed="zero_stage=0,tp=1,pp=1")
    assert "without zero_stage=0 it fits" in str(caught.value)
    assert "on 2x8xA100-SXM-40GB it fits" not in str(caught.value)  # with more nodes of what is fixed it does not
    with pytest.raises(PlanError) as caught:
        plan("llama2-13b", "1x4xA100-40GB", global_batch_size=8, seq=2048, fixed="offload=none")
    assert "on 4x4xA100-SXM-40GB it fits" in str(caught.value)


@pytest.mark.parametrize("memory_bytes", [8e9, 30e9])
def test_whether_anything_fits_is_what_a_search_finds(memory_bytes: float) -> None:
    """Advice of a change that does not fit, or none where one would, sends a user the wrong way."""
    request = request_for(memory_bytes=memory_bytes)
    assert anything_fits(request) == bool(search(request).found) == (memory_bytes > 2e10)


def test_gpipe_is_planned_where_messages_take_long_and_only_there() -> None:
    """No forward of it waits for a backward to come back, which counts where a message takes as long as a stage."""
    fixed = {"fixed": "pp=8,recompute=full,virtual_stages=1", "model": "gpt3-1.3b", "global_batch_size": 64}
    slow = search(request_for(**fixed, cluster="8x1xA100-80GB", network="1x1G")).found
    assert slow[0].candidate.schedule == "gpipe"
    assert search(request_for(**fixed, cluster="1x8xA100-80GB")).found[0].candidate.schedule != "gpipe"


def test_why_tells_of_every_layout_that_was_asked_for() -> None:
    """The answer to 'why not tp 4' is a sentence for each layout with it."""
    request = replace(request_for(), fixed=read_fixed("tp=4,pp=1,micro_batch_size=8,recompute=none"))
    told, num_more = why(request)
    assert told
    assert num_more == 0
    assert why(request, limit=3) == (told[:3], len(told) - 3)
    for candidate, outcome in told:
        assert candidate.tp == 4
        assert "s a step" in outcome or "needs" in outcome
    ((refused,), _) = why(replace(request_for(model="llama3-8b", cluster="3x8xA100-80GB"), fixed={"tp": 3, "pp": 8}))
    assert "does not divide 32 (attention heads)" in refused[1]


def test_an_optimizer_that_needs_whole_parameters_keeps_tp_and_stage_3_out() -> None:
    """The runtime refuses both; a plan for them could not start."""
    found = search(request_for(cluster="1x8xH200", optimizer="muon", model="gpt3-1.3b")).found
    assert found
    assert all(one.candidate.tp == 1 and one.candidate.zero_stage < 3 for one in found)


def test_offload_is_planned_where_it_is_asked_for_and_its_strategy_says_so() -> None:
    """A plan whose memory counts on the host, and whose strategy does not say so, would run out of memory."""
    assert not any(one.candidate.is_offloaded for one in search(request_for()).found)
    plans = plan("llama2-7b", "1x2xA100-80GB", global_batch_size=4, seq=2048, fixed="offload=optimizer", num_plans=2)
    for one in plans:
        resolved = one.strategy.resolve(2)
        assert (resolved.offload, resolved.zero_stage) == ("optimizer", one.candidate.zero_stage)
    alone = plan("llama2-7b", "1x1xA100-80GB", global_batch_size=1, seq=2048, fixed="offload=optimizer", num_plans=1)
    assert alone.best.strategy.to_dict()["sharding_configs"] | {"bucket_bytes": 0} == {
        "stage": 0, "offload": "optimizer", "bucket_bytes": 0
    }  # fmt: skip
    with pytest.raises(PlanError) as caught:
        plan("llama2-7b", "1x1xA100-80GB", global_batch_size=1, seq=2048)
    assert "with offload=optimizer it fits" in str(caught.value)
    with pytest.raises(PlanError, match="expected one of none, optimizer, parameters"):
        request_for(fixed="offload=all")


def test_what_offload_needs_of_a_host_is_planned_and_refused_where_it_is_not_there() -> None:
    """Parameters on the host let one device train what does not fit into it, if the host has the memory: a plan that
    looks at the device alone would end the host."""
    asked = {"global_batch_size": 1, "seq": 512, "num_plans": 1}
    best = plan("llama2-13b", "1x1xA100-40GB", **asked, fixed="offload=parameters").best
    assert best.strategy.resolve(1).offload == "parameters"
    assert best.candidate.zero_stage == 3
    worst = best.memory.worst
    assert worst.parts["parameters"] == 0
    assert worst.host_bytes == pytest.approx(18 * best.job.model.num_parameters, rel=0.01)
    several = replace(best.candidate, dp_shard=2)
    fresh = Job(model=best.job.model, cluster=parse_cluster("1x2xA100-40GB"), global_batch_size=2, seq=512)
    plain, offloaded = (replace(several, offload=what) for what in ("none", "parameters"))
    before = step_time(fresh, plain).total_seconds
    assert step_time(replace(fresh), offloaded).total_seconds > before
    shared = replace(fresh)  # what is kept of one layout does not price the other
    assert step_time(shared, offloaded).total_seconds > step_time(shared, plain).total_seconds == before
    with pytest.raises(PlanError, match=r"in the memory of one host, which has 140 GiB"):
        plan("llama2-13b", "1x1xA100-40GB", **asked, fixed="offload=parameters", host_memory_bytes=150e9)
    roomy = {"cluster": "1x2xA100-40GB", "host_memory": "400GB"}
    four = plan("llama2-13b", roomy, global_batch_size=4, seq=512, fixed="offload=optimizer", num_plans=1).best
    assert four.memory.fullest_host_bytes == 2 * four.memory.worst.host_bytes
    with pytest.raises(PlanError, match=r"which has 74\.5 GiB"):
        plan("llama2-13b", {**roomy, "host_memory": "80GB"}, global_batch_size=4, seq=512, fixed="offload=parameters")
    with pytest.raises(PlanError, match="processors, whose memory is the host's"):
        plan("gpt3-125m", "local", global_batch_size=4, precision="fp32", fixed="offload=optimizer")


def test_only_layouts_that_are_cut_alike_are_known_to_fail_by_one_that_fails() -> None:
    """A larger micro-batch, or less recompute, keeps more, but not where the model is cut elsewhere, nor as the only
    one of a step, whose gradients are reduced as they come."""
    job = Job(model=preset("llama3-8b"), cluster=parse_cluster("1x8xA100"), global_batch_size=16, seq=4096)
    leanest = Candidate(tp=1, pp=4, dp_replicate=2, micro_batch_size=1, num_micro_batches=8, recompute="full")
    asked: list[Candidate] = []

    def least_bytes(base: Candidate) -> float | None:
        asked.append(base)
        return 1e12 if base.num_micro_batches > 1 else None

    group = Group(leanest)
    two = replace(leanest, micro_batch_size=2, num_micro_batches=4)
    assert stage_ranges(job, two) is stage_ranges(job, leanest)
    assert group.failing_bytes(job, replace(two, recompute="none"), least_bytes) == 1e12
    assert asked == [leanest]
    elsewhere = replace(two, split=(8, 8, 8, 10))
    assert group.failing_bytes(job, elsewhere, least_bytes) == 1e12
    assert asked == [leanest, elsewhere]
    assert group.failing_bytes(job, replace(leanest, micro_batch_size=8, num_micro_batches=1), least_bytes) is None


@pytest.mark.parametrize(
    ("fixed", "way"),
    [
        ("tp=3", "tp 3 does not divide the 8 devices of 1x8xA100: 2 or 4 would do"),
        ("tp=2,pp=3", "= 6 does not divide the 8 devices of 1x8xA100: the product must divide 8"),
        ("tp=2,pp=2,dp=1", "= 4 leaves idle some of the 8 devices of 1x8xA100: the product must be 8"),
        ("micro_batch_size=3", "= 3 does not divide the global batch 16: 2 or 4 would do"),
        ("tp=2,zero_stage=1,shard_size=1", "zero_stage 1 with shard_size 1 cuts nothing: give stage 0"),
        ("dp=8,micro_batch_size=1,pp=1,zero_stage=2,shard_size=1", "zero_stage 2 with shard_size 1 cuts nothing"),
    ],
)
def test_what_excludes_each_other_is_told_with_what_would_do(fixed: str, way: str) -> None:
    with pytest.raises(PlanError) as caught:
        make_request("gpt3-1.3b", "1x8xA100", global_batch_size=16, seq=1024, fixed=fixed)
    assert way in str(caught.value)


def test_a_batch_smaller_than_its_ranks_names_one_batch_that_would_do() -> None:
    with pytest.raises(PlanError, match=r"or a batch of 8 \(1 layout\)"):
        plan("gpt3-1.3b", "1x8xA100", global_batch_size=7, seq=1024, fixed="dp=8")


def test_samples_longer_than_a_model_was_made_for_are_planned_with_a_note() -> None:
    """Rotary positions reach any length, so nothing else says that none of these were learned; tables end."""
    long, usual = (
        make_request("llama3-8b", "1x8xH100", global_batch_size=8, seq=seq).job.model.notes for seq in (100_000, 8192)
    )
    assert "seq = 100,000, but llama3-8b was made for 8,192 positions" in long[0]
    assert not any("was made for" in note for note in usual)
    with pytest.raises(PlanError, match="takes at most 1024 tokens"):
        make_request("gpt2-xl", "1x8xH100", global_batch_size=8, seq=100_000)


def test_the_largest_batch_is_planned() -> None:
    """What micro-batches of a hundred million samples keep is more bytes than 64 bits count."""
    assert plan("llama3-8b", "1x8xH100", global_batch_size=10**9).best.candidate.micro_batch_size < 1000
