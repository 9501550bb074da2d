"""Labels follow memory, and keep it."""

from __future__ import annotations

import gc

import torch

from autolaunch_strategies.torch_private.tracing import fake_tensors, storage_key
from autolaunch_strategies.tracing.tensors import Labels, first_input, first_output, tensors_in


def test_windows_on_one_memory_share_labels() -> None:
    labels = Labels[str]()
    with fake_tensors():
        tensor, other = torch.ones(4, 4), torch.ones(4)
        labels.put(tensor[0], {"a"})
        labels.add(tensor.t(), frozenset({"b"}))
        assert labels.of(tensor) == {"a", "b"}
        assert labels.of(other) == frozenset() == labels.of()
        labels.put(other, {"c"})
        assert labels.of(other[:2], tensor) == {"a", "b", "c"}
        labels.put(tensor, {"d"})
        assert labels.of(tensor[1]) == {"d"}


def test_labelled_memory_is_not_given_out_again() -> None:
    labels, keys = Labels[int](), set()
    with fake_tensors():
        for number in range(100):
            tensor = torch.ones(4)
            labels.put(tensor, {number})
            keys.add(storage_key(tensor))
            del tensor
            gc.collect(0)
        fresh = torch.ones(4)
        assert len(keys) == 100 and labels.of(fresh) == frozenset()


def test_the_tensors_that_styles_change() -> None:
    ids, mask, x = torch.ones(2, dtype=torch.long), torch.ones(2, dtype=torch.bool), torch.ones(2)
    assert first_input((None, mask), {"x": x}) is mask
    assert first_input((), {"mask": mask, "x": x}) is x
    assert first_input((), {"ids": ids, "mask": mask}) is ids
    assert first_input((1,), {}) is None
    assert first_output((None, x, ids)) is x
    assert first_output({"loss": None, "logits": x}) is x
    assert first_output(3) is None
    assert [id(tensor) for tensor in tensors_in(({"a": [x, 1]}, ids))] == [id(x), id(ids)]
