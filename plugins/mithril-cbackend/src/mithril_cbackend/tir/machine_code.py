"""Compilation of TIR functions to machine code, for this machine's CPU or another that LLVM supports."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from mithril.graph import BackendError
from mithril_cbackend.cpu_info import enable_tiles
from mithril_cbackend.instructions import SELECTED
from mithril_cbackend.tir.tvm_api import tirx, tvm


@cache
def host_cpu() -> str:
    """Return LLVM's name of this machine's CPU."""
    return str(tvm.get_global_func("target.llvm_get_system_cpu")())


def cpu_names() -> list[str]:
    """Return LLVM's names of the CPUs of this machine's architecture."""
    return [str(n) for n in tvm.get_global_func("target.llvm_get_cpu_archlist")(target(host_cpu(), 1))]


def missing_features(cpu: str) -> list[str]:
    """Return the features of a CPU that this machine lacks."""
    features_of = tvm.get_global_func("target.llvm_get_cpu_features")
    available = tvm.get_global_func("tvm.codegen.llvm.GetHostCPUFeatures")()
    additional = {str(f) for f in features_of(target(cpu, 1))} - {str(f) for f in features_of(target(host_cpu(), 1))}
    return sorted(f for f in additional if f in available and not available[f])


# LLVM 22 folds VPMOV*2M and KMOV into VMOVMSK, which has no encoding for the registers 16 to 31: it reads another
# register instead (llvm-project issue 191304), or a live mask is lost (pull request 198220). Both need 128- or 256-bit
# vectors with the EVEX encoding; the 512-bit vectors that kernels use are not affected. With instructions for float16,
# but without those, it cannot select instructions for short vectors of float16 ("Cannot select: v16f16").
UNSOUND = ("avx512vl", "avx512fp16")


@cache
def target(cpu: str, threads: int, features: tuple[str, ...] = ()) -> Any:
    """Return the TVM target of a CPU with additional features, without those that LLVM compiles incorrectly."""
    full = _target(cpu, threads)
    present = {str(f) for f in tvm.get_global_func("target.llvm_get_cpu_features")(full)}
    changes = [f"+{f}" for f in features if f not in present] + [f"-{f}" for f in UNSOUND if f in present]
    return _target(cpu, threads, mattr=changes) if changes else full


@cache
def selected_features(cpu: str | None) -> tuple[str, ...]:
    """Return the features of a CPU, of this machine by default, that kernels may use."""
    if cpu is not None:
        names = {str(f) for f in tvm.get_global_func("target.llvm_get_cpu_features")(_target(cpu, 1))}
    else:
        names = {str(f) for f, has in tvm.get_global_func("tvm.codegen.llvm.GetHostCPUFeatures")().items() if has}
    tiles = cpu is None and enable_tiles()
    return tuple(f for f in SELECTED if f in names and (tiles or not f.startswith("amx")))


# Of LLVM's optimization. Level 3 differs by unrolling loops that kernels leave rolled, up to four times as much code.
LEVEL = 2

# Without UNSOUND, LLVM 22 cannot select instructions for shuffles that join selections of short vectors ("Cannot
# select: v8i1 = bitcast"), and ends the process. Kernels have none; LLVM writes them, at every level, where it turns
# a loop over interleaved elements into vectors.
NO_INTERLEAVING = "-max-interleave-group-factor:uint=1"


def _target(cpu: str, threads: int, **options: Any) -> Any:
    # TVM assigns every buffer its own alias class, which is invalid once a kernel is inlined into the driver, where
    # buffers of two kernels overlap. Inlining is not worthwhile anyway: a driver with hundreds of inlined calls took
    # LLVM half a minute.
    plain = ["-enable-tbaa:bool=false", "-inline-instr-cost:int=10000", NO_INTERLEAVING]
    settings = {"mcpu": cpu, "num-cores": max(threads, 1), "opt-level": LEVEL, "cl-opt": plain, **options}
    return tvm.target.Target({"kind": "llvm", **settings})


def compiled(
    functions: Mapping[str, Any], entries: Mapping[str, Any], cpu: str, threads: int, features: tuple[str, ...] = ()
) -> Any:
    """Compile functions by name, and the entry points for Python, to a module of machine code."""
    selected = target(cpu, threads, features)
    lower = tirx.transform
    # Intrinsics are lowered before loops become vectors: TVM's analysis of integers fails on vectors of bools.
    for_kernels = [lower.UnrollLoop(), lower.LowerIntrin(), lower.VectorizeLoop(True)]
    for_entries = [lower.MakePackedAPI(), lower.SkipAssert(), lower.LowerTVMBuiltin(), lower.LowerIntrin()]
    try:
        lowered = {}
        for group, passes in ((functions, for_kernels), (entries, for_entries)):
            module = lower.BindTarget(selected.with_host(selected))(tvm.IRModule(dict(group)))
            results = tvm.ir.transform.Sequential(passes)(module).functions
            lowered.update({g.name_hint: f for g, f in results.items()})
        return tvm.get_global_func("target.build.llvm")(tvm.IRModule(lowered), selected)
    except Exception as cause:
        first = next((line for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
        raise BackendError(
            f"TVM cannot compile: {first}",
            facts=[f"CPU '{cpu}', {len(functions)} functions"],
            hint="this is a bug in mithril-cbackend: please report it with str(compiled.graph)",
        ) from cause


def set_threads(count: int) -> None:
    """Set the size of TVM's thread pool, which all programs of the process share."""
    tvm.get_global_func("runtime.config_threadpool")(1, count)


def listing(module: Any, kind: str) -> str:
    """Return the LLVM IR (``ll``) or assembly (``asm``) of a module."""
    return str(module.inspect_source(kind))
