"""What an optimizer keeps for a parameter, by the number of its dimensions."""

import torch
from torch import nn

from lightning_zero.planner.optimizers import KeptStates


def test_a_matrix_is_not_counted_as_a_vector_that_adafactor_keeps_whole():
    matrix, vector = nn.Parameter(torch.zeros(40, 30)), nn.Parameter(torch.zeros(40))
    states = KeptStates([torch.optim.Adafactor([matrix, vector])])
    assert states.of(matrix, torch.float32).element_bytes == 0
    assert states.of(vector, torch.float32).element_bytes == 4


def test_muon_which_refuses_vectors_is_counted_for_matrices():
    matrix = nn.Parameter(torch.zeros(40, 30))
    states = KeptStates([torch.optim.Muon([matrix])])
    assert states.of(matrix, torch.float32).element_bytes == 4
