"""An unmodified Llama of transformers in 3D: pipeline × tensor × data parallel, ZeRO stage 2; offline, half a minute.

python examples/hf_3d.py                                        one process
hybrid run --nproc 4 examples/hf_3d.py                          two stages, each layer cut over two ranks
hybrid run --nproc 8 examples/hf_3d.py                          as well over two data-parallel ranks
torchrun --nproc-per-node 8 examples/hf_3d.py                   the same under plain torchrun
"""

import argparse
import os
import pathlib
import sysconfig

import torch
from torch.utils.data import DataLoader

import hybrid

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as error:
    raise SystemExit("This example needs transformers: pip install 'transformers>=5,<6'") from error

LENGTH, HELD_OUT = 64, 64  # bytes of a window; windows that are not trained on


def main() -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16, help="windows per step, of all ranks together")
    parser.add_argument("--pp", type=int, default=2 if ranks > 1 else 1, help="pipeline stages")
    parser.add_argument("--tp", type=int, default=2 if ranks > 3 else 1, help="ranks that share a layer")
    parser.add_argument("--out", type=pathlib.Path, default="llama_3d", help="folder for the weights")
    options = parser.parse_args()
    if ranks % (options.pp * options.tp):
        raise SystemExit(f"{ranks} ranks are no multiple of --pp {options.pp} x --tp {options.tp}: choose others")
    strategy = hybrid.DistributedStrategy(sharding=True, sharding_configs={"stage": 2}, gradient_clipping=1.0)
    strategy.tensor_parallel, strategy.tensor_parallel_configs = True, {"degree": options.tp}
    strategy.accumulate_steps = 4  # micro-batches
    if options.pp > 1:
        strategy.pipeline, strategy.pipeline_configs = True, {"degree": options.pp, "schedule": "zb-h1"}
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "max_position_embeddings": LENGTH}
    config = LlamaConfig(vocab_size=256, num_attention_heads=4, num_key_value_heads=2, **sizes)  # a byte is a token
    torch.manual_seed(0)
    ids = torch.zeros(max(1, options.batch // max(1, ranks // options.pp // options.tp) // 4), LENGTH, dtype=torch.long)
    model = hybrid.distributed_model(
        LlamaForCausalLM(config),
        strategy=strategy,
        sample={"input_ids": ids, "labels": ids} if options.pp > 1 else None,  # a micro-batch, to find the cuts
    )
    optimizer = hybrid.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=2e-3))

    text = b"".join(file.read_bytes() for file in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")))
    text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    windows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH).long()
    train, held_out = windows[:-HELD_OUT], windows[-HELD_OUT:]
    own, rank = options.batch // hybrid.get_mesh().degree("dp_shard"), hybrid.get_mesh().rank
    sampler = hybrid.DistributedBatchSampler(train, own, shuffle=True, drop_last=True)
    for step, x in enumerate(DataLoader(train, batch_sampler=sampler), start=1):
        result = model.train_batch({"input_ids": x, "labels": x}, optimizer)  # calls model(**batch), takes its .loss
        if rank == 0 and (step % 10 == 0 or step == options.steps):
            print(f"step {step}: loss {result.loss:.4f} nats per byte")
        if step == options.steps:
            break
    sampler = hybrid.DistributedBatchSampler(held_out, HELD_OUT // hybrid.get_mesh().degree("dp_shard"))
    (x,) = DataLoader(held_out, batch_sampler=sampler)
    trained = model.eval_batch({"input_ids": x, "labels": x}).loss
    folder = hybrid.export_weights(model, options.out)  # nothing is gathered: each rank writes what it holds
    hybrid.shutdown()
    if rank > 0:
        return
    plain = LlamaForCausalLM.from_pretrained(folder).eval()  # any process can, without hybrid
    with torch.no_grad():
        loaded = plain(input_ids=held_out, labels=held_out).loss
    print(f"held-out loss {trained:.4f}; of from_pretrained({str(folder)!r}) in one process {loaded:.4f}")


if __name__ == "__main__":
    main()
