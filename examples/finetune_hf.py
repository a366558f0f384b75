"""Masked-word training of a small BERT from transformers: tied embedding, a loss over tokens, offline, half a minute.

python examples/finetune_hf.py                                                    one process
hybrid run --nproc 2 examples/finetune_hf.py --stage 3 --amp bf16 --recompute     two ranks, all state cut over them
hybrid run --nproc 4 examples/finetune_hf.py                                      four ranks, ZeRO stage 2
torchrun --nproc-per-node 4 examples/finetune_hf.py                               the same under plain torchrun
"""

import argparse

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

import hybrid

try:
    from transformers import BertConfig, BertForMaskedLM
except ImportError as error:
    raise SystemExit("This example needs transformers: pip install 'transformers>=5,<6'") from error

PAD, MASK, TOPICS, WORDS, LENGTH = 0, 1, 8, 8, 24


def document(seed: int) -> dict[str, torch.Tensor]:
    """8 to 24 words of one topic: who reads the topic off the others guesses a masked word right once in 8."""
    generator = torch.Generator().manual_seed(seed)
    topic, length = (torch.randint(*ends, (1,), generator=generator) for ends in ((0, TOPICS), (8, LENGTH + 1)))
    words = 2 + topic * WORDS + torch.randint(WORDS, (LENGTH,), generator=generator)
    real = torch.arange(LENGTH) < length
    masked = real & (torch.rand(LENGTH, generator=generator) < 0.15)
    ids = words.masked_fill(masked, MASK).masked_fill(~real, PAD)
    return {"input_ids": ids, "attention_mask": real.long(), "labels": words.masked_fill(~masked, -100)}


def masked_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    # Not model(**batch).loss, a mean over this rank's masked words: ranks have different numbers of them, and the mean
    # of the ranks' means is not the mean over all. With (sum, count) the step is that of one process on all documents.
    ids, mask, labels = (batch[k].to(model.device) for k in ("input_ids", "attention_mask", "labels"))
    scores = model(ids, attention_mask=mask).logits
    return functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="documents per step, of all ranks together (default: 32)")
    parser.add_argument("--stage", type=int, choices=range(4), default=2, help="ZeRO stage (default: %(default)s)")
    parser.add_argument("--amp", choices=["bf16"], help="compute in bfloat16, with float32 masters (default: float32)")
    parser.add_argument("--recompute", action="store_true", help="compute activations again in backward")
    options = parser.parse_args()
    strategy = hybrid.DistributedStrategy(sharding=True, sharding_configs={"stage": options.stage})
    strategy.global_batch_size, strategy.recompute = options.batch, options.recompute
    if options.amp:
        strategy.amp, strategy.amp_configs = True, {"dtype": options.amp, "level": "O2"}
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # ranks would draw different ones
    model = BertForMaskedLM(BertConfig(vocab_size=2 + TOPICS * WORDS, initializer_range=0.1, **sizes, **no_dropout))
    model = hybrid.distributed_model(model, strategy=strategy)
    optimizer = hybrid.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))

    def batches(seeds: range) -> DataLoader:
        documents, own_size = [document(seed) for seed in seeds], options.batch // hybrid.get_mesh().world_size
        return DataLoader(documents, batch_sampler=hybrid.DistributedBatchSampler(documents, own_size))

    show = print if hybrid.get_mesh().rank == 0 else lambda line: None
    show(" step    loss per masked word")
    for step, batch in enumerate(batches(range(options.steps * options.batch)), start=1):
        result = model.train_batch(batch, optimizer, forward_step=masked_loss)
        if step % 10 == 1 or step == options.steps:
            show(f"{step:5}    {result.loss:.4f}")
    held_out = [model.eval_batch(batch, forward_step=masked_loss) for batch in batches(range(10**9, 10**9 + 256))]
    show(f"held-out loss {sum(one.loss * one.count for one in held_out) / sum(one.count for one in held_out):.4f}")
    show(f"bytes on a rank between steps: {model.memory_bytes()}")
    hybrid.shutdown()


if __name__ == "__main__":
    main()
