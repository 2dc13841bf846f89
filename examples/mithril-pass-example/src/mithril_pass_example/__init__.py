"""A third party's pass for mithril: folds batch norm into the convolution before it."""
