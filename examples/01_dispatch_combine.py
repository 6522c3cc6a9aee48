"""Tokens to their experts and back, checked against a dense computation.

    python examples/01_dispatch_combine.py
    torchrun --standalone --nproc-per-node 4 examples/01_dispatch_combine.py

Each rank knows what all ranks hold, so it can compute its own part of the answer with every expert at hand. The outputs
and all gradients must agree with that. Exits non-zero when they do not.
"""

import os
import sys

import torch
import torch.distributed as dist

import moonep

EXPERTS, TOP_K, HIDDEN = 60, 6, 64


def make_rank(rank):
    """What a rank passes: tokens [T, H], chosen experts and their weights [T, K], and the gradient of its output."""
    generator = torch.Generator().manual_seed(rank)
    num_tokens = 100 + 17 * rank  # T may differ
    x = torch.randn(num_tokens, HIDDEN, generator=generator)
    scores = torch.randn(num_tokens, EXPERTS, generator=generator)
    weights, topk_idx = scores.softmax(1).topk(TOP_K)
    topk_idx[::5, -1] = -1  # no route: these tokens go to one expert fewer
    return x, topk_idx, weights, torch.randn(num_tokens, HIDDEN, generator=generator)


def dense(x, topk_idx, weights, experts):
    """Every token through its experts, all of them here."""
    y = torch.zeros_like(x)
    for k in range(TOP_K):
        token = (topk_idx[:, k] >= 0).nonzero().flatten()
        expert = topk_idx[token, k]
        y = y.index_add(0, token, torch.einsum("th,thi->ti", x[token], experts[expert]) * weights[token, k, None])
    return y


def carried(ep, x, topk_idx, weights, local_experts):
    """The same with this rank's experts alone; the tokens travel."""
    plan = ep.plan(topk_idx)
    recv = ep.dispatch(x, plan, weights)
    groups = recv.x.split(plan.group_sizes.tolist())  # the rows of each expert
    expert_out = torch.cat([rows @ w for rows, w in zip(groups, local_experts, strict=True)])
    return ep.combine(expert_out, plan, recv.weights)


def leaves(*tensors):
    return [tensor.clone().requires_grad_() for tensor in tensors]


def main():
    if "WORLD_SIZE" in os.environ:  # torchrun
        dist.init_process_group("gloo")
    experts = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(1000)) / HIDDEN**0.5

    with moonep.Buffer(num_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=1000, dtype=torch.float32) as ep:
        rank, num_ranks = ep.rank, ep.num_ranks
        home = slice(ep.first_local_expert, ep.first_local_expert + ep.num_local_experts)

        x, topk_idx, weights, grad_y = make_rank(rank)
        found = leaves(x, weights, experts[home])
        y = carried(ep, found[0], topk_idx, found[1], found[2])
        y.backward(grad_y)

        with torch.no_grad():
            again = carried(ep, x, topk_idx, weights, experts[home])
        transport = ep.transport

    # Gradients of experts are sums over the tokens of all ranks.
    all_experts = experts.clone().requires_grad_()
    expected = None
    for other in range(num_ranks):
        other_x, other_idx, other_weights, other_grad = make_rank(other)
        inputs = leaves(other_x, other_weights)
        other_y = dense(inputs[0], other_idx, inputs[1], all_experts)
        other_y.backward(other_grad)
        if other == rank:
            expected = other_y, inputs[0].grad, inputs[1].grad
    checks = {
        "y": (y, expected[0]),
        "gradient of x": (found[0].grad, expected[1]),
        "gradient of the weights": (found[1].grad, expected[2]),
        "gradient of the experts": (found[2].grad, all_experts.grad[home]),
    }
    wrong = [name for name, pair in checks.items() if not torch.allclose(*pair, rtol=1e-4, atol=1e-4)]
    if not torch.equal(y, again):
        wrong.append("y when repeated")
    if dist.is_initialized():
        dist.destroy_process_group()
    if wrong:
        sys.exit(f"rank {rank}: wrong: {', '.join(wrong)}")
    print(f"rank {rank} of {num_ranks} ({transport}): {len(x)} tokens, outputs and gradients as computed densely")


if __name__ == "__main__":
    main()
