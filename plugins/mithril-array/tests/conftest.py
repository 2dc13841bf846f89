"""The switch of SciPy for array namespaces, which scikit-learn reads at import."""

import os

os.environ["SCIPY_ARRAY_API"] = "1"
