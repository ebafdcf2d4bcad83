"""What TileLang 0.1.15 cannot express or gets wrong, as the smallest program that shows it, and which kernel works around it.

Every test here fails once TileLang changes: then the workaround that it names may go. Nothing runs: sources are read.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

import pytest

from kda_tl.compiler import lower
from kda_tl.compiler.errors import BuildError
from kda_tl.specs.archs import ARCHS

pytestmark = pytest.mark.tilelang

Source = Callable[..., str]


@pytest.fixture(scope="module")
def programs() -> Any:
    return importlib.import_module("limit_programs")


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Source:
    """source(program, arch): the body of its kernel in CUDA, with nvcc left out."""
    monkeypatch.setattr(lower, "_nvcc", lambda code, arch: (b"\x7fELF", ""))

    def body(program: Any, arch: str = "sm_90") -> str:
        text = lower.lower_program(program, ARCHS[arch], "limit").files["kernel.cu"].decode()
        return text[text.rindex('extern "C"') :]

    return body


# A cluster of chunk_scan's V tiles had barriers for arrivals from other blocks, which bring the cluster_sync.
def test_a_multicast_may_meet_a_barrier_that_is_not_there_yet(programs: Any, source: Source) -> None:
    lonely, released = source(programs.multicast("ordinary")), source(programs.multicast("released"))
    for text in (lonely, released):  # every block expects the bytes, which come from the first one
        before, after = text.split("block_rank_in_cluster() == 0", 1)
        assert "full[0].expect_transaction(8192)" in before and "tma_load_multicast" in after
    assert "cluster_sync" not in lonely and "__syncthreads" in lonely.split("tma_load_multicast")[0]
    assert released.index("fence_barrier_init") < released.index("cluster_sync") < released.index("tma_load_multicast")
    # Nor does a block wait, before it ends, for what others send it or its barriers.
    assert "cluster" not in released.split(".wait(0)")[1]


# There, ordinary barriers counted the bytes; those of the cluster only counted arrivals.
def test_a_cluster_barrier_expects_bytes_in_the_first_block_alone(programs: Any, source: Source) -> None:
    text = source(programs.multicast("cluster"))
    (bytes_expected,) = re.findall(r"expect_transaction\((\d+)\)", text)
    assert int(bytes_expected) == 2 * 64 * 64 * 2  # twice the tile: meant for two halves of a pair of blocks
    assert re.search(r"block_rank_in_cluster\(\) == 0\) \{\s*full\[0\].expect_transaction", text)


# There, the first block of a cluster loaded for all, instead of every block a part.
def test_only_the_first_block_of_the_mask_can_multicast(programs: Any, source: Source) -> None:
    text = source(programs.multicast("one caller"))  # the second one
    assert "expect_transaction" in text.split("block_rank_in_cluster() == 1")[1]
    assert "tma_load_multicast" not in text  # it waits for bytes that nobody sends


# TileTarget.pair: chunk_wy and the decay products write such results to another pair.
def test_a_pair_changed_by_a_function_is_read_from_before(programs: Any, source: Source) -> None:
    import tilelang.language as T

    wrong, right = source(programs.pair_changed_twice(T.exp2)), source(programs.pair_changed_twice(lambda x: x * 2.0))
    loaded = r"float2 (v_\w*) = \*\(float2\*\)\(x \+ 0\)"
    assert len(re.findall(loaded, wrong)) == 1 and len(re.findall(loaded, right)) == 2
    (pair,) = re.findall(loaded, wrong)
    assert f"exp2f({pair}.x)" in wrong and re.search(rf"= \({pair}\.x\*v_", wrong)  # 3 y rather than 3 exp2(y)


# chunk_wy: the barriers are its own.
def test_a_loop_for_some_threads_leaves_the_next_one_without_a_barrier(programs: Any, source: Source) -> None:
    text = source(programs.written_by_some(64))
    assert "__sync_thread_partial(3, 64)" in text and "__syncthreads" not in text
    loop, after = source(programs.written_by_some(128)).rsplit("__syncthreads", 1)
    assert "tile[" not in after.split("y[")[0] and loop.count("__syncthreads") == 1


# tiles.triangular_inverse: warps multiply tiles of 16 x 8 by mma, each on its own.
def test_a_block_cannot_share_out_a_product_of_16_rows(programs: Any, source: Source) -> None:
    for arch in ("sm_80", "sm_90"):
        with pytest.raises(BuildError, match="No valid warp partition"):
            source(programs.product_of_16(16), arch)
        assert "mma" in source(programs.product_of_16(64), arch)


# TileTarget.column_pairs: a tile whose loops look along rows lies in plain registers, a pair of columns per thread.
def test_a_loop_indexes_a_fragment_in_one_way(programs: Any, source: Source) -> None:
    with pytest.raises(BuildError, match="StructuralEqual"):
        source(programs.fragment_reversed("fragment"))
    assert "tile" in source(programs.fragment_reversed("shared"))


# chunk_scan_warp_specialized: its macros take all barriers of a kind, and the stage.
def test_a_macro_cannot_take_one_of_several_barriers(programs: Any, source: Source) -> None:
    assert "barriers[i].arrive()" in source(programs.barrier_to_a_macro(whole=True))
    with pytest.raises(TypeError, match="mbarrier must be"):
        programs.barrier_to_a_macro(whole=False)
