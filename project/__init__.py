"""A starter for PyTorch projects on Lightning."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from project.fitting import fit as fit

__all__ = ["fit"]


def __getattr__(name: str) -> Any:
    if name == "fit":  # imported when asked for: torch takes seconds
        from project.fitting import fit

        return fit
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
