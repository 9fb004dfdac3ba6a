"""GPTQ: columns are rounded one after the other, and each error is made up for in the columns still to come.

Frantar et al. 2022 (arXiv 2210.17323), with groups fixed beforehand, so that columns keep their places in the file
even when the important ones are rounded first ("act-order").
"""

import torch
from torch import Tensor

from armillary.model.quantized.formats import spread
from armillary.model.quantized.packed_rows import PackedRows
from armillary.model.quantizing.rounding import IntGrid

BLOCK = 128  # columns whose updates are applied to all later ones together
_DAMPING = 0.01  # of the mean diagonal (the paper's 1 %)


def gptq(weight_NK: Tensor, gram_KK: Tensor, grid: IntGrid, *, act_order: bool = True) -> PackedRows:
    """`gram_KK` is XᵀX over the calibration inputs X; any factor does."""
    importance_K = gram_KK.diagonal()
    if not bool(importance_K.any()):  # an expert that no token came to
        return grid.round(weight_NK)
    columns = weight_NK.shape[1]
    scale_NG, zero_NG = grid.fit(weight_NK, importance_K)
    scale_NK, zero_NK = (spread(each, grid.group, columns).expand(-1, columns) for each in (scale_NG, zero_NG))
    order_K = importance_K.argsort(descending=True) if act_order else torch.arange(columns, device=gram_KK.device)
    factor_KK = inverse_factor(gram_KK[order_K][:, order_K])
    codes_NK = torch.empty_like(weight_NK)
    left_NK = weight_NK[:, order_K].clone()
    for begin in range(0, columns, BLOCK):
        end = min(begin + BLOCK, columns)
        errors = torch.empty_like(left_NK[:, begin:end])
        for i in range(begin, end):
            k = order_K[i]
            scale, zero = scale_NK[:, k].float(), zero_NK[:, k]
            codes_NK[:, k] = code = grid.codes(left_NK[:, i], scale, zero)
            error = (left_NK[:, i] - (code - zero) * scale) / factor_KK[i, i]
            left_NK[:, i + 1 : end] -= error[:, None] * factor_KK[i, i + 1 : end]
            errors[:, i - begin] = error
        left_NK[:, end:] -= errors @ factor_KK[begin:end, end:]
    return grid.packed(codes_NK, scale_NG, zero_NG)


def inverse_factor(gram_KK: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse, damped until there is one."""
    diagonal = gram_KK.diagonal()
    mean = diagonal.mean()
    damping = _DAMPING
    while True:
        damped = gram_KK + torch.diag(torch.where(diagonal > 0, damping * mean, mean))
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed):
                return upper
        damping *= 10
