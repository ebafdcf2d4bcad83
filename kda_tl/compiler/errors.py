"""What goes wrong while building."""

from kda_tl.registry.errors import KdaTlError

__all__ = ["BuildError", "ToolchainError"]


class BuildError(KdaTlError, RuntimeError):
    """A program could not be compiled. The message names spec, arch and the tool's own words."""


class ToolchainError(BuildError):
    """A compiler is missing. The message names what to install."""
