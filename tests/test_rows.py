"""Row moves and sums against slow, explicit loops, bit for bit, with every set of row kernels that this machine has."""

import itertools
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch

import moonep
from moonep import _C
from moonep.config import BufferConfig
from moonep.plan import Crossings, Plan, plan_plain
from moonep.transport.rows import Rows, crossing_chunks, host_order

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [1, 7, 15, 16, 17, 63, 64, 65, 100, 3584]
KERNELS = ["generic", "avx2", "avx512"]

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
each_width = pytest.mark.parametrize("width", WIDTHS)


@pytest.fixture(params=KERNELS, autouse=True)
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs every test with each set of row kernels, on one thread unless it asks for more."""
    before = _C.row_kernels(), torch.get_num_threads()
    if not _C.use_row_kernels(request.param):
        pytest.skip(f"no {request.param} on this machine")
    assert _C.row_kernels() == request.param
    torch.set_num_threads(1)
    yield request.param
    assert _C.use_row_kernels(before[0])
    torch.set_num_threads(before[1])


def make_rows(width: int, dtype: torch.dtype, rank: int = 0, host_of_rank: Sequence[int] = (0,)) -> Rows:
    config = BufferConfig(8, 2, width, 64, dtype, moonep.Home(), "auto", 1, "float32", 60.0)
    return Rows(config, rank, host_of_rank)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.dtype.itemsize == 4 else torch.int16)


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor, *, nan_payload: bool = False) -> None:
    """Every bit, but where both are NaN only with `nan_payload`: which NaN arithmetic gives is the CPU's business."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    different = bits(found) != bits(expected)
    if not nan_payload:
        different &= ~(found.isnan() & expected.isnan())
    if different.any():
        place = tuple(different.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(different.sum())} of {found.numel()} differ, first at {place}: "
            f"{found[place].item()!r} instead of {expected[place].item()!r}"
        )


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int, *, special: bool = True) -> torch.Tensor:
    """Numbers of very different sizes; with `special` also zeros of both signs, subnormals, infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-12, 12, shape, generator=generator)
    values = (torch.randn(shape, generator=generator) * torch.exp2(exponents.float())).to(dtype)
    if special:
        info = torch.finfo(dtype)
        rare = [0.0, -0.0, info.smallest_normal / 2, -info.smallest_normal / 4, info.max, -info.max]
        rare += [info.smallest_normal * info.eps, float("inf"), -float("inf"), float("nan")]
        which = torch.randint(0, 40 * len(rare), shape, generator=generator)
        for i, value in enumerate(rare):
            values[which == i] = value
    return values.contiguous()


def address_of(tensor: torch.Tensor, row: int = 0) -> int:
    return tensor.data_ptr() + row * tensor.stride(0) * tensor.element_size()


def random_plans(num_ranks: int, tokens: int, *, experts: int = 8, top_k: int = 4, alignment: int = 1) -> list[Plan]:
    """Plans of all ranks for a routing with holes and repeated experts; rank r has tokens + r tokens."""
    generator = torch.Generator().manual_seed(num_ranks)
    idx = [torch.randint(-1, experts, (tokens + rank, top_k), generator=generator) for rank in range(num_ranks)]
    return [plan_plain(idx, rank, num_experts=experts, expert_alignment=alignment) for rank in range(num_ranks)]


def routes_of(box: Crossings, crossing: int) -> list[tuple[int, int]]:
    """(route, row) of one crossing."""
    begin, end = int(box.start[crossing]), int(box.start[crossing + 1])
    return list(zip(box.route[begin:end].tolist(), box.row[begin:end].tolist(), strict=True))


def sum_of_rows(rows: torch.Tensor, weights: torch.Tensor | None, places: Sequence[int]) -> torch.Tensor:
    """The float32 sum from +0 of rows in order, each product rounded before it is added."""
    total = torch.zeros(rows.shape[1])
    for place in places:
        row = rows[place].float()
        total = total + (row if weights is None else row * weights[place])
    return total


def crossing_range(box: Crossings, peer: int, tokens: tuple[int, int]) -> tuple[int, int]:
    return crossing_chunks(box, [0, *tokens, 2**31])[peer][1][:2]


# ---- copies ----


@each_dtype
@each_width
def test_expand(width: int, dtype: torch.dtype) -> None:
    """Every source's rows, in two pieces that begin at different tokens; padding is zero."""
    plans = random_plans(3, 6, alignment=4)
    mover, plan = make_rows(width, dtype), plans[1]
    x_of_rank = [numbers((p.num_tokens, width), dtype, seed) for seed, p in enumerate(plans)]
    rows = mover.empty_rows(plan)
    for source, x in enumerate(x_of_rank):
        for tokens in ((0, 2), (2, 100)):
            begin, end = crossing_range(plan.inbox, source, tokens)
            mover.expand(rows, address_of(x, tokens[0]), plan, begin, end, tokens[0])
    expected = torch.zeros(plan.num_rows, width, dtype=dtype)
    for source, x in enumerate(x_of_rank):
        for crossing in range(int(plan.inbox.first[source]), int(plan.inbox.first[source + 1])):
            for _, row in routes_of(plan.inbox, crossing):
                expected[row] = x[int(plan.inbox.token[crossing])]
    assert_same_bits(rows, expected, nan_payload=True)


@each_dtype
@each_width
def test_pack(width: int, dtype: torch.dtype) -> None:
    plan = random_plans(3, 6)[2]
    x = numbers((plan.num_tokens, width), dtype, 0)
    for peer in range(3):
        begin, end = int(plan.outbox.first[peer]), int(plan.outbox.first[peer + 1])
        packed = torch.full((end - begin + 1, width), 7, dtype=dtype)
        make_rows(width, dtype).pack(packed.data_ptr(), x, plan, begin, end)
        assert_same_bits(packed[:-1], x[plan.outbox.token[begin:end].long()], nan_payload=True)
        assert (packed[-1] == 7).all()


@each_dtype
def test_empty_rows_in_used_memory(dtype: torch.dtype) -> None:
    """Padding reads as zeros where NaN lay before, and only padding is written."""
    width, plan = 4096, random_plans(1, 8, alignment=16)[0]
    mover, filled = make_rows(width, dtype), float("nan")
    before = mover.memory.empty((plan.num_rows, width), dtype).fill_(filled)
    where = before.data_ptr()
    del before
    rows = mover.empty_rows(plan)
    assert rows.data_ptr() == where
    start = 0
    for size, end in zip(plan.group_sizes.tolist(), plan.group_ends.tolist(), strict=True):
        assert rows[start : start + size].isnan().all()
        assert (bits(rows[start + size : end]) == 0).all()
        start = end
    assert start == plan.num_rows


@pytest.mark.parametrize(("row_bytes", "shift"), [(256, 0), (258, 2), (258, 62), (512 + 62, 14), (7168, 0), (7168, 6)])
def test_expand_streams_past_the_caches(row_bytes: int, shift: int) -> None:
    """More than 4 MiB, also at places that are aligned to nothing."""
    width, tokens = row_bytes // 2, (5 << 20) // row_bytes // 2 + 1
    idx = torch.randint(0, 8, (tokens, 2), generator=torch.Generator().manual_seed(0))
    plan = plan_plain([idx], 0, num_experts=8)
    x = torch.randint(-(2**15), 2**15, (tokens, width), dtype=torch.int16)
    memory = torch.full((plan.num_rows * row_bytes + 64,), 99, dtype=torch.uint8)
    rows = memory[shift : shift + plan.num_rows * row_bytes].view(torch.int16).view(plan.num_rows, width)
    expected = torch.empty_like(rows)
    expected[plan.dst_row.flatten()] = x.repeat_interleave(2, 0)
    for count in (1, 2):
        torch.set_num_threads(count)
        rows.zero_()
        make_rows(width, torch.bfloat16).expand(rows, x.data_ptr(), plan, 0, tokens, 0)
        assert torch.equal(rows, expected)
        assert (memory[:shift] == 99).all()
        assert (memory[shift + plan.num_rows * row_bytes :] == 99).all()


def test_stream_copy_of_any_size_anywhere() -> None:
    src = torch.randint(0, 256, (512,), dtype=torch.uint8)
    for num_bytes, to, at in itertools.product([0, 1, 63, 64, 65, 127, 128, 200, 300], [0, 1, 31, 63], [0, 5]):
        dst = torch.full((512,), 77, dtype=torch.uint8)
        _C.stream_copy(dst.data_ptr() + to, src.data_ptr() + at, num_bytes, 1)
        assert torch.equal(dst[to : to + num_bytes], src[at : at + num_bytes])
        assert (dst[:to] == 77).all()
        assert (dst[to + num_bytes :] == 77).all()


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_copy(num_threads: int) -> None:
    src = torch.randint(0, 256, ((3 << 20) + 17,), dtype=torch.uint8)
    dst = torch.full((len(src) + 1,), 77, dtype=torch.uint8)
    _C.copy(dst.data_ptr(), src.data_ptr() + 1, len(src) - 1, num_threads)
    assert torch.equal(dst[:-2], src[1:])
    assert (dst[-2:] == 77).all()


def test_move_floats() -> None:
    src, index, to = torch.rand(8), torch.tensor([12, 10, 17], dtype=torch.int32), torch.tensor([5, 3, 4])
    dst = torch.zeros(8)
    _C.move_floats(dst.data_ptr(), 0, 0, src.data_ptr(), index.data_ptr(), 10, 3)
    assert torch.equal(dst[:3], src[[2, 0, 7]])
    dst.zero_()
    to = to.int()
    _C.move_floats(dst.data_ptr(), to.data_ptr(), 3, src.data_ptr(), 0, 0, 3)
    assert torch.equal(dst[[2, 0, 1]], src[:3])
    assert (dst[3:] == 0).all()


# ---- scaled copies ----


@each_dtype
@each_width
def test_expand_scaled(width: int, dtype: torch.dtype) -> None:
    plan = random_plans(2, 6)[0]
    mover, x = make_rows(width, dtype), numbers((7, width), dtype, 0)
    weights = numbers((plan.num_rows,), torch.float32, 1)
    begin, end = crossing_range(plan.inbox, 1, (1, 6))
    untouched = numbers((plan.num_rows, width), dtype, 2)
    for row_weights in (weights, None):
        rows, expected = untouched.clone(), untouched.clone()
        mover.expand_scaled(rows, address_of(x, 1), plan, begin, end, 1, row_weights, None, None)
        for crossing in range(begin, end):
            token = x[int(plan.inbox.token[crossing])]
            for _, row in routes_of(plan.inbox, crossing):
                expected[row] = token if row_weights is None else (token.float() * row_weights[row]).to(dtype)
        assert_same_bits(rows, expected, nan_payload=row_weights is None)


@each_dtype
@each_width
def test_dots(width: int, dtype: torch.dtype) -> None:
    """dots[row] = <other[row], the row before it is scaled>; a NaN stays with its own row."""
    plan = random_plans(2, 6)[0]
    mover = make_rows(width, dtype)
    x, other = (numbers((n, width), dtype, n, special=False) for n in (7, plan.num_rows))
    (begin, end), weights = plan.inbox.first[1:3].tolist(), numbers((plan.num_rows,), torch.float32, 1)
    other[int(plan.inbox.row[-1]), width // 2] = float("nan")
    dots, again = torch.full((2, plan.num_rows), -5.0).unbind()
    rows = torch.empty(plan.num_rows, width, dtype=dtype)
    mover.expand_scaled(rows, x.data_ptr(), plan, begin, end, 0, weights, other, dots)
    mover.expand_scaled(rows, x.data_ptr(), plan, begin, end, 0, None, other, again)
    assert_same_bits(dots, again)
    visited = torch.zeros(plan.num_rows, dtype=torch.bool)
    for crossing in range(begin, end):
        token = x[int(plan.inbox.token[crossing])].double()
        for _, row in routes_of(plan.inbox, crossing):
            visited[row] = True
            products = token * other[row].double()
            if products.isnan().any():
                assert row == int(plan.inbox.row[-1])
                assert dots[row].isnan()
            else:
                assert abs(float(dots[row] - products.sum())) <= 1e-6 * float(products.abs().sum())
    assert (dots[~visited] == -5).all()


def test_dots_of_small_integers_are_exact() -> None:
    plan, width = random_plans(1, 4)[0], 1000
    x, other = (torch.randint(-9, 10, (n, width)).to(torch.bfloat16) for n in (4, plan.num_rows))
    rows, dots = torch.empty_like(other), torch.zeros(plan.num_rows)
    make_rows(width, torch.bfloat16).expand_scaled(
        rows, x.data_ptr(), plan, 0, len(plan.inbox.token), 0, None, other, dots
    )
    assert torch.equal(dots, (rows.double() * other.double()).sum(1).float())


# ---- sums ----


@each_dtype
@each_width
def test_sum_crossings(width: int, dtype: torch.dtype) -> None:
    plan = random_plans(3, 6)[1]
    rows = numbers((plan.num_rows, width), dtype, 0)
    weights = numbers((plan.num_rows,), torch.float32, 1)
    begin, end = crossing_range(plan.inbox, 2, (1, 7))
    assert end - begin > 3
    for row_weights in (weights, None):
        sums = torch.full((end - begin + 1, width), 7.0)
        make_rows(width, dtype).sum_crossings(sums.data_ptr(), rows, row_weights, plan, begin, end)
        expected = [
            sum_of_rows(rows, row_weights, [row for _, row in routes_of(plan.inbox, c)]) for c in range(begin, end)
        ]
        assert_same_bits(sums[:-1], torch.stack(expected))
        assert (sums[-1] == 7).all()


@dataclass
class Sent:
    """Other ranks' sums of one rank's crossings, from crossing `first[rank]` on."""

    sums: list[torch.Tensor]
    first: list[int]


def expected_sums(
    plan: Plan, rank: int, hosts: Sequence[int], rows: torch.Tensor, weights: torch.Tensor | None, sent: Sent
) -> torch.Tensor:
    """The definition: k ascending within a rank, ranks ascending within a host, hosts by their lowest rank."""
    y = torch.zeros(plan.num_tokens, rows.shape[1], dtype=rows.dtype)
    for t in range(plan.num_tokens):
        total = torch.zeros(rows.shape[1])
        for host in dict.fromkeys(hosts):
            of_host = torch.zeros(rows.shape[1])
            for peer in range(len(hosts)):
                begin, end = plan.outbox.first[peer : peer + 2].tolist()
                here = [c for c in range(begin, end) if int(plan.outbox.token[c]) == t]
                if hosts[peer] != host or not here:
                    continue
                if peer == rank:
                    of_peer = sum_of_rows(rows, weights, [row for _, row in routes_of(plan.outbox, here[0])])
                else:
                    of_peer = sent.sums[peer][here[0] - sent.first[peer]]
                of_host = of_host + of_peer
            total = total + of_host
        y[t] = total.to(rows.dtype)
    return y


@each_dtype
@pytest.mark.parametrize(
    ("width", "hosts"),
    [*((width, (0, 1, 0, 1)) for width in WIDTHS), *((65, hosts) for hosts in [(0,) * 4, (0, 1, 1, 0), (0, 1, 2, 3)])],
)
def test_finish(width: int, dtype: torch.dtype, hosts: tuple[int, ...]) -> None:
    rank = 2
    plan = random_plans(4, 6, experts=7, top_k=5)[rank]
    mover = make_rows(width, dtype, rank, hosts)
    rows = numbers((plan.num_rows, width), dtype, 0)
    weights = numbers((plan.num_rows,), torch.float32, 1)
    counts = plan.outbox.first.diff().tolist()
    sums = [numbers((count, width), torch.float32, 2 + peer) for peer, count in enumerate(counts)]
    whole = Sent(sums, plan.outbox.first[:-1].tolist())
    for row_weights in (weights, None):
        expected = expected_sums(plan, rank, hosts, rows, row_weights, whole)
        y = torch.full((plan.num_tokens, width), 3, dtype=dtype)
        for tokens in ((0, 3), (3, 3), (3, plan.num_tokens)):  # in chunks: what peers sent begins at each chunk's first
            first = [crossing_range(plan.outbox, peer, tokens)[0] for peer in range(4)]
            addresses = [
                0 if peer == rank else address_of(part, first[peer] - whole.first[peer])
                for peer, part in enumerate(sums)
            ]
            mover.finish(y, rows, row_weights, plan, tokens, addresses, first)
        assert_same_bits(y, expected)


@each_dtype
def test_sums_start_at_positive_zero(dtype: torch.dtype) -> None:
    """Rows of -0 sum to +0, and so does a token without routes."""
    idx = torch.tensor([[0, 1], [-1, -1], [2, -1]])
    plan = plan_plain([idx], 0, num_experts=3)
    rows, y = torch.full((3, 70), -0.0, dtype=dtype), torch.ones(3, 70, dtype=dtype)
    for weights in (None, torch.ones(3)):
        make_rows(70, dtype).finish(y, rows, weights, plan, (0, 3), [0], [0])
        assert (bits(y) == 0).all()


@each_dtype
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_stay_with_their_token(dtype: torch.dtype, value: float) -> None:
    generator = torch.Generator().manual_seed(0)
    idx, width = torch.randint(0, 5, (20, 3), generator=generator), 100
    plan = plan_plain([idx], 0, num_experts=5, expert_alignment=8)
    mover, weights = make_rows(width, dtype), torch.rand(plan.num_rows)
    x = numbers((20, width), dtype, 0, special=False)

    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        rows, y = mover.empty_rows(plan), torch.empty_like(x)
        mover.expand(rows, x.data_ptr(), plan, 0, len(plan.inbox.token), 0)
        start = 0
        for size, end in zip(plan.group_sizes.tolist(), plan.group_ends.tolist(), strict=True):
            rows[start + size : end] = float("nan")  # nor does what experts left in padding go anywhere
            start = end
        mover.finish(y, rows, weights, plan, (0, 20), [0], [0])
        return y

    clean = there_and_back(x)
    assert clean.isfinite().all()
    x[7] = value
    y = there_and_back(x)
    assert not y[7].isfinite().any()
    others = [t for t in range(20) if t != 7]
    assert_same_bits(y[others], clean[others])


@each_dtype
@pytest.mark.parametrize("hosts", [(0, 0, 0), (0, 1, 0)])
def test_there_and_back_over_ranks(dtype: torch.dtype, hosts: tuple[int, ...]) -> None:
    """dispatch and combine of three ranks, with what crosses handed over here, from the routes alone."""
    plans, width = random_plans(3, 6, experts=7, top_k=5), 40
    movers = [make_rows(width, dtype, rank, hosts) for rank in range(3)]
    x_of_rank = [numbers((plan.num_tokens, width), dtype, rank) for rank, plan in enumerate(plans)]
    rows_of_rank, weights_of_rank = [], []
    for rank, plan in enumerate(plans):
        rows = movers[rank].empty_rows(plan)
        for source, x in enumerate(x_of_rank):
            begin, end = plan.inbox.first[source : source + 2].tolist()
            movers[rank].expand(rows, x.data_ptr(), plan, begin, end, 0)
        rows_of_rank.append(rows)
        weights_of_rank.append(numbers((plan.num_rows,), torch.float32, rank))
    for rank, plan in enumerate(plans):
        sums = []
        for peer, there in enumerate(plans):
            begin, end = there.inbox.first[rank : rank + 2].tolist()
            part = torch.empty(end - begin, width)
            movers[peer].sum_crossings(part.data_ptr(), rows_of_rank[peer], weights_of_rank[peer], there, begin, end)
            sums.append(part)
        y = torch.empty(plan.num_tokens, width, dtype=dtype)
        addresses, first = [part.data_ptr() for part in sums], plan.outbox.first[:-1].tolist()
        tokens = (0, plan.num_tokens)
        movers[rank].finish(y, rows_of_rank[rank], weights_of_rank[rank], plan, tokens, addresses, first)

        expected = torch.zeros_like(y)
        for t in range(plan.num_tokens):
            total = torch.zeros(width)
            for host in dict.fromkeys(hosts):
                of_host = torch.zeros(width)
                for peer in range(3):
                    places = plan.dst_row[t][plan.dst_rank[t] == peer].tolist()
                    if hosts[peer] == host:
                        of_host = of_host + sum_of_rows(rows_of_rank[peer], weights_of_rank[peer], places)
                total = total + of_host
            expected[t] = total.to(dtype)
        assert_same_bits(y, expected)


@pytest.mark.parametrize(
    ("hosts", "order", "opens"),
    [
        ([0], [0], [False]),
        ([5, 5, 5], [0, 1, 2], [False, False, False]),
        ([0, 1, 0, 1], [0, 2, 1, 3], [False, False, True, False]),
        ([7, 3, 3, 7, 9], [0, 3, 1, 2, 4], [False, False, True, False, True]),
    ],
)
def test_host_order(hosts: list[int], order: list[int], opens: list[bool]) -> None:
    assert host_order(hosts) == (order, opens)


def test_crossing_chunks() -> None:
    def int32(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    # Peers with the tokens 0, 2, 5, with none, and with 1, 2; two routes for token 2 of the last.
    box = Crossings(
        int32(0, 3, 3, 5), int32(0, 2, 5, 1, 2), int32(0, 1, 2, 3, 4, 6), int32(*range(6)), int32(*range(6))
    )
    assert crossing_chunks(box, [0, 9]) == [[(0, 3, 0, 3)], [(3, 3, 3, 0)], [(3, 5, 3, 3)]]
    assert crossing_chunks(box, [0, 2, 4, 2**40]) == [
        [(0, 1, 0, 1), (1, 2, 1, 1), (2, 3, 2, 1)],
        [(3, 3, 3, 0)] * 3,
        [(3, 4, 3, 1), (4, 5, 4, 2), (5, 5, 6, 0)],
    ]


# ---- rounding ----


def every_value(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(
    "factor", [1.0, -1.0, 0.5, 1 / 3, 3.14159, 2**-10, 1e-7, 65504.0, 0.0, 1e-45, 3e38, float("inf")]
)
def test_scaling_of_every_value(dtype: torch.dtype, factor: float) -> None:
    x = every_value(dtype).view(1, -1)
    plan = plan_plain([torch.tensor([[0]])], 0, num_experts=1)
    rows, weights = torch.empty_like(x), torch.tensor([factor])
    make_rows(x.numel(), dtype).expand_scaled(rows, x.data_ptr(), plan, 0, 1, 0, weights, None, None)
    assert_same_bits(rows, (x.float() * weights).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_rounding_around_every_value(dtype: torch.dtype) -> None:
    """Sums at, just below and just above every value of the dtype, and halfway to the next, are rounded to even."""
    exact = every_value(dtype).float()
    exact = torch.where(exact.isnan(), 0.0, exact)
    upper = torch.nextafter(exact.to(dtype), torch.tensor(float("inf"), dtype=dtype)).float()
    halves = exact / 2 + torch.where(upper.isfinite(), upper, exact) / 2
    largest = torch.full((8,), torch.finfo(dtype).max) * torch.linspace(0.999, 1.01, 8)
    centres = torch.cat([exact, halves, largest, torch.tensor([float("nan"), torch.finfo(torch.float32).max])])
    sums = torch.cat([centres, *(torch.nextafter(centres, torch.tensor(s * float("inf"))) for s in (-1, 1))]).view(
        1, -1
    )
    plan = plan_plain([torch.tensor([[1]]), torch.empty(0, 1, dtype=torch.int64)], 0, num_experts=2)
    y, none = torch.empty(sums.shape, dtype=dtype), torch.empty(0, sums.numel(), dtype=dtype)
    make_rows(sums.numel(), dtype, 0, (0, 0)).finish(y, none, None, plan, (0, 1), [0, sums.data_ptr()], [0, 0])
    assert_same_bits(y, (sums + 0.0).to(dtype))  # + 0: sums start at +0, so -0 cannot come out


# ---- threads, odd addresses, large offsets ----


@each_dtype
def test_several_threads_do_what_one_does(dtype: torch.dtype) -> None:
    """With enough rows that threads start (1 MiB each)."""
    width, hosts, generator = 3584, (0, 1), torch.Generator().manual_seed(0)
    tokens = 602 // dtype.itemsize
    idx = [torch.randint(-1, 8, (tokens + rank, 4), generator=generator) for rank in range(2)]
    plan = plan_plain(idx, 0, num_experts=8)
    mover = make_rows(width, dtype, 0, hosts)
    x = numbers((tokens + 1, width), dtype, 0, special=False)
    weights = torch.rand(plan.num_rows, generator=generator)
    (_, own_end, end), out_begin = plan.inbox.first.tolist(), int(plan.outbox.first[1])

    def everything() -> list[torch.Tensor]:
        rows, scaled = (torch.zeros(plan.num_rows, width, dtype=dtype) for _ in range(2))
        mover.expand(rows, x.data_ptr(), plan, 0, own_end, 0)
        mover.expand(rows, x.data_ptr(), plan, own_end, end, 0)
        dots = torch.zeros(plan.num_rows)
        for begin, stop in ((0, own_end), (own_end, end)):
            mover.expand_scaled(scaled, x.data_ptr(), plan, begin, stop, 0, weights, rows, dots)
        packed = torch.zeros(len(plan.outbox.token) - out_begin, width, dtype=dtype)
        mover.pack(packed.data_ptr(), x, plan, out_begin, len(plan.outbox.token))
        sums, y = torch.zeros(end, width), torch.zeros(tokens, width, dtype=dtype)
        mover.sum_crossings(sums.data_ptr(), rows, weights, plan, 0, end)
        of_peer = packed.float()
        mover.finish(y, rows, weights, plan, (0, tokens), [0, of_peer.data_ptr()], [0, out_begin])
        return [rows, scaled, dots, packed, sums, y]

    alone = everything()
    for count in (2, 3):
        torch.set_num_threads(count)
        for one, several in zip(alone, everything(), strict=True):
            assert_same_bits(several, one)


@each_dtype
@pytest.mark.parametrize("shift", [1, 3, 9])
def test_addresses_need_only_hold_elements(dtype: torch.dtype, shift: int) -> None:
    """Slices of a byte buffer that begin anywhere an element may."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        size, at = tensor.numel() * tensor.element_size(), shift * tensor.element_size()
        memory = torch.zeros(size + 128, dtype=torch.uint8)
        to = memory[at : at + size].view(tensor.dtype).view(tensor.shape)
        assert to.data_ptr() % 64
        return to.copy_(tensor)

    width, rank, hosts = 101, 0, (0, 1)
    plan = random_plans(2, 9)[rank]
    mover = make_rows(width, dtype, rank, hosts)
    x = numbers((10, width), dtype, 0)
    weights, other = numbers((plan.num_rows,), torch.float32, 1), numbers((plan.num_rows, width), dtype, 2)
    end, out = int(plan.inbox.first[-1]), plan.outbox.first.tolist()
    from_peer = numbers((out[2] - out[1], width), torch.float32, 3)

    def everything(place: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        rows, scaled = (place(torch.zeros(plan.num_rows, width, dtype=dtype)) for _ in range(2))
        dots, sums = place(torch.zeros(plan.num_rows)), place(torch.zeros(end, width))
        packed, y = (place(torch.zeros(count, width, dtype=dtype)) for count in (out[2], 9))
        here, with_weights, with_other, peer = place(x), place(weights), place(other), place(from_peer)
        mover.expand(rows, here.data_ptr(), plan, 0, end, 0)
        mover.expand_scaled(scaled, here.data_ptr(), plan, 0, end, 0, with_weights, with_other, dots)
        mover.pack(packed.data_ptr(), here, plan, 0, out[2])
        mover.sum_crossings(sums.data_ptr(), rows, with_weights, plan, 0, end)
        mover.finish(y, rows, with_weights, plan, (0, 9), [0, peer.data_ptr()], [0, out[1]])
        return [rows, scaled, dots, packed, sums, y]

    for aligned, shifted in zip(everything(torch.clone), everything(moved), strict=True):
        assert_same_bits(shifted, aligned)


def test_offsets_beyond_32_bits() -> None:
    """Rows whose bytes and elements lie past 2**32, in address space of which only a few pages are ever touched."""
    width, last = 3584, 2**21
    row_bytes = 2 * width
    space = mmap.mmap(-1, (last + 1) * row_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # NORESERVE
    rows = torch.frombuffer(space, dtype=torch.bfloat16).view(last + 1, width)
    assert last * width > 2**32

    def int32(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    box = Crossings(int32(0, 2), int32(0, last), int32(0, 1, 2), int32(0, 1), int32(last, 0))
    x = numbers((1, width), torch.bfloat16, 0, special=False)
    _C.expand(rows.data_ptr(), x.data_ptr(), row_bytes, box.addresses, 0, 1, 0, 1)
    assert torch.equal(rows[last], x[0])
    _C.expand(rows.data_ptr(), rows.data_ptr(), row_bytes, box.addresses, 1, 2, 0, 1)
    assert torch.equal(rows[0], x[0])
    sums, weights = torch.zeros(1, width), rows.view(torch.float32).flatten()  # any memory that reaches row `last`
    weights[last] = 2.0
    _C.sum_crossings(sums.data_ptr(), rows.data_ptr(), width, 1, weights.data_ptr(), box.addresses, 0, 1, False, 1)
    assert torch.equal(sums[0], 2 * x[0].float())
    packed = torch.zeros(1, width, dtype=torch.bfloat16)
    _C.pack(packed.data_ptr(), rows.data_ptr(), row_bytes, box.addresses, 1, 2, 1)
    assert torch.equal(packed, x)
    dots = torch.zeros(last + 1)
    rows[1] = 1
    args = (x.data_ptr(), width, 1, 0, rows.data_ptr(), dots.data_ptr(), box.addresses, 0, 1, 0, 1)
    _C.expand_scaled(rows.data_ptr(), *args)
    assert dots[last] == pytest.approx(float((x.double() ** 2).sum()), rel=1e-6)
    rows[last] = 0
    own = (0, rows.data_ptr(), 0)
    _C.finish(
        rows.data_ptr(), width, 1, [0], [False], [0], [0], False, *own, box.addresses, box.addresses, last, last + 1, 1
    )
    assert torch.equal(rows[last], x[0])
    rows[last] = 1
    sizes, ends = torch.tensor([last]), int32(last + 1)
    _C.zero_padding(rows.data_ptr(), last + 1, row_bytes, sizes.data_ptr(), ends.data_ptr(), 1)
    assert (rows[last] == 0).all()
    assert (rows[1] == 1).all()


def test_nothing_to_do() -> None:
    """No tokens and no rows, with null addresses."""
    plan = plan_plain([torch.empty(0, 2, dtype=torch.int64)], 0, num_experts=3, expert_alignment=4)
    mover, dtype = make_rows(5, torch.float16), torch.float16
    rows, x = mover.empty_rows(plan), torch.empty(0, 5, dtype=dtype)
    assert rows.shape == (0, 5)
    mover.expand(rows, 0, plan, 0, 0, 0)
    mover.expand_scaled(rows, 0, plan, 0, 0, 0, torch.empty(0), rows, torch.empty(0))
    mover.pack(0, x, plan, 0, 0)
    mover.sum_crossings(0, rows, None, plan, 0, 0)
    mover.finish(x, rows, None, plan, (0, 0), [0], [0])


def test_unknown_kernels_change_nothing(kernels: str) -> None:
    assert not _C.use_row_kernels("sse9")
    assert _C.row_kernels() == kernels
