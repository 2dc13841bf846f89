"""Datasets that worker processes can import."""

import os
import time

import numpy as np


class Squares:
    def __init__(self, n, fail=None, sleep=0.0):
        self.n, self.fail, self.sleep = n, fail, sleep

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if i == self.fail:
            raise ZeroDivisionError(f"sample {i} is broken")
        time.sleep(self.sleep)
        return {"x": np.full((64, 64), i, np.float32), "y": i * i}


class Dying:
    def __len__(self):
        return 4

    def __getitem__(self, i):
        os._exit(3)
