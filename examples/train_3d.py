"""A byte-level GPT in 3D: pipeline × tensor × data parallel with ZeRO stage 2. The model knows nothing of it.

python examples/train_3d.py                                     one process
hybrid run --nproc 4 examples/train_3d.py                       two stages, each layer cut over two ranks
hybrid run --nproc 8 examples/train_3d.py                       as well over two data-parallel ranks
torchrun --nproc-per-node 8 examples/train_3d.py                the same under plain torchrun
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


class GPT(nn.Module):
    def __init__(self, width: int = 128, num_layers: int = 4, length: int = 64) -> None:
        super().__init__()
        settings = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, **settings) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        x = self.bytes(x) + self.positions[: x.shape[1]]
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return self.head(self.norm(x))


def loss_fn(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def main() -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8, help="windows per step of each data-parallel rank")
    parser.add_argument("--pp", type=int, default=2 if ranks > 1 else 1, help="pipeline stages")
    parser.add_argument("--tp", type=int, default=2 if ranks > 3 else 1, help="ranks that share a layer")
    options = parser.parse_args()
    if ranks % (options.pp * options.tp):
        raise SystemExit(f"{ranks} ranks are no multiple of --pp {options.pp} x --tp {options.tp}: choose others")
    strategy = hybrid.DistributedStrategy(sharding=True, sharding_configs={"stage": 2})
    strategy.tensor_parallel, strategy.tensor_parallel_configs = True, {"degree": options.tp}
    strategy.accumulate_steps = 4  # micro-batches
    if options.pp > 1:
        strategy.pipeline, strategy.pipeline_configs = True, {"degree": options.pp, "schedule": "zb-h1"}
    torch.manual_seed(0)
    sample = torch.zeros(options.batch // 4, 64, dtype=torch.long) if options.pp > 1 else None  # a micro-batch
    model = hybrid.distributed_model(GPT(), strategy=strategy, sample=sample)
    optimizer = hybrid.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    text = b"".join(file.read_bytes() for file in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")))
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // 65 * 65].view(-1, 65).long()
    sampler = hybrid.DistributedBatchSampler(windows, options.batch, shuffle=True, drop_last=True)
    rank, device = hybrid.get_mesh().rank, hybrid.get_mesh().device
    for step, x in enumerate(DataLoader(windows, batch_sampler=sampler), start=1):
        result = model.train_batch((x[:, :-1].to(device), x[:, 1:].to(device)), optimizer, loss_fn=loss_fn)
        if rank == 0 and (step % 10 == 0 or step == options.steps):
            print(f"step {step}: loss {result.loss:.3f} nats per byte", flush=True)
        if step == options.steps:
            break
    hybrid.shutdown()


if __name__ == "__main__":
    main()
