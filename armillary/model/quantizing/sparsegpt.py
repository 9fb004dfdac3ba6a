"""SparseGPT: two weights of every four inputs become zero, and the others make up for them.

Frantar and Alistarh 2023 (arXiv 2301.00774): columns are taken one after the other as in GPTQ. When the first of four
is reached, the two whose loss is least become zero in each row, as the weights are by then.
"""

import torch
from torch import Tensor

from armillary.kernels.quantized.sparse import prune
from armillary.model.quantizing.gptq import BLOCK, inverse_factor


def sparsegpt(weight_NK: Tensor, gram_KK: Tensor) -> Tensor:
    """[N, K] with two zeros in every four columns; `gram_KK` is XᵀX over the calibration inputs X, or any multiple."""
    if not bool(gram_KK.diagonal().any()):  # an expert that no token came to
        return prune(weight_NK)
    columns = weight_NK.shape[1]
    factor_KK = inverse_factor(gram_KK)
    left_NK = weight_NK.clone()
    for begin in range(0, columns, BLOCK):
        end = min(begin + BLOCK, columns)
        errors = torch.empty_like(left_NK[:, begin:end])
        for i in range(begin, end):
            if i % 4 == 0:
                zeros_N4 = _least_loss(left_NK[:, i : i + 4], factor_KK.diagonal()[i : i + 4])
            value = left_NK[:, i].masked_fill(zeros_N4[:, i % 4], 0)
            errors[:, i - begin] = error = (left_NK[:, i] - value) / factor_KK[i, i]
            left_NK[:, i] = value
            left_NK[:, i + 1 : end] -= error[:, None] * factor_KK[i, i + 1 : end]
        left_NK[:, end:] -= errors @ factor_KK[begin:end, end:]
    return left_NK


def _least_loss(weight_N4: Tensor, diagonal_4: Tensor) -> Tensor:
    """Of every row, the two that cost least when they become zero."""
    two = (weight_N4 / diagonal_4).abs().topk(2, dim=1, largest=False).indices
    return torch.zeros_like(weight_N4, dtype=torch.bool).scatter_(1, two, True)
