"""Several optimizers in one step, each for the parameters of a pattern."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mithril.backend import covers, require_match
from mithril.graph import OptionError
from mithril_train.optim.optimizers import Optimizer


@dataclass(frozen=True)
class Parts(Optimizer):
    """Optimizers by pattern of parameters; the first matching pattern applies."""

    optimizers: Mapping[str, Optimizer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.optimizers:
            raise OptionError(
                "optimizer is an empty dictionary", hint='optimizer={"critic.*": ml.Adam(), "*": ml.SGD()}'
            )
        for pattern, optimizer in self.optimizers.items():
            if not isinstance(pattern, str) or not isinstance(optimizer, Optimizer):
                raise OptionError(
                    f"optimizer: expected optimizers by pattern, got {pattern!r}: {optimizer!r}",
                    hint='optimizer={"critic.*": ml.Adam(), "*": ml.SGD()}',
                )

    def _part_of(self, name: str) -> str:
        return next((pattern for pattern in self.optimizers if covers(pattern, name)), "")

    def _group(self, group: str) -> tuple[str, str]:
        """Return the pattern of the optimizer and its group."""
        return next(
            (p, g) for p, o in self.optimizers.items() for g in ("", *o.group_names()) if group == _joined(p, g)
        )

    def group_of(self, name: str) -> str:
        pattern = self._part_of(name)
        return _joined(pattern, self.optimizers[pattern].group_of(name)) if pattern else ""

    def group_names(self) -> list[str]:
        return [_joined(p, g) for p, o in self.optimizers.items() for g in ("", *o.group_names())]

    def in_group(self, pattern: str) -> Optimizer:
        part, group = self._group(pattern)
        return self.optimizers[part].in_group(group)

    def rates(self, step: int) -> dict[str, float]:
        rates: dict[str, float] = {}
        for pattern, optimizer in self.optimizers.items():
            group_rates = optimizer.rates(step)
            rates.update(
                (_joined(pattern, g), group_rates.get(g, group_rates[""])) for g in ("", *optimizer.group_names())
            )
        return rates

    def with_rate(self, rate: Any) -> Optimizer:
        if not isinstance(rate, Mapping):
            raise OptionError(
                f"learning_rate={rate!r}: there are several optimizers",
                hint=f"write learning_rate={{{next(iter(self.optimizers))!r}: ...}}",
            )
        for pattern in rate:
            require_match("learning_rate", "optimizer", pattern, list(self.optimizers))
        return replace(
            self, optimizers={p: o.with_rate(rate[p]) if p in rate else o for p, o in self.optimizers.items()}
        )

    def check_groups(self, parameters: Sequence[str]) -> None:
        for pattern, optimizer in self.optimizers.items():
            require_match("optimizer", "parameter", pattern, parameters)
            optimizer.check_groups([name for name in parameters if self._part_of(name) == pattern])

    def check_trained(self, names: Sequence[str]) -> None:
        missing = next((name for name in names if not self._part_of(name)), None)
        if missing is not None:
            raise OptionError(
                f"no optimizer for the parameter '{missing}'",
                facts=["optimizers: " + ", ".join(map(repr, self.optimizers))],
                hint="""add one for all others, "*": ml.Adam(), or freeze it""",
            )

    @property
    def standard(self) -> bool:
        return all(optimizer.standard for optimizer in self.optimizers.values())

    def train_step(self, step: Any) -> None:
        """Update each part by the gradients of its loss, one part after the other."""
        for pattern, optimizer in self.optimizers.items():
            part = step.part(pattern)
            step.update(optimizer.gradients(part))


def _joined(pattern: str, group: str) -> str:
    return f"{pattern}/{group}" if group else pattern
