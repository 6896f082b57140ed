"""Limits on the requests and tokens that each API key may have in a minute."""

from __future__ import annotations

import math
import time
from typing import Any

from specbuild.runtime.errors import OptionError
from specbuild.serve.errors import ApiError


class RateLimits:
    """Counts by key, in windows of a minute. A text's tokens count once it has ended."""

    def __init__(self, requests: int | None = None, tokens: int | None = None) -> None:
        """Begin to count; None: any number. Raises OptionError if the package `limits` is not installed."""
        self._items = dict[str, Any]()
        if requests is None and tokens is None:
            return
        try:
            from limits import RateLimitItemPerMinute
            from limits.storage import MemoryStorage
            from limits.strategies import FixedWindowRateLimiter
        except ImportError:
            raise OptionError("limits by key need a package: pip install 'specbuild-trt[serve]'") from None
        self._limiter = FixedWindowRateLimiter(MemoryStorage())
        found = {"requests": requests, "tokens": tokens}
        self._items = {
            name: RateLimitItemPerMinute(most, namespace=name) for name, most in found.items() if most is not None
        }

    def begin(self, tenant: str | None) -> None:
        """Count a request; raises ApiError if its key has had all that it may have in this minute."""
        for name, item in self._items.items():
            allowed = self._limiter.hit if name == "requests" else self._limiter.test
            if not allowed(item, tenant or ""):
                told = f"this key has {item.amount} {name} a minute, and has had them: try again later"
                raise ApiError(429, told, code=f"{name}_per_minute", retry_after=self._reset(item, tenant))

    def spend(self, tenant: str | None, tokens: int) -> None:
        """Count the tokens of a request that has ended."""
        if tokens and (item := self._items.get("tokens")):
            self._limiter.hit(item, tenant or "", cost=tokens)

    def headers(self, tenant: str | None) -> dict[str, str]:
        """Return OpenAI's headers of what is left to a key."""
        told = dict[str, str]()
        for name, item in self._items.items():
            left = self._limiter.get_window_stats(item, tenant or "").remaining
            told[f"X-RateLimit-Limit-{name.title()}"] = str(item.amount)
            told[f"X-RateLimit-Remaining-{name.title()}"] = str(max(left, 0))
            told[f"X-RateLimit-Reset-{name.title()}"] = f"{self._reset(item, tenant)}s"
        return told

    def _reset(self, item: Any, tenant: str | None) -> int:
        """Return the seconds until a key has all again."""
        end = float(self._limiter.get_window_stats(item, tenant or "").reset_time)
        return max(math.ceil(end - time.time()), 0)
