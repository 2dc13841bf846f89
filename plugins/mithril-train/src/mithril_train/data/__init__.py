"""Data loading: datasets, shuffling, batches, workers."""

from mithril_train.data.loader import DataLoader
from mithril_train.data.shuffle import permutation

__all__ = ["DataLoader", "permutation"]
