"""Changes of Keras archives: of their bytes, configurations, weights and members."""

import io
import json
import zipfile
from copy import deepcopy
from functools import partial

from mithril_keras.archive import CONFIG, WEIGHTS
from mithril_testing.damaged_files import flipped, truncated

STRANGE = (None, -1, 0, 10**9, 1 << 62, "", "Dense", [], {}, [None], True, 0.5, {"class_name": "__lambda__"})


def members_of(content):
    with zipfile.ZipFile(io.BytesIO(content)) as z:
        return {i.filename: z.read(i) for i in z.infolist()}


def archive_of(members):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        for name, data in members.items():
            z.writestr(name, data)
    return out.getvalue()


def changed_config(content, rng, count):
    members = members_of(content)
    config = json.loads(members[CONFIG])
    for _ in range(count):
        _replace(config, rng)
    return archive_of({**members, CONFIG: json.dumps(config).encode()})


def changed_weights(content, rng):
    members = members_of(content)
    return archive_of({**members, WEIGHTS: flipped(members[WEIGHTS], rng)})


def without_a_member(content, rng):
    members = members_of(content)
    members.pop(rng.choice(list(members)))
    return archive_of(members)


def _replace(config, rng):
    """Replace, remove or exchange a value somewhere in the configuration."""
    places = []
    stack = [config]
    while stack:
        node = stack.pop()
        pairs = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in pairs:
            places.append((node, key))
            if isinstance(value, (dict, list)):
                stack.append(value)
    node, key = rng.choice(places)
    choice = rng.randrange(3)
    if choice == 0:
        del node[key]
    elif choice == 1:
        node[key] = rng.choice(STRANGE)
    else:
        other, name = rng.choice(places)
        value = other.get(name) if isinstance(other, dict) else other[name] if name < len(other) else None
        node[key] = deepcopy(value)


CHANGES = {
    "truncated": truncated,
    "flipped": flipped,
    **{f"{n} changes of the configuration": partial(changed_config, count=n) for n in (1, 2, 3)},
    "weights": changed_weights,
    "a member less": without_a_member,
}
