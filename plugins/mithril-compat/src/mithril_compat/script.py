"""The main module of the other processes of a mesh: it runs the program of the first one."""

import os
import sys

from mithril_compat.running import SCRIPT, run

if __name__ == "__main__":
    run(os.environ[SCRIPT], sys.argv[1:])
