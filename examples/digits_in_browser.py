"""Digits that you draw, recognized in the browser: trains the network of train_digits.py and writes a site.

python examples/digits_in_browser.py [--epochs 30] [--folder digits_site]
python -m http.server -d digits_site    # then open http://localhost:8000/draw.html
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from train_digits import convolutional, data, train

import mithril as ml

PAGE = Path(__file__).with_suffix(".html")


def write(folder: str | os.PathLike[str], epochs: int, progress: bool | None = None, **options: Any) -> float:
    """Write the site of a trained network, and return its accuracy on images that it has not seen."""
    trainer = train("CNN", "c", epochs, progress)
    _, (images, _) = data()
    compiled = ml.compile(convolutional(), "c", shapes={"input": [1, 1, 8, 8]}, inference=True)
    compiled.bind(trainer.params)
    print(compiled.export(folder, format="web", name="digits", inputs={"input": images[:1]}, **options))
    (Path(folder) / "draw.html").write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    return float(trainer.history["val_accuracy"][-1])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--epochs", type=int, default=30)
    arguments.add_argument("--folder", default="digits_site")
    options = arguments.parse_args()
    accuracy = write(options.folder, options.epochs)
    print(f"accuracy {accuracy:.3f}; serve {options.folder} and open draw.html")


if __name__ == "__main__":
    main()
