"""A small language model whose MoE layers have 896 experts, top-16, trained on one rank or several.

    python examples/02_moe_layer.py
    torchrun --standalone --nproc-per-node 2 examples/02_moe_layer.py --record trace.npz
    torchrun --standalone --nproc-per-node 4 examples/02_moe_layer.py --policy balanced

It reads English byte by byte: the documentation that comes with Python. The experts are spread over the ranks and the
sequences of a batch as well; the batch is the same for any number of ranks, and so are the losses, up to rounding.
They are the same under either policy, too: it only says where an expert computes its rows.
Exits non-zero when the model has learned nothing, or ranks that should be balanced are not.
"""

import argparse
import json
import os
import pydoc_data.topics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import moonep

EXPERTS, TOP_K = 896, 16
HIDDEN, EXPERT_WIDTH, HEADS, LAYERS = 64, 24, 4, 2
CONTEXT, BATCH = 64, 32  # a batch is for all ranks together
LEARNING_RATE, WARMUP_STEPS = 3e-3, 20
BALANCE = 1e-2  # weight of the balancing loss
# Without slack, so that every step needs replicas.
POLICIES = {"home": moonep.Home(), "balanced": moonep.Balanced(slack=0)}


class MoE(nn.Module):
    """A router, and this rank's part of the experts. All layers use one Buffer."""

    def __init__(self, ep: moonep.Buffer):
        super().__init__()
        self.ep = ep
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.load = torch.ones(EXPERTS)  # of every expert in the last step, over the mean load
        # Every rank draws all experts and keeps its own, so that the model does not depend on the number of ranks.
        home = slice(ep.first_local_expert, ep.first_local_expert + ep.num_local_experts)
        self.w_in = nn.Parameter((torch.randn(EXPERTS, HIDDEN, EXPERT_WIDTH) / HIDDEN**0.5)[home].clone())
        self.w_out = nn.Parameter((torch.randn(EXPERTS, EXPERT_WIDTH, HIDDEN) / EXPERT_WIDTH**0.5)[home].clone())
        # Of the last step: (topk_idx, topk_weights), the balancing loss, and the rows of every rank.
        self.routing = self.crowding = self.rank_rows = None

    def forward(self, x):  # [T, H]
        logits = self.router(x)
        scores, topk_idx = logits.sigmoid().topk(TOP_K)
        weights = scores / scores.sum(1, keepdim=True)
        # Lower when the router prefers experts that had little to do: 1 at equal preference or equal load.
        self.crowding = (logits.softmax(1) @ self.load).sum() / (BATCH * CONTEXT)

        plan = self.ep.plan(topk_idx)
        recv = self.ep.dispatch(x, plan, weights)
        y = self.ep.combine(self.experts(recv.x, plan), plan, recv.weights)

        self.routing, self.rank_rows = (topk_idx, weights.detach()), plan.rank_rows
        return y

    def experts(self, rows, plan):
        """Each group of rows [N, H] through its expert: those at home here, then the replicas of this step."""
        w_in, w_out = self.ep.replicate(plan, self.w_in, self.w_out)
        sizes = plan.group_sizes.tolist()
        *groups, unused = rows.split([*sizes, len(rows) - sum(sizes)])
        out = [F.gelu(x @ w1) @ w2 for x, w1, w2 in zip(groups, w_in, w_out, strict=True)]
        return torch.cat([*out, unused])

    def note_load(self):
        """Takes the load of all ranks into the next step's balancing loss."""
        counts = torch.bincount(self.routing[0].flatten(), minlength=EXPERTS)
        sum_over_ranks([counts])
        self.load = counts * EXPERTS / counts.sum()

    @property
    def maxvio(self):
        return self.load.max().item() - 1

    @property
    def fullest(self):
        """Rows of the rank that has most, over the mean."""
        return (self.rank_rows.max() / self.rank_rows.double().mean()).item()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x):  # [B, C, H]
        split = self.qkv(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*split, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, ep: moonep.Buffer):
        super().__init__()
        self.embed, self.position = nn.Embedding(256, HIDDEN), nn.Embedding(CONTEXT, HIDDEN)
        self.attention = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.moe = nn.ModuleList(MoE(ep) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2 * LAYERS + 1))
        self.head = nn.Linear(HIDDEN, 256)

    def forward(self, text):  # [B, C] -> [B, C, 256]
        x = self.embed(text) + self.position.weight
        for i in range(LAYERS):
            x = x + self.attention[i](self.norms[2 * i](x))
            x = x + self.moe[i](self.norms[2 * i + 1](x).flatten(0, 1)).view_as(x)
        return self.head(self.norms[-1](x))

    def dense_parameters(self):
        """Those that every rank holds. Gradients of experts are complete where the experts are."""
        return [p for name, p in self.named_parameters() if not name.endswith((".w_in", ".w_out"))]


def sum_over_ranks(tensors):
    """Adds up each tensor over the ranks, in one exchange."""
    if dist.is_initialized():
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))


def read_text():
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def unigram_entropy(text):
    """In nats: the loss of the best guess that looks at no context."""
    share = torch.bincount(text, minlength=256) / len(text)
    return -torch.xlogy(share, share).sum().item()


def train(ep, text, steps, seed, recorder):
    """The loss of every step: the mean over the whole batch."""
    torch.manual_seed(seed)  # on every rank the same: the model's dense part and the batches
    model = Model(ep)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), eps=1e-6)
    mine = slice(BATCH * ep.rank // ep.num_ranks, BATCH * (ep.rank + 1) // ep.num_ranks)
    losses = []
    began = time.perf_counter()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS)
        starts = torch.randint(len(text) - CONTEXT, (BATCH,))[mine]
        window = text[starts[:, None] + torch.arange(CONTEXT + 1)]
        logits = model(window[:, :-1])
        # Gradients are summed over ranks, so the mean is over the tokens of all of them.
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten(), reduction="sum") / (BATCH * CONTEXT)
        optimizer.zero_grad()
        (loss + BALANCE * sum(moe.crowding for moe in model.moe)).backward()
        total = loss.detach()
        sum_over_ranks([p.grad for p in model.dense_parameters()] + [total])
        optimizer.step()
        for moe in model.moe:
            moe.note_load()
        losses.append(total.item())
        recorder.step(step, model.moe[-1].routing)
        if ep.rank == 0 and (step % 20 == 0 or step == steps - 1):
            maxvio = "  ".join(f"{moe.maxvio:.1f}" for moe in model.moe)
            fullest = "  ".join(f"{moe.fullest:.3f}" for moe in model.moe)
            secs = time.perf_counter() - began
            print(
                f"step {step:4d}  loss {losses[-1]:.4f}  maxvio {maxvio}  fullest rank {fullest}  {secs:6.1f} s",
                flush=True,
            )
        if ep.config.policy == POLICIES["balanced"] and any(moe.fullest > 1.001 for moe in model.moe):
            sys.exit(f"the ranks should have the same number of rows: {model.moe[0].rank_rows.tolist()}")
    return losses


class Recorder:
    """Keeps the routing of the last layer: of the last step, and of two on the way."""

    def __init__(self, path, steps):
        self.path, self.wanted = path, {steps // 4, steps // 2, steps - 1}
        self.routings = []

    def step(self, step, routing):
        if self.path and step in self.wanted:
            self.routings.append([gather_tokens(tensor) for tensor in routing])

    def save(self, rank):
        if not self.path or rank != 0:
            return
        from moonep.trace import Trace, save_trace

        idx, weights = (torch.stack(tensors).numpy() for tensors in zip(*self.routings, strict=True))
        steps = ", ".join(str(step) for step in sorted(self.wanted))
        description = f"examples/02_moe_layer.py: layer {LAYERS} of {LAYERS}, steps {steps}; text: pydoc_data.topics"
        save_trace(self.path, Trace(idx.astype("int32"), weights.astype("float16"), EXPERTS, description))


def gather_tokens(tensor):
    """The whole batch, from the ranks that hold it."""
    if dist.is_initialized():
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor.contiguous())
        tensor = torch.cat(parts)
    return tensor


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", choices=POLICIES, default="home", help="where rows may go")
    parser.add_argument("--record", metavar="FILE.npz", help="write the routing as a trace for moonep bench")
    parser.add_argument("--losses", metavar="FILE.json", help="write the loss of every step")
    options = parser.parse_args()

    torch.set_num_threads(1)  # the tensors are small: more threads only wait for each other
    if "WORLD_SIZE" in os.environ:  # torchrun
        dist.init_process_group("gloo")
        if BATCH % dist.get_world_size():
            sys.exit(f"the ranks must divide the batch of {BATCH} sequences, got {dist.get_world_size()}")
    text = read_text()
    recorder = Recorder(options.record, options.steps)
    with moonep.Buffer(
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden=HIDDEN,
        max_tokens=BATCH * CONTEXT,
        dtype=torch.float32,
        policy=POLICIES[options.policy],
    ) as ep:
        if ep.rank == 0:
            experts = f"{EXPERTS} experts, top-{TOP_K}, {LAYERS} layers, policy {options.policy}"
            print(f"{ep.num_ranks} rank(s), {ep.transport}; {experts}", flush=True)
        losses = train(ep, text, options.steps, options.seed, recorder)
        rank = ep.rank
    recorder.save(rank)
    if dist.is_initialized():
        dist.destroy_process_group()

    final, entropy = sum(losses[-10:]) / len(losses[-10:]), unigram_entropy(text)
    if rank == 0:
        if options.losses:
            with open(options.losses, "w") as file:
                json.dump(losses, file)
        print(f"first loss {losses[0]:.3f}, mean of the last {len(losses[-10:])} {final:.3f} nats per byte")
        print(f"unigram entropy of the {len(text)} bytes: {entropy:.3f}")
    learned = final < losses[0] if options.steps < 100 else final < 0.85 * entropy
    if not learned:
        sys.exit("the model has not learned: the loss should be lower")


if __name__ == "__main__":
    main()
