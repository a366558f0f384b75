"""A small byte-level GPT as a list of layers, over the stages of a pipeline; its head is its embedding.

python examples/train_pipeline.py                                     one process
hybrid run --nproc 2 examples/train_pipeline.py --virtual 2           two stages of two chunks of layers each
hybrid run --nproc 4 examples/train_pipeline.py                       two stages, each on two ranks with ZeRO stage 2
torchrun --nproc-per-node 4 examples/train_pipeline.py                the same under plain torchrun
"""

import argparse
import os
import pathlib
import sysconfig

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import hybrid


class Positions(nn.Embedding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight[: x.shape[1]]


class Block(nn.TransformerEncoderLayer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return super().forward(x, mask, is_causal=True)


def head(layer: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, layer.weight) * 0.1  # the embedding's values are large for a head


def loss_fn(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def gpt(width: int = 128, num_layers: int = 6) -> hybrid.PipelineLayer:
    settings = {"dropout": 0.0, "batch_first": True, "norm_first": True}
    layers = [  # nothing is built here: each rank builds those of its own stage
        hybrid.SharedLayerDesc("bytes", nn.Embedding, 256, width),
        hybrid.LayerDesc(Positions, 64, width),
        *[hybrid.LayerDesc(Block, width, 4, 4 * width, **settings) for _ in range(num_layers)],
        hybrid.LayerDesc(nn.LayerNorm, width),
        hybrid.SharedLayerDesc("bytes", nn.Embedding, 256, width, forward_func=head),
    ]
    return hybrid.PipelineLayer(layers, loss_fn=loss_fn, seed=0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="windows per step of each pipeline")
    parser.add_argument("--stages", type=int, default=min(2, int(os.environ.get("WORLD_SIZE", "1"))))
    parser.add_argument("--virtual", type=int, default=1, help="chunks of layers per stage; interleaves from 2 on")
    options = parser.parse_args()
    strategy = hybrid.DistributedStrategy(sharding=True, sharding_configs={"stage": 2}, pipeline=True)
    strategy.pipeline_configs = {"degree": options.stages, "accumulate_steps": 4, "virtual_stages": options.virtual}
    if options.virtual > 1:
        strategy.pipeline_configs["schedule"] = "interleaved"
    model = hybrid.distributed_model(gpt(), strategy=strategy)
    optimizer = hybrid.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    text = b"".join(file.read_bytes() for file in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")))
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // 65 * 65].view(-1, 65).long()
    sampler = hybrid.DistributedBatchSampler(windows, options.batch, shuffle=True, drop_last=True)
    rank, device = hybrid.get_mesh().rank, hybrid.get_mesh().device
    for step, x in enumerate(DataLoader(windows, batch_sampler=sampler), start=1):  # the same batch on all stages
        result = model.train_batch((x[:, :-1].to(device), x[:, 1:].to(device)), optimizer, loss_fn=loss_fn)
        if rank == 0 and (step % 10 == 0 or step == options.steps):
            print(f"step {step}: loss {result.loss:.3f} nats per byte", flush=True)
        if step == options.steps:
            break
    hybrid.shutdown()


if __name__ == "__main__":
    main()
