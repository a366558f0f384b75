"""A small byte-level GPT in a plain loop: an ordinary model, an ordinary optimizer, two calls of hybrid.

python examples/train_gpt.py                                  one process
hybrid run --nproc 4 examples/train_gpt.py                    four ranks, ZeRO stage 2
torchrun --nproc-per-node 4 examples/train_gpt.py             the same under plain torchrun
"""

import argparse
import pathlib
import sysconfig

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hybrid


class SourceCode(Dataset):
    """Part of Python's standard library, as windows of 64 bytes and the byte that follows each of them."""

    def __init__(self, length: int = 64) -> None:
        files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"\n".join(file.read_bytes() for file in files)
        self.text, self.length = torch.frombuffer(bytearray(text), dtype=torch.uint8), length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.text[index * self.length : (index + 1) * self.length + 1].long()
        return window[:-1], window[1:]


class GPT(nn.Module):
    def __init__(self, width: int = 128, num_layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(64, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.head(self.blocks(self.embedding(x) + self.position[: x.shape[1]], mask, is_causal=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="windows per rank and step")
    options = parser.parse_args()

    torch.manual_seed(0)
    strategy = hybrid.DistributedStrategy()
    strategy.sharding = True
    strategy.sharding_configs = {"stage": 2}
    model = hybrid.distributed_model(GPT(), strategy=strategy)  # starts torch.distributed if nobody has
    optimizer = hybrid.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))

    dataset, loss_fn = SourceCode(), nn.CrossEntropyLoss()
    sampler = hybrid.DistributedBatchSampler(dataset, options.batch, shuffle=True, drop_last=True)
    rank, device = hybrid.get_mesh().rank, hybrid.get_mesh().device
    for step, (x, y) in enumerate(DataLoader(dataset, batch_sampler=sampler), start=1):
        loss = loss_fn(model(x.to(device)).flatten(0, 1), y.to(device).flatten())
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step % 10 == 0 or step == options.steps):
            print(f"step {step}: loss {loss.item():.3f} nats per byte", flush=True)
        if step == options.steps:
            break
    hybrid.shutdown()


if __name__ == "__main__":
    main()
