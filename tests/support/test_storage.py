from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from tests.support.storage import live_storage_bytes


class Kept:
    """Something that a weak reference can lose."""


@pytest.fixture
def grown():
    """Returns the bytes that became live since the test began."""
    gc.collect()
    before = live_storage_bytes()

    def measure() -> int:
        gc.collect()
        return live_storage_bytes() - before

    return measure


def test_a_model_in_training_holds_16_bytes_per_parameter_and_the_step_counters(grown) -> None:
    model = nn.Linear(100, 50)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    num_counters = 2  # a float32 for each parameter
    assert grown() == 16 * (100 * 50 + 50) + 4 * num_counters


def test_a_gradient_that_python_never_touched_is_seen(grown) -> None:
    weight = torch.ones(1000, requires_grad=True)
    (weight * 2).sum().backward()
    assert grown() == 8000


def test_a_view_counts_its_entire_base_once(grown) -> None:
    views = torch.zeros(1000)[:10].split(5)
    assert len(views) == 2
    assert grown() == 4000


def test_freed_storage_counts_nothing(grown) -> None:
    tensor = torch.zeros(1000)
    tensor.untyped_storage().resize_(0)
    assert grown() == 0


def test_meta_tensors_count_nothing_and_bare_storages_count(grown) -> None:
    kept = torch.zeros(1000, device="meta"), torch.zeros(500).untyped_storage()
    assert len(kept) == 2
    assert grown() == 2000


@pytest.mark.slow
def test_tensor_subclasses_and_sparse_tensors_show_what_they_hold(grown) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    both = TwoTensor(torch.zeros(1000), torch.zeros(1000))
    sparse = torch.sparse_coo_tensor(torch.zeros(1, 5, dtype=torch.int64), torch.zeros(5), (9,))
    assert both is not sparse
    assert grown() == 8000 + 40 + 20


@pytest.mark.slow
def test_a_dead_proxy_does_no_harm(grown) -> None:
    target = Kept()
    proxy = weakref.proxy(target)
    del target
    assert grown() == 0
    assert type(proxy) is weakref.ProxyType
