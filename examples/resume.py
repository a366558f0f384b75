"""Training that can be stopped at any time and goes on: a checkpoint every few steps, one command for every start.

hybrid run --nproc 2 --resume checkpoints examples/resume.py                     stop it with Ctrl-C, run it again
hybrid run --nproc 4 --resume checkpoints examples/resume.py                     goes on with four ranks
hybrid run --nproc 4 --resume checkpoints --max-restarts 3 examples/resume.py    starts again by itself after a failure
HYBRID_RESUME=checkpoints torchrun --nproc-per-node 4 examples/resume.py         the same under plain torchrun

Without a folder nothing is saved: python examples/resume.py, or hybrid run --nproc 4 examples/resume.py.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hybrid


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10)
    options = parser.parse_args()

    torch.manual_seed(0)
    inputs = torch.randn(1000, 16)
    dataset = TensorDataset(inputs, torch.sin(inputs).sum(1, keepdim=True))

    strategy = hybrid.DistributedStrategy(sharding=True, sharding_configs={"stage": 2})
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1))
    model = hybrid.distributed_model(model, strategy=strategy)
    optimizer = hybrid.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    sampler = hybrid.DistributedBatchSampler(dataset, 32 // hybrid.get_mesh().world_size, shuffle=True, drop_last=True)
    state = {"lr_scheduler": scheduler, "sampler": sampler}

    # Nothing saved so far, or no --resume: step 0.
    step = hybrid.load_checkpoint(None, model, optimizer, **state).step
    directory = hybrid.resume_directory()
    rank = hybrid.get_mesh().rank
    if rank == 0:
        print(f"from step {step}", flush=True)
    while step < options.steps:
        for batch in DataLoader(dataset, batch_sampler=sampler, generator=torch.Generator()):
            result = model.train_batch(batch, optimizer, lr_scheduler=scheduler, loss_fn=nn.functional.mse_loss)
            step += 1
            if rank == 0 and step % 10 == 0:
                print(f"step {step}: loss {result.loss:.4f}", flush=True)
            if directory is not None and (step % options.save_every == 0 or step == options.steps):
                hybrid.save_checkpoint(directory, model, optimizer, step=step, keep_last=2, **state)
            if step == options.steps:
                break
    hybrid.shutdown()


if __name__ == "__main__":
    main()
