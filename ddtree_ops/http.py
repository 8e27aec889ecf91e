"""HTTP to a router. The only module that uses httpx; others take ``Request``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ddtree_ops.errors import UnreachableError

CONNECT_S = 3.0


@dataclass(frozen=True)
class Reply:
    """What came back."""

    status: int
    text: str

    def json(self) -> Any:
        """The body as JSON; None if it is not."""
        try:
            return json.loads(self.text)
        except ValueError:
            return None


class Request(Protocol):
    """One request; UnreachableError if nothing came back."""

    def __call__(
        self, method: str, url: str, *, headers: Mapping[str, str], body: Any = None, timeout_s: float = 10.0
    ) -> Reply: ...


def request(method: str, url: str, *, headers: Mapping[str, str], body: Any = None, timeout_s: float = 10.0) -> Reply:
    """Straight to ``url``: no proxy of the environment, no redirect to somewhere else."""
    import httpx  # by need: a tenth of a second, and most commands speak with no router

    timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
    try:
        with httpx.Client(timeout=timeout, trust_env=False, follow_redirects=False) as client:
            answer = client.request(method, url, headers=dict(headers), json=body)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UnreachableError(
            f"{method} {url}: {error or type(error).__name__}",
            why="the router did not answer",
            next=f"curl -i {url}",
        ) from error
    return Reply(answer.status_code, answer.text)
