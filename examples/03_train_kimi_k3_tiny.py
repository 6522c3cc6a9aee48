"""A small language model of Kimi K3's layers: 896 experts, top-16, latent, evenly used by Quantile Balancing.

    python examples/03_train_kimi_k3_tiny.py
    torchrun --standalone --nproc-per-node 2 examples/03_train_kimi_k3_tiny.py --out curves
    torchrun --standalone --nproc-per-node 4 examples/03_train_kimi_k3_tiny.py --expert-ranks 2

It reads English byte by byte (the documentation that comes with Python) and trains twice, with and without Quantile
Balancing. All ranks divide the sequences of a batch; groups of `--expert-ranks` of them divide the experts, and hold
the same ones as the other groups. Policy `Balanced` evens the ranks' rows within a step, Quantile Balancing the
experts' from step to step. Exits non-zero when the model has learned nothing, or is not more even than without.
"""

import argparse
import json
import os
import pydoc_data.topics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import moonep
from moonep.nn import LatentMoE, LatentMoEConfig

CONFIG = LatentMoEConfig.kimi_k3_tiny()
HEADS, LAYERS = 4, 3
CONTEXT, BATCH = 64, 32  # a batch is for all ranks together
LEARNING_RATE, WARMUP_STEPS = 3e-3, 20
RUNS = {"with Quantile Balancing": True, "without": False}


# ---- the model ----


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(CONFIG.hidden, 3 * CONFIG.hidden, bias=False)
        self.out = nn.Linear(CONFIG.hidden, CONFIG.hidden, bias=False)

    def forward(self, x):  # [B, C, H]
        split = self.qkv(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*split, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, ep: moonep.Buffer):
        super().__init__()
        self.embed, self.position = nn.Embedding(256, CONFIG.hidden), nn.Embedding(CONTEXT, CONFIG.hidden)
        self.attention = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.moe = nn.ModuleList(LatentMoE(ep, CONFIG) for _ in range(LAYERS))  # one Buffer for all
        self.norms = nn.ModuleList(nn.RMSNorm(CONFIG.hidden) for _ in range(2 * LAYERS + 1))
        self.head = nn.Linear(CONFIG.hidden, 256)

    def forward(self, text):  # [B, C] -> [B, C, 256]
        x = self.embed(text) + self.position.weight
        for i in range(LAYERS):
            x = x + self.attention[i](self.norms[2 * i](x))
            x = x + self.moe[i](self.norms[2 * i + 1](x))
        return self.head(self.norms[-1](x))


# ---- the ranks ----


class Ranks:
    """Who shares what: `world` a batch, `experts` (a part of it) the experts, `copies` the same experts."""

    def __init__(self, expert_ranks):
        self.world = self.experts = self.copies = None  # one process alone
        if "WORLD_SIZE" not in os.environ:  # not torchrun
            return
        dist.init_process_group("gloo")
        size = dist.get_world_size()
        expert_ranks = expert_ranks or size
        if size % expert_ranks or BATCH % size:
            sys.exit(f"--expert-ranks must divide the {size} ranks, and these the batch of {BATCH} sequences")
        mesh = dist.init_device_mesh("cpu", (size // expert_ranks, expert_ranks), mesh_dim_names=("copies", "experts"))
        self.world, self.experts, self.copies = dist.group.WORLD, mesh.get_group("experts"), mesh.get_group("copies")

    @property
    def rank(self):
        return dist.get_rank() if self.world else 0

    @property
    def num_ranks(self):
        return dist.get_world_size() if self.world else 1


def sum_over(group, tensors):
    """Adds up each tensor over the ranks of a group, in one exchange."""
    if group is not None and dist.get_world_size(group) > 1:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat, group=group)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))


def sum_gradients(model, ranks, total):
    """Gradients of all tokens. An expert's has those of its group's tokens already; `total` is summed along."""
    grads = {name: p.grad for name, p in model.named_parameters()}
    sum_over(ranks.world, [grad for name, grad in grads.items() if ".experts." not in name] + [total])
    sum_over(ranks.copies, [grad for name, grad in grads.items() if ".experts." in name])


# ---- training ----


def read_text():
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def unigram_entropy(text):
    """In nats: the loss of the best guess that looks at no context."""
    share = torch.bincount(text, minlength=256) / len(text)
    return -torch.xlogy(share, share).sum().item()


def train(ep, ranks, text, steps, seed, balanced):
    """Of every step: the mean loss of the batch, and the imbalance of experts in every layer."""
    torch.manual_seed(seed)  # on every rank the same: the model's dense part and the batches
    model = Model(ep)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), eps=1e-6)
    mine = slice(BATCH * ranks.rank // ranks.num_ranks, BATCH * (ranks.rank + 1) // ranks.num_ranks)
    losses, maxvios = [], []
    began = time.perf_counter()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS)
        starts = torch.randint(len(text) - CONTEXT, (BATCH,))[mine]
        window = text[starts[:, None] + torch.arange(CONTEXT + 1)]
        logits = model(window[:, :-1])
        # Gradients are summed over ranks, so the mean is over the tokens of all of them.
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten(), reduction="sum") / (BATCH * CONTEXT)
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach()
        sum_gradients(model, ranks, total)
        for moe in model.moe:
            balancing = moe.router.balancing
            balancing.step(ranks.world)
            if not balanced:
                balancing.bias.zero_()
        optimizer.step()
        losses.append(total.item())
        maxvios.append([moe.router.balancing.maxvio for moe in model.moe])
        if ranks.rank == 0 and (step % 20 == 0 or step == steps - 1):
            shown = "  ".join(f"{maxvio:5.1f}" for maxvio in maxvios[-1])
            print(
                f"step {step:4d}  loss {losses[-1]:.4f}  maxvio {shown}  {time.perf_counter() - began:6.1f} s",
                flush=True,
            )
    return losses, maxvios


def mean_of_last(values, count=10):
    return torch.tensor(values[-count:]).mean().item()


def plot(curves, path):
    """Loss and imbalance (the mean over layers) of both runs."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 7), layout="constrained")
    for name, (losses, maxvios) in curves.items():
        top.plot(losses, label=name, linewidth=1)
        bottom.plot(torch.tensor(maxvios).mean(1).tolist(), label=name, linewidth=1)
    top.set(title=f"{CONFIG.num_experts} experts, top-{CONFIG.top_k}, {LAYERS} layers", ylabel="loss, nats per byte")
    bottom.set(ylabel="imbalance of experts: max load / mean - 1", xlabel="step", yscale="log")
    top.legend()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--expert-ranks", type=int, help="ranks that divide the experts; default: all")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write curves.json and curves.png there")
    options = parser.parse_args()

    torch.set_num_threads(1)  # the tensors are small: more threads only wait for each other
    ranks, text, curves = Ranks(options.expert_ranks), read_text(), {}
    with moonep.Buffer(
        ranks.experts,
        num_experts=CONFIG.num_experts,
        top_k=CONFIG.top_k,
        hidden=CONFIG.latent,
        max_tokens=BATCH * CONTEXT,
        dtype=torch.float32,
        policy=moonep.Balanced(),
    ) as ep:
        for name, balanced in RUNS.items():
            if ranks.rank == 0:
                print(f"{name}: {ranks.num_ranks} rank(s), experts over {ep.num_ranks}, {ep.transport}", flush=True)
            curves[name] = train(ep, ranks, text, options.steps, options.seed, balanced)
    rank = ranks.rank
    if dist.is_initialized():
        dist.destroy_process_group()

    if rank == 0 and options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "curves.json").write_text(json.dumps(curves))
        plot(curves, options.out / "curves.png")
    losses, maxvios = curves["with Quantile Balancing"]
    final, entropy = mean_of_last(losses), unigram_entropy(text)
    even, uneven = mean_of_last(maxvios), mean_of_last(curves["without"][1])
    if rank == 0:
        print(f"loss {losses[0]:.3f} at first, {final:.3f} nats per byte in the end; unigram entropy {entropy:.3f}")
        print(f"imbalance in the end {even:.2f} with Quantile Balancing, {uneven:.2f} without")
    if not (final < losses[0] if options.steps < 100 else final < 0.85 * entropy):
        sys.exit("the model has not learned: the loss should be lower")
    if not even < uneven / 2:
        sys.exit("Quantile Balancing should have made the experts' load at least twice as even")


if __name__ == "__main__":
    main()
