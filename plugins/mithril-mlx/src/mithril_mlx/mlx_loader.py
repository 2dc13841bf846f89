"""MLX itself: everything imports it from here, so that a BLAS is in place before it loads."""

from mithril_mlx.blas import prepare

BLAS = prepare()

import mlx.core as mx  # noqa: E402

__all__ = ["BLAS", "mx"]
