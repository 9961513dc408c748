"""Bytes that live tensors hold, in a rank: the process of the tests has a million objects."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from tests.support.storage import live_storage_bytes
from tests.support.warm import run_ranks


class Kept:
    """Something that a weak reference can lose."""


def grown(make):
    """Bytes that are live since `make` was called; the test keeps what it returns."""
    return run_ranks(1, _grown, make)[0]


def _grown(rank, world_size, make):
    gc.collect()
    before = live_storage_bytes()
    kept = make()  # noqa: F841
    gc.collect()
    return live_storage_bytes() - before


def _train():
    model = nn.Linear(100, 50)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_model_in_training_holds_16_bytes_per_parameter_and_the_step_counters():
    num_counters = 2  # a float32 for each parameter
    assert grown(_train) == 16 * (100 * 50 + 50) + 4 * num_counters


def _gradient():
    weight = torch.ones(1000, requires_grad=True)
    (weight * 2).sum().backward()
    return weight


def test_a_gradient_that_python_never_touched_is_seen():
    assert grown(_gradient) == 8000


def _views():
    return torch.zeros(1000)[:10].split(5)


def test_a_view_counts_its_entire_base_once():
    assert grown(_views) == 4000


def _freed():
    tensor = torch.zeros(1000)
    tensor.untyped_storage().resize_(0)
    return tensor


def test_freed_storage_counts_nothing():
    assert grown(_freed) == 0


def _meta_and_bare():
    return torch.zeros(1000, device="meta"), torch.zeros(500).untyped_storage()


def test_meta_tensors_count_nothing_and_bare_storages_count():
    assert grown(_meta_and_bare) == 2000


def _subclass_and_sparse():
    from torch.testing._internal.two_tensor import TwoTensor

    both = TwoTensor(torch.zeros(1000), torch.zeros(1000))
    sparse = torch.sparse_coo_tensor(torch.zeros(1, 5, dtype=torch.int64), torch.zeros(5), (9,))
    return both, sparse


@pytest.mark.slow
def test_tensor_subclasses_and_sparse_tensors_show_what_they_hold():
    assert grown(_subclass_and_sparse) == 8000 + 40 + 20


def _dead_proxy():
    target = Kept()
    proxy = weakref.proxy(target)
    del target
    assert type(proxy) is weakref.ProxyType
    return proxy


@pytest.mark.slow
def test_a_dead_proxy_does_no_harm():
    assert grown(_dead_proxy) == 0
