"""The former home of `AsyncEngine`, kept so that old imports work; new code imports it from `specbuild`."""

from .engine.async_engine import AsyncEngine

__all__ = ["AsyncEngine"]
