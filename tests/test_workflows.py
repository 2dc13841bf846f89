"""Workflows of this project and of new plugins name each action by one commit, so that no moved tag changes them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEMPLATES = ROOT / "plugins/mithril-tools/src/mithril_tools/new_plugin/common/.github/workflows"
PINNED = re.compile(r"([\w-]+/[\w-]+)@[0-9a-f]{40} # v\d+\.\d+\.\d+")


def test_actions_are_commits_with_versions_and_equal_in_all_workflows():
    files = [*(ROOT / ".github/workflows").glob("*.yml"), *TEMPLATES.iterdir()]
    used = {line for file in files for line in re.findall(r"uses: (.+)", file.read_text())}
    matches = {line: PINNED.fullmatch(line) for line in used}
    assert [line for line, match in matches.items() if match is None] == []
    names = [match[1] for match in matches.values() if match]
    assert sorted(names) == sorted(set(names)) and "actions/checkout" in names
