"""A bucket's views: the model's own parameters, in their own strides, over one flat buffer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from hybrid.contracts.partition import SMALL_ALIGNMENT_BYTES, PartitionKind, partition_bucket
from hybrid.sharding.bucket import Bucket, BucketKey, own_strides


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """0.5, 1.5, 2.5, ... so that a misplaced element shows."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float32) + 0.5).to(dtype).reshape(shape)


FORMS: dict[str, Callable[[], torch.Tensor]] = {
    "matrix": lambda: numbered(5, 3),
    "vector": lambda: numbered(7),
    "scalar": lambda: torch.tensor(2.5),
    "one": lambda: numbered(1),
    "empty": lambda: torch.zeros(0, 3),
    "transposed": lambda: numbered(4, 6).t(),
    "permuted": lambda: numbered(2, 3, 4).permute(2, 0, 1),
    "channels_last": lambda: numbered(4, 3, 2, 2).to(memory_format=torch.channels_last),
    "slice_of_larger": lambda: numbered(6, 6)[1:5, 2:5],
    "expanded": lambda: numbered(1, 4).expand(3, 4),
}


def bucket_of(
    parameters: dict[str, nn.Parameter],
    *,
    num_shards: int = 2,
    shard: int = 0,
    kind: PartitionKind = "element",
    grad_dtype: torch.dtype | None = None,
) -> Bucket:
    dtype = next(iter(parameters.values())).dtype
    key = BucketKey(dtype=dtype, grad_dtype=grad_dtype or dtype, sync_axes=("dp_shard",))
    partition = partition_bucket(
        [(fqn, p.numel()) for fqn, p in parameters.items()],
        num_shards=num_shards,
        element_bytes=min(key.dtype.itemsize, key.grad_dtype.itemsize),
        kind=kind,
    )
    ordered = [parameters[entry.fqn] for entry in partition.entries]
    return Bucket(
        index=0, key=key, partition=partition, parameters=ordered, shard=shard, counts=True, device=torch.device("cpu")
    )


def every_form() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(make()) for name, make in FORMS.items()}


@pytest.mark.parametrize("kind", ["element", "parameter"])
@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_parameters_keep_their_values_and_lie_inside_the_flat_buffer(num_shards: int, kind: PartitionKind) -> None:
    """Protects zero copy: what the collective sends is the memory that the model computes with."""
    parameters = every_form()
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    bucket = bucket_of(parameters, num_shards=num_shards, kind=kind)
    low = bucket.data.data_ptr()
    high = low + bucket.data.numel() * bucket.data.element_size()
    for entry in bucket.partition.entries:
        parameter = parameters[entry.fqn]
        assert torch.equal(parameter, before[entry.fqn]), entry.fqn
        assert parameter.shape == before[entry.fqn].shape, entry.fqn
        if parameter.numel() == 0:
            continue
        assert low <= parameter.data_ptr() < high, entry.fqn
        assert parameter.data_ptr() == low + entry.offset_elements * 4, entry.fqn
        assert (parameter.data_ptr() - low) % SMALL_ALIGNMENT_BYTES == 0, entry.fqn
        parameter.detach().fill_(77.0)
        flat = bucket.data[entry.offset_elements : entry.offset_elements + entry.num_elements]
        assert torch.equal(flat, torch.full_like(flat, 77.0)), entry.fqn


@pytest.mark.parametrize("name", ["matrix", "transposed", "permuted", "channels_last"])
def test_dense_strides_are_kept(name: str) -> None:
    """Protects kernels that choose by memory format: a transposed or channels-last weight stays as it was."""
    parameters = {name: nn.Parameter(FORMS[name]())}
    strides = parameters[name].stride()
    bucket_of(parameters)
    assert parameters[name].stride() == strides


@pytest.mark.parametrize("name", ["slice_of_larger", "expanded"])
def test_strides_with_holes_or_overlap_become_contiguous(name: str) -> None:
    """Protects against views that would reach into the next parameter's memory."""
    tensor = FORMS[name]()
    assert own_strides(tensor) == torch.empty(tensor.shape).stride()
    parameters = {name: nn.Parameter(tensor), "next": nn.Parameter(numbered(9))}
    bucket_of(parameters)
    assert torch.equal(parameters["next"], numbered(9))
    assert parameters[name].is_contiguous()


@pytest.mark.parametrize("kind", ["element", "parameter"])
def test_padding_is_zero_in_data_and_in_gradients(kind: PartitionKind) -> None:
    """Protects the norm, which runs over whole shards: padding must never hold what malloc left there."""
    parameters = every_form()
    bucket = bucket_of(parameters, num_shards=3, kind=kind)
    assert bucket.partition.gaps()
    torch.full((bucket.partition.num_elements,), float("nan"))  # what a fresh buffer may well be cut from
    for position, parameter in enumerate(bucket.parameters):
        bucket.accumulate(position, torch.ones(parameter.shape))
    gradient = bucket.take_local()
    for begin, end in bucket.partition.gaps():
        assert torch.count_nonzero(bucket.data[begin:end]) == 0
        assert torch.count_nonzero(gradient[begin:end]) == 0


def test_a_gradient_lands_on_its_own_elements_whatever_its_layout() -> None:
    """Protects a weight whose gradient comes in another memory order: element (i, j) goes to element (i, j)."""
    parameters = every_form()
    bucket = bucket_of(parameters, num_shards=2)
    for position, fqn in enumerate(bucket.fqns):
        gradient = numbered(*parameters[fqn].shape)
        bucket.accumulate(position, gradient)
        bucket.accumulate(position, gradient.clone(memory_format=torch.contiguous_format))
    whole = bucket.take_local()
    for position, fqn in enumerate(bucket.fqns):
        expected = 2 * numbered(*parameters[fqn].shape)
        assert torch.equal(bucket.view(whole, position), expected), fqn


def test_a_sparse_gradient_is_added_up_densely() -> None:
    """Protects embeddings with sparse=True: repeated rows are summed, untouched rows are zero."""
    parameters = {"embed": nn.Parameter(torch.zeros(4, 2))}
    bucket = bucket_of(parameters)
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 3, 1]]), torch.ones(3, 2), (4, 2), check_invariants=True)
    bucket.accumulate(0, sparse)
    bucket.accumulate(0, sparse)
    expected = torch.tensor([0.0, 4.0, 0.0, 2.0])[:, None].expand(4, 2)
    assert torch.equal(bucket.view(bucket.take_local(), 0), expected)


def test_parameters_without_a_gradient_count_as_zero_in_a_reduction() -> None:
    """Protects against uninitialised memory in the sum when only part of a bucket was used."""
    parameters = {"used": nn.Parameter(numbered(3)), "idle": nn.Parameter(numbered(40))}
    bucket = bucket_of(parameters, num_shards=1)
    bucket.accumulate(0, torch.ones(3))
    whole = bucket.take_local()
    assert torch.equal(bucket.view(whole, 1), torch.zeros(40))
    assert bucket.has_gradient == [True, False]
    # A rank that used nothing of the bucket sends zeros.
    assert torch.count_nonzero(bucket.take_local()) == 0


@pytest.mark.parametrize("shard", [0, 1, 2])
@pytest.mark.parametrize("kind", ["element", "parameter"])
def test_own_slices_are_views_of_the_own_shard(shard: int, kind: PartitionKind) -> None:
    """Protects the update: what the optimizer writes into a slice is what is gathered."""
    parameters = every_form()
    bucket = bucket_of(parameters, num_shards=3, shard=shard, kind=kind)
    for part in bucket.slices:
        view = bucket.slice_view(bucket.own_data(), part)
        assert view.data_ptr() == bucket.data.data_ptr() + part.offset_elements * 4
        parameter = parameters[part.fqn]
        if part.num_elements == parameter.numel():
            # Whole here: its own shape, so that optimizers which look at the shape see the user's.
            assert (view.shape, view.stride()) == (parameter.shape, own_strides(parameter))
        else:
            assert view.shape == (part.num_elements,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_gets_an_fp32_master_of_the_own_shard(dtype: torch.dtype) -> None:
    """Protects against updates that vanish below half a step of the compute dtype (BC-30)."""
    parameters = {"a": nn.Parameter(numbered(5, 3, dtype=dtype)), "b": nn.Parameter(numbered(200, dtype=dtype))}
    bucket = bucket_of(parameters, num_shards=2, shard=1, grad_dtype=torch.float32)
    assert bucket.master is not None
    assert bucket.master.dtype == torch.float32
    assert bucket.master.numel() == bucket.high - bucket.low
    assert bucket.own_data() is bucket.master
    assert torch.equal(bucket.master, bucket.data[bucket.low : bucket.high].float())
    assert bucket.new_gradient_buffer().dtype == torch.float32
    # Its storage is its own: a write to the master does not reach the parameters before it is copied back.
    bucket.master.fill_(3.0)
    assert torch.equal(parameters["b"], numbered(200, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_precision_needs_no_master(dtype: torch.dtype) -> None:
    """Protects memory: fp32 and fp64 parameters are updated in their buffer."""
    bucket = bucket_of({"a": nn.Parameter(numbered(5, dtype=dtype))})
    assert bucket.master is None
    assert bucket.own_data().untyped_storage().data_ptr() == bucket.data.untyped_storage().data_ptr()


def test_gradients_in_fp32_do_not_lose_small_micro_batches() -> None:
    """Protects long accumulation over bf16 weights: 64 gradients of 0.01 add up to 0.64, not to what bf16 keeps."""
    bucket = bucket_of({"a": nn.Parameter(torch.ones(3, dtype=torch.bfloat16))}, grad_dtype=torch.float32)
    small = torch.full((3,), 0.01, dtype=torch.bfloat16)
    for _ in range(64):
        bucket.accumulate(0, small)
    expected = 64 * small.float()
    torch.testing.assert_close(bucket.view(bucket.take_local(), 0), expected, rtol=1e-6, atol=0)


def test_settled_gradients_add_up_each_with_its_own_scale() -> None:
    """Protects two settlements before one step: the second sum must not be scaled by the first's factor."""
    bucket = bucket_of({"a": nn.Parameter(torch.zeros(2))}, num_shards=1)
    for value, scale in ((8.0, 0.5), (3.0, 2.0)):
        bucket.accumulate(0, torch.full((2,), value))
        bucket.add_reduced(bucket.take_local())
        bucket.settle(scale)
    bucket.apply_scale()
    assert bucket.settled is not None
    assert bucket.view(bucket.settled, 0).tolist() == [10.0, 10.0]


def test_dropping_one_gradient_leaves_its_neighbours() -> None:
    """Protects `p.grad = None` for one parameter: the others of the bucket keep theirs."""
    bucket = bucket_of({"a": nn.Parameter(torch.zeros(3)), "b": nn.Parameter(torch.zeros(50))}, num_shards=1)
    for position in (0, 1):
        bucket.accumulate(position, torch.ones(bucket.parameters[position].shape))
    bucket.drop(0)
    whole = bucket.take_local()
    assert bucket.view(whole, 0).tolist() == [0.0] * 3
    assert bucket.view(whole, 1).tolist() == [1.0] * 50
    assert bucket.has_gradient == [False, True]


def test_replaced_memory_is_noticed_by_name() -> None:
    """Protects against `.to()` or `.data =` after wrapping, which would leave the engine with the old memory."""
    parameters = {"a": nn.Parameter(numbered(3)), "b": nn.Parameter(numbered(4))}
    bucket = bucket_of(parameters)
    assert bucket.moved(bucket.fqns) is None
    parameters["b"].data = numbered(4)
    assert bucket.moved(bucket.fqns) == "b"


def test_bytes_are_those_of_the_buffers_that_are_alive() -> None:
    """Protects the memory report: nothing before the first gradient, B with it, nothing after it is given up."""
    bucket = bucket_of({"a": nn.Parameter(numbered(100))}, num_shards=2)
    whole_bytes = bucket.partition.num_elements * 4
    assert bucket.gradient_bytes() == 0
    bucket.accumulate(0, torch.ones(100))
    assert bucket.gradient_bytes() == whole_bytes
    bucket.add_reduced(bucket.take_local())
    assert bucket.gradient_bytes() == whole_bytes // 2
    bucket.drop_all()
    assert bucket.gradient_bytes() == 0


def test_a_bucket_of_empty_parameters_works() -> None:
    """Protects layers of width 0: no element, no shard, no crash."""
    bucket = bucket_of({"a": nn.Parameter(torch.zeros(0, 3))}, num_shards=2)
    bucket.accumulate(0, torch.zeros(0, 3))
    assert bucket.take_local().numel() == 0
    assert bucket.slices == ()
