"""Compile target of a program: this machine, or a device (``target_hardware="mobile"``, ``mobile_options=``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mithril import plugins
from mithril.graph import OptionError, unknown
from mithril_cbackend.toolchains import ALWAYS, FAST, FOREIGN, HOST, SMALL, Toolchain

PLATFORMS = ("android", "linux", "bare", "wasi")
PHONES = {"arm64-v8a": "mobile_arm64", "armeabi-v7a": "mobile_armv7", "x86_64": "mobile_x86_64"}
ARCHITECTURES = {**dict.fromkeys(PHONES, "android"), "armv7e-m": "bare", "wasm32": "wasi"}  # with default platforms


@dataclass(frozen=True)
class CompileTarget:
    """Architecture, platform and code options of a program; ``arch`` is None for this machine."""

    arch: str | None = None
    platform: str = "linux"
    quantization: str | None = None
    optimize_size: bool = False

    @property
    def toolchain(self) -> Toolchain:
        return HOST if self.arch is None else FOREIGN[self.platform, self.arch]

    @property
    def vector_bytes(self) -> int:
        """The vector width of the architecture: that of NEON, SSE and SIMD128, none on microcontrollers."""
        return 4 if self.platform == "bare" else 16

    def flags_of(self, compiler: str) -> str:
        """Return the flags for a compiler, including those of the architecture."""
        return f"{self.portable_flags} {self.toolchain.flags_of(compiler)}"

    @property
    def portable_flags(self) -> str:
        """Compiler flags without those of the architecture."""
        return f"{ALWAYS} {SMALL if self.optimize_size else FAST}"


def resolve_target(settings: Mapping[str, Any]) -> CompileTarget:
    """Return the target that the compile options select."""
    name = settings["target_hardware"]
    target = plugins.target(name).spec if name is not None else None
    mobile = target is not None and target.family == "mobile"
    overrides: Mapping[str, Any] = settings["mobile_options"]
    if not mobile and not overrides:
        return CompileTarget()
    implied_arch = next(
        (arch for arch, t in PHONES.items() if mobile and target is not None and t == target.name), None
    )
    arch = _one_of("arch", overrides.get("arch", implied_arch or "arm64-v8a"), ARCHITECTURES)
    if implied_arch is not None and arch != implied_arch:
        raise OptionError(
            f"mobile_options: arch '{arch}' conflicts with target_hardware='{name}', which is {implied_arch}",
            hint=f"drop 'arch' from mobile_options, or pass target_hardware='{PHONES.get(arch, 'mobile')}'",
        )
    platform = _one_of("platform", overrides.get("platform", ARCHITECTURES[arch]), PLATFORMS)
    if (platform, arch) not in FOREIGN:
        possible = [p for p, a in FOREIGN if a == arch]
        raise OptionError(
            f"mobile_options: arch '{arch}' conflicts with platform '{platform}'",
            hint=f"pass platform={' or '.join(map(repr, possible))}",
        )
    return CompileTarget(
        arch,
        platform,
        _one_of("quantization", overrides["quantization"], ("int8",)) if overrides.get("quantization") else None,
        bool(overrides.get("optimize_size", False)),
    )


def _one_of(key: str, value: Any, accepted: Any) -> str:
    if value not in accepted:
        message, facts, hint = unknown(f"value of mobile_options' '{key}'", str(value), tuple(accepted))
        raise OptionError(message, facts=facts, hint=hint)
    return str(value)
