import gc
from types import SimpleNamespace

import pytest

from megatron.training.hooks import GarbageCollectionHook


@pytest.mark.parametrize(("interval", "collections"), [(0, 1), (2, 1 + 3), (6, 1 + 1), (7, 1)])
def test_collects_at_its_iterations_and_not_otherwise(monkeypatch, interval, collections):
    calls = []
    monkeypatch.setattr(gc, "collect", lambda: calls.append(None))
    hook = GarbageCollectionHook(interval)
    try:
        hook.before_training(SimpleNamespace())
        for iteration in range(1, 7):
            assert not gc.isenabled()
            hook.after_step(SimpleNamespace(progress=SimpleNamespace(iteration=iteration)), None, 0.1)
        hook.after_training(SimpleNamespace())
        assert gc.isenabled()
    finally:
        gc.enable()
    assert len(calls) == collections
