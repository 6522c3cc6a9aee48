"""Recycled memory: what is handed out, when it comes back, and that nothing is lost."""

import gc
import os
import random
import threading
from pathlib import Path

import pytest
import torch

from moonep import _C
from moonep.transport.memory import Memory

PAGE = 4096
MIB = 1 << 20


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = line.split(maxsplit=1)[0].split("-")
        if int(begin, 16) <= address < int(end, 16):
            return True
    return False


def num_mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


# ---- tensors ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64])
@pytest.mark.parametrize("shape", [(3,), (100_000,), (300, 700), (5, 70, 300)])
def test_tensors_are_what_was_asked_for(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = Memory().empty(shape, dtype)
    assert (tuple(tensor.shape), tensor.dtype, tensor.device.type) == (shape, dtype, "cpu")
    assert tensor.is_contiguous()
    assert not tensor.requires_grad
    tensor.fill_(3)
    assert (tensor == 3).all()


@pytest.mark.parametrize("shape", [(0,), (0, 3584), (3584, 0), (0, 0)])
def test_zero_size(shape: tuple[int, ...]) -> None:
    memory = Memory()
    tensor = memory.empty(shape, torch.bfloat16)
    assert tuple(tensor.shape) == shape
    assert tensor.sum() == 0
    memory.close()
    assert tuple(memory.empty(shape, torch.bfloat16).shape) == shape


def test_memory_is_used_again() -> None:
    memory = Memory()
    tensor = memory.empty((1000, 1000), torch.float32)
    where = tensor.data_ptr()
    assert where % PAGE == 0
    del tensor
    # Also for another dtype and a size that differs a little, as N does from step to step.
    again = memory.empty((1990, 1000), torch.bfloat16)
    assert again.data_ptr() == where
    assert memory.empty((1000, 1000), torch.float32).data_ptr() != where


def test_memory_comes_back_with_the_last_view() -> None:
    memory = Memory()
    tensor = memory.empty((512, 512), torch.float32).fill_(1)
    where, view, array = tensor.data_ptr(), tensor[100:].t(), tensor[:2].numpy()
    del tensor
    other = memory.empty((512, 512), torch.float32).fill_(2)
    assert other.data_ptr() != where
    assert (view == 1).all()
    del view
    assert memory.empty((512, 512), torch.float32).fill_(3).data_ptr() != where
    assert (array == 1).all()
    del array
    held = [memory.empty((512, 512), torch.float32) for _ in range(3)]
    assert where in [each.data_ptr() for each in held]


def test_tensors_outlive_close_and_the_memory_itself() -> None:
    memory = Memory()
    tensor, idle = memory.empty((MIB,), torch.uint8).fill_(5), memory.empty((MIB,), torch.uint8)
    where, idle_at = tensor.data_ptr(), idle.data_ptr()
    del idle
    assert is_mapped(idle_at)
    memory.close()
    memory.close()
    assert not is_mapped(idle_at)
    late = memory.empty((MIB,), torch.uint8).fill_(6)
    del memory
    gc.collect()
    assert (tensor == 5).all()
    assert (late == 6).all()
    assert is_mapped(where)
    del tensor
    assert not is_mapped(where)


def test_autograd_keeps_tensors() -> None:
    """What a graph saved is not handed out again before the graph is gone."""
    memory = Memory()
    rows, weights = memory.empty((200, 200), torch.float32).fill_(2), torch.ones(200, 200, requires_grad=True)
    product = (rows * weights).sum()
    del rows
    memory.empty((200, 200), torch.float32).fill_(9)
    product.backward()
    assert (weights.grad == 2).all()


# ---- the pool's accounts ----


def test_accounts() -> None:
    pool = _C.Pool()
    assert (pool.used_bytes, pool.free_bytes) == (0, 0)
    small, large = pool.take(1), pool.take(5 * MIB + 1)
    assert memoryview(small).nbytes == 1
    assert not memoryview(large).readonly
    assert memoryview(large).nbytes == 5 * MIB + 1
    assert small.address % PAGE == large.address % PAGE == 0
    used = pool.used_bytes
    assert PAGE + 5 * MIB < used <= PAGE + (5 * MIB + 1) * 9 // 8 + PAGE
    del large
    assert pool.used_bytes == PAGE
    assert pool.free_bytes == used - PAGE
    pool.close()
    assert (pool.used_bytes, pool.free_bytes) == (PAGE, 0)
    del small
    assert (pool.used_bytes, pool.free_bytes) == (0, 0)


def test_nothing_is_still_a_block() -> None:
    pool = _C.Pool()
    block = pool.take(0)
    assert memoryview(block).nbytes == 0
    assert block.address
    del block
    assert pool.used_bytes == 0


def test_a_view_of_a_block_keeps_it() -> None:
    pool = _C.Pool()
    view = memoryview(pool.take(MIB))
    view[0] = 1
    assert pool.used_bytes == MIB
    del view
    assert (pool.used_bytes, pool.free_bytes) == (0, MIB)


def test_much_larger_memory_is_not_wasted_on_small_requests() -> None:
    pool = _C.Pool()
    large = pool.take(64 * MIB)
    where = large.address
    del large
    small = pool.take(MIB)
    assert small.address != where
    assert pool.used_bytes == MIB


def test_what_cannot_be_had_changes_nothing() -> None:
    pool = _C.Pool()
    held, idle = pool.take(MIB), pool.take(MIB)
    del idle
    for num_bytes in (2**48, 2**60, 2**62):
        with pytest.raises(MemoryError):
            pool.take(num_bytes)
    assert pool.used_bytes == MIB
    memoryview(held)[MIB - 1] = 1
    assert memoryview(pool.take(MIB)).nbytes == MIB


def test_random_use() -> None:
    """Blocks never overlap, the accounts stay true, and no more is held than was once in use."""
    random.seed(0)
    pool, peak = _C.Pool(), 0
    live: dict[int, tuple[object, int]] = {}
    for step in range(3000):
        if live and random.random() < 0.5:
            del live[random.choice(list(live))]
        else:
            num_bytes = int(2 ** random.uniform(0, 22))
            block = pool.take(num_bytes)
            begin, end = block.address, block.address + num_bytes
            assert all(end <= at or at + size <= begin for at, (_, size) in live.items())
            live[begin] = (block, num_bytes)
            del block
        peak = max(peak, pool.used_bytes)
        asked = sum(size for _, size in live.values())
        assert asked <= pool.used_bytes <= asked * 9 // 8 * 5 // 4 + 2 * PAGE * len(live)
        assert pool.used_bytes + pool.free_bytes <= peak, f"step {step}"
    live.clear()
    assert pool.used_bytes == 0
    pool.close()
    assert pool.free_bytes == 0


def test_changing_sizes_do_not_pile_up() -> None:
    """Growing requests, each a little larger than what came back, replace the old memory."""
    pool = _C.Pool()
    for step in range(200):
        block = pool.take(MIB + step * MIB // 8)
        capacity = pool.used_bytes
        del block
        assert pool.free_bytes <= capacity


def test_nothing_leaks_over_many_rounds() -> None:
    def rounds(count: int) -> None:
        for step in range(count):
            memory = Memory()
            held = [memory.empty((40_000 + 999 * (step % 7) * i,), torch.float32) for i in range(4)]
            held[0][-1] = held[3][0] = 1
            if step % 3 == 0:
                memory.close()
            if step % 2:
                del memory
            del held

    rounds(10)
    before = num_mappings()
    rounds(1000)
    assert num_mappings() <= before + 8  # the interpreter's own may come and go


# ---- threads and processes ----


def test_many_threads() -> None:
    pool, problems = _C.Pool(), []
    barrier = threading.Barrier(4)

    def work(seed: int) -> None:
        order = random.Random(seed)
        mine = bytes([seed]) * 64
        held: list[memoryview] = []
        barrier.wait()
        for _ in range(1500):
            view = memoryview(pool.take(64 + order.randrange(200_000)))
            view[:64] = view[-64:] = mine
            held.append(view)
            if len(held) > 5:
                old = held.pop(order.randrange(len(held)))
                if old[:64] != mine or old[-64:] != mine:
                    problems.append(seed)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert problems == []
    assert pool.used_bytes == 0
    assert pool.free_bytes > 0


def test_dropping_in_another_thread() -> None:
    memory = Memory()
    box = [memory.empty((MIB,), torch.uint8)]
    where = box[0].data_ptr()
    worker = threading.Thread(target=box.clear)
    worker.start()
    worker.join()
    assert memory.empty((MIB,), torch.uint8).data_ptr() == where


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_its_own() -> None:
    memory = Memory()
    tensor = memory.empty((MIB,), torch.uint8).fill_(1)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            memoryview(tensor.numpy())[0] = 7
            memory.close()
            del tensor
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert (tensor == 1).all()
