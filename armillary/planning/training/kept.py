"""Kept: bytes a token that the layers of a model hold between forward and backward pass, by when they are there."""

from __future__ import annotations

from dataclasses import dataclass

from armillary.planning.device_model.layout_arrays import Array


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Bytes that one layer keeps a token (mean over kinds of layers), on one device."""

    whole: Array
    """without recomputation"""
    selective: Array
    """where norms and activation functions (unfused: the scores) are made again"""
    entry: Array
    """the layer's input alone, for full recomputation"""
    working: Array
    """gradients in flight inside one layer of the backward pass"""
    again: Array
    """what one layer makes again, at the moment it is differentiated"""
    top: Array
    """beyond all layers: the last norm and the hidden states that the loss reads"""
