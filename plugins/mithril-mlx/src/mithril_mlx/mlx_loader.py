"""Loader of MLX: other modules import MLX from here, so that a BLAS library is loaded first."""

from mithril_mlx.blas import prepare

BLAS = prepare()

import mlx.core as mx  # noqa: E402

__all__ = ["BLAS", "mx"]
