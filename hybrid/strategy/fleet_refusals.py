"""Fields of Fleet's `DistributedStrategy` that are refused: path, the values that ask for nothing, the reason.

Each reason says why, and the way to what the field was meant for.
"""

from __future__ import annotations

from typing import Any

__all__ = ["REFUSALS"]

_OPTIMIZER = "the optimizer is yours: pass {} to distributed_optimizer instead"
_STATIC = "it steers Fleet's static graph, which does not exist here; leave it out"
_SERVER = "parameter servers are not what this library does; training is collective"
_CUDNN = "it is a setting of the device library: set {} before training"
_NCCL = "NCCL reads its own environment variables ({}): set them for the launch"
_LATER = "{} is not available yet; leave it out"
_MOE = "expert parallelism is not available yet; leave it out or set 1"
_LOCAL = (
    "it lets replicas drift apart, so a run no longer gives one process's numbers; "
    "use accumulate_steps to communicate less often"
)

_OFF = (False,)

REFUSALS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    # ---- optimizers by flag
    ("lamb", _OFF, _OPTIMIZER.format("a LAMB optimizer")),
    ("lamb_configs", (), _OPTIMIZER.format("a LAMB optimizer")),
    ("lars", _OFF, _OPTIMIZER.format("a LARS optimizer")),
    ("lars_configs", (), _OPTIMIZER.format("a LARS optimizer")),
    ("adam_d2sum", _OFF, _OPTIMIZER.format("that optimizer")),
    (
        "dgc",
        _OFF,
        "it drops gradient elements, so the numbers change; use gradient accumulation or stage 1 to send less",
    ),
    (
        "dgc_configs",
        (),
        "it drops gradient elements, so the numbers change; use accumulate_steps to send less",
    ),
    ("localsgd", _OFF, _LOCAL),
    ("localsgd_configs", (), _LOCAL),
    ("adaptive_localsgd", _OFF, _LOCAL),
    ("adaptive_localsgd_configs", (), _LOCAL),
    (
        "sync_batch_norm",
        _OFF,
        "the model is yours: call torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before distributed_model",
    ),
    ("asp", _OFF, "pruning is a change of the model: prune it before distributed_model"),
    ("qat", _OFF, "quantization is a change of the model: prepare it before distributed_model"),
    ("qat_configs", (), "quantization is a change of the model: prepare it before distributed_model"),
    # ---- communication
    ("nccl_comm_num", (1,), "one communicator for each group is used; leave it out or set 1"),
    ("use_hierarchical_allreduce", _OFF, _NCCL.format("NCCL_ALGO")),
    ("hierarchical_allreduce_inter_nranks", (1,), _NCCL.format("NCCL_ALGO")),
    ("last_comm_group_size_MB", (1,), "all buckets aim at one size: set bucket_bytes"),
    ("fuse_grad_size_in_num", (), "buckets are sized in bytes: set bucket_bytes"),
    ("fuse_grad_size_in_TFLOPS", (), "buckets are sized in bytes: set bucket_bytes"),
    ("heter_ccl_mode", _OFF, "mixed kinds of devices in one job are not supported; leave it out"),
    *(
        (f"hybrid_configs.{axis}_configs.{name}", (), _NCCL.format("NCCL_NTHREADS, NCCL_ALGO, NCCL_PROTO"))
        for axis in ("mp", "pp", "sharding")
        for name in ("nccl_config", "coll_nccl_config", "p2p_nccl_config", "shared_nccl_config", "check_nccl_config")
    ),
    *(
        (f"hybrid_configs.{group}_configs", (), _NCCL.format("NCCL_NTHREADS, NCCL_ALGO, NCCL_PROTO"))
        for group in (
            "dp",
            "sep",
            "ep",
            "cp",
            "moe_sharding",
            "cp_sharding",
            "default_comm_group",
            "dp_sep",
            "pp_mp",
        )
    ),
    # ---- static graph, parameter server, automatic modes
    ("auto", _OFF, "layouts are given, not searched, by a strategy; leave it out"),
    ("semi_auto", _OFF, "layouts are given, not searched, by a strategy; leave it out"),
    ("auto_search", _OFF, "layouts are given, not searched, by a strategy; leave it out"),
    ("split_data", (True,), "each data-parallel rank gets its own samples: use DistributedBatchSampler"),
    ("build_strategy", (), _STATIC),
    ("execution_strategy", (), _STATIC),
    (
        "calc_comm_same_stream",
        _OFF,
        "communication has a stream of its own; set overlap_comm = False to run it in line",
    ),
    ("a_sync", _OFF, _SERVER),
    ("a_sync_configs", (), _SERVER),
    ("elastic", _OFF, "a job does not change its size while it runs; start it again with another world size"),
    ("is_fl_ps_mode", _OFF, _SERVER),
    ("with_coordinator", _OFF, _SERVER),
    ("is_with_coordinator", _OFF, _SERVER),
    ("trainer_desc_configs", (), _SERVER),
    ("fs_client_param", (), _SERVER),
    ("sparse_table_configs", (), _SERVER),
    ("downpour_table_param", (), _SERVER),
    ("cudnn_exhaustive_search", _OFF, _CUDNN.format("torch.backends.cudnn.benchmark = True")),
    ("cudnn_batchnorm_spatial_persistent", _OFF, _CUDNN.format("torch.backends.cudnn options")),
    ("conv_workspace_size_limit", (), _CUDNN.format("torch.backends.cudnn options")),
    (
        "gradient_scale_configs.scale_gradient",
        _OFF,
        "gradients are scaled in one place; divide the loss instead",
    ),
    (
        "gradient_merge_configs.avg",
        (True,),
        "gradients are the mean over micro-batches; set loss_reduction = 'sum' to sum",
    ),
    # ---- sharding_configs
    (
        "sharding_configs.sharding_segment_strategy",
        ("segment_broadcast_MB",),
        "cuts follow bucket_bytes; leave it out",
    ),
    ("sharding_configs.segment_anchors", (), "cuts follow bucket_bytes; leave it out"),
    ("sharding_configs.optimize_cast", _OFF, _STATIC),
    ("sharding_configs.pp_allreduce_in_optimize", _OFF, _STATIC),
    ("sharding_configs.enable_tuning", _OFF, "layouts are given, not searched, by a strategy; leave it out"),
    ("sharding_configs.use_calc_stream", _OFF, "set overlap_comm = False to run communication in line"),
    (
        "hybrid_configs.sharding_configs.enable_fuse_optimizer_states",
        _OFF,
        "optimizer state keeps the optimizer's own form; leave it out",
    ),
    (
        "hybrid_configs.sharding_configs.offload_opt_buffer_size",
        (-1, 0),
        "host memory is as large as the state; set sharding_configs.offload = 'optimizer'",
    ),
    # ---- pipeline
    ("pipeline_configs.enable_partial_send_recv", _OFF, _LATER.format("sending boundary values cut over tp")),
    *(
        (f"hybrid_configs.pp_configs.{key}", _OFF, _LATER.format(f"{key} (a pipeline setting)"))
        for key in (
            "best_unbalanced_scheduler",
            "enable_offload_queue",
            "use_dualpipev",
            "forward_backward_overlap_scheduler",
            "overlap_p2p_comm",
            "clear_every_step_cache",
        )
    ),
    (
        "hybrid_configs.pp_configs.use_batch_p2p_comm",
        (True,),
        _LATER.format("another way to send between stages"),
    ),
    ("hybrid_configs.pp_configs.enable_timer", _OFF, "use hybrid.trace() to measure"),
    ("hybrid_configs.pp_configs.profiling", _OFF, "use hybrid.trace() to measure"),
    (
        "hybrid_configs.pp_configs.sync_mode",
        ("broadcast",),
        "weights held by several stages are equal by construction",
    ),
    ("hybrid_configs.enable_optimizer_timer", _OFF, "use hybrid.trace() to measure"),
    # ---- tensor parallel
    ("hybrid_configs.mp_configs.sync_mode", ("broadcast",), "replicated weights are equal by construction"),
    (
        "hybrid_configs.mp_configs.sync_param_name",
        (),
        "replicated weights are equal by construction, all of them",
    ),
    *(
        (f"hybrid_configs.mp_configs.{key}", _OFF, _LATER.format(f"{key} (a tensor-parallel setting)"))
        for key in (
            "mp_async_allreduce",
            "mp_skip_c_identity",
            "mp_fused_linear_param_grad_add",
            "recompute_allgather",
            "sp_async_reduce_scatter",
        )
    ),
    # ---- experts
    ("hybrid_configs.ep_degree", (1,), _MOE),
    ("hybrid_configs.moe_sharding_degree", (1,), _MOE),
    ("hybrid_configs.cp_sharding_degree", (1,), _MOE),
    # ---- mixed precision and recompute
    (
        "amp_configs.decr_every_n_nan_or_inf",
        (1,),
        "the loss scale shrinks at every overflow; leave it out or set 1",
    ),
    ("amp_configs.use_dynamic_loss_scaling", (True,), _LATER.format("a fixed loss scale")),
    ("amp_configs.custom_white_list", (), "list the modules that must stay in fp32 in custom_fp32 instead"),
    (
        "amp_configs.custom_black_varnames",
        (),
        "list modules in custom_fp32; there are no variable names here",
    ),
    ("amp_configs.use_fp16_guard", _OFF, _STATIC),
    ("amp_configs.use_optimizer_fp16", _OFF, "optimizer state is fp32; leave it out"),
    ("recompute_configs.checkpoints", (), "it names tensors of a static graph; name modules in units"),
    ("recompute_configs.enable_offload", _OFF, _LATER.format("offload of activations")),
    ("recompute_configs.checkpoint_shape", (), _STATIC),
)
