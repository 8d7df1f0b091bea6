"""Tether's contract: messages, subjects, topology, the pure state machines that services share, and the client.

`import tether` is cheap: submodules are imported where they are used, `tether.Client` on first access.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tether.client import Client

__version__ = "0.1.0"
__all__ = ["Client", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Client":
        from tether.client import Client

        return Client
    raise AttributeError(f"module 'tether' has no attribute {name!r}")
