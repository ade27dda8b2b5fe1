"""The owner's state: loading, ready, failed; layouts on demand."""

import threading

import pytest

from model_owner import weights as module
from model_owner.arena import ArenaError
from model_owner.loader import PackedWeights
from model_owner.weights import Failure, Progress, Weights
from tie.assets.sample import make_sample_bundle
from tie.daemon.errors import BundleError
from tie.proto import owner_pb2
from waiting import wait_for


def _settled(weights, layout_id):
    def settled():
        found = weights.get(layout_id)
        return None if isinstance(found, Progress) else found

    return wait_for(settled, "the load to end")


@pytest.fixture
def closing():
    made = []
    yield made.append
    for weights in made:
        weights.close()


def test_ready(sample, closing):
    weights = Weights(str(sample.directory), "torch-cpu-bf16")
    closing(weights)
    packed = _settled(weights, "torch-cpu-bf16")
    assert isinstance(packed, PackedWeights)
    status = weights.status()
    assert status.state == owner_pb2.STATE_READY
    assert (status.model, status.release) == (sample.manifest.model, sample.manifest.release)
    assert (status.loads, status.generation, list(status.layouts)) == (1, 1, ["torch-cpu-bf16"])
    assert status.weight_bytes_read == sample.manifest.files["model.safetensors"].bytes
    assert status.arena_bytes == packed.arena.size
    assert status.progress_total == 0
    assert weights.get("torch-cpu-bf16") is packed, "asking again loads nothing"
    assert weights.opened().manifest == sample.manifest


def test_another_layout_on_demand_keeps_the_generation(sample, closing):
    weights = Weights(str(sample.directory), "torch-cpu-bf16")
    closing(weights)
    _settled(weights, "torch-cpu-bf16")
    assert isinstance(weights.get("torch-cpu-f32"), Progress)
    assert isinstance(_settled(weights, "torch-cpu-f32"), PackedWeights)
    status = weights.status()
    assert (status.loads, status.generation) == (2, 1)
    assert list(status.layouts) == ["torch-cpu-bf16", "torch-cpu-f32"]


def test_unknown_layout(sample, closing):
    weights = Weights(str(sample.directory), "torch-cpu-bf16")
    closing(weights)
    assert weights.get("torch-tpu-f8") == Failure("unknown-layout")


@pytest.mark.parametrize(("path", "code"), [("", "no-bundle"), ("/does/not/exist", "no-bundle")])
def test_no_bundle(closing, path, code):
    weights = Weights(path, "torch-cpu-bf16")
    closing(weights)
    assert _settled(weights, "torch-cpu-bf16") == Failure(code)
    status = weights.status()
    assert (status.state, status.error) == (owner_pb2.STATE_FAILED, code)
    with pytest.raises(BundleError):
        weights.opened()


def test_damaged_bundle(own_sample, closing):
    file = own_sample / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    weights = Weights(str(own_sample), "torch-cpu-bf16")
    closing(weights)
    assert _settled(weights, "torch-cpu-bf16") == Failure("bundle-invalid")


def test_no_gpu_is_said_and_the_cpu_layout_still_served(sample, closing, monkeypatch):
    pack = module.pack

    def without_gpu(bundle, layout_id, **options):
        if "cuda" in layout_id:
            raise ArenaError("there is no usable GPU", code="no-gpu")
        return pack(bundle, layout_id, **options)

    monkeypatch.setattr(module, "pack", without_gpu)
    weights = Weights(str(sample.directory), "torch-cpu-bf16")
    closing(weights)
    assert isinstance(_settled(weights, "torch-cpu-bf16"), PackedWeights)
    assert _settled(weights, "torch-cuda-bf16") == Failure("no-gpu")
    assert weights.status().state == owner_pb2.STATE_READY


def test_an_unforeseen_error_leaves_the_owner_answerable(sample, closing, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(module, "pack", broken)
    weights = Weights(str(sample.directory), "torch-cpu-bf16")
    closing(weights)
    assert _settled(weights, "torch-cpu-bf16") == Failure("internal")


def test_progress_and_close_in_the_middle(sample, monkeypatch):
    inside, seen = threading.Event(), []

    def slow(bundle, layout_id, *, on_read, cancelled):
        on_read(10)
        inside.set()
        assert cancelled.wait(30)
        raise module.CancelledError("shutting down")

    monkeypatch.setattr(module, "pack", slow)
    weights = Weights(str(sample.directory), "torch-cpu-bf16")
    assert inside.wait(30)
    seen.append(weights.get("torch-cpu-bf16"))
    status = weights.status()
    weights.close()
    total = sample.manifest.files["model.safetensors"].bytes
    assert seen == [Progress(10, total)]
    assert (status.state, status.progress_bytes, status.progress_total) == (owner_pb2.STATE_LOADING, 10, total)
    assert weights.get("torch-cpu-bf16") == Failure("stopping")
    assert weights.get("torch-cpu-f32") == Failure("stopping"), "no load starts after the end"


@pytest.fixture
def link(tmp_path, sample):
    """Where the owner looks, and a way to put another bundle there."""
    path = tmp_path / "active"

    def put(bundle):
        path.unlink(missing_ok=True)
        path.symlink_to(bundle)
        return path

    put(sample.directory)
    return put


def test_other_prompts_around_the_same_weights_keep_what_is_packed(sample, link, tmp_path, closing):
    weights = Weights(str(link(sample.directory)), "torch-cpu-bf16")
    closing(weights)
    packed = _settled(weights, "torch-cpu-bf16")
    assert not weights.follow()
    prompts = make_sample_bundle(tmp_path / "prompts", layers=2, system_prompts={"new": "You are new."})
    link(prompts.directory)
    assert weights.follow()
    assert not weights.follow()
    assert weights.get("torch-cpu-bf16") is packed
    status = weights.status()
    assert (status.release, status.loads, status.generation) == (prompts.manifest.release, 1, 1)
    assert status.release != sample.manifest.release


def test_other_weights_are_packed_in_place_of_the_old(sample, link, tmp_path, closing):
    weights = Weights(str(link(sample.directory)), "torch-cpu-bf16")
    closing(weights)
    old = _settled(weights, "torch-cpu-bf16").arena
    other = make_sample_bundle(tmp_path / "other", layers=2, seed=9)
    link(other.directory)
    assert weights.follow()
    assert isinstance(_settled(weights, "torch-cpu-bf16"), PackedWeights)
    status = weights.status()
    assert (status.release, status.loads, status.generation) == (other.manifest.release, 2, 2)
    assert list(status.layouts) == ["torch-cpu-bf16"]
    assert old.descriptors() == (-1,), "both were in memory"


def test_a_bundle_that_comes_later_is_seen(sample, link, tmp_path, closing):
    weights = Weights(str(link(tmp_path / "none")), "torch-cpu-bf16")
    closing(weights)
    assert _settled(weights, "torch-cpu-bf16") == Failure("no-bundle")
    assert not weights.follow()
    assert weights.get("torch-cpu-bf16") == Failure("no-bundle"), "who attaches is told, and not to wait"
    link(sample.directory)
    assert weights.follow()
    assert isinstance(_settled(weights, "torch-cpu-bf16"), PackedWeights)
    assert not weights.follow()
    status = weights.status()
    assert (status.state, status.release, status.generation) == (owner_pb2.STATE_READY, sample.manifest.release, 1)


def test_what_failed_is_tried_again_with_the_next_bundle(sample, link, tmp_path, closing, monkeypatch):
    pack, memory = module.pack, []

    def short_of_memory(bundle, layout_id, **options):
        if not memory:
            raise ArenaError("no memory", code="out-of-memory")
        return pack(bundle, layout_id, **options)

    monkeypatch.setattr(module, "pack", short_of_memory)
    weights = Weights(str(link(sample.directory)), "torch-cpu-bf16")
    closing(weights)
    assert _settled(weights, "torch-cpu-bf16") == _settled(weights, "torch-cpu-f32") == Failure("out-of-memory")
    memory.append("enough")
    assert not weights.follow(), "the same bundle"
    link(make_sample_bundle(tmp_path / "prompts", layers=2, system_prompts={"new": "You are new."}).directory)
    assert weights.follow()
    for layout in ("torch-cpu-bf16", "torch-cpu-f32"):
        assert isinstance(_settled(weights, layout), PackedWeights)


def test_the_state_can_be_asked_for_at_any_moment_of_a_change(sample, link, tmp_path, closing, monkeypatch):
    weights = Weights(str(link(sample.directory)), "torch-cpu-bf16")
    closing(weights)
    _settled(weights, "torch-cpu-bf16")
    states = []
    monkeypatch.setattr(module.log, "event", lambda *_, **__: states.append(weights.status().state))
    link(make_sample_bundle(tmp_path / "other", layers=2, seed=9).directory)
    assert weights.follow()
    assert isinstance(_settled(weights, "torch-cpu-bf16"), PackedWeights)
    assert owner_pb2.STATE_FAILED not in states


def test_a_bundle_that_cannot_be_opened_changes_nothing(sample, link, tmp_path, closing):
    weights = Weights(str(link(sample.directory)), "torch-cpu-bf16")
    closing(weights)
    packed = _settled(weights, "torch-cpu-bf16")
    link(tmp_path)
    assert not weights.follow()
    assert weights.get("torch-cpu-bf16") is packed
    assert weights.status().release == sample.manifest.release
