"""``python -m mithril``: the command line, where its script is not on the path."""

from importlib.metadata import entry_points

if __name__ == "__main__":
    commands = entry_points(group="console_scripts", name="mithril")
    if not commands:
        raise SystemExit("the command line is not installed: pip install mithril-tools")
    next(iter(commands)).load()(prog_name="mithril")
