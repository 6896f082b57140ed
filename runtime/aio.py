"""Where `AsyncEngine` was before `specbuild` itself had it; the import still works."""

from .engine.async_engine import AsyncEngine

__all__ = ["AsyncEngine"]
