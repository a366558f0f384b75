"""What one block does and keeps, operation by operation: norms, attention, feed-forward, residuals.

Dense blocks with dropout follow arXiv:2205.05198, section 4.1 and equation 2: 34·s·b·h of 16-bit activations and
masks for a feed-forward of 4·h, 18 + 4·ffn/h in general, and 5·a·s²·b for scores.
"""

from __future__ import annotations

from hybrid.planner.architecture import Architecture
from hybrid.planner.feed_forward import add_feed_forward
from hybrid.planner.moe import add_experts
from hybrid.planner.parameter_names import FAMILIES
from hybrid.planner.unit_ledger import Ledger, Region

__all__ = ["add_block", "add_norm"]

_STATISTICS = 8  # bytes per token: mean and 1/deviation, in fp32
_MASK = 1  # bytes of an element of a dropout mask


def add_block(ledger: Ledger, arch: Architecture, *, has_experts: bool) -> None:
    """One block, from the value that enters it to the one that leaves it."""
    add_norm(ledger, arch)
    ledger.save_column_input(arch.hidden)
    if arch.latent is not None:
        _add_latent_attention(ledger, arch)
    else:
        _add_attention(ledger, arch)
    _add_residual(ledger, arch)
    if arch.is_parallel:
        ledger.save(-arch.hidden)  # the second norm saves the same input again
    add_norm(ledger, arch)
    ledger.save_column_input(arch.hidden)
    if has_experts:
        add_experts(ledger, arch)
    else:
        add_feed_forward(ledger, arch, "mlp", arch.ffn)
    _add_residual(ledger, arch)


def add_norm(ledger: Ledger, arch: Architecture, *, width: int = 0, region: Region = "whole") -> None:
    """A norm over `width` features (all of the hidden ones); its output is saved by who takes it."""
    width, size = width or arch.hidden, arch.activation_bytes
    statistics = 4 if arch.norm == "rms" else _STATISTICS
    if arch.norm == "layer" or not arch.is_eager:
        ledger.save(width, region)
        if arch.counts_statistics:
            ledger.save(1, region, width=statistics)
        ledger.move(size, size, elements=width, region=region)
        return
    # x32 = x.float(); x32 * rsqrt(mean(x32²) + eps), cast back; weight * that.
    ledger.save(width, region, width=4)
    ledger.save(width, region, width=4 if arch.is_norm_fp32 else size)
    if arch.counts_statistics:
        ledger.save(1, region, width=4)
    is_cast = size < 4
    kernels = 6 + 2 * is_cast  # pow, mean, add, rsqrt, mul, mul by the weight; the casts
    casts = (size, 4, 4, size) if is_cast else ()
    ledger.move(*casts, 4, 4, 4, 4, 4, size, size, elements=width, region=region, kernels=kernels)


def _add_attention(ledger: Ledger, arch: Architecture) -> None:
    query, kv = arch.query_width, arch.kv_width
    fewer = arch.kv_heads if arch.kv_heads < arch.heads else 0
    if "qkv" in FAMILIES[arch.family].block:
        ledger.multiply("attention.qkv", arch.hidden, query + 2 * kv, cut="column")
    else:
        ledger.multiply("attention.q", arch.hidden, query, cut="column")
        ledger.multiply("attention.k", arch.hidden, kv, cut="column", min_parts=fewer)
        ledger.multiply("attention.v", arch.hidden, kv, cut="column", min_parts=fewer)
    if arch.has_qk_norm:
        add_norm(ledger, arch, width=query, region="cut")
        add_norm(ledger, arch, width=kv, region="cut")
        if arch.counts_statistics:  # per head, not per token
            ledger.save(arch.heads + arch.kv_heads - 2, "cut", width=4)
    if arch.positions == "rotary":
        _add_rotary(ledger, arch, query + kv)
    ledger.save(query + 2 * kv, "cut")
    ledger.attend(
        arch.heads,
        arch.kv_heads,
        arch.head_dim,
        arch.head_dim,
        is_causal=arch.is_causal,
        dropout=arch.attention_dropout,
        is_eager=arch.is_eager,
    )
    _add_attention_output(ledger, arch, query)


def _add_rotary(ledger: Ledger, arch: Architecture, elements: int) -> None:
    """Backward turns the other way: nothing is saved but the angles, which all blocks share."""
    size = arch.activation_bytes
    if arch.is_eager:  # of queries and of keys: x·cos, halves negated and joined, ·sin, the sum
        ledger.move(*(size,) * 11, elements=elements, region="cut", kernels=10)
    else:
        ledger.move(size, size, elements=elements, region="cut", kernels=1)


def _add_attention_output(ledger: Ledger, arch: Architecture, width: int) -> None:
    ledger.save(width, "cut")
    ledger.multiply("attention.out", width, arch.hidden, cut="row")


def _add_latent_attention(ledger: Ledger, arch: Architecture) -> None:
    """Queries, keys and values from compressed ones (arXiv:2405.04434, equations 37 to 47)."""
    latent, size, hidden = arch.latent, arch.activation_bytes, arch.hidden
    assert latent is not None
    head = latent.nope_dim + latent.rope_dim
    query = arch.heads * head
    if latent.query_rank:
        ledger.multiply("attention.q_a", hidden, latent.query_rank)
        add_norm(ledger, arch, width=latent.query_rank)
        ledger.save_column_input(latent.query_rank)
        ledger.multiply("attention.q_b", latent.query_rank, query, cut="column")
    else:
        ledger.multiply("attention.q", hidden, query, cut="column")
    ledger.multiply("attention.kv_a", hidden, latent.kv_rank + latent.rope_dim)
    add_norm(ledger, arch, width=latent.kv_rank)
    ledger.save_column_input(latent.kv_rank)
    ledger.multiply("attention.kv_b", latent.kv_rank, arch.heads * (latent.nope_dim + latent.value_dim), cut="column")
    _add_rotary(ledger, arch, arch.heads * latent.rope_dim + latent.rope_dim)
    # Queries and keys are put together anew; values stay where the product wrote them, the other part of a key beside.
    ledger.move(size, size, elements=2 * query, region="cut", kernels=2)
    ledger.save(2 * query, "cut")
    ledger.save(arch.heads * latent.value_dim, "cut")
    if arch.is_eager:
        ledger.save(arch.heads * latent.nope_dim, "cut")
    ledger.attend(
        arch.heads,
        arch.heads,
        head,
        latent.value_dim,
        is_causal=arch.is_causal,
        dropout=arch.attention_dropout,
        is_eager=arch.is_eager,
    )
    _add_attention_output(ledger, arch, arch.heads * latent.value_dim)


def _add_residual(ledger: Ledger, arch: Architecture) -> None:
    """A norm of what came back (Gemma 2), dropout, and the sum with what entered, which saves nothing."""
    size = arch.activation_bytes
    if arch.norms_per_block == 4:
        add_norm(ledger, arch)
    if arch.hidden_dropout:
        ledger.save(arch.hidden, width=_MASK)
        ledger.move(size, size, _MASK, elements=arch.hidden)
    ledger.move(size, size, size, elements=arch.hidden)
