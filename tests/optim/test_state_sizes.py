"""States of an optimizer for a parameter, by the number of its dims."""

import torch
from torch import nn

from lightning_zero.optim.state_sizes import OptimizerStates


def test_adafactor_states_of_a_matrix_are_not_those_of_a_vector():
    matrix, vector = nn.Parameter(torch.zeros(40, 30)), nn.Parameter(torch.zeros(40))
    states = OptimizerStates([torch.optim.Adafactor([matrix, vector])])
    assert states.of(matrix, torch.float32).element_bytes == 0
    assert states.of(vector, torch.float32).element_bytes == 4


def test_muon_which_refuses_vectors_is_counted_for_matrices():
    matrix = nn.Parameter(torch.zeros(40, 30))
    states = OptimizerStates([torch.optim.Muon([matrix])])
    assert states.of(matrix, torch.float32).element_bytes == 4


def test_states_that_depend_on_sizes_are_counted_for_the_parameters_sizes():
    matrix, kernel = nn.Parameter(torch.zeros(400, 300)), nn.Parameter(torch.zeros(6, 5, 4, 3, 2))
    states = OptimizerStates([torch.optim.Adafactor([matrix, kernel])])
    for parameter, rows, columns in ((matrix, 400, 300), (kernel, 6 * 5 * 4 * 3, 6 * 5 * 4 * 2)):
        found = states.of(parameter, torch.float32)
        assert found.full_bytes(tuple(parameter.shape)) == 4 * (rows + columns + 1)


def test_a_matrix_is_probed_at_a_size_that_optimizers_factor():
    class FromOneHundredAndTwentyEight(torch.optim.SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                is_large = min(p.shape) >= 128
                self.state[p]["rows"] = torch.zeros(p.shape[0]) if is_large else torch.zeros_like(p)

    large, small = nn.Parameter(torch.zeros(200, 150)), nn.Parameter(torch.zeros(200, 50))
    states = OptimizerStates([FromOneHundredAndTwentyEight([large, small])])
    assert states.of(large, torch.float32).full_bytes((200, 150)) == 4 * 200
    assert states.of(small, torch.float32).full_bytes((200, 50)) == 4 * 200 * 50
