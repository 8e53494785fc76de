"""What the peers are handed is what they need, and what they cannot do is said in words."""

from __future__ import annotations

import ctypes
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from bench import baselines, cases
from bench.baselines import Baseline, NotApplicable, lmcache_ops, lmcache_staged, vllm_swap
from bench.moving import host_slots
from bench.trials import Trial
from bench.workload import over, set_up

VLLM_FILE = """
from vllm import _custom_ops as ops
from vllm.triton_utils import tl, triton

MIN_N = 16


def swap_blocks_batch(src_addrs, dst_addrs, sizes, *, bytes_per_chunk):
    return triton, tl, ops
"""


@pytest.mark.parametrize("name", ["memcpy_batch", "lmcache", "vllm_swap"])
def test_peers_of_the_gpu_say_so_on_a_host(tiny_trial, name):
    with pytest.raises(NotApplicable, match="needs a CUDA device"):
        baselines.BASELINES[name](set_up(tiny_trial, "cpu"))


def test_runs_copied_one_by_one_are_the_copy(tiny_trial):
    """The addresses handed to batched copies, against torch's own indexing."""
    work = set_up(tiny_trial, "cpu")
    work.poison()
    to, origin, width = work.runs(len(work.ids))
    assert len(to) * width == work.moved
    for dst, src in zip(to.tolist(), origin.tolist(), strict=True):
        ctypes.memmove(dst, src, width)
    assert work.is_exact()


def test_runs_of_the_first_blocks_only(tiny_trial):
    work = set_up(tiny_trial, "cpu")
    work.poison()
    to, origin, width = work.runs(2)
    for dst, src in zip(to.tolist(), origin.tolist(), strict=True):
        ctypes.memmove(dst, src, width)
    assert len(to) * width == 2 * tiny_trial.case.block_bytes
    assert work.is_exact(2)
    assert not work.is_exact(3)


def test_a_peer_that_fails_or_copies_wrongly_is_left_out_with_the_reason(tiny_trial):
    def broken(work):
        raise RuntimeError("no such symbol")

    def idle(work):
        return Baseline(lambda: None, work.moved, work.poison, work.is_exact)

    candidates = {"broken": broken, "idle": idle}
    contenders, absent = baselines.enter(set_up(tiny_trial, "cpu"), candidates)
    assert contenders == []
    assert absent["broken"] == "failed: RuntimeError: no such symbol"
    assert "differs" in absent["idle"]


class FakeOps:
    """Stands for LMCache's compiled module and does what its call does, in host memory."""

    class PageBufferShapeDesc(SimpleNamespace):
        pass

    TransferDirection = SimpleNamespace(D2H="D2H", H2D="H2D")
    EngineKVFormat = SimpleNamespace(**{name: name for name in lmcache_ops.FORMATS.values()})

    def __init__(self, work):
        self.work = work
        self.launches = []

    def multi_layer_block_kv_transfer(
        self, pages, objects, ids, device, direction, shape, chunk_tokens, layout, skip
    ):
        assert pages.tolist() == [cache.data_ptr() for cache in self.work.caches]
        assert (chunk_tokens, skip) == (256, 0)
        assert len(ids) == len(objects) * chunk_tokens // shape.bs
        self.launches.append(len(objects))
        object_shape = (shape.kv_size, shape.nl, chunk_tokens, shape.nh, shape.hs)
        nbytes = torch.Size(object_shape).numel() * shape.element_size
        for number, address in enumerate(objects):
            memory = (ctypes.c_uint8 * nbytes).from_address(address)
            dtype = self.work.views[0].dtype
            one = torch.frombuffer(memory, dtype=dtype).view(object_shape)
            for position, block in enumerate(ids.view(len(objects), -1)[number].tolist()):
                here = one[:, :, position * shape.bs : (position + 1) * shape.bs]
                for layer, view in enumerate(self.work.views):
                    if direction == "D2H":
                        here[:, layer] = view[:, block]
                    else:
                        view[:, block] = here[:, layer]


def test_lmcache_is_driven_four_objects_a_launch(tiny_trial, monkeypatch):
    from dataclasses import replace

    trial = replace(tiny_trial, nbytes=3 * tiny_trial.nbytes)  # nine objects
    work = set_up(trial, "cpu")
    ops = FakeOps(work)
    monkeypatch.setattr(lmcache_ops, "launcher_for", partial(fake_launcher, ops))
    baseline = lmcache_ops.prepare(work)
    baseline.poison()
    assert not baseline.is_exact()
    baseline.run()
    assert baseline.is_exact()
    assert ops.launches == [4, 4, 1]


@pytest.mark.parametrize("direction", ["gather", "scatter"])
def test_lmcache_stages_four_objects_at_a_time(direction, tiny_case, monkeypatch):
    nbytes = 9 * 256 // tiny_case.block_tokens * tiny_case.block_bytes
    trial = Trial(tiny_case, direction, nbytes)
    work = set_up(trial, "cpu", partial(host_slots, "cpu"))
    ops = FakeOps(work)
    monkeypatch.setattr(lmcache_staged, "launcher_for", partial(fake_launcher, ops))
    baseline = lmcache_staged.prepare(work)
    baseline.poison()
    assert not baseline.is_exact()
    baseline.run()
    assert baseline.is_exact()
    assert ops.launches == [4, 4, 1]


def test_lmcache_stages_many_objects_through_little_memory(tiny_case, monkeypatch):
    work = set_up(Trial(tiny_case, "scatter", 1), "cpu")  # memory for one object
    blocks = 6 * work.blocks_per_chunk
    many = over(
        work.trial,
        "cpu",
        tiny_case.tensors(blocks, "cpu"),
        list(range(blocks)),
        lambda chunks, nbytes: work.chunk,
    )
    monkeypatch.setattr(lmcache_staged, "launcher_for", partial(fake_launcher, FakeOps(many)))
    lmcache_staged.Staged(many)(many.ids)
    (first, *others) = (
        [view[:, n : n + work.blocks_per_chunk] for view in many.views]
        for n in range(0, blocks, work.blocks_per_chunk)
    )
    assert all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True))


def fake_launcher(ops, work, objects):
    return lmcache_ops.Launcher(work, objects, ops, lmcache_ops.FORMATS[work.trial.case.layout])


def test_lmcache_has_a_format_for_every_layout():
    assert set(lmcache_ops.FORMATS) == set(cases.LAYOUTS)


def test_vllms_file_is_executed_without_vllm(tmp_path, monkeypatch):
    import sys

    import triton

    path = tmp_path / "vllm" / vllm_swap.FILE
    path.parent.mkdir(parents=True)
    path.write_text(VLLM_FILE)
    monkeypatch.syspath_prepend(tmp_path)
    vllm_swap._module.cache_clear()
    module = vllm_swap._module()
    found, language, _ = module.swap_blocks_batch([], [], [], bytes_per_chunk=1)
    assert (found, language) == (triton, triton.language)
    assert not [name for name in sys.modules if name.split(".")[0] == "vllm"]
    vllm_swap._module.cache_clear()


@pytest.mark.parametrize(
    ("module", "words"), [(lmcache_ops._compiled_module, "lmcache"), (vllm_swap._module, "vLLM")]
)
def test_a_peer_that_is_not_installed_is_named(module, words, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    module.cache_clear()
    with pytest.raises(NotApplicable, match=f"{words} is not installed"):
        module()
