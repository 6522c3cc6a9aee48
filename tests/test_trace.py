"""Routing traces: what is written comes back, and nothing in a file is believed."""

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from moonep.cli import main
from moonep.sizing.trace_plot import chosen_together
from moonep.testing import lognormal_routing, maxvio
from moonep.trace import BUILTIN_TRACES, Trace, load_trace, save_trace

STEPS, TOKENS, K, E = 3, 20, 4, 32


def make_trace(num_experts: int = E, description: str = "router of layer 7") -> Trace:
    idx = np.stack([lognormal_routing(TOKENS, E, K, 1.0, seed) for seed in range(STEPS)]).astype(np.int32)
    weights = np.random.default_rng(0).random(idx.shape).astype(np.float16)
    return Trace(idx, weights, num_experts, description)


def members(trace: Trace) -> dict[str, np.ndarray]:
    return {
        "topk_idx": trace.topk_idx.astype(np.uint16),
        "topk_weights": trace.topk_weights,
        "num_experts": np.int64(trace.num_experts),
        "description": np.frombuffer(trace.description.encode(), np.uint8),
    }


# ---- there and back ----


@pytest.mark.parametrize("description", ["", "naïve 文"])
def test_round_trip(tmp_path: Path, description: str) -> None:
    trace = make_trace(description=description)
    save_trace(tmp_path / "a.npz", trace)
    found = load_trace(tmp_path / "a.npz")
    np.testing.assert_array_equal(found.topk_idx, trace.topk_idx)
    np.testing.assert_array_equal(found.topk_weights, trace.topk_weights)
    assert found.topk_idx.dtype == np.int32
    assert (found.num_experts, found.description) == (E, description)
    assert (found.num_steps, found.num_tokens, found.top_k) == (STEPS, TOKENS, K)


@pytest.mark.parametrize(("value", "dtype"), [(0, "uint16"), (65535, "uint16"), (65536, "int32"), (-1, "int32")])
def test_ids_are_kept_in_two_bytes_where_they_fit(tmp_path: Path, value: int, dtype: str) -> None:
    trace = make_trace(num_experts=100_000)
    trace.topk_idx[1, 2, 3] = value
    save_trace(tmp_path / "a.npz", trace)
    with np.load(tmp_path / "a.npz", allow_pickle=False) as archive:
        assert archive["topk_idx"].dtype == dtype
    np.testing.assert_array_equal(load_trace(tmp_path / "a.npz").topk_idx, trace.topk_idx)


def test_the_name_of_the_file_is_kept(tmp_path: Path) -> None:
    save_trace(tmp_path / "trace", make_trace())
    assert load_trace(str(tmp_path / "trace")).num_experts == E


@pytest.mark.parametrize("name", BUILTIN_TRACES)
def test_built_in_traces(name: str) -> None:
    trace = load_trace(name)
    assert (trace.num_experts, trace.top_k) == (896, 16)
    assert trace.num_tokens >= 1024
    assert trace.description
    sizes = [path.stat().st_size for path in Path(load_trace.__code__.co_filename).parent.glob("data/*.npz")]
    assert sum(sizes) <= 300_000


# ---- ranks' parts ----


def test_ranks_take_consecutive_tokens_of_a_step() -> None:
    trace = make_trace()
    parts = [trace.slice_for(rank, 4, 5, step=1) for rank in range(4)]
    np.testing.assert_array_equal(np.concatenate([part.topk_idx for part in parts]), trace.topk_idx[1])
    weights = np.concatenate([part.topk_weights for part in parts])
    assert weights.dtype == np.float32
    np.testing.assert_array_equal(weights, trace.topk_weights[1].astype(np.float32))


def test_tokens_and_steps_start_over() -> None:
    trace = make_trace()
    part = trace.slice_for(1, 2, 17, step=STEPS)
    np.testing.assert_array_equal(part.topk_idx, np.concatenate([trace.topk_idx[0, 17:], trace.topk_idx[0, :14]]))
    np.testing.assert_array_equal(trace.slice_for(0, 1, TOKENS).topk_idx, trace.topk_idx[-1])
    assert trace.slice_for(0, 1, 0).topk_idx.shape == (0, K)


@pytest.mark.parametrize(("rank", "num_tokens", "name"), [(2, 5, "rank"), (-1, 5, "rank"), (0, -1, "num_tokens")])
def test_parts_that_cannot_be(rank: int, num_tokens: int, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        make_trace().slice_for(rank, 2, num_tokens)


def test_maxvio_of_step() -> None:
    trace = make_trace()
    assert trace.maxvio_of_step() == [maxvio(idx, E) for idx in trace.topk_idx]


# ---- what is refused ----


def change(name: str, value: object) -> Callable[[dict[str, np.ndarray]], None]:
    def apply(arrays: dict[str, np.ndarray]) -> None:
        arrays[name] = np.asarray(value)

    return apply


def edit(name: str, place: tuple[int, ...], value: float, dtype: str | None = None) -> Callable[[dict], None]:
    def apply(arrays: dict[str, np.ndarray]) -> None:
        arrays[name] = arrays[name].astype(dtype or arrays[name].dtype)
        arrays[name][place] = value

    return apply


WRONG = {
    "no weights": (lambda arrays: arrays.pop("topk_weights"), "topk_weights"),
    "float ids": (lambda arrays: arrays.update(topk_idx=arrays["topk_idx"].astype(np.float32)), "topk_idx.*float32"),
    "64-bit ids": (lambda arrays: arrays.update(topk_idx=arrays["topk_idx"].astype(np.int64)), "topk_idx.*int64"),
    "two dimensions": (lambda arrays: arrays.update(topk_idx=arrays["topk_idx"][0]), "topk_idx.*3 dimensions"),
    "no steps": (lambda arrays: arrays.update({n: arrays[n][:0] for n in ("topk_idx", "topk_weights")}), "none of"),
    "other shape": (lambda arrays: arrays.update(topk_weights=arrays["topk_weights"][:, 1:]), "topk_weights.*shape"),
    "column order": (lambda arrays: arrays.update(topk_idx=np.asfortranarray(arrays["topk_idx"])), "Fortran"),
    "pickled": (change("description", np.array([{"a": 1}], dtype=object)), "description.*object"),
    "not UTF-8": (change("description", np.array([0xFF], np.uint8)), "utf-8"),
    "id past the end": (edit("topk_idx", (1, 2, 3), E), rf"-1 to {E - 1}, got {E} at step 1, token 2, k 3"),
    "id below -1": (edit("topk_idx", (0, 4, 1), -2, "int32"), "got -2 at step 0, token 4, k 1"),
    "NaN": (edit("topk_weights", (0, 0, 0), np.nan), "topk_weights.*finite"),
    "fewer experts than K": (change("num_experts", np.int64(K - 1)), "num_experts"),
    "too many experts": (change("num_experts", np.int64(2**40)), "num_experts"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_contents(tmp_path: Path, case: str) -> None:
    spoil, message = WRONG[case]
    arrays = members(make_trace())
    spoil(arrays)
    path = tmp_path / "a.npz"
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=message) as caught:
        load_trace(path)
    assert str(path) in str(caught.value)


def npy(header_shape: tuple[int, ...], dtype: str, data: bytes) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": header_shape}
    )
    return file.getvalue() + data


@pytest.mark.parametrize(
    "shape", [(2**40, 2**20, 2**10), (2**62, 4, 4), (1, 1, 100), (0, 2**60, 2**60), (-1, 2, 2), (1, 1, 1)]
)
def test_sizes_that_a_file_claims_are_not_believed(tmp_path: Path, shape: tuple[int, ...]) -> None:
    save_trace(tmp_path / "good.npz", make_trace())
    path = tmp_path / "bad.npz"
    with zipfile.ZipFile(tmp_path / "good.npz") as good, zipfile.ZipFile(path, "w") as bad:
        for name in good.namelist():
            bad.writestr(name, npy(shape, "uint16", b"\0" * 48) if name == "topk_idx.npy" else good.read(name))
    with pytest.raises(ValueError, match=r"bad\.npz: not a trace: topk_idx"):
        load_trace(path)


def test_every_cut_and_every_flipped_byte_is_survived(tmp_path: Path) -> None:
    save_trace(tmp_path / "good.npz", make_trace())
    good = (tmp_path / "good.npz").read_bytes()
    path = tmp_path / "bad.npz"
    for i in range(0, len(good), 7):
        path.write_bytes(good[:i])
        with pytest.raises(ValueError, match="not a trace"):
            load_trace(path)
        path.write_bytes(good[:i] + bytes([good[i] ^ 0xFF]) + good[i + 1 :])
        try:  # some bytes do not matter, such as dates
            load_trace(path)
        except ValueError as error:
            assert "not a trace" in str(error)  # noqa: PT017


def test_not_an_archive(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_text("step,expert\n")
    with pytest.raises(ValueError, match="not a trace"):
        load_trace(tmp_path / "a.npz")


def test_no_such_file_names_the_built_in_traces() -> None:
    with pytest.raises(FileNotFoundError, match="pydoc"):
        load_trace("pidoc")


# ---- the command ----


def test_command_summarises(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    trace = make_trace()
    save_trace(path, trace)
    result = CliRunner().invoke(main, ["trace", str(path)])
    assert result.exit_code == 0
    assert "router of layer 7" in result.output
    assert f"steps {STEPS}, tokens {TOKENS}, experts {E}, top-k {K}" in result.output
    assert [line.split()[1] for line in result.output.splitlines()[-STEPS:]] == [
        f"{value:.2f}" for value in trace.maxvio_of_step()
    ]


def test_command_says_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_text("")
    result = CliRunner().invoke(main, ["trace", str(tmp_path / "a.npz")])
    assert result.exit_code == 2  # as bench has it
    assert "not a trace" in result.output
    assert "Traceback" not in result.output


def test_info_tells_what_ranks_get(tmp_path: Path) -> None:
    idx = np.array([[[0], [0], [1], [3]], [[0], [1], [2], [3]]], np.int32)  # 2 steps of 4 tokens
    save_trace(tmp_path / "a.npz", Trace(idx, np.ones(idx.shape, np.float16), 4))
    result = CliRunner().invoke(main, ["trace", "info", str(tmp_path / "a.npz"), "--ranks", "2"])
    assert [line.split() for line in result.output.splitlines()[-2:]] == [
        ["0", "1.00", "1", "50.0%"],
        ["1", "0.00", "0", "0.0%"],
    ]


def test_plot(tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    result = CliRunner().invoke(main, ["trace", "plot", "pydoc", str(picture), "--ranks", "4"])
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    result = CliRunner().invoke(main, ["trace", "plot", "pydoc", str(tmp_path / "a.pdf")])
    assert result.exit_code == 2
    assert "PICTURE: expected a file named *.png or *.svg" in result.output


def test_chosen_together() -> None:
    # 2 ranks of 2 experts. Half of the tokens go to both ranks, a quarter to each alone: 0.5 / 0.75^2.
    idx = np.array([[[0, 2], [1, 3], [0, 1], [2, -1]]], np.int32)
    found = chosen_together(Trace(idx, np.ones(idx.shape, np.float16), 4), 2)
    assert found[0, 1] == found[1, 0] == 0.5 / 0.75**2
    assert np.isnan(found[0, 0])
