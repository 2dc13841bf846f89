"""The tasks of the project: ``nox -l`` lists them, ``nox -s demo`` runs one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import nox

ROOT = Path(__file__).parent
DISTRIBUTIONS = [ROOT / "mithril-core", *sorted((ROOT / "plugins").glob("mithril-*"))]
EVERYDAY = [
    "mithril-core",
    *(f"plugins/mithril-{name}" for name in ("passes", "tools", "numpy", "jax", "mlx", "torch")),
]
SOAKED = [
    ROOT / "plugins" / name
    for name in (
        "mithril-cbackend",
        "mithril-openvino",
        "mithril-passes",
        "mithril-tinygrad",
        "mithril-torch",
        "mithril-tpu",
        "mithril-train",
    )
]  # have tests marked soak
FILE_BENCHMARKS = ("array_api", "onnx", "qdq")  # they measure checkouts and models that an argument names
BENCHMARK_ARGUMENTS = {"checkpoints": (("--engine", "jax"), ("--engine", "torch"))}  # of one engine in each run
PINNED = ["-c", "constraints.txt"]

nox.options.sessions = ["lint", "types", "docs"]
nox.options.reuse_existing_virtualenvs = True


def install(session: nox.Session, *what: str) -> None:
    session.install(*PINNED, *what)


@nox.session
def demo(session: nox.Session) -> None:
    """Run one model on every backend: compared results, timings, a picture of the graph."""
    install(session, *EVERYDAY)
    session.run("mithril", "demo", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, imports and English; ``nox -s lint -- fix`` applies automatic fixes."""
    install(session, "import-linter", "ruff")
    fix = "fix" in session.posargs
    session.run("ruff", "check", *(["--fix"] if fix else []), ".")
    session.run("ruff", "format", *([] if fix else ["--check"]), ".")
    sources = os.pathsep.join(str(distribution / "src") for distribution in DISTRIBUTIONS)
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": sources})
    session.run("python", "tools/check_english.py")


@nox.session
def audit(session: nox.Session) -> None:
    """Build all distributions, and check metadata, licenses and the content of the wheels."""
    install(session, "build", "hatchling", "twine", "check-wheel-contents", str(ROOT / "mithril-core"))
    session.run("python", "tools/audit_distributions.py", session.create_tmp())


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict, on the core."""
    install(session, "./mithril-core", "./plugins/mithril-tools", "./plugins/mithril-testing", "mypy", "libcst")
    session.run("python", "-m", "mithril_tools.generate")
    session.run("mypy")


@nox.session
def docs(session: nox.Session) -> None:
    """Write the reference pages from the code and build the site; ``nox -s docs -- --check`` only compares."""
    install(session, "hatchling", str(ROOT / "mithril-core"), *([] if session.posargs else ["mkdocs-material"]))
    install(session, "--no-build-isolation", *map(str, DISTRIBUTIONS))  # one build environment instead of one each
    session.run("python", "-m", "mithril_tools.generate", "--coverage")
    session.run("python", "docs/render.py", *session.posargs)
    if not session.posargs:
        session.run("python", "docs/plots.py")
        session.run("python", "docs/site_pages.py")
        session.run("mkdocs", "build", "-f", "build/mkdocs.yml", env={"NO_MKDOCS_2_WARNING": "1"})
        session.log(f"open {ROOT / 'build/site/index.html'}")


@nox.session
def generate(session: nox.Session) -> None:
    """Write everything that is generated: registry, stubs, pages, errors, the list of public names."""
    install(session, *map(str, DISTRIBUTIONS))
    session.run("python", "-m", "mithril_tools.generate", "--coverage")
    session.run("python", "-m", "mithril_tools.known")
    session.run("python", "docs/render.py")
    session.run("python", "docs/common_errors.py")
    session.run("python", "mithril-core/tests/test_public_names.py")


@nox.session
def bench(session: nox.Session) -> None:
    """Run the benchmarks of the documentation that need no file, or selected ones: ``nox -s bench -- plugins``."""
    install(session, *map(str, DISTRIBUTIONS), "mpmath", "optax", "scikit-learn")
    scripts = {path.stem.removeprefix("bench_"): path for path in sorted(ROOT.glob("benchmarks/bench_*.py"))}
    if not session.posargs:
        for name in FILE_BENCHMARKS:
            del scripts[name]
            session.log(f"bench_{name}.py is left out, as it reads files of yours: see its first lines")
    for name in session.posargs or scripts:
        for arguments in BENCHMARK_ARGUMENTS.get(name, ((),)):
            session.run("python", str(scripts[name]), *arguments)


@nox.session
def soak(session: nox.Session) -> None:
    """Tests that take minutes: every hostile name in every place, thousands of malformed calls, the complete kit."""
    install(session, *map(str, DISTRIBUTIONS), "pytest", "hypothesis", "transformers", "ziglang")
    for tests in [session.posargs] if session.posargs else [["tests"], *([str(d / "tests")] for d in SOAKED)]:
        session.run("pytest", "-q", "-m", "soak", "--hypothesis-profile=default", *tests)
    if not session.posargs:
        kits = sorted(str(path) for path in ROOT.glob("plugins/*/tests/test_conformance.py"))
        session.run("pytest", "-q", "--kit-bodies", *kits)


@nox.session
def crossings(session: nox.Session) -> None:
    """Features together, compared with the reference: ``nox -s crossings -- --rows 150 --seed today``."""
    install(session, *map(str, DISTRIBUTIONS))
    session.run("python", "-m", "crossings", *session.posargs, env={"PYTHONPATH": str(ROOT / "tests")})


@nox.session
def promises(session: nox.Session) -> None:
    """Observe every promise on every engine and write docs/promises.md: ``nox -s promises -- --engine c``."""
    install(session, *map(str, DISTRIBUTIONS))
    session.run("python", "-m", "promises", *session.posargs, env={"PYTHONPATH": str(ROOT / "tests")})


@nox.session
def operators(session: nox.Session) -> None:
    """Import all operators of PyTorch's and JAX's own databases: ``nox -s operators -- torch --samples 6``."""
    install(session, *map(str, DISTRIBUTIONS), "absl-py", "expecttest")
    source, *settings = session.posargs or ["torch"]
    session.run("python", f"benchmarks/operators_{source}.py", *settings)


@nox.session(name="soak-graphs")
def soak_graphs(session: nox.Session) -> None:
    """Random graphs at every level, for hours; ``-- torch --graphs 500`` tries one backend, and fewer."""
    install(session, *map(str, DISTRIBUTIONS))
    counts = {"numpy": 10_000, "jax": 10_000, "torch": 10_000, "mlx": 10_000, "c": 2_000, "ggml": 2_000}
    runs = [session.posargs] if session.posargs else [[name, "--graphs", str(n)] for name, n in counts.items()]
    for arguments in runs:
        session.run("python", "tests/soak.py", *arguments)


@nox.session
def mutants(session: nox.Session) -> None:
    """List the changes of one line that no test notices: ``-- FILES --sample 40 --seed 1``."""
    install(session, *map(str, DISTRIBUTIONS), "pytest", "hypothesis")
    session.run("python", "tools/mutants.py", *session.posargs)


@nox.session
def wheels(session: nox.Session) -> None:
    """Build a wheel and an sdist of every distribution into dist/."""
    install(session, "build")
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    for distribution in DISTRIBUTIONS:
        session.run("python", "-m", "build", "--outdir", str(ROOT / "dist"), str(distribution))


@nox.session
def conda(session: nox.Session) -> None:
    """Write a conda recipe for each sdist in dist/ into build/conda/, and check that rattler-build reads it."""
    install(session, "py-rattler-build")
    session.run("python", "tools/conda_recipes.py", "build/conda", "dist")


@nox.session(reuse_venv=False)
def sbom(session: nox.Session) -> None:
    """List the wheels in dist/ and all that they need in dist/mithril.cdx.json; ``-- core numpy`` selects wheels."""
    names = session.posargs or ["*"]
    wheels = [str(path) for name in names for path in ROOT.glob(f"dist/mithril_{name}-*.whl")]
    if not wheels:
        session.error("dist/ holds no such wheels: run `nox -s wheels`")
    environment = Path(session.create_tmp()) / "environment"  # holds nothing but them
    session.run("python", "-m", "venv", "--clear", str(environment))
    python = str(environment / "bin" / "python")
    session.run(python, "-m", "pip", "install", "-q", *PINNED, *wheels, external=True)
    install(session, "cyclonedx-bom")
    session.run("cyclonedx-py", "environment", python, "--output-reproducible", "-o", "dist/mithril.cdx.json")


@nox.session(reuse_venv=False)
def fresh(session: nox.Session) -> None:
    """Install the built wheels in an empty environment and run the README's demo."""
    names = ["core", "passes", "tools", "numpy", "jax", "mlx"]
    wheels = [str(path) for name in names for path in ROOT.glob(f"dist/mithril_{name}-*.whl")]
    if len(wheels) != len(names):
        session.error("dist/ does not hold one wheel of each distribution: run `nox -s wheels fresh`")
    install(session, *wheels)  # by path, not from an index
    session.run("mithril", "demo")
