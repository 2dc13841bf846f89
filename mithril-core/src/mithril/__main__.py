"""``python -m mithril``: the command line, where its script is not on the path."""

from mithril.tools.cli import main

if __name__ == "__main__":
    main(prog_name="mithril")
