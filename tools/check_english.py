"""Report prose and names that a native engineer would not write: ``check_english.py [--summary] [PATH...]``.

Checks docstrings, comments, error texts, help texts and names in .py files and the prose of .md files; ``--subjects``
checks commit subjects from stdin. Without a path, every .py and .md file of the repository is checked. A line that
contains ``english: ok`` is skipped. Exits with 1 if there are findings.
E1 free-standing "what"; E2 banned word; E3 bare participle or E4 function word as a name; E5 opening of a function's
docstring; E6 British spelling; E7 "is no X"; E8 commit subject; E9 name of a test.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

Finding = tuple[int, str, str]
Function = (ast.FunctionDef, ast.AsyncFunctionDef)

# Words before "what" that make it an indirect question or a plain idiom ("that is what XLA does").
ASKING = set(
    """know knows known see sees show shows shown check checks checked determine determines decide decides tell
    tells ask asks matter matters understand define defines defined describe describes explain explains specify control
    controls learn out guess remember document exactly about is are was be that's it's do does did doing say says said
    sure clear unclear consider match matches just only like""".split()
)
ALSO_ASKING = re.compile(r"(regardless|irrespective|independent\w*|aware|idea|instead|because) of\s+$|, but\s+$", re.I)
NOT_FREE = re.compile(r"\s+(if|kind|type|sort|else|happen\w*|to|about|follows)\b", re.I)
BANNED = r"""
    nobody|no one -> no caller, nothing ;; somebody|someone else|anybody|whoever -> the caller, the user
    (is|are|was|were) told|told (by|from|off|apart|as|of|it|what|when) -> is given, reports, is passed
    (lies?|lay)(?! between| within) -> is stored at, is located in ;; anew|afresh -> again, re-<verb>
    stands? (for|in|at|on|beside|where|alone|there|above|behind|before) -> represents, is at, is placed
    meets?(?! (the|these|those|all|our|your)\b) -> is combined with, matches ;; besides -> in addition to
    beside -> next to ;; apart(?! from) -> separately, separate ;; save for -> except ;; none where -> or None if
    meanwhile -> concurrently, until then ;; so many|so[- ]\w*nieth|every \w*nieth -> n, the given number of, every n-th
    one after the other -> in sequence, consecutively ;; in turns -> alternately ;; brings?|brought -> provides
    newest -> latest ;; comes? to (an end|rest|light) -> terminates, converges, is found ;; as good as -> equivalent to
    looked (at|into) -> inspected ;; asked for -> requested ;; (let|lets) go -> release ;; telephones? -> phone
    (makes?|made|becomes?) of (?!this|these|it\b) -> computed from, composed of ;; counted (from|anew) -> relative to
    (?<!by )(handed|hands?) (on|over|out|in) -> pass, return ;; held (to|against) -> checked against
    dear -> expensive
    as (it is|they are|it was|they were|it comes|they come)(?=[.,;:)]|$) -> unchanged, as is ;; kin -> and similar
    (product|sum|mean|reduction|take|max) of nothing -> of an empty array ;; goes? on (with|as) -> continue
    laid (out )?(with|as|side|flat|in) -> stored, arranged ;; turned (round|around|in|as) -> transposed, byte-swapped
    tak(e|es|ing) turns -> alternate, share the buffer ;; (go|goes|going) on -> continue ;; left alone -> is unchanged
    whole or not at all -> atomically ;; once more -> again ;; (of|by) (yours|ours|theirs|mine) -> your own, custom
    alike -> the same way, equal ;; by want of|for want of -> for lack of ;; comes? back -> is returned"""
BAN = [
    ("E2", re.compile(rf"\b(?:{pattern.strip()})(?!\w)", re.I), f"write {instead.strip()}")
    for pattern, _, instead in (entry.partition(" -> ") for entry in re.split(r";;|\n", BANNED.strip()))
]
IS_NO = re.compile(
    r"(?<!there )\b(is|are|was|were) no (?!longer|more|such|need|way|other|different|guarantee|reason|point|one\b|"
    r"less|larger|greater|better|worse|op\b|matter|further|known|explicit|default)[a-z{'\"]+",
    re.I,
)
BRITISH = re.compile(
    r"\b[a-z]{2,}(al|im|or|on|ar|er|(?<!pr)om|il|el|en|an|gn|rd|et|as|it|ol|nt)is(e[drs]?|ers|ing|ations?)(?![a-z])|"
    r"(behaviour|colour|neighbour|favour|honour|artefact)s?|analys(e|ed|er|ing)(?![a-z])|(labell|modell)(ed|ing)|"
    r"\b(centres?|licence|learnt|whilst|judgement)\b",
    re.I,
)
PARTICIPLES = set(
    """made found given known kept told met held taken placed turned moved wanted chosen said joined
    brought sent gone come thought meant heard put got asked answered named settled gathered noted gave""".split()
)
FUNCTION_WORDS = set(
    """what of at there here why some most least mine ours have own near inside outside like same
    both each about to apart whole wide alone where whose these those others gone yet""".split()
)
FIELDS = {"at", "of", "like", "where", "what", "why"}  # of public classes: `error.what`, `Found.why`
PARAMETERS = {"where", "like", "of"}  # conventional as parameters: np.sum(where=), np.empty_like, gradients(of=)
OPENERS = set(
    """what whatever which where when how as of for with without by in into to from at on one ones those
    these all every each both another other so none equal everything it they here there after the a an""".split()
)
OPENER_OK = re.compile(r"for (use|testing|internal)|in[- ]place|all[- ]?(reduce|gather)|to be|a no-?op", re.I)
HELP = {"help", "hint", "summary", "reason", "description", "message"}  # keywords whose strings users read
IGNORED = {".git", ".venv", ".tox", ".nox", ".ci", "build", "dist", "node_modules", "__pycache__"}
NOUN_LIKE = re.compile(r"property|overload|hookspec|vjp|jvp|\bop\b|composite|command")  # decorators


def prose_findings(text: str) -> Iterator[Finding]:
    """Yield (offset, code, message) for a piece of prose."""
    text = re.sub(r"``[^`]*``|`[^`\n]*`|\"[^\"\n]*\"|(?<!\w)'[\w.-]+'(?!\w)|>>> .*", lambda m: "x" * len(m[0]), text)
    for m in re.finditer(r"\bwhat\b(?!-|')", text, re.I):
        before, after = text[: m.start()], text[m.end() :]
        previous = re.search(r"([\w']+)[^\w.;:,(]*$", before)
        question = re.match(r"[^.;:!?]*\?", after)
        indirect = previous and previous[1].lower() in ASKING
        if not (indirect or question or NOT_FREE.match(after) or ALSO_ASKING.search(before)):
            yield m.start(), "E1", f"free-standing 'what{' '.join(after[:25].split(chr(10)))}...': name the thing"
    for code, pattern, advice in [*BAN, ("E7", IS_NO, "write 'is not a'"), ("E6", BRITISH, "American spelling")]:
        yield from ((m.start(), code, f"'{m[0]}': {advice}") for m in pattern.finditer(text))


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of comments, with consecutive whole-line comments joined."""
    block: list[str] = []
    start = end = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#\s*(type:|noqa|fmt:|pragma|-{2,}|!)", token.string):
            if block and (token.start[0] != end + 1 or not token.line.lstrip().startswith("#")):
                yield start, "\n".join(block)
                block = []
            end = token.start[0]
            start = start if block else end
            block.append(token.string.lstrip("# "))
    yield start, "\n".join(block)


def text_of(node: ast.expr) -> str:
    """Return the text of a string or f-string, ``{}`` in place of each placeholder."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(v) if isinstance(v, ast.Constant) else "{}" for v in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def name_findings(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Finding]:
    """Yield each poor parameter or local name of a function once, at its first binding."""
    a = function.args
    bound = [(x.lineno, x.arg) for x in [*a.posonlyargs, *a.args, *a.kwonlyargs] if x.arg not in PARAMETERS]
    pending: list[ast.AST] = list(function.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.append((node.lineno, node.id))
        if not isinstance(node, (*Function, ast.ClassDef)):
            pending += ast.iter_child_nodes(node)
    for name, line in {n: line for line, n in sorted(bound, reverse=True)}.items():
        if name in PARTICIPLES or name in FUNCTION_WORDS:
            yield line, "E3" if name in PARTICIPLES else "E4", f"name '{name}': use a noun of the field"


def field_findings(node: ast.ClassDef) -> Iterator[Finding]:
    """Yield each poor name of a field or an attribute of a class once."""
    bound = [
        (x.lineno, x.target.id) for x in node.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)
    ]
    for x in ast.walk(node):
        if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store) and ast.unparse(x.value) == "self":
            bound.append((x.lineno, x.attr))
    for name, line in {n: line for line, n in sorted(bound, reverse=True)}.items():
        if (word := name.strip("_")) in PARTICIPLES | FUNCTION_WORDS - FIELDS:
            yield line, "E3" if word in PARTICIPLES else "E4", f"attribute '{name}': use a noun of the field"


def python_findings(source: str, states_behavior: bool = False) -> Iterator[Finding]:
    """Yield (line, code, message) for a Python file."""
    texts = list(comments(source))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            callee = ast.unparse(node.func).rpartition(".")[2]
            if callee.endswith(("Error", "Warning", "Exception")) or callee in ("record", "with_hint", "with_facts"):
                texts += [(x.lineno, text_of(x)) for x in [*node.args, *(k.value for k in node.keywords)]]
            else:
                texts += [(k.value.lineno, text_of(k.value)) for k in node.keywords if k.arg in HELP]
        if isinstance(node, (*Function, ast.ClassDef)) and (m := BRITISH.search(node.name.replace("_", " "))):
            yield node.lineno, "E6", f"name '{node.name}': American spelling of '{m[0]}'"
        if isinstance(node, ast.ClassDef):
            yield from field_findings(node)
        if isinstance(node, Function):
            yield from name_findings(node)
            if node.name.startswith("test_"):
                messages = (message for *_, message in prose_findings(node.name.replace("_", " ")))
                yield from ((node.lineno, "E9", f"name '{node.name}': {message}") for message in messages)
        documented = isinstance(node, (*Function, ast.ClassDef, ast.Module))
        if documented and (doc := ast.get_docstring(node, clean=False)):
            texts.append((node.body[0].lineno, doc))
            first = re.match(r"\s*([A-Z]\w*)", doc)
            noun_like = NOUN_LIKE.search(" ".join(ast.unparse(d) for d in getattr(node, "decorator_list", [])))
            noun_like = noun_like or not isinstance(node, Function) or OPENER_OK.match(doc.strip())
            noun_like = noun_like or (states_behavior and node.name.startswith("test_"))
            if first and first[1].lower() in OPENERS and not noun_like:
                yield texts[-1][0], "E5", f"'{first[1]} ...': begin with a verb (Return), or 'Whether' for a bool"
    for line, text in texts:
        yield from ((line + text.count("\n", 0, i), code, message) for i, code, message in prose_findings(text))


def file_findings(path: Path, text: str) -> Iterator[Finding]:
    """Yield the findings of one file that no ``english: ok`` silences."""
    silenced = {n for n, line in enumerate(text.splitlines(), 1) if "english: ok" in line}
    prose = re.sub(r"(?ms)^```.*?^```", lambda m: "\n" * m[0].count("\n"), text)
    in_prose = ((1 + prose.count("\n", 0, i), code, message) for i, code, message in prose_findings(prose))
    yield from sorted(
        f
        for f in (python_findings(text, "tests" in path.parts) if path.suffix == ".py" else in_prose)
        if f[0] not in silenced
    )


def files_below(path: Path) -> Iterator[Path]:
    """Yield the .py and .md files of a path, without those of tools and environments."""
    if path.is_file():
        yield path
        return
    for folder, folders, names in os.walk(path):
        # Environments are not entered: pip may change one while this runs.
        folders[:] = sorted({*folders} - IGNORED)
        yield from (Path(folder, n) for n in sorted({*names} - IGNORED) if n.endswith((".py", ".md")))


def main() -> int:
    """Print the findings of the paths on the command line; return 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--summary", action="store_true", help="print counts and the rate instead of findings")
    parser.add_argument("--subjects", action="store_true", help="check commit subjects read from stdin")
    arguments = parser.parse_args()
    counts, lines = Counter[str](), 0
    for subject in sys.stdin.read().splitlines() if arguments.subjects else []:
        verb = re.sub(r"^[\w ,.+-]{1,20}: ", "", subject).split(" ")[0]
        messages = [m for *_, m in prose_findings(subject)] + ["longer than 72 characters"] * (len(subject) > 72)
        messages += [f"'{verb}': begin with an imperative verb"] * (verb.lower() in OPENERS)
        counts["E8"], lines = counts["E8"] + len(messages), lines + 1
        print(*(f"E8 {message}: {subject}\n" for message in messages), sep="", end="")
    paths = arguments.paths or ([] if arguments.subjects else [Path(__file__).parents[1]])
    for path in paths:
        for file in files_below(path):
            text = file.read_text(errors="replace")
            lines += text.count("\n")
            for line, code, message in file_findings(file, text):
                counts[code] += 1
                print(end="" if arguments.summary else f"{file}:{line}: {code} {message}\n")
    total = sum(counts.values())
    if arguments.summary:
        print(f"{total} findings in {lines} lines, 1 per {lines / max(1, total):.0f}; {dict(sorted(counts.items()))}")
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
