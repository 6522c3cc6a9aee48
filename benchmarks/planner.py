"""Tables of docs/planner.md: what balancing by replicas takes and reaches, and how near it comes to an optimum.

    python benchmarks/planner.py
    python benchmarks/planner.py --optimum

Nothing is moved: these are counts of replicas and the time to decide on them. `--optimum` solves small cases by integer
programs and needs SciPy (HiGHS), which MoonEP itself does not.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import click
import numpy as np
import numpy.typing as npt
import torch

from moonep import _C
from moonep.bench.machine import machine
from moonep.config import BufferConfig
from moonep.plan import first_expert, home_rank
from moonep.policy import Balanced, Home, Policy
from moonep.sizing.loads import fewest_replicas
from moonep.trace import load_trace
from moonep.transport.planner import Planner

EXPERTS, TOP_K = 896, 16
ROWS_PER_RANK = 16384  # 1,024 tokens of 16 experts
EXPERT_MB = 66.06  # one routed expert of Kimi K3: 3 * 3584 * 3072 parameters of 2 bytes
RANKS = (2, 4, 8, 16, 32, 64)
SLACKS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)
SIGMAS = (0.05, 0.3, 1.0, 2.0)
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Outcome:
    """What was decided for one draw."""

    replicas: int  # in all ranks together
    received: int  # by the rank that receives most
    sent: int  # by the home that sends most
    imbalance: float  # of the fullest rank: rows over the even share, minus 1
    secs: float
    at_least: int  # replicas that any rule needs; see fewest_replicas in moonep/sizing/loads.py


# ---- the rule ----


def decide(totals_E: Counts, num_ranks: int, policy: Balanced, repeats: int = 20) -> Outcome:
    """Calls the native rule, several times over for its time."""
    experts = len(totals_E)
    slots = policy.slots_per_rank(experts, num_ranks)
    experts_RS, rows_RS = np.empty((2, num_ranks, slots), np.int64)
    rank_rows_R = np.empty(num_ranks, np.int64)
    limit = policy.row_limit(int(totals_E.sum()), num_ranks)
    arrays = [each.ctypes.data for each in (experts_RS, rows_RS, rank_rows_R)]
    address, times = totals_E.ctypes.data, []
    for _ in range(repeats):
        began = time.perf_counter()
        _C.balance(address, experts, num_ranks, limit, slots, policy.slack == 0, *arrays)
        times.append(time.perf_counter() - began)

    used = experts_RS >= 0
    homes = [home_rank(int(expert), experts, num_ranks) for expert in experts_RS[used]]
    return Outcome(
        replicas=int(used.sum()),
        received=int(used.sum(axis=1).max()),
        sent=int(np.bincount(homes, minlength=num_ranks).max()),
        imbalance=float(rank_rows_R.max() * num_ranks / totals_E.sum() - 1),
        secs=statistics.median(times),
        at_least=fewest_replicas(totals_E, num_ranks, limit),
    )


def home_rows(totals_E: Counts, num_ranks: int) -> tuple[list[Counts], Counts]:
    """Rows of every home's experts, largest first, and their sums [R]."""
    firsts = [first_expert(rank, len(totals_E), num_ranks) for rank in range(num_ranks + 1)]
    homes = [np.sort(totals_E[begin:end])[::-1] for begin, end in itertools.pairwise(firsts)]
    return homes, np.array([home.sum() for home in homes])


def lognormal_totals(num_ranks: int, sigma: float, seed: int, experts: int = EXPERTS) -> Counts:
    """Rows of every expert when popularity is lognormal; the draws of tests/test_balance.py."""
    rng = np.random.RandomState(seed)
    popularity = np.exp(sigma * rng.standard_normal(experts))
    totals_E: Counts = rng.multinomial(ROWS_PER_RANK * num_ranks, popularity / popularity.sum()).astype(np.int64)
    return totals_E


# ---- tables ----


def mean(outcomes: Sequence[Outcome], name: str) -> float:
    return statistics.fmean(getattr(each, name) for each in outcomes)


def table(heading: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def over_slack(draws: int, sigma: float) -> str:
    """Replicas in all, most received by a rank, most sent by a home; by ranks and slack."""
    rows = []
    for num_ranks in RANKS:
        totals = [lognormal_totals(num_ranks, sigma, seed) for seed in range(draws)]
        cells = []
        for slack in SLACKS:
            found = [decide(each, num_ranks, Balanced(slack), 1) for each in totals]
            cells.append(" / ".join(f"{mean(found, name):.1f}" for name in ("replicas", "received", "sent")))
        home = [decide(each, num_ranks, Balanced(0.0, 0), 1) for each in totals]
        rows.append([num_ranks, f"{mean(home, 'imbalance'):.1%}", *cells])
    return table(["R", "without", *(f"slack {slack:.0%}" for slack in SLACKS)], rows)


def at_default(draws: int) -> str:
    """The default policy: counts against the bound, bytes, balance, time."""
    rows = []
    for num_ranks in RANKS:
        for sigma in SIGMAS:
            totals = [lognormal_totals(num_ranks, sigma, seed) for seed in range(draws)]
            rows.append([num_ranks, sigma, *default_cells(totals, num_ranks)])
    return table(["R", "sigma", *DEFAULT_HEADING], rows)


DEFAULT_HEADING = (
    "imbalance without",
    "reached",
    "replicas",
    "at least",
    "most received",
    "MB received",
    "most sent",
    "MB sent",
    "plan us",
)


def default_cells(totals: Sequence[Counts], num_ranks: int) -> list[str]:
    home = [decide(each, num_ranks, Balanced(0.0, 0), 1) for each in totals]
    found = [decide(each, num_ranks, Balanced()) for each in totals]
    received, sent = mean(found, "received"), mean(found, "sent")
    return [
        f"{mean(home, 'imbalance'):.1%}",
        f"{mean(found, 'imbalance'):.1%}",
        f"{mean(found, 'replicas'):.2f}",
        f"{mean(found, 'at_least'):.2f}",
        f"{received:.2f}",
        f"{received * EXPERT_MB:.0f}",
        f"{sent:.2f}",
        f"{sent * EXPERT_MB:.0f}",
        f"{mean(found, 'secs') * 1e6:.1f}",
    ]


def of_trace(name: str) -> str:
    """The default policy on every step of a recorded trace."""
    trace = load_trace(name)
    steps = [np.bincount(idx[idx >= 0], minlength=trace.num_experts).astype(np.int64) for idx in trace.topk_idx]
    rows = [[num_ranks, *default_cells(steps, num_ranks)] for num_ranks in RANKS]
    about = f"{trace.num_steps} steps of {trace.num_tokens:,} tokens, top-{trace.top_k} of {trace.num_experts}\n\n"
    return about + table(["R", *DEFAULT_HEADING], rows)


def few_slots(draws: int) -> str:
    """Imbalance of the fullest rank when the number of replicas on a rank is limited, slack 0."""
    rows = []
    for num_ranks, sigma in itertools.product((8, 64), SIGMAS):
        totals = [lognormal_totals(num_ranks, sigma, seed) for seed in range(draws)]
        found = [[decide(each, num_ranks, Balanced(0.0, slots)) for each in totals] for slots in (0, 1, 2, 4, None)]
        cells = [f"{mean(each, 'imbalance'):.2%}" for each in found]
        slowest = max(outcome.secs for each in found for outcome in each)
        rows.append([num_ranks, sigma, *cells, f"{slowest * 1e6:.0f}"])
    return table(["R", "sigma", "none", "1", "2", "4", "any number", "slowest plan us"], rows)


def wire_rows() -> str:
    """Tokens that cross to other ranks, each once per rank, of a rank on average: without replicas and with them."""
    rows = []
    for num_ranks in (2, 8, 32):
        for sigma in SIGMAS:
            ids = [lognormal_ids(num_ranks, sigma, rank) for rank in range(num_ranks)]
            home, balanced = (crossings(ids, policy) for policy in (Home(), Balanced()))
            rows.append([num_ranks, sigma, f"{home:.0f}", f"{balanced:.0f}", f"{balanced / home - 1:+.1%}"])
    return table(["R", "sigma", "Home", "Balanced", "more"], rows)


def lognormal_ids(num_ranks: int, sigma: float, rank: int) -> npt.NDArray[np.int32]:
    """Routing [T, K] of one rank: distinct experts, drawn with probabilities proportional to their popularity."""
    popularity_E = sigma * np.random.RandomState(num_ranks).standard_normal(EXPERTS)
    noise_TE = np.random.RandomState(1000 + rank).gumbel(size=(ROWS_PER_RANK // TOP_K, EXPERTS))
    return np.argpartition(-(popularity_E + noise_TE), TOP_K, axis=1)[:, :TOP_K].astype(np.int32)


def crossings(ids: Sequence[npt.NDArray[np.int32]], policy: Policy) -> float:
    """Rows that a rank sends to others in dispatch, by the planner's own count."""
    config = BufferConfig(EXPERTS, TOP_K, 1, len(ids[0]), torch.bfloat16, policy, "auto", 1, "float32", 60.0)
    counts = [np.bincount(each.ravel(), minlength=EXPERTS).astype(np.int32) for each in ids]
    tokens, sent = [len(each) for each in ids], []
    for rank, own in enumerate(ids):
        planner = Planner(config, rank, [0] * len(ids))
        _, outgoing, _ = planner.words_to_send(own.ctypes.data, [each.ctypes.data for each in counts], tokens)
        first = outgoing.outbox.first.tolist()
        sent.append(first[-1] - (first[rank + 1] - first[rank]))
    return statistics.fmean(sent)


def worst_case() -> str:
    """Rank 0's experts get nothing, all others the same; exact shares."""
    rows = []
    for num_ranks in RANKS:
        local = EXPERTS // num_ranks
        totals_E = np.full(EXPERTS, num_ranks * local, np.int64)
        totals_E[:local] = 0
        cells = []
        for slack in (0.0, 0.05):
            found = decide(totals_E, num_ranks, Balanced(slack))
            cells += [found.received, found.replicas, f"{found.secs * 1e6:.0f}"]
        rows.append([num_ranks, -(-EXPERTS * (num_ranks - 1) // num_ranks**2), local, *cells])
    columns = ("most received", "replicas", "plan us")
    heading = [f"{name}, slack {slack}" for slack in ("0", "5%") for name in columns]
    return table(["R", "any rule needs", "slots", *heading], rows)


# ---- the optimum ----


def solve(totals_E: Counts, num_ranks: int, slots: int, limit: int | None, most: int, secs: float) -> float:
    """What no rule can be better than: replicas under `limit`, or (None) rows of the fullest rank.

    An integer program: rows and a yes or no for every (expert, rank). Only the `most` largest experts of a home can
    matter when no more than that many replicas are made: a larger one can stand in for a smaller. Where HiGHS does not
    end within `secs`, this is the bound that it has proved.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
    from scipy.sparse import lil_array  # type: ignore[import-untyped]

    _, rows_R = home_rows(totals_E, num_ranks)
    experts = len(totals_E)
    home_E = np.array([home_rank(expert, experts, num_ranks) for expert in range(experts)])
    givers = [rank for rank in range(num_ranks) if limit is None or rows_R[rank] > limit]
    chosen = [
        expert
        for rank in givers
        for expert in sorted(np.flatnonzero(home_E == rank), key=lambda e: -totals_E[e])[:most]
        if totals_E[expert] > 0
    ]
    pairs = [(e, r) for e in chosen for r in range(num_ranks) if r != home_E[e]]
    if not pairs:
        return 0 if limit is not None else float(rows_R.max())

    # Variables: rows of each pair (in units of the mean, for the solver's sake), whether it is used, the fullest rank.
    unit = totals_E.sum() / num_ranks
    n = len(pairs)
    constraints = lil_array((2 * num_ranks + experts + n, 2 * n + 1))
    upper = np.concatenate([-rows_R / unit, np.full(num_ranks, slots), totals_E / unit, np.zeros(n)])
    constraints[:num_ranks, 2 * n] = -1
    for i, (expert, rank) in enumerate(pairs):
        constraints[rank, i] = 1
        constraints[home_E[expert], i] = -1
        constraints[num_ranks + rank, n + i] = 1
        constraints[2 * num_ranks + expert, i] = 1
        constraints[2 * num_ranks + experts + i, i] = 1
        constraints[2 * num_ranks + experts + i, n + i] = -totals_E[expert] / unit
    fullest = (0, np.inf) if limit is None else (limit / unit, limit / unit)
    result = milp(
        np.concatenate([np.zeros(n), np.full(n, limit is not None), [limit is None]]).astype(float),
        constraints=LinearConstraint(constraints.tocsr(), -np.inf, upper),
        integrality=np.concatenate([np.zeros(n), np.ones(n), [0]]),
        bounds=Bounds(
            np.append(np.zeros(2 * n), fullest[0]), np.concatenate([np.full(n, np.inf), np.ones(n), [fullest[1]]])
        ),
        options={"time_limit": secs},
    )
    bound = float(result.mip_dual_bound)
    return float(np.ceil(bound - 1e-6)) if limit is not None else float(np.ceil(bound * unit - 0.5))


def against_optimum(draws: int, secs: float) -> str:
    """Replicas of the rule and what no rule can do without."""
    rows = []
    for (experts, num_ranks), sigma, slack in itertools.product(
        ((16, 4), (32, 8), (64, 16), (896, 8)), (1.0, 2.0), (0.01, 0.05)
    ):
        policy = Balanced(slack)
        ours, theirs = [], []
        for seed in range(draws):
            totals_E = lognormal_totals(num_ranks, sigma, seed, experts)
            limit = policy.row_limit(int(totals_E.sum()), num_ranks)
            ours.append(decide(totals_E, num_ranks, policy, 1).replicas)
            slots = policy.slots_per_rank(experts, num_ranks)
            theirs.append(solve(totals_E, num_ranks, slots, limit, ours[-1], secs))
        same = sum(a == b for a, b in zip(ours, theirs, strict=True))
        cells = [f"{statistics.fmean(ours):.2f}", f"{statistics.fmean(theirs):.2f}", f"{same} of {draws}"]
        rows.append([experts, num_ranks, sigma, f"{slack:.0%}", *cells])
    return table(["E", "R", "sigma", "slack", "replicas", "optimum (bound)", "equal"], rows)


def against_best_balance(draws: int, secs: float) -> str:
    """Imbalance of the rule and of the best balance, with one or two replicas on a rank."""
    rows = []
    for (experts, num_ranks), sigma, slots in itertools.product(((64, 4), (128, 8)), (1.0, 2.0), (1, 2)):
        ours, theirs = [], []
        for seed in range(draws):
            totals_E = lognormal_totals(num_ranks, sigma, seed, experts)
            ours.append(decide(totals_E, num_ranks, Balanced(0.0, slots), 1).imbalance)
            best = solve(totals_E, num_ranks, slots, None, num_ranks * slots, secs)
            theirs.append(best * num_ranks / totals_E.sum() - 1)
        rows.append(
            [experts, num_ranks, sigma, slots, f"{statistics.fmean(ours):.2%}", f"{statistics.fmean(theirs):.2%}"]
        )
    return table(["E", "R", "sigma", "max_replicas", "imbalance", "best (bound)"], rows)


@click.command()
@click.option("--draws", default=20, show_default=True, help="Draws of every lognormal case; cells are means.")
@click.option("--trace", default="pydoc", show_default=True, help="A recorded trace: a file, or a built-in one.")
@click.option("--optimum", is_flag=True, help="Only compare small cases with integer programs; needs SciPy.")
@click.option("--solver-secs", default=10.0, show_default=True, help="For one integer program.")
def main(draws: int, trace: str, optimum: bool, solver_secs: float) -> None:
    """Tabulate what policy Balanced takes and reaches."""
    about = machine()
    click.echo(f"{about['cpu']}, {about['system']}, one thread; {EXPERTS} experts, {ROWS_PER_RANK:,} rows a rank\n")
    if optimum:
        click.echo("## Against the fewest replicas\n\n" + against_optimum(draws, solver_secs))
        click.echo("## Against the best balance\n\n" + against_best_balance(draws, solver_secs))
        return
    click.echo("## The default, slack 5 %\n\n" + at_default(draws))
    click.echo(f"## The default on trace {trace}\n\n" + of_trace(trace))
    for sigma in SIGMAS:
        click.echo(f"## Replicas / most received / most sent, sigma {sigma:g}\n\n" + over_slack(draws, sigma))
    click.echo("## max_replicas, slack 0: imbalance reached\n\n" + few_slots(draws))
    click.echo("## Rows that cross, per rank\n\n" + wire_rows())
    click.echo("## The input that needs most\n\n" + worst_case())


if __name__ == "__main__":
    main()
