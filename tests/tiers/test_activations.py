"""Activation offload in one process without an engine."""

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from lightning_zero import offload_activations


def gradients(context, function, *inputs):
    """The value of `function` inside `context`, and its gradients."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    with context:
        loss = function(*inputs)
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


def assert_same_gradients(function, *inputs, min_bytes=1):
    """Compares gradients with and without offload; returns the offloaded bytes."""
    context = offload_activations(min_bytes=min_bytes)
    ours = gradients(context, function, *inputs)
    plain = gradients(torch.enable_grad(), function, *inputs)
    for one, other in zip(ours, plain, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
    return context.nbytes


def test_what_backward_needs_is_freed_after_forward_and_comes_back():
    x = torch.randn(100, requires_grad=True)
    with offload_activations(min_bytes=1):
        middle = x * 2
        loss = middle.sin().sum()
    storage = StorageWeakRef(middle.untyped_storage())
    expected = 2 * middle.detach().cos()
    del middle
    assert storage.expired()
    loss.backward()
    assert torch.equal(x.grad, expected)


def test_small_tensors_stay():
    x = torch.randn(100)
    assert assert_same_gradients(lambda x: x.sin().sum(), x, min_bytes=401) == 0
    assert assert_same_gradients(lambda x: x.sin().sum(), x, min_bytes=400) == 400


def test_a_tensor_that_several_operations_save_is_copied_once():
    x = torch.randn(100)
    assert assert_same_gradients(lambda x: (x.sin() + x.cos() * x.tanh()).sum(), x) == 3 * 400


def test_views_keep_their_strides_and_overlapping_ones_stay():
    x, y = torch.randn(6, 5, 4), torch.randn(4)

    def sliced(x, y):
        return (x[:, 1:3].transpose(0, 2).sin() * x[::2, :1].permute(2, 1, 0).cos().sum()).sum()

    assert assert_same_gradients(lambda x, y: sliced(x, y) + (y * y).sum(), x, y) > 0
    assert assert_same_gradients(lambda y: (y.expand(9, 4).sin()).sum(), y) == 0
    assert assert_same_gradients(lambda y: (y.unfold(0, 2, 1) * 2).sin().sum(), y) > 0


def test_parameters_stay_and_no_engine_is_needed():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8, bias=False))
    assert_same_gradients(lambda x: module(x).square().sum(), torch.randn(3, 8))
    context = offload_activations(min_bytes=1)
    with context:
        module(torch.randn(3, 8)).sum()
    assert context.nbytes == 3 * (3 * 8 * 4)  # the inputs of three layers, no weight


def test_a_graph_that_is_kept_is_walked_twice_and_a_context_entered_twice():
    context = offload_activations(min_bytes=1, num_prefetched=1)
    x = torch.randn(50, requires_grad=True)
    for _ in range(2):
        with context:
            loss = (x.sin().exp() * x.cos()).sum()
        (first,) = torch.autograd.grad(loss, x, retain_graph=True)
        (second,) = torch.autograd.grad(loss, x)
        assert torch.equal(first, second)


def test_gradients_of_gradients():
    def penalty(x):
        (slope,) = torch.autograd.grad(x.sin().square().sum(), x, create_graph=True)
        return slope.square().sum()

    assert_same_gradients(penalty, torch.randn(50))


def test_dropout_attention_and_layer_norm():
    def network(x):
        torch.manual_seed(3)
        q, k, v = F.layer_norm(x, (12,)).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.dropout(mixed.relu(), 0.5).square().sum()

    assert_same_gradients(network, torch.randn(2, 5, 12))


def test_a_saved_tensor_that_is_changed_before_its_copy_is_complete_is_torchs_error():
    x = torch.randn(50, requires_grad=True)
    with offload_activations(min_bytes=1000):
        middle = x * 2
        loss = middle.sin().sum()
        middle.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_negative_numbers_are_refused():
    with pytest.raises(ValueError, match="min_bytes must not be negative, got -1"):
        offload_activations(min_bytes=-1)
    with pytest.raises(ValueError, match="num_prefetched must not be negative, got -1"):
        offload_activations(num_prefetched=-1)
