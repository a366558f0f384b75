"""Matrix products by the faster of torch's two libraries: the values, where it steps back, and who decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from hybrid import cpu_products
from hybrid.cpu_products import VARIABLE, add_product, fast_product, is_wanted, matrix_product, take
from hybrid.errors import LaunchError

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch comes without oneDNN")


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cpu_products._State, "is_chosen", True)
    monkeypatch.setattr(cpu_products._State, "least_multiplications", 1)
    with torch.no_grad():
        yield


def matrix(rows: int, columns: int, seed: int, *, is_transposed: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if is_transposed:
        return torch.randn(columns, rows, generator=generator).t()
    return torch.randn(rows, columns, generator=generator)


def close(found: torch.Tensor | None, exact: torch.Tensor) -> bool:
    assert found is not None
    return torch.allclose(found.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("sizes", [(5, 7, 3), (64, 33, 17), (1, 40, 1)])
def test_products_and_sums_of_products(sizes: tuple[int, int, int], transposed: tuple[bool, bool]) -> None:
    """Protects forward, both gradients, and what is added to in pieces, for matrices that lie either way."""
    m, k, n = sizes
    left, right = matrix(m, k, 1, is_transposed=transposed[0]), matrix(k, n, 2, is_transposed=transposed[1])
    bias = torch.randn(n, generator=torch.Generator().manual_seed(3))
    exact = left.double() @ right.double()
    assert close(fast_product(left, right), exact)
    assert close(fast_product(left, right, bias), exact + bias.double())
    assert close(matrix_product(left, right), exact)
    whole = torch.full((m + 2, n), 7.0)
    add_product(whole[1 : m + 1], left, right, is_first=True)
    assert close(whole[1 : m + 1], exact)
    add_product(whole[1 : m + 1], left, right, is_first=False)
    assert close(whole[1 : m + 1], 2 * exact)
    assert whole[[0, -1]].eq(7).all()


SPREAD = {
    "left": (torch.ones(1, 1).expand(6, 4), torch.randn(4, 5), None),  # the gradient of a sum
    "right": (torch.randn(6, 4), torch.ones(1, 1).expand(4, 5), None),
    "every other column": (torch.randn(6, 8)[:, ::2], torch.randn(4, 10)[:, ::2], None),
    "one bias for all": (torch.randn(6, 4), torch.randn(4, 5), torch.ones(1).expand(5)),
    "every other bias": (torch.randn(6, 4), torch.randn(4, 5), torch.arange(10.0)[::2]),
}


@pytest.mark.parametrize("name", SPREAD)
def test_elements_that_do_not_lie_side_by_side(name: str) -> None:
    """Protects against the library's own reading of strides: it takes a bias as lying side by side."""
    left, right, bias = SPREAD[name]
    exact = left.double() @ right.double() + (0 if bias is None else bias.double())
    assert close(fast_product(left, right, bias), exact)


def test_a_large_sum_is_added_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects the memory of a step: no second gradient as large as the first."""
    sizes = []
    kernel = cpu_products.shims.ONEDNN_PRODUCT

    def counted(left: torch.Tensor, *others: object) -> torch.Tensor:
        sizes.append(left.shape[0])
        return kernel(left, *others)

    monkeypatch.setattr(cpu_products.shims, "ONEDNN_PRODUCT", counted)
    monkeypatch.setattr(cpu_products, "_PIECE_BYTES", 0)
    monkeypatch.setattr(cpu_products, "_LEAST_PIECE_ROWS", 4)
    left, right, target = torch.randn(10, 6), torch.randn(6, 5), torch.ones(10, 5)
    add_product(target, left, right, is_first=False)
    assert sizes == [4, 4, 2]
    assert close(target, 1 + left.double() @ right.double())


def test_more_dims_are_rows() -> None:
    left, right = torch.randn(2, 3, 8), torch.randn(8, 5)
    assert close(fast_product(left, right), left.double() @ right.double())


class Own(torch.Tensor):
    """A user's kind of tensor."""


def reduced_precision(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
    usual = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        return fast_product(left, right)
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = usual


def switched_off(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
    with torch.backends.mkldnn.flags(enabled=False):
        return fast_product(left, right)


@pytest.mark.parametrize(
    "attempt",
    [
        torch.enable_grad()(fast_product),
        lambda left, right: fast_product(left.double(), right.double()),
        lambda left, right: fast_product(left.bfloat16(), right.bfloat16()),
        lambda left, right: fast_product(left.as_subclass(Own), right),
        lambda left, right: fast_product(left.to("meta"), right.to("meta")),
        lambda left, right: fast_product(left[:0], right),
        lambda left, right: fast_product(left, right, torch.ones(4, dtype=torch.float64)),
        lambda left, right: fast_product(left, right, torch.ones(1)),
        lambda left, right: fast_product(left.to_sparse(), right),
        lambda left, right: fast_product(left.to_mkldnn(), right),
        reduced_precision,
        switched_off,
    ],
)
def test_where_it_steps_back(attempt: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]) -> None:
    """Protects graphs, other types and classes, and whoever asked for other kernels."""
    assert attempt(torch.randn(4, 4), torch.randn(4, 4)) is None


def test_transforms_and_forward_mode_go_torchs_way() -> None:
    """Protects a vmap over a model without gradients, and derivatives along a direction: the kernel knows neither."""
    left, right = torch.randn(3, 4, 5), torch.randn(5, 2)
    assert close(torch.vmap(lambda one: matrix_product(one, right))(left), left.double() @ right.double())
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(left[0], torch.ones(4, 5))
        slope = forward_ad.unpack_dual(matrix_product(dual, right)).tangent
        assert close(slope, torch.ones(4, 5).double() @ right.double())


def test_small_products_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    take(True)
    try:
        assert fast_product(torch.randn(8, 8), torch.randn(8, 8)) is None
    finally:
        take(False)


def test_flops_are_counted() -> None:
    """Protects everybody who counts with torch's own counter."""
    with FlopCounterMode(display=False) as counter:
        fast_product(torch.randn(3, 4), torch.randn(4, 5))
    assert counter.get_total_flops() == 2 * 3 * 4 * 5


@pytest.mark.parametrize(
    ("cpu", "capability", "wanted"),
    [
        ("vendor_id\t: AuthenticAMD\ncpu family\t: 26\n\nvendor_id\t: other", "AVX512", True),
        ("vendor_id\t: AuthenticAMD\ncpu family\t: 25", "AVX512", False),
        ("vendor_id\t: GenuineIntel\ncpu family\t: 26", "AVX512", False),
        ("vendor_id\t: AuthenticAMD\ncpu family\t: 26", "AVX2", False),
        ("nothing", "AVX512", False),
    ],
)
def test_it_is_taken_where_it_was_measured(
    cpu: str, capability: str, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(cpu_products.platform, "system", lambda: "Linux")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: cpu)
    monkeypatch.setattr(cpu_products, "_is_faster_here", cpu_products._is_faster_here.__wrapped__)
    assert is_wanted() is wanted


def test_the_variable_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, " ON ")
    assert is_wanted()
    monkeypatch.setenv(VARIABLE, "0")
    assert not is_wanted()
    monkeypatch.setenv(VARIABLE, "mkl")
    with pytest.raises(LaunchError, match=r"HYBRID_ONEDNN='mkl': expected 1 .* 0 \(never\), or nothing"):
        is_wanted()
