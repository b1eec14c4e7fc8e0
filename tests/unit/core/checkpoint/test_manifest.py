import json

import pytest

from megatron.core.checkpoint import CheckpointError, Manifest, Rectangle, StoredShard, StoredTensor
from megatron.core.checkpoint.manifest import decode_manifest, encode_manifest


def _manifest(**changes):
    shards = (
        StoredShard(Rectangle((0, 0), (2, 3)), "rank_00000.safetensors", "w#0"),
        StoredShard(Rectangle((2, 0), (2, 3)), "rank_00001.safetensors", "w#0"),
    )
    fields = {
        "save_id": "abc",
        "iteration": 7,
        "files": {"rank_00000.safetensors": 100, "rank_00001.safetensors": 100},
        "tensors": {"model.w": StoredTensor((4, 3), "F32", shards), "e": StoredTensor((0,), "I64", ())},
        "state": {"lr": 0.1 + 0.2, "consumed_samples": 2**60, "scaler": None},
    }
    return Manifest(**{**fields, **changes})


def test_a_manifest_comes_back_as_it_went():
    manifest = _manifest()
    found = decode_manifest(encode_manifest(manifest), "m")
    assert found == manifest
    assert found.names("model.") == ["model.w"]
    assert found.names("optimizer.") == []


def test_tuples_in_the_state_do_not_upset_the_digest():
    assert decode_manifest(encode_manifest(_manifest(state={"betas": (0.9, 0.95)})), "m").state == {
        "betas": [0.9, 0.95]
    }


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("iteration",), 8),
        (("state", "consumed_samples"), 5),
        (("files", "rank_00000.safetensors"), 101),
        (("tensors", "model.w", "dtype"), "BF16"),
        (("tensors", "model.w", "shards", 0, "key"), "w#1"),
    ],
)
def test_any_edit_is_noticed(path, value):
    body = json.loads(encode_manifest(_manifest()))
    place = body
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(CheckpointError, match="m was changed after it was written"):
        decode_manifest(json.dumps(body), "m")


def test_reformatting_is_no_edit():
    text = json.dumps(json.loads(encode_manifest(_manifest())), indent=2, sort_keys=True)
    assert decode_manifest(text, "m") == _manifest()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "m is not JSON"),
        ("[]", "m is not the manifest"),
        ('{"format": "other"}', "m is not the manifest"),
        ('{"format": "megatron-sharded", "version": 2}', "format version 2, .* reads version 1"),
        ('{"format": "megatron-sharded", "version": 1}', "m was changed"),
    ],
)
def test_what_is_no_manifest_is_refused(text, message):
    with pytest.raises(CheckpointError, match=message):
        decode_manifest(text, "m")


def test_half_a_manifest_is_refused():
    text = encode_manifest(_manifest())
    for length in range(0, len(text), 97):
        with pytest.raises(CheckpointError):
            decode_manifest(text[:length], "m")


def test_a_manifest_that_does_not_tile_is_refused():
    half = StoredTensor((4, 3), "F32", (StoredShard(Rectangle((0, 0), (2, 3)), "f", "w#0"),))
    with pytest.raises(CheckpointError, match=r"tensor model.w .*no rank holds \[2:4, 0:3\]"):
        decode_manifest(encode_manifest(_manifest(tensors={"model.w": half})), "m")


def test_state_that_json_cannot_hold_is_refused():
    with pytest.raises(TypeError, match="not JSON serializable"):
        encode_manifest(_manifest(state={"x": object()}))
