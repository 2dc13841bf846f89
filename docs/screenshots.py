"""Takes pictures of the examples for browsers: ``python docs/screenshots.py`` writes docs/pictures/*-in-browser.png.

It needs Chromium and pillow, and trains the examples whose sites are not in build/sites (a minute each).
"""

from __future__ import annotations

import functools
import http.server
import importlib
import io
import shutil
import subprocess
import sys
import threading
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
SITES = ROOT / "build/sites"
# For each example: its page, the steps or epochs of training, the height of the picture, the actions of the visitor.
DRAW = """
const canvas = page.getElementById('canvas'), { left, top, width } = canvas.getBoundingClientRect();
const send = (kind, [x, y]) => canvas.dispatchEvent(new frame.contentWindow.PointerEvent(
  kind, { clientX: left + x * width, clientY: top + y * width, buttons: 1, bubbles: true }));
const line = [[0.3, 0.22], [0.68, 0.2], [0.7, 0.3], [0.6, 0.45], [0.5, 0.6], [0.42, 0.82]];
send('pointerdown', line[0]); line.slice(1).forEach((point) => send('pointermove', point));
send('pointerup', line.at(-1));
"""
PAGES = {
    "digits": ("draw.html", 30, 520, DRAW),
    "search": ("search.html?query=a+kitten+runs+after+a+puppy", 3000, 503, ""),
    "stories": ("stories.html?write", 1200, 420, ""),
}
FRAME = """<!doctype html><style>html, body, iframe { margin: 0; width: 100%; height: 100%; border: 0; }</style>
<iframe id="frame" src="ADDRESS"></iframe><script type="module">
const frame = document.getElementById('frame');
while (!frame.contentDocument?.documentElement.dataset.ready) await new Promise((resolve) => setTimeout(resolve, 50));
const page = frame.contentDocument;
ACTION
</script>"""


def take(name: str) -> Path:
    """Write the picture of an example and return its path."""
    address, steps, height, action = PAGES[name]
    folder = SITES / name
    if not folder.exists():
        importlib.import_module(f"{name}_in_browser").write(folder, steps)
    (folder / "frame.html").write_text(FRAME.replace("ADDRESS", address).replace("ACTION", action), encoding="utf-8")
    shot = SITES / f"{name}.png"
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        flags = ["--headless=new", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=60000", "--disable-quic"]
        flags += [f"--user-data-dir={SITES / 'profile'}", f"--window-size=760,{height}", f"--screenshot={shot}"]
        browser = shutil.which("chromium") or "google-chrome"
        subprocess.run([browser, *flags, f"http://127.0.0.1:{server.server_port}/frame.html"], check=True)
        server.shutdown()
    picture, small = ROOT / f"docs/pictures/{name}-in-browser.png", io.BytesIO()
    Image.open(shot).convert("RGB").quantize(32).save(small, "png", optimize=True)
    picture.write_bytes(small.getvalue())
    return picture


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "examples"))
    for name in sys.argv[1:] or PAGES:
        print(take(name))
